"""Weight versions of a tape: where their checkpoints lie, and whether weights are one of them.

A digest cannot give weights back. So a version is run from a checkpoint that somebody names, and
what was loaded has to have the digest that the tape recorded for that version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolltape.recorder.digest import GroupDigest
from rolltape.store import ModelMismatchError, Tape, UsageError

#: Buffers that an implementation makes for itself: no checkpoint has them.
_NOT_STORED = "derived"
_HOW = "--checkpoint VERSION=PATH"


def parse_checkpoints(items: Iterable[str]) -> dict[int, str]:
    """Version -> path, from `["3=runs/ckpt/step-30", ...]`.

    Raises:
        UsageError: not VERSION=PATH, or a version given twice.
    """
    found: dict[int, str] = {}
    for item in items:
        version, equals, path = item.partition("=")
        if not equals or not path or not version.isdecimal():
            raise UsageError(f"checkpoint {item!r} is not VERSION=PATH", hint=_HOW)
        if int(version) in found:
            raise UsageError(f"the checkpoint of version {int(version)} is given twice", hint=_HOW)
        found[int(version)] = path
    return found


def as_version(weights: str | None) -> int | None:
    """The version that a value of the switch `weights` names; None if it is a path or `recorded`.

    A folder whose name is a number is `./3`.
    """
    return int(weights) if weights is not None and weights.isdecimal() else None


def checkpoint_of(
    weights: str | None, checkpoints: Mapping[int, str], model: Any = None
) -> Any | None:
    """What to load for a value of the switch `weights`.

    Args:
        weights: a path, a version, or None or `recorded`.
        checkpoints: by version.
        model: that was given beside it.

    Returns:
        A path, or `model`; None is what the tape names.

    Raises:
        UsageError: two models are given.
    """
    if weights is None or weights == "recorded":
        return model
    version = as_version(weights)
    path = weights if version is None else checkpoints.get(version)
    if path is not None and model not in (None, path):
        raise UsageError(
            f"for the switch weights={weights} both {path} and a model are given",
            hint="give one of them",
        )
    return model if path is None else path


def versions_of(tape: Tape, engine: str) -> tuple[int, ...]:
    """The versions of an engine's weights that were complete."""
    rows = tape.rows("weights")
    found = {r["version"] for r in rows if r["engine"] == engine and r["state"] == "complete"}
    return tuple(sorted(found))


def check_known(tape: Tape, versions: Iterable[int], engines: Iterable[str] | None = None) -> None:
    """Whether a tape recorded versions; said before anything is loaded.

    Args:
        tape: the recording.
        versions: asked for.
        engines: that have to have them; by default any.

    Raises:
        UsageError: naming those that it has.
    """
    chosen = list(tape.engines) if engines is None else list(engines)
    known = [set(versions_of(tape, engine)) for engine in chosen]
    for version in versions:
        there = [version in one for one in known]
        if not any(there) or (engines is not None and not all(there)):
            names = ", ".join(str(v) for v in sorted(set().union(*known))) or "none"
            raise UsageError(
                f"{tape.place} has no weight version {version}",
                hint=f"it has: {names}; weights=PATH runs any checkpoint",
            )


def check_version(
    tape: Tape, engine: str, version: int, found: Sequence[GroupDigest], name: str
) -> list[str]:
    """Prove that weights are a version of an engine.

    Args:
        tape: the recording.
        engine: uuid.
        version: that they should be.
        found: digests of what was loaded, as the engine's recorder makes them.
        name: of what was loaded, for messages.

    Returns:
        What could not be compared, one line.

    Raises:
        ModelMismatchError: they are not, naming the first tensor group; or nothing of the two can
            be compared.
        UsageError: the tape has no such version.
    """
    check_known(tape, [version], [engine])
    recorded = {
        row["group"] or "": row
        for row in tape.rows("weights")
        if (row["engine"], row["version"], row["state"]) == (engine, version, "complete")
    }
    loaded = {row.group: row for row in found}
    if set(recorded) == {""}:  # a tape without groups
        loaded = {group: row for group, row in loaded.items() if not group}
    reasons: list[str] = []
    wrong: list[str] = []
    groups = sorted((recorded.keys() | loaded.keys()) - {_NOT_STORED}, key=_natural)
    for group in groups:
        there, here = recorded.get(group), loaded.get(group)
        if there is None or here is None:
            sides = ("not there", "there") if there is None else ("there", "not there")
            wrong.append(f"{_called(group)} is {sides[0]} in {tape.place}, {sides[1]} in {name}")
        elif None in (there["digest"], here.value) or there["reason"] != here.reason:
            reasons.append(there["reason"] or here.reason or "it has no digest")
        elif there["digest"] != here.value:
            values = f"{there['digest']:016x}", f"{here.value:016x}"
            wrong.append(f"{_called(group)} is {values[0]} in {tape.place}, {values[1]} in {name}")
    if wrong:
        raise ModelMismatchError(
            f"weights of version {version}: {wrong[0]}", hint=_hint(tape, engine, found)
        )
    if len(reasons) == len(groups):
        why = reasons[0] if reasons else "it has no digest"
        raise ModelMismatchError(
            f"weights of version {version}: nothing of {name} can be compared with "
            f"{tape.place}: {why}",
            hint="weights=PATH runs a checkpoint without comparing it",
        )
    if not reasons:
        return []
    text = f"{len(reasons)} of {len(groups)} groups of weights could not be compared: {reasons[0]}"
    return [f"version {version}: {text}"]


def _hint(tape: Tape, engine: str, found: Sequence[GroupDigest]) -> str:
    """Which version they are instead: checkpoints are often one off."""
    whole = next((row.value for row in found if not row.group), None)
    for row in tape.rows("weights"):
        known = row["engine"] == engine and not row["group"] and row["digest"] is not None
        if known and row["digest"] == whole:
            return f"it is version {row['version']}"
    return f"{_HOW}; weights=PATH runs a checkpoint without comparing it"


def _called(group: str) -> str:
    return group or "the whole model"


def _natural(group: str) -> tuple[Any, ...]:
    """Layer 2 before layer 10, the whole model last."""
    parts = re.split(r"(\d+)", group)
    return not group, [(p.isdecimal(), int(p) if p.isdecimal() else p) for p in parts]
