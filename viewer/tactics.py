"""Kernel choices: what each tuner answered, on both sides, and what nobody can see."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.viewer.answers import bad_parameter
from rolltape.viewer.library import Pair

MAX_LIMIT = 500
_CHOICE = ("tuner", "op", "key", "graph")
_ANSWER = ("implementation", "tactic", "source")
_COLUMNS = (*_CHOICE, *_ANSWER, "reason", "engine", "writer", "t_ns", "time_ms")

Choice = tuple[str | None, ...]

_KEPT: WeakKeyDictionary[Tape, dict[Choice, list[dict[str, Any]]]] = WeakKeyDictionary()


def choices(tape: Tape) -> dict[Choice, list[dict[str, Any]]]:
    """The answers to each choice (tuner, op, key, graph), the first one first.

    An answer has `implementation`, `tactic`, `source`, `reason`, `count` (rows), `processes`
    (writers), `time_ms` (the least measured one, or None) and `t_ns` (when it was first seen; as
    text).
    """
    if tape not in _KEPT:
        found: dict[Choice, list[dict[str, Any]]] = defaultdict(list)
        for row in _grouped(tape).to_pylist():
            answer = {name: row[name] for name in (*_ANSWER, "reason")}
            answer |= {
                "count": row["t_ns_count"],
                "processes": row["writer_count_distinct"],
                "time_ms": row["time_ms_min"],
                "t_ns": str(row["t_ns_min"]),
            }
            found[tuple(row[name] for name in _CHOICE)].append(answer)
        _KEPT[tape] = dict(sorted(found.items(), key=lambda item: _order(item[0])))
    return _KEPT[tape]


def _grouped(tape: Tape) -> pa.Table:
    schema = pa.schema([tape.schemas["tactics"].field(name) for name in _COLUMNS])
    batches = [batch for _, _, batch in tape.batches("tactics", _COLUMNS)]
    table = pa.Table.from_batches(batches, schema)
    counted = [("t_ns", "min"), ("t_ns", "count"), ("time_ms", "min"), ("writer", "count_distinct")]
    return table.group_by([*_CHOICE, *_ANSWER, "reason"]).aggregate(counted).sort_by("t_ns_min")


def _order(choice: Choice) -> tuple[str, ...]:
    return tuple(part or "" for part in choice)


def tactics(pair: Pair, *, query: str | None, after: str | None, limit: int) -> dict[str, Any]:
    """One page of the choices of A, each with B's answers.

    Args:
        pair: tape A and, where it is open, B.
        query: words; a choice is kept if each stands in its operator, key, graph or an answer.
            `differs` keeps those where A and B differ.
        after: where the page begins, `next` of the one before.
        limit: choices of a page.

    Raises:
        Problem: 400, naming the parameter.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise bad_parameter("limit", f"1 to {MAX_LIMIT}")
    if after is not None and not (after.isdecimal() and len(after) < 10):
        raise bad_parameter("after", "not a place in this list")
    ours = choices(pair.tape) if pair.tape is not None else {}
    theirs = choices(pair.b) if pair.b is not None else {}
    every = [_row(c, ours.get(c, []), theirs.get(c, [])) for c in _united(ours, theirs)]
    if pair.b is None:
        every = [row | {"differs": None} for row in every]
    seen = [row for row in every if not row["unrecorded"]]
    words = (query or "").lower().split()
    kept = [row for row in seen if _matches(row, words)]
    start = int(after or 0)
    page = kept[start : start + limit]
    return {
        "rows": page,
        "start": start,
        "matched": len(kept),
        "total": len(seen),
        "differ": sum(row["differs"] is True for row in seen),
        "b": pair.b is not None,
        "b_recorded": bool(theirs),
        "next": str(start + limit) if start + limit < len(kept) else None,
        "unrecorded": _unrecorded(ours),
    }


def _united(ours: dict[Choice, Any], theirs: dict[Choice, Any]) -> list[Choice]:
    return sorted({**ours, **theirs}, key=_order)


def _row(choice: Choice, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    both = [*a, *b]
    return {
        **dict(zip(_CHOICE, choice, strict=True)),
        "a": a,
        "b": b,
        # what was seen once on a side and not on the other is no difference of answers
        "differs": _answers(a) != _answers(b) if a and b else None,
        "only": None if a and b else "a" if a else "b",
        "unrecorded": all(answer["source"] == "unrecorded" for answer in both),
    }


def _answers(rows: list[dict[str, Any]]) -> set[tuple[Any, Any]]:
    return {(row["implementation"], row["tactic"]) for row in rows}


def _matches(row: dict[str, Any], words: list[str]) -> bool:
    if "differs" in words and row["differs"] is not True:
        return False
    answers = [a[name] for a in (*row["a"], *row["b"]) for name in _ANSWER]
    text = "\n".join(str(x) for x in (*(row[n] for n in _CHOICE), *answers) if x).lower()
    return all(word in text for word in words if word != "differs")


def _unrecorded(found: dict[Choice, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What no interface shows, with the reason; alike ones of several processes are one."""
    out: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (tuner, op, key, _), answers in found.items():
        for answer in answers:
            if answer["source"] == "unrecorded":
                row = out.setdefault(
                    (tuner, op, answer["reason"]),
                    {"tuner": tuner, "op": op, "reason": answer["reason"], "key": key, "count": 0},
                )
                row["count"] += answer["count"]
    return list(out.values())


def known_by(tape: Tape, *, engine: str, graph: str | None, t_ns: int | None) -> dict[str, Any]:
    """Choices that an engine had made when a step began: of its graph, or the eager ones.

    Args:
        tape: where they were recorded.
        engine: of the step; choices of processes with several engines, or none, count too.
        graph: of the step; None is eager.
        t_ns: when it began; None counts all.

    Returns:
        `rows` (at most 200: tuner, op, key, implementation, tactic, source), `of`.
    """
    columns = ["tuner", "op", "key", *_ANSWER, "graph", "engine", "t_ns"]
    kept = []
    for _, _, batch in tape.batches("tactics", columns):
        where = pc.and_(
            pc.is_in(batch.column("engine"), pa.array([engine, ""])),
            pc.not_equal(batch.column("source"), "unrecorded"),
        )
        of_graph = (
            pc.is_null(batch.column("graph"))
            if graph is None
            else pc.fill_null(pc.equal(batch.column("graph"), graph), False)
        )
        where = pc.and_(where, of_graph)
        if t_ns is not None:
            where = pc.and_(where, pc.less_equal(batch.column("t_ns"), t_ns))
        kept.append(batch.filter(where))
    schema = pa.schema([tape.schemas["tactics"].field(name) for name in columns])
    table = pa.Table.from_batches(kept, schema).sort_by("t_ns")
    rows = table.slice(0, 200).select(["tuner", "op", "key", *_ANSWER, "graph"]).to_pylist()
    return {"rows": rows, "of": table.num_rows, "timed": t_ns is not None}
