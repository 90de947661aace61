"""The steps of a serving engine as a tape holds them, and whether two tapes have the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolltape.replay.bitwise import Findings, composition_difference
from rolltape.store import Tape
from rolltape.store.keys import Key

_OF_A_STEP = (
    "kind",
    "tokens",
    "padded_tokens",
    "graph",
    "attention",
    "experts",
    "cache",
    "threads",
)
_OF_A_PART = ("start", "n", "kind", "drafted", "accepted", "kv_source")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one sequence had in one step: positions [start, start + n).

    `facts` are more columns of its row in `forwards`.
    """

    key: Key
    start: int
    n: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its number, its parts in row order, and its row in `steps`.

    A prefix that came from the cache is no part: nothing ran for it.
    """

    number: int
    parts: tuple[Part, ...]
    facts: Mapping[str, Any]


def serving_engines(tape: Tape) -> list[str]:
    """Engines of a tape whose steps belong to no call: those that schedule requests."""
    found = dict.fromkeys(row["engine"] for row in tape.rows("steps") if row["call"] is None)
    return [engine for engine in found if tape.engine(engine)["role"] == "rollout"]


def recorded_steps(tape: Tape, engine: str) -> list[Step]:
    """The steps of one engine in the order in which they ran."""
    table = tape.table("forwards")
    names = dict.fromkeys(("engine", "step", "row", "request", "sample", "pass", *_OF_A_PART))
    columns = {name: table.column(name).to_pylist() for name in names}
    found: dict[int, list[tuple[int, Part]]] = {}
    for row in range(table.num_rows):
        if columns["engine"][row] != engine or columns["kind"][row] == "cached":
            continue
        key = Key(engine, *(columns[name][row] for name in ("request", "sample", "pass")))
        facts = {name: columns[name][row] for name in _OF_A_PART}
        part = Part(key=key, start=facts["start"], n=facts["n"], facts=facts)
        found.setdefault(columns["step"][row], []).append((columns["row"][row], part))
    steps = {row["step"]: row for row in tape.rows("steps") if row["engine"] == engine}
    return [
        Step(
            number=number,
            parts=tuple(part for _, part in sorted(rows, key=lambda item: item[0])),
            facts=steps.get(number, {}),
        )
        for number, rows in sorted(found.items())
    ]


def compare_serving_steps(
    a: Tape, b: Tape, pairs: Mapping[Key, Key], engines: Mapping[str, int], findings: Findings
) -> None:
    """Compare the steps of every engine that was run again, one after another.

    Args:
        a: the recording.
        b: its re-execution.
        pairs: sequence of `a` -> sequence of `b`.
        engines: order of the engines of `a`.
        findings: to add to.
    """
    for engine in serving_engines(a):
        twins = {pairs[key].engine for key in pairs if key.engine == engine}
        if not twins:
            continue
        others = [step for twin in sorted(twins) for step in recorded_steps(b, twin)]
        mine = recorded_steps(a, engine)
        place = engines[engine]
        for index, step in enumerate(mine):
            other = others[index] if index < len(others) else None
            _compare(place, step, other, pairs, findings)
        if len(others) > len(mine):
            last = mine[-1].number if mine else 0
            values = len(mine), len(others)
            findings.add(
                "steps", 1, composition_difference(place, last, None, "steps of the engine", values)
            )


def _compare(
    place: int, step: Step, other: Step | None, pairs: Mapping[Key, Key], findings: Findings
) -> None:
    findings.count("steps", 1)
    findings.count("forwards", len(step.parts))
    if other is None:
        values = "ran", "did not run"
        findings.add("steps", 1, composition_difference(place, step.number, None, "step", values))
        return
    names = [name for name in _OF_A_STEP if step.facts.get(name) != other.facts.get(name)]
    if names:
        both = step.facts.get(names[0]), other.facts.get(names[0])
        what = f"step {names[0]}"
        findings.add("steps", 1, composition_difference(place, step.number, None, what, both))
    for row in range(max(len(step.parts), len(other.parts))):
        left = step.parts[row] if row < len(step.parts) else None
        right = other.parts[row] if row < len(other.parts) else None
        wrong = _part_differs(left, right, pairs)
        if wrong is not None:
            what, both = wrong
            key = None if left is None else left.key
            difference = composition_difference(place, step.number, key, f"row {row}: {what}", both)
            findings.add("forwards", 1, difference)


def _part_differs(
    left: Part | None, right: Part | None, pairs: Mapping[Key, Key]
) -> tuple[str, tuple[Any, Any]] | None:
    if left is None or right is None:
        return "sequence", tuple(None if p is None else p.key.id for p in (left, right))  # type: ignore[return-value]
    if pairs.get(left.key) != right.key:
        return "sequence", (left.key.id, right.key.id)
    for name in _OF_A_PART:
        if left.facts[name] != right.facts[name]:
            return name, (left.facts[name], right.facts[name])
    return None
