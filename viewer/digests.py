"""Digests of tensor groups: which engines and which side hold the same weights as one version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.viewer.library import Pair

Row = dict[str, Any]

#: Versions whose digests are given at a time.
WINDOW = 8
#: Mismatches that are listed one by one.
_SHOWN = 200
_COLUMNS = ("engine", "version", "group", "digest", "tensors", "elements", "label", "reason")

_UNLIKE: WeakKeyDictionary[Tape, pa.Table] = WeakKeyDictionary()
_MISMATCHES: WeakKeyDictionary[Pair, pa.Table] = WeakKeyDictionary()
_COUNTS: WeakKeyDictionary[Pair, tuple[int, int]] = WeakKeyDictionary()
_KEPT: WeakKeyDictionary[Tape, pa.Table] = WeakKeyDictionary()


def complete(tape: Tape) -> pa.Table:
    """Rows of complete versions: `_COLUMNS` and the dtype of the engine; `group` is never null."""
    if tape not in _KEPT:
        schema = pa.schema([tape.schemas["weights"].field(name) for name in _COLUMNS])
        parts = []
        for _, _, batch in tape.batches("weights", [*_COLUMNS, "state"]):
            kept = batch.filter(pc.equal(batch.column("state"), "complete"))
            parts.append(kept.select(list(_COLUMNS)))
        table = pa.Table.from_batches(parts, schema)
        group = pc.fill_null(table.column("group"), "")
        table = table.set_column(table.schema.get_field_index("group"), "group", group)
        of = table.column("engine").unify_dictionaries().combine_chunks().dictionary_encode()
        dtypes = [tape.engine(name).get("dtype") for name in of.dictionary.to_pylist()]
        column = pa.array([*dtypes, None], pa.string()).take(of.indices)
        _KEPT[tape] = table.append_column("dtype", column)
    return _KEPT[tape]


def compared(a: Row, b: Row) -> str:
    """`equal`, `differs`, or why two digests of a group cannot be compared.

    Equal digests are equal weights whatever else is said of them.
    """
    if a["digest"] is not None and a["digest"] == b["digest"]:
        return "equal"
    for row in (a, b):
        if row["digest"] is None:
            return f"not comparable: {row['reason'] or 'no digest was recorded'}"
    for row in (a, b):
        if row["reason"]:
            return f"not comparable: {row['reason']}"
    if a["group"] == "derived":
        return "not comparable: made by the engine"
    if a["dtype"] != b["dtype"]:
        return f"not comparable: {a['dtype']} against {b['dtype']}"
    if (a["tensors"], a["elements"]) != (b["tensors"], b["elements"]):
        return (
            f"not comparable: {a['tensors']} tensors of {a['elements']} elements against "
            f"{b['tensors']} of {b['elements']}"
        )
    return "differs"


def differing(a: pa.Table, b: pa.Table, keys: list[str]) -> pa.Table:
    """Pairs of rows that `compared` says differ: the columns of a, those of b with `_b` added.

    Args:
        a: rows as `complete` gives them.
        b: likewise.
        keys: columns by which they belong together; null belongs to nothing.
    """
    pairs = a.join(b, keys=keys, join_type="inner", left_suffix="", right_suffix="_b")
    same = [
        pc.equal(pairs.column(name), pairs.column(f"{name}_b"))
        for name in ("tensors", "elements", "dtype")
    ]
    unlike = pc.not_equal(pairs.column("digest"), pairs.column("digest_b"))
    plain = pc.and_(pc.is_null(pairs.column("reason")), pc.is_null(pairs.column("reason_b")))
    where = pc.and_(unlike, pc.and_(plain, pc.not_equal(pairs.column("group"), "derived")))
    for column in same:
        where = pc.and_(where, column)
    return pairs.filter(pc.fill_null(where, False))


def window(tape: Tape, last: int | None) -> Row:
    """Digests of at most `WINDOW` versions up to `last`, by group and version.

    Returns:
        `versions` (numbers shown), `all` (how many there are), `first`, `last`, and `groups`: per
        group `cells`, a list by version of the different answers, each with the engines that gave
        it; `moved` says whether it changed against the version before (None: not known).
    """
    table = complete(tape)
    every = np.unique(table.column("version").to_numpy())
    shown = every[: np.searchsorted(every, last, side="right")] if last is not None else every
    shown = (shown if len(shown) else every)[-WINDOW:]
    # one more, to see what moved
    before = every[every < shown[0]][-1:] if len(shown) else shown
    wanted = pa.array(np.concatenate([before, shown]), pa.int64())
    rows = table.filter(pc.is_in(table.column("version"), wanted)).to_pylist()
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["group"], {}).setdefault(row["version"], []).append(row)
    groups = []
    for group in sorted(found, key=natural):
        versions = found[group]
        cells = []
        for version in shown.tolist():
            earlier = max((v for v in versions if v < version), default=None)
            last_rows = versions[earlier] if earlier is not None else []
            cells.append(_answers(versions.get(version, []), last_rows))
        groups.append({"group": group, "cells": cells})
    return {
        "versions": shown.tolist(),
        "all": len(every),
        "first": int(every[0]) if len(every) else None,
        "last": int(every[-1]) if len(every) else None,
        "groups": groups,
    }


def _answers(rows: list[Row], before: list[Row]) -> Row:
    """The different digests of one group and version, and whether engines hold the same."""
    last = {row["engine"]: row["digest"] for row in before}
    out: dict[Any, Row] = {}
    for row in rows:
        known = last.get(row["engine"])
        moved = None if known is None or row["digest"] is None else known != row["digest"]
        answer = out.setdefault(
            (row["digest"], row["reason"]),
            {
                "digest": hexa(row["digest"]),
                **{n: row[n] for n in ("reason", "tensors", "elements", "label")},
                "moved": moved,
                "engines": [],
            },
        )
        answer["engines"].append(row["engine"])
    words = [compared(rows[0], row) for row in rows[1:]]
    found = next((word for word in ("differs", "equal") if word in words), None)
    return {"answers": list(out.values()), "engines": found or (words[0] if words else "only one")}


def hexa(digest: int | None) -> str | None:
    """16 hex digits."""
    return None if digest is None else f"{digest:016x}"


def natural(group: str) -> tuple[Any, ...]:
    """Order of groups: the whole model, then by name, layers by number."""
    parts = group.split(".")
    number = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else -1
    return (group != "", parts[0], number, group)


def against_b(pair: Pair, versions: Iterable[int]) -> Row:
    """Digests of A and B for the same version, by group: match, mismatch or not comparable.

    Versions are counters of each tape. They are paired by the job's name of them if both sides
    name any, else by number.

    Args:
        pair: with both tapes.
        versions: of A, whose groups are listed one by one.

    Returns:
        `state` (match, mismatch, inconclusive, not-run), `reason`, `paired_by`, `counts` of all
        versions, `rows` of `versions`, and `mismatches`, the first ones of all versions. It is a
        match only where nothing is left that was not compared. `counts` are of pairs of digests;
        `unpaired` are versions, of either side, without a name where names pair them.
    """
    nothing: Row = {"paired_by": None, "rows": [], "mismatches": [], "counts": {}}
    if pair.tape is None or pair.b is None:
        return {"state": "not-run", "reason": "tape B is not open", **nothing}
    a, b = complete(pair.tape), complete(pair.b)
    for side, table in (("A", a), ("B", b)):
        if not table.num_rows:
            return {"state": "not-run", "reason": f"tape {side} has no version", **nothing}
    by = _paired_by(a, b)
    differ = b_mismatches(pair)
    if pair not in _COUNTS:
        pairs = _pairs(a, b, by)
        same = pc.equal(pairs.column("digest"), pairs.column("digest_b"))
        _COUNTS[pair] = pairs.num_rows, int(pc.sum(same).as_py() or 0)
    every, equal = _COUNTS[pair]
    counts = {
        "match": equal,
        "mismatch": differ.num_rows,
        "not comparable": every - equal - differ.num_rows,
        "unpaired": _unnamed(a) + _unnamed(b) if by == "label" else 0,
    }
    left = counts["not comparable"] + counts["unpaired"]
    state = "mismatch" if differ.num_rows else "inconclusive" if left else "match"
    reason = "" if every else f"no version of A has a partner in B by its {by}"
    if every and state == "inconclusive":
        reason = f"{equal:,} of {every:,} pairs of digests are equal, the others not comparable"
        unnamed = counts["unpaired"]
        if unnamed:
            reason += f"; {unnamed:,} version{'s have' if unnamed > 1 else ' has'} no name"
    here = pc.is_in(a.column("version"), pa.array(list(versions), pa.int64()))
    rows = _pair_rows(_pairs(a.filter(here), b, by), by)
    rows.sort(key=lambda r: (r["version"], r["result"] != "mismatch", natural(r["group"])))
    return {
        "state": state if every else "not-run",
        "reason": reason,
        "paired_by": "name" if by == "label" else "number",
        "counts": counts,
        "rows": rows,
        "mismatches": _pair_rows(differ.slice(0, _SHOWN), by),
    }


def b_mismatches(pair: Pair) -> pa.Table:
    """Rows of A whose partner in B has another digest, as `differing` gives them."""
    if pair.tape is None or pair.b is None:
        return _none()
    if pair not in _MISMATCHES:
        a, b = complete(pair.tape), complete(pair.b)
        _MISMATCHES[pair] = differing(a, b, ["group", _paired_by(a, b)])
    return _MISMATCHES[pair]


def _none() -> pa.Table:
    names = {"engine": pa.string(), "version": pa.int64(), "group": pa.string()}
    return pa.schema(list(names.items())).empty_table()


def _paired_by(a: pa.Table, b: pa.Table) -> str:
    named = all(table.column("label").null_count < table.num_rows for table in (a, b))
    return "label" if named else "version"


def _unnamed(table: pa.Table) -> int:
    """Versions of engines that the job gave no name."""
    rows = table.filter(pc.is_null(table.column("label")))
    return int(rows.group_by(["engine", "version"]).aggregate([]).num_rows)


def _pairs(a: pa.Table, b: pa.Table, by: str) -> pa.Table:
    return a.join(b, keys=["group", by], join_type="inner", left_suffix="", right_suffix="_b")


def _pair_rows(pairs: pa.Table, by: str) -> list[Row]:
    """Pairs of digests; those that say the same of several engines are one, with their number."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in pairs.to_pylist():
        word = compared(row, {n: row.get(f"{n}_b", row[n]) for n in (*_COLUMNS, "dtype")})
        pair = {
            "group": row["group"],
            "version": row["version"],
            "version_b": row["version"] if by == "version" else row["version_b"],
            "label": row["label"],
            "a": hexa(row["digest"]),
            "b": hexa(row["digest_b"]),
            "result": {"equal": "match", "differs": "mismatch"}.get(word, word),
        }
        found.setdefault(tuple(pair.values()), pair | {"pairs": 0})["pairs"] += 1
    return list(found.values())


