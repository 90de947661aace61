"""A row of facts a sequence, so that lists, filters and overviews never scan a tape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.counting import NULL, START, Totals, totals_of
from rolltape.store.errors import StorageError
from rolltape.store.facts import FACTS, facts_of
from rolltape.store.index import INDEXED, KEY_COLUMNS
from rolltape.store.places import LocalPlace, ObjectPlace
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.sequences import Tape
from rolltape.store.writer import TapeWriter

_SCHEMA = TAPE_TABLES["rollups"]
_BATCH_ROWS = 1 << 17
#: Tables of which the offsets say where the rows of a sequence are.
_LISTED = ("sequences", *INDEXED)


def rollups(tape: Tape) -> pa.Table:
    """A row a sequence, in the order of `tape.keys()`; stored if the seal has them, else counted.

    Returns:
        Table with the schema of `rollups`.
    """
    stored = tape.index.rollups
    if stored is not None and any(key not in tape.index.codes for key in tape.sequence_rows):
        stored = None  # a shard that was damaged when the tape was sealed is whole again
    table = count(tape) if stored is None else stored
    # rows of both stand in the order of the codes
    order = [tape.index.codes[key] for key in tape.sequence_rows]
    if order == list(range(len(table))):
        return table
    return table.take(pa.array(order, pa.int64()))


def sequence_facts(tape: Tape) -> pa.Table:
    """A row a sequence for lists, in the order of `tape.keys()`: its id and a few roll-ups.

    Returns:
        Table with `id` and `rolltape.store.facts.FACTS`; `group` and `finish` are dictionaries.
    """
    stored = tape.stored_facts
    found = facts_of(rollups(tape)) if stored is None else stored
    return found.table.select(["id", *FACTS])


def count(tape: Tape) -> pa.Table:
    """The roll-ups of every key that the tape holds anything of, by code of `tape.index`."""
    return _table(tape, totals_of(tape))


def _table(tape: Tape, totals: Totals) -> pa.Table:
    keys = list(tape.index.codes)
    size = len(keys)
    rows = [tape.sequence_rows.get(key) for key in keys]
    names = [
        "group",
        "origin",
        "prompt_len",
        "finish",
        "digest",
        "opened_ns",
        "closed_ns",
        "length",
    ]
    facts = tape.facts.select(names).take(pa.array(rows, pa.int64()))
    known = np.zeros(size, np.int64)
    tokens = tape.index.entries("tokens")
    np.maximum.at(known, tokens.code, tokens.end.astype(np.int64))
    prompt_len = facts.column("prompt_len").fill_null(0)
    open_length = np.maximum(known, prompt_len.to_numpy())
    length = pc.coalesce(facts.column("length"), pa.array(open_length, pa.int32()))
    columns: dict[str, Any] = {
        **{name: facts.column(name) for name in names},
        **{name: [key[i] for key in keys] for i, name in enumerate(KEY_COLUMNS)},
        "prompt_len": prompt_len,
        "length": length,
        "finish": facts.column("finish").fill_null("unknown"),
    }
    for name, start in START.items():
        numbers = totals.column(name, size)[:size]
        none = np.zeros(size, bool)
        if name.endswith(NULL):
            none = numbers == start
        elif name.endswith("_sum") and name != "kept_sum":
            none = totals.column(f"{name[:-4]}_count", size)[:size] == 0
        values = np.where(none, np.zeros(1, numbers.dtype), numbers)
        columns[name] = pa.array(values, _SCHEMA.field(name).type, mask=none, safe=False)
    arrays = []
    for field in _SCHEMA:
        values = columns[field.name]
        if isinstance(values, list):
            values = pa.array(values, type=field.type)
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        arrays.append(values)
    return pa.table(arrays, schema=_SCHEMA)


def write_index(place: LocalPlace | ObjectPlace) -> dict[str, Any] | None:
    """Write the roll-ups and the offsets of what a seal lists, as shards of their own.

    Returns:
        For the seal: `covers`, the number of shards it lists, and `shards`, the files written.
        None if a listed shard is damaged or gone: an index without it would hide that.
    """
    tape = Tape(place, skip_damaged=True)
    tape.seal = {**(tape.seal or {}), "index": None}
    listed = [str(entry["shard"]) for entry in tape.seal.get("shards", [])]
    number = {name: i for i, name in enumerate(listed)}
    for table in TAPE_TABLES:
        tape.only(table, [n.partition("/")[2] for n in listed if n.startswith(f"{table}/")])
    table = count(tape)
    for name in _LISTED:
        tape.index.entries(name)
    if tape.damaged:
        return None
    writer = TapeWriter(place)
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        writer.write_batch("rollups", batch)
    for name in _LISTED:
        entries = tape.index.entries(name)
        shards = np.array([number[f"{name}/{file}"] for file in entries.files], np.int32)
        none = pa.nulls(len(entries.code), pa.int64())
        steps = entries.steps
        rows = pa.record_batch(
            [
                pa.repeat(pa.scalar(name), len(entries.code)),
                *(
                    pa.array(values, pa.int32())
                    for values in (
                        entries.code,
                        shards[entries.file] if len(shards) else entries.file,
                        entries.batch,
                        entries.rows,
                        entries.start,
                        entries.end,
                    )
                ),
                none if steps is None else pa.array(np.ascontiguousarray(steps[:, 0])),
                none if steps is None else pa.array(np.ascontiguousarray(steps[:, 1])),
            ],
            schema=TAPE_TABLES["offsets"],
        )
        for start in range(0, rows.num_rows, _BATCH_ROWS):
            writer.write_batch("offsets", rows.slice(start, _BATCH_ROWS))
    writer.close()
    shards_written = []
    for name in DERIVED_TABLES:
        for file, size in sorted(place.files(name).items()):
            if file.startswith(writer.id):
                shards_written.append({"shard": f"{name}/{file}", "bytes": size})
    if len(table) and not shards_written:
        raise StorageError(f"{place}: the index that was just written is not there")
    return {"covers": len(listed), "shards": shards_written}
