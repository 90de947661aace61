"""One row of facts a sequence, from the rows that several processes wrote about its life.

The front end of an engine may open and close a sequence, a worker may have seen only its start:
their rows meet here, whatever the order of the shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.index import KEY_COLUMNS, rows_of
from rolltape.store.keys import Key

# Facts that hold from the start. What an end says is never mixed from two rows.
_FROM_THE_START = (
    "group",
    "group_derived",
    "turn",
    "continues",
    "external",
    "origin",
    "sampling",
)


class _Life(NamedTuple):
    row: int  # the one that counts
    opened: int | None
    others: tuple[int, ...]  # their facts stand where that one has none


def join_lives(table: pa.Table) -> tuple[dict[Key, int], pa.Table]:
    """Join the rows of `sequences` by key.

    A closing row wins over an opening one whoever wrote it, of several closing ones the one that
    was written last (`closed_ns`). Facts of the start that it lacks come from the others.

    Args:
        table: all rows of `sequences`.

    Returns:
        Key -> row of the second, in the order in which the sequences were opened; and a row a
        sequence with the schema of `sequences`.
    """
    opening = pc.equal(table.column("finish"), "open").to_numpy()
    closed = table.column("closed_ns").fill_null(-1).to_numpy()
    lives: dict[Key, _Life] = {}
    found = rows_of(table, (*KEY_COLUMNS, "opened_ns"))
    for row, (*parts, opened) in enumerate(found):
        key = Key(*parts)
        before = lives.get(key)
        if before is None:
            lives[key] = _Life(row, opened, ())
            continue
        late = before.row
        if not opening[row] and (opening[late] or closed[row] >= closed[late]):
            started = before.opened if opened is None else opened
            lives[key] = _Life(row, started, (late, *before.others))
        else:
            started = opened if before.opened is None else before.opened
            lives[key] = _Life(late, started, (*before.others, row))
    if not all(a <= b for a, b in itertools.pairwise(life.opened or 0 for life in lives.values())):
        lives = dict(sorted(lives.items(), key=lambda item: item[1].opened or 0))
    facts = _facts(table, list(lives.values()))
    return {key: i for i, key in enumerate(lives)}, facts


def _facts(table: pa.Table, lives: Sequence[_Life]) -> pa.Table:
    facts = table.take(pa.array([life.row for life in lives], pa.int64()))
    for level in range(max((len(life.others) for life in lives), default=0)):
        rows = [life.others[level] if level < len(life.others) else None for life in lives]
        where = pa.array(rows, pa.int64())
        for name in _FROM_THE_START:
            known = facts.column(name)
            if known.null_count:
                other = table.column(name).take(where)
                facts = _with(facts, name, pc.coalesce(known, other))
    opened = pa.array([life.opened for life in lives], pa.int64())
    return _with(facts, "opened_ns", opened).combine_chunks()


def overridden(facts: pa.Table, said: dict[int, dict[str, str | int]]) -> pa.Table:
    """Facts with what annotations say instead.

    Args:
        facts: from `join_lives`.
        said: row -> group and turn as annotated.
    """
    if not said:
        return facts
    for name in ("group", "turn"):
        rows = [row for row, values in said.items() if name in values]
        if rows:
            values = facts.column(name).to_pylist()
            for row in rows:
                values[row] = said[row][name]
            facts = _with(facts, name, pa.array(values, facts.schema.field(name).type))
    grouped = np.array([row for row, values in said.items() if "group" in values], np.int64)
    if len(grouped):
        derived = facts.column("group_derived").to_pylist()
        for row in grouped.tolist():
            derived[row] = False
        facts = _with(facts, "group_derived", pa.array(derived, pa.bool_()))
    return facts


def _with(facts: pa.Table, name: str, values: pa.Array) -> pa.Table:
    at = facts.schema.get_field_index(name)
    return facts.set_column(at, facts.schema.field(name), values)
