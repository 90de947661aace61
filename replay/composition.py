"""Whether the steps of a re-execution were composed as the recorded ones were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltape.replay.bitwise import Findings, composition_difference
from rolltape.replay.schedule import steps_of_calls
from rolltape.store import Tape
from rolltape.store.keys import Key

_OF_A_STEP = (
    "kind",
    "rows",
    "columns",
    "tokens",
    "padded_tokens",
    "graph",
    "attention",
    "experts",
    "sdpa",
    "cache",
    "threads",
)
_OF_A_ROW = ("row", "start", "n", "kind", "pad_left", "kv_source")


def compare_steps(
    a: Tape, b: Tape, pairs: Mapping[Key, Key], engines: Mapping[str, int], findings: Findings
) -> None:
    """Compare the steps of every call that was run again, and the padding of its rows.

    Args:
        a: the recording.
        b: its re-execution.
        pairs: sequence of `a` -> sequence of `b`.
        engines: order of the engines of `a`.
        findings: to add to.
    """
    theirs = steps_of_calls(b)
    home = {key: call for call, found in theirs.items() for key in found.first_rows()}
    for (engine, _), mine in steps_of_calls(a).items():
        rows = mine.rows()
        done = [key for key in rows if key in pairs]
        if not done or engine not in engines:
            continue
        call = home.get(pairs[done[0]])
        steps = [] if call is None else theirs[call].steps
        others = {} if call is None else theirs[call].rows()
        place = engines[engine]
        _compare_call(place, mine.steps, steps, findings)
        for key in done:
            last = mine.steps[-1]["step"]
            _compare_rows(place, key, rows[key], others.get(pairs[key], []), last, findings)
            first = mine.steps[0]["step"]
            _compare_layout(place, a, b, key, pairs[key], first, findings)


def _compare_call(
    place: int, mine: list[dict[str, Any]], found: list[dict[str, Any]], findings: Findings
) -> None:
    for index, step in enumerate(mine):
        other = found[index] if index < len(found) else None
        _compare_fields(place, None, step, other, _OF_A_STEP, "step", findings)
    if len(found) > len(mine):
        last = mine[-1]["step"]
        values = len(mine), len(found)
        findings.add(
            "steps", 1, composition_difference(place, last, None, "steps of the call", values)
        )


def _compare_rows(
    place: int,
    key: Key,
    rows: list[dict[str, Any]],
    others: list[dict[str, Any]],
    last: int,
    findings: Findings,
) -> None:
    for index, row in enumerate(rows):
        other = others[index] if index < len(others) else None
        _compare_fields(place, key, row, other, _OF_A_ROW, "row", findings)
    if len(others) > len(rows):
        values = len(rows), len(others)
        findings.add(
            "forwards", 1, composition_difference(place, last, key, "forwards of the row", values)
        )


def _compare_layout(
    place: int, a: Tape, b: Tape, key: Key, other: Key, step: int, findings: Findings
) -> None:
    """The pad tokens: they are inputs like any other, but no positions."""
    layouts = [tape.info(k)["sampling"].get("layout") for tape, k in ((a, key), (b, other))]
    if layouts[0] is None:
        return
    for name, value in layouts[0].items():
        findings.count("layout", 1)
        seen = None if layouts[1] is None else layouts[1].get(name)
        if seen != value:
            what = f"layout {name}"
            findings.add("layout", 1, composition_difference(place, step, key, what, (value, seen)))


def _compare_fields(
    place: int,
    key: Key | None,
    row: Mapping[str, Any],
    other: Mapping[str, Any] | None,
    names: tuple[str, ...],
    what: str,
    findings: Findings,
) -> None:
    table = "steps" if key is None else "forwards"
    findings.count(table, 1)
    if other is None:
        values: tuple[Any, Any] = "ran", "did not run"
        findings.add(table, 1, composition_difference(place, row["step"], key, what, values))
        return
    wrong = [name for name in names if row[name] != other[name]]
    if wrong:
        name = wrong[0]
        values = row[name], other[name]
        first = composition_difference(place, row["step"], key, f"{what} {name}", values)
        findings.add(table, 1, first)