def unlike_engines(tape: Tape) -> pa.Table:
    """Rows of engines that hold other weights than the first of their kind, as `differing`.

    Only engines of one role, model and dtype whose versions have the same numbers and names are
    compared: counters of engines that were updated another number of times need not agree.
    """
    if tape not in _UNLIKE:
        _UNLIKE[tape] = _unlike(tape)
    return _UNLIKE[tape]


def _unlike(tape: Tape) -> pa.Table:
    table = complete(tape)
    kinds: dict[Any, list[str]] = {}
    for engine in pc.unique(table.column("engine")).to_pylist():
        mine = table.filter(pc.equal(table.column("engine"), engine))
        history = mine.group_by(["version", "label"]).aggregate([]).sort_by("version")
        facts = tape.engine(engine)
        kind = (
            *(facts.get(name) for name in ("role", "model_fingerprint", "dtype")),
            *(tuple(column.to_pylist()) for column in history.columns),
        )
        kinds.setdefault(kind, []).append(engine)
    found = []
    for first, *others in kinds.values():
        if others:
            a = table.filter(pc.equal(table.column("engine"), first))
            b = table.filter(pc.is_in(table.column("engine"), pa.array(others)))
            found.append(differing(a, b, ["group", "version"]))
    return pa.concat_tables(found) if found else _none()
