"""The model of a replay: loaded, and proven to be the one of the tape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rolltape.recorder.digest import GroupDigest, group_digests, weights_digest
from rolltape.recorder.facts import architecture, dtype_name, model_facts
from rolltape.recorder.parts import parts_of_transformers
from rolltape.replay.ranks import ALONE, Ranks, compute_dtype, is_sharded
from rolltape.replay.versions import as_version, check_version, versions_of
from rolltape.store import ModelMismatchError, Tape, UsageError

#: What has to agree before any weight is looked at.
_ARCHITECTURE = ("vocab_size", "num_layers", "moe_layers", "num_experts", "experts_per_token")


@dataclass(frozen=True)
class Match:
    """How a model belongs to one engine of a tape.

    Args:
        digests: of the model's weights, before any switch; by group if the tape has groups.
        version: weight version of the tape with that digest; None if the tape has no digests, or
            other weights are run on purpose.
        versions: every weight version of that engine.
        warnings: what could not be verified.
    """

    digests: tuple[GroupDigest, ...]
    version: int | None
    versions: tuple[int, ...]
    warnings: list[str] = field(default_factory=list)


def load_model(tape: Tape, *, model: str | None, device: str | None) -> tuple[nn.Module, str]:
    """Load the model of a tape in the tape's dtype, from local files only.

    Args:
        tape: whose model.
        model: path or cached name; by default what the tape names.
        device: torch device; by default CUDA if there is one.

    Returns:
        The model and the name that it was loaded by.

    Raises:
        UsageError: no such model here, or the tape does not name one.
        ModelMismatchError: its architecture is not that of the tape; said before any weight is
            read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = list(tape.engines.values())
    name = model or model_of(tape)
    dtype = dtype_of(tape)
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise UsageError(f"model {name}: no such folder", hint="--model PATH of a checkpoint")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            outline = architecture(AutoModelForCausalLM.from_config(config))
        for row in rows:
            _compare(row, outline, _ARCHITECTURE, tape=tape, name=name)
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or "auto",
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model {name}: {reason}", hint="--model PATH of a checkpoint") from error
    try:
        return loaded.to(place), name
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {place}: {reason}", hint="--device cpu") from error


def model_of(tape: Tape) -> str:
    """Path or name of the model that a tape was recorded with, as it can be loaded from here.

    Raises:
        UsageError: the tape names none, or several.
    """
    names = sorted({str(r["model"]) for r in tape.engines.values() if r["model"]})
    if len(names) != 1:
        found = f"{len(names)} models: {', '.join(names)}" if names else "no model"
        raise UsageError(f"{tape.place} names {found}", hint="--model PATH")
    return _where(tape, names[0])


def dtype_of(tape: Tape) -> torch.dtype | None:
    """The dtype that the engines of a tape ran in; None if none said so.

    Raises:
        UsageError: they ran in several.
    """
    dtypes = {str(r["dtype"]) for r in tape.engines.values() if r["dtype"]}
    if len(dtypes) > 1:
        raise UsageError(f"{tape.place} has engines of dtypes {', '.join(sorted(dtypes))}")
    return getattr(torch, dtypes.pop()) if dtypes else None


def _where(tape: Tape, name: str) -> str:
    """A relative folder is meant from where the job ran."""
    provenance = tape.header.get("provenance")
    cwd = provenance.get("cwd") if isinstance(provenance, dict) else None
    if isinstance(cwd, str) and not Path(name).exists() and Path(cwd, name).is_dir():
        return str(Path(cwd, name))
    return name


def facts_of(model: nn.Module, name: str) -> dict[str, Any]:
    """`model_facts` with the dtype that the model computes in: masters may be wider."""
    dtype = compute_dtype(model)
    facts = model_facts(model, name)
    return facts if dtype is None else {**facts, "dtype": dtype_name(dtype)}


