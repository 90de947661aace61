"""`rolltape import`: dumps of other frameworks become a sealed tape, and an account of the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store import TapeWriter, codecs, create_tape, seal
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.exchange import nemo, slime, verl
from rolltape.store.exchange.export import whole_or_not
from rolltape.store.exchange.routes import Survey, layer_numbers
from rolltape.store.exchange.rows import Carried, Row
from rolltape.store.keys import token_digest
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED
from rolltape.store.writer import new_uuid

FRAMEWORKS = ("slime", "miles", "verl", "nemo-rl")
_ROUTES = {
    "slime": slime.ROUTES,
    "miles": slime.ROUTES,
    "verl": verl.ROUTES,
    "nemo-rl": nemo.ROUTES,
}


@dataclass(frozen=True)
class Meaning:
    """What the rollout logprobs of a dump are, as the user says it; no dump does.

    Args:
        column: raw, scaled or processed; None: unknown. They then stand in `processed` with a
            temperature, edits and truncation of null: whatever an engine returns is some
            temperature, some edits and some truncation, and none of them is claimed.
        temperature: as applied; needed for scaled and processed.
        edits: logit edits in the order applied, for example "repetition_penalty=1.1".
        truncation: in the order applied, for example "top_k=50".

    Raises:
        UsageError: parts that do not belong together.
    """

    column: str | None = None
    temperature: float | None = None
    edits: tuple[str, ...] = ()
    truncation: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        told = self.temperature is not None or self.edits or self.truncation
        if self.column is None and told:
            raise UsageError(
                "--temperature, --edit and --truncation need --semantics",
                hint="raw|scaled|processed",
            )
        if self.column == "raw" and told:
            raise UsageError("--semantics raw has no temperature, edit or truncation")
        if self.column in ("scaled", "processed") and self.temperature is None:
            raise UsageError(
                f"--semantics {self.column} needs --temperature",
                hint="leave --semantics away if it is not known",
            )
        if self.column == "scaled" and self.truncation:
            raise UsageError("--semantics scaled has no truncation", hint="--semantics processed")

    @property
    def cell(self) -> dict[str, Any]:
        """The `semantics` cell."""
        told = self.column in ("scaled", "processed")
        return {
            "temperature": self.temperature,
            "edits": list(self.edits) if told else None,
            "truncation": list(self.truncation) if self.column == "processed" else None,
            "vocab_size": None,
            "dtype": None,
            "source": "engine",
        }


def import_dumps(
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    framework: str,
    meaning: Meaning | None = None,
    layers: str | None = None,
    experts: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    model: str | None = None,
) -> Carried:
    """Make a sealed tape of rollout dumps; nothing in them is run.

    Args:
        files: dumps, one after another.
        out: new folder.
        framework: one of `FRAMEWORKS`.
        meaning: of the rollout logprobs; by default unknown.
        layers: model layer of each column of the routes, "3:61" or "0,2,4"; by default 0, 1, ...
        experts: experts a layer; by default the largest id + 1.
        tokenizer: `tokenizer.json`, for text without ids (verl).
        model: path or name of the model, noted in `engines`.

    Returns:
        What was carried and what was not.

    Raises:
        TapeExistsError: there is something at `out` already.
        UsageError: an option does not fit the dump.
        SchemaError: a file is not such a dump, or is refused.
    """
    if framework not in FRAMEWORKS:
        raise UsageError(f"no importer for {framework!r}", hint=" | ".join(FRAMEWORKS))
    if tokenizer is not None and framework != "verl":
        raise UsageError("--tokenizer is for verl", hint=f"dumps of {framework} have token ids")
    meaning = meaning or Meaning()
    carried = Carried()
    numbers = layer_numbers(layers) if layers else None
    given = Path(tokenizer) if tokenizer is not None else None
    names = [Path(file).name for file in files]
    with whole_or_not(Path(out)) as root:
        create_tape(root, role="rollout", provenance={"import": framework, "files": names})
        with TapeWriter(root) as writer:
            target = _Target(writer, new_uuid(), meaning, carried)
            if experts is None and len(files) > 1:
                target.experts = _experts(framework, files, given)
            for ordinal, file in enumerate(files):
                rows = _read(framework, Path(file), ordinal, carried, given)
                _write_file(target, rows, framework, numbers, experts)
            if not target.sequences:
                raise SchemaError(f"{', '.join(names)}: no sequence that a tape can hold")
            _finish(target, framework, model, derived=given is not None)
        seal(root, status={"import": framework})
    return carried


@dataclass
class _Target:
    writer: TapeWriter
    engine: str
    meaning: Meaning
    carried: Carried
    sequences: int = 0
    moe_layers: frozenset[int] = frozenset()
    experts: int = 0
    k: int = 0
    known_layers: bool = False


def _read(
    framework: str, path: Path, ordinal: int, carried: Carried, tokenizer: Path | None
) -> list[Row]:
    try:
        if framework == "verl":
            return verl.read(path, ordinal, carried, tokenizer=tokenizer)
        if framework == "nemo-rl":
            return nemo.read(path, ordinal, carried)
        return slime.read(path, ordinal, carried)
    except (TypeError, ValueError, OverflowError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SchemaError(
            f"{path}: a field is not what {framework} writes there: {what}",
            hint="ids, masks and logprobs are lists of numbers",
        ) from error


def _experts(
    framework: str, files: Sequence[str | os.PathLike[str]], tokenizer: Path | None
) -> int:
    """The largest expert id of all files + 1, so that all sequences have one number of experts.

    The files are read once more for it: they need not fit into memory together.
    """
    largest = -1
    for ordinal, file in enumerate(files):
        unused = Carried()  # they are counted when they are written
        rows = _read(framework, Path(file), ordinal, unused, tokenizer)
        largest = max(largest, _survey(framework, rows, unused).largest)
    return largest + 1


def _survey(framework: str, rows: list[Row], carried: Carried) -> Survey:
    survey = Survey(
        carried,
        name=_ROUTES[framework],
        placeholders=framework == "nemo-rl",
        short=framework == "slime",
    )
    survey.look(rows)
    return survey


def _write_file(
    target: _Target,
    rows: list[Row],
    framework: str,
    numbers: tuple[int, ...] | None,
    experts: int | None,
) -> None:
    name = _ROUTES[framework]
    survey = _survey(framework, rows, target.carried)
    if survey.width and numbers is not None and len(numbers) != survey.width:
        raise UsageError(f"--layers names {len(numbers)} layers, {name} has {survey.width} columns")
    if experts is not None and survey.largest >= experts:
        raise UsageError(f"--experts {experts}: {name} holds the expert id {survey.largest}")
    layers = tuple(
        int(column) if numbers is None else numbers[column] for column in survey.columns.tolist()
    )
    if layers:
        _note_routes(target, survey, framework, numbers is not None, experts)
        target.moe_layers |= frozenset(layers)
        target.k = survey.k
    for row in rows:
        _write_sequence(target, row)
        found = survey.found(row) if layers else None
        if found is not None:
            target.writer.append(
                "routes",
                {
                    **_span(target, row, len(found.ids)),
                    "role": "used",
                    "weight_version": row.version,
                    "layers": [list(layers)],
                    "k": survey.k,
                    "num_experts": target.experts,
                    "encoding": "plain",
                    "ids": codecs.encode_plain(found.ids, target.experts),
                    "valid": codecs.encode_bits(found.code == 0),
                    "missing": json.dumps(found.missing(layers)),
                },
            )


def _note_routes(
    target: _Target, survey: Survey, framework: str, told: bool, experts: int | None
) -> None:
    carried, name = target.carried, _ROUTES[framework]
    # slime and miles keep a column a layer; what the others take from vLLM has MoE layers only
    target.known_layers = told or framework in ("slime", "miles")
    if not target.known_layers:
        carried.note(
            f"{name}: the dump does not say which layers its {survey.width} columns are; they are "
            "numbered from 0, --layers names them"
        )
    target.experts = experts or max(target.experts, survey.largest + 1)
    if experts is None:
        carried.note(
            f"{name}: the number of experts is the largest id + 1, {target.experts}; the model may "
            "have more, --experts says so"
        )


def _key(target: _Target, row: Row) -> dict[str, Any]:
    return {"engine": target.engine, "request": row.request, "sample": row.sample, "pass": 0}


def _span(target: _Target, row: Row, n: int) -> dict[str, Any]:
    return {**_key(target, row), "start": 0, "n": n}


def _write_sequence(target: _Target, row: Row) -> None:
    is_open = row.finish == "open"
    if row.finish == "unknown":
        target.carried.drop("finish reason", "sequences: the dump does not say; it is `unknown`")
    target.writer.append(
        "sequences",
        {
            **_key(target, row),
            "group": row.group,
            "group_derived": row.group_derived,
            "prompt_len": row.prompt_len,
            "length": None if is_open else row.length,
            "digest": None if is_open else token_digest(row.prompt_len, row.ids),
            "finish": row.finish,
        },
    )
    target.sequences += 1
    if row.length:
        _write_tokens(target, row)
    _write_version(target, row)
    for name, value in row.annotations.items():
        target.writer.append(
            "annotations",
            {
                **_key(target, row),
                "name": name,
                "number": value if isinstance(value, float) else None,
                "text": value if isinstance(value, str) else None,
                "t_ns": 0,
            },
        )


def _write_tokens(target: _Target, row: Row) -> None:
    column = target.meaning.column or "processed"
    columns: dict[str, Any] = {**_span(target, row, row.length), "ids": [row.ids]}
    if row.loss_mask is not None:
        columns["loss_mask"] = [row.loss_mask]
    if row.logprobs is not None:
        columns[column] = [row.logprobs]
        columns["semantics"] = [target.meaning.cell]
    target.writer.append("tokens", columns)
    if row.kept is not None:
        counts, ids = row.kept
        state = np.where(counts > 0, SUPPORT_EXPLICIT, SUPPORT_UNRECORDED).astype(np.uint8)
        target.writer.append(
            "supports",
            {
                **_span(target, row, row.length),
                "derived": False,
                "state": [state],
                "counts": [counts],
                "ids": [ids],
            },
        )


def _write_version(target: _Target, row: Row) -> None:
    if row.version is None or row.length <= row.prompt_len or not row.prompt_len:
        return
    target.carried.note(
        "weight_versions: `forwards` has one row a sequence that carries the version; its step is "
        "the number of the sequence, not a step of an engine"
    )
    target.writer.append(
        "forwards",
        {
            "engine": target.engine,
            "step": target.sequences - 1,
            "row": 0,
            "request": row.request,
            "sample": row.sample,
            "pass": 0,
            # the inputs that scored the response
            "start": row.prompt_len - 1,
            "n": row.length - row.prompt_len,
            "kind": "score",
            "weight_version": row.version,
        },
    )


def _finish(target: _Target, framework: str, model: str | None, *, derived: bool) -> None:
    carried, meaning = target.carried, target.meaning
    unnamed = [field for field, entry in carried.kept.items() if entry["into"] == ""]
    for field in unnamed:
        carried.kept[field]["into"] = f"tokens.{meaning.column or 'processed'}"
    if unnamed and meaning.column is None:
        carried.note(
            f"{unnamed[0]}: the dump does not say what they are, so their temperature, edits and "
            "truncation are unknown and a diff refuses to compare them; --semantics says it"
        )
    routed = bool(target.moe_layers)
    target.writer.append(
        "engines",
        {
            "engine": target.engine,
            "writer": target.writer.id,
            "role": "rollout",
            "adapter": f"import:{framework}",
            "model": model,
            "moe_layers": [sorted(target.moe_layers)] if routed and target.known_layers else None,
            "num_experts": target.experts if routed else None,
            "experts_per_token": target.k if routed else None,
            "effective": json.dumps({"tokens": "derived from text"}) if derived else None,
        },
    )