def check_model(
    tape: Tape,
    model: nn.Module,
    engines: list[str],
    name: str,
    *,
    ranks: Ranks = ALONE,
    weights: str = "recorded",
) -> dict[str, Match]:
    """Prove that a model is the one that the engines of a tape ran.

    Args:
        tape: the recording.
        model: in the dtype of the tape, before any switch.
        engines: of the sequences that are scored.
        name: of the model, for messages.
        ranks: that hold the model together; all of them have to call it.
        weights: `recorded`: it has to be any version of each engine; a version: that one; a path:
            other weights are meant.

    Raises:
        ModelMismatchError: naming the field or tensor group and both values; or ranks that hold
            other weights.
        UsageError: a sharded model and a tape that has no digest that shards add up to.
    """
    facts = facts_of(model, name)
    known: dict[bool, tuple[GroupDigest, ...]] = {}
    out = {}
    for engine in engines:
        row = tape.engine(engine)
        warnings = []
        if not row:
            warnings.append(f"engine {engine[:8]} left no description: the model is not verified")
        _compare(row, facts, (*_ARCHITECTURE, "dtype"), tape=tape, name=name)
        grouped = _grouped(tape, engine)
        if grouped not in known:
            known[grouped] = _digests(model, grouped, ranks)
        digests = known[grouped]
        wanted = as_version(weights)
        if wanted is not None:
            warnings += check_version(tape, engine, wanted, digests, name)
            version: int | None = wanted
            versions = versions_of(tape, engine)
        elif weights == "recorded":
            version, versions = _version(tape, engine, digests[-1], name, warnings)
        else:
            version, versions = None, versions_of(tape, engine)
        out[engine] = Match(digests, version, versions, warnings)
    return out


def _grouped(tape: Tape, engine: str) -> bool:
    """Whether the tape has digests by the checkpoint's names; tapes before 1.2 have not."""
    rows = [r for r in tape.rows("weights") if r["engine"] == engine]
    return not rows or any(r["group"] for r in rows)


def _digests(model: nn.Module, grouped: bool, ranks: Ranks) -> tuple[GroupDigest, ...]:
    sharded = is_sharded(model)
    if grouped:
        rows = group_digests(parts_of_transformers(model), dtype=compute_dtype(model))
        return tuple(ranks.whole_model(rows, sharded=sharded))
    if sharded:
        raise UsageError(
            "the tape is older than 1.2: a sharded model cannot be compared with its digest",
            hint="give it a model that is not sharded",
        )
    whole = weights_digest(model)
    return (
        GroupDigest(group="", value=whole.value, tensors=whole.tensors, elements=whole.elements),
    )


def _compare(
    row: Mapping[str, Any],
    facts: Mapping[str, Any],
    fields: tuple[str, ...],
    *,
    tape: Tape,
    name: str,
) -> None:
    for field_name in fields:
        recorded, found = row.get(field_name), facts[field_name]
        if recorded is not None and recorded != found:
            hint = "--model PATH of the model that was recorded"
            if field_name == "dtype":
                hint = f"load it as {recorded}; the switch dtype={found} changes it on purpose"
            raise ModelMismatchError(
                f"{field_name}: {tape.place} has {recorded}, {name} has {found}", hint=hint
            )


def _version(
    tape: Tape, engine: str, digest: GroupDigest, name: str, warnings: list[str]
) -> tuple[int | None, tuple[int, ...]]:
    rows = [r for r in tape.rows("weights") if r["engine"] == engine]
    versions = tuple(sorted({r["version"] for r in rows}))
    whole = [r for r in rows if not r["group"] and r["digest"] is not None]
    if not whole:
        warnings.append("the tape has no weight digest: the weights are not verified")
        return None, versions
    matching = [r["version"] for r in whole if r["digest"] == digest.value]
    if not matching:
        known = ", ".join(f"{r['digest']:016x} (version {r['version']})" for r in whole)
        raise ModelMismatchError(
            f"weights digest: {tape.place} has {known}, {name} has {digest.value:016x}",
            hint="the checkpoint that the engine ran, in the same dtype",
        )
    return max(matching), versions


def versions_of_model(
    tape: Tape, model: nn.Module, engine: str, name: str
) -> tuple[frozenset[int] | None, list[str]]:
    """The weight versions of an engine that a model is, all of them.

    Args:
        tape: the recording.
        model: in the dtype of the tape.
        engine: uuid.
        name: of the model, for messages.

    Returns:
        The versions, None if the tape has no digest to tell them by; and what is not verified.

    Raises:
        ModelMismatchError: it is none of them.
    """
    match = check_model(tape, model, [engine], name)[engine]
    if match.version is None:
        return None, match.warnings
    digest = match.digests[-1].value
    rows = [r for r in tape.rows("weights") if r["engine"] == engine and not r["group"]]
    return frozenset(r["version"] for r in rows if r["digest"] == digest), match.warnings
