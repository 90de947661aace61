"""A row of facts a sequence, so that lists, filters and overviews never scan a tape.

Computed batch by batch in bounded memory. Fragments of a sequence usually do not overlap, and then
sums over fragments are sums over the sequence. Where they do, the joined sequence is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import codecs
from rolltape.store.columns import Masked
from rolltape.store.errors import StorageError
from rolltape.store.index import INDEXED, KEY_COLUMNS, Index, grouped
from rolltape.store.keys import Key
from rolltape.store.places import LocalPlace, ObjectPlace
from rolltape.store.schema import (
    DERIVED_TABLES,
    SUPPORT_EXPLICIT,
    TAPE_TABLES,
)
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.writer import TapeWriter

_SCHEMA = TAPE_TABLES["rollups"]
_SPAN = (*KEY_COLUMNS, "start", "n")
_BATCH_ROWS = 1 << 17


class _Totals:
    """The counts of all sequences, as arrays over their codes."""

    def __init__(self, size: int) -> None:
        self.columns: dict[str, np.ndarray] = {}
        for name in ("loss_tokens", "routed", "route_rows", "live_rows", "explicit"):
            self.columns[name] = np.zeros(size, np.int64)
        for name in ("kept_sum", "kept_max", "gaps"):
            self.columns[name] = np.zeros(size, np.int64)
        for column in LOGPROBS:
            self.columns[f"{column}_count"] = np.zeros(size, np.int64)
            self.columns[f"{column}_non_finite"] = np.zeros(size, np.int64)
            self.columns[f"{column}_sum"] = np.zeros(size, np.float64)
            self.columns[f"{column}_min"] = np.full(size, np.inf, np.float32)
            self.columns[f"{column}_min_at"] = np.full(size, -1, np.int64)
        self.columns["version_min"] = np.full(size, np.iinfo(np.int64).max)
        self.columns["version_max"] = np.full(size, np.iinfo(np.int64).min)

    def reset(self, code: int, names: tuple[str, ...]) -> None:
        """Forget what was counted of one sequence in columns that begin with `names`."""
        fresh = _Totals(1)
        for name, values in self.columns.items():
            if name.startswith(names):
                values[code] = fresh.columns[name][0]


def rollups(tape: Tape) -> pa.Table:
    """A row a sequence, in the order of `tape.keys()`; stored if the seal has them, else counted.

    Returns:
        Table with the schema of `rollups`.
    """
    stored = tape.index.rollups
    table = count(tape) if stored is None else stored
    columns = (table.column(c).to_pylist() for c in KEY_COLUMNS)
    at = {Key(*row): i for i, row in enumerate(zip(*columns, strict=True))}
    order = [at[key] for key in tape.sequence_rows if key in at]
    return table.take(pa.array(order, pa.int64()))


def count(tape: Tape) -> pa.Table:
    """The roll-ups of every key that the tape holds anything of, by code of `tape.index`."""
    index = tape.index
    for table in INDEXED:
        index.entries(table)
    sequences = {s.key: s for s in tape}
    for key in sequences:
        index.codes.setdefault(key, len(index.codes))
    totals = _Totals(len(index.codes))
    table = tape.table("sequences")
    prompts = np.zeros(len(index.codes), np.int64)
    prompts[_codes(index, table)] = table.column("prompt_len").to_numpy()
    _count_tokens(tape, index, totals, prompts)
    _count_routes(tape, index, totals)
    _count_supports(tape, index, totals)
    _count_versions(tape, index, totals)
    _count_gaps(tape, index, totals)
    for table, names, recount in (
        ("tokens", ("loss_tokens", *LOGPROBS), _recount_tokens),
        ("routes", ("routed", "route_rows", "live_rows"), _recount_routes),
        ("supports", ("explicit", "kept_"), _recount_supports),
    ):
        for key in _overlapping(tape, index, table):
            if key in sequences:
                totals.reset(index.codes[key], names)
                recount(sequences[key], index.codes[key], totals)
    return _table(tape, index, totals)


def _codes(index: Index, table: pa.Table | pa.RecordBatch) -> np.ndarray:
    codes = np.zeros(table.num_rows, np.int64)
    at = 0
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    for batch in batches:
        for key, rows in grouped(batch):
            codes[at + rows] = index.codes.setdefault(key, len(index.codes))
        at += batch.num_rows
    return codes


def _count_tokens(tape: Tape, index: Index, totals: _Totals, prompts: np.ndarray) -> None:
    columns = [*_SPAN, "loss_mask", *LOGPROBS]
    for _, _, batch in tape.batches("tokens", columns):
        codes = _codes(index, batch)
        starts = batch.column("start").to_numpy()
        mask = batch.column("loss_mask")
        sizes = pc.list_value_length(mask).fill_null(0).to_numpy()
        flat = pc.list_flatten(mask).fill_null(False).to_numpy(zero_copy_only=False)
        np.add.at(totals.columns["loss_tokens"], np.repeat(codes, sizes), flat)
        for name in LOGPROBS:
            column = batch.column(name)
            sizes = pc.list_value_length(column).fill_null(0).to_numpy()
            flat = pc.list_flatten(column)
            if not len(flat):
                continue
            position = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            position += np.repeat(starts, sizes)
            owner = np.repeat(codes, sizes)
            values = flat.fill_null(0).to_numpy()
            valid = flat.is_valid().to_numpy(zero_copy_only=False)
            _add_logprobs(totals, name, owner, position, values, valid, prompts)


def _add_logprobs(
    totals: _Totals,
    name: str,
    owner: np.ndarray,
    position: np.ndarray,
    values: np.ndarray,
    valid: np.ndarray,
    prompts: np.ndarray,
) -> None:
    keep = valid & (position >= prompts[owner])
    finite = keep & np.isfinite(values)
    np.add.at(totals.columns[f"{name}_count"], owner[keep], 1)
    np.add.at(totals.columns[f"{name}_non_finite"], owner[keep & ~finite], 1)
    owner, position, values = owner[finite], position[finite], values[finite]
    np.add.at(totals.columns[f"{name}_sum"], owner, values.astype(np.float64))
    least, at = totals.columns[f"{name}_min"], totals.columns[f"{name}_min_at"]
    before = least.copy()
    np.minimum.at(least, owner, values)
    # the first position of the new minimum; fragments come in any order
    hit = values == least[owner]
    fell = least < before
    at[fell] = np.iinfo(np.int64).max
    found = np.full(len(at), np.iinfo(np.int64).max)
    np.minimum.at(found, owner[hit], position[hit])
    known = np.where(at < 0, np.iinfo(np.int64).max, at)
    better = np.minimum(known, found)
    touched = better < np.iinfo(np.int64).max
    at[touched] = better[touched]


def _count_routes(tape: Tape, index: Index, totals: _Totals) -> None:
    columns = [*_SPAN, "role", "layers", "encoding", "valid"]
    for _, _, batch in tape.batches("routes", columns):
        codes = _codes(index, batch)
        layers = pc.list_value_length(batch.column("layers")).to_numpy()
        for i, row in enumerate(batch.select(["n", "role", "valid", "encoding"]).to_pylist()):
            shape = (row["n"], int(layers[i]))
            if row["valid"] is None:
                positions, rows = row["n"] if shape[1] else 0, shape[0] * shape[1]
            else:
                valid = codecs.decode_bits(row["valid"], shape, field="routes.valid")
                positions, rows = int(valid.any(axis=1).sum()), int(valid.sum())
            if row["role"] == "used":
                totals.columns["routed"][codes[i]] += positions
                totals.columns["route_rows"][codes[i]] += rows
            else:
                totals.columns["live_rows"][codes[i]] += rows


def _count_supports(tape: Tape, index: Index, totals: _Totals) -> None:
    for _, _, batch in tape.batches("supports", [*KEY_COLUMNS, "state", "counts"]):
        codes = _codes(index, batch)
        sizes = pc.list_value_length(batch.column("state")).to_numpy()
        states = pc.list_flatten(batch.column("state")).to_numpy()
        counts = pc.list_flatten(batch.column("counts")).to_numpy()
        if len(states) != len(counts):
            continue  # refused when it is read as a kept set, with its name
        owner = np.repeat(codes, sizes)
        explicit = states == SUPPORT_EXPLICIT
        np.add.at(totals.columns["explicit"], owner[explicit], 1)
        np.add.at(totals.columns["kept_sum"], owner[explicit], counts[explicit])
        np.maximum.at(totals.columns["kept_max"], owner[explicit], counts[explicit])


def _count_versions(tape: Tape, index: Index, totals: _Totals) -> None:
    for _, _, batch in tape.batches("forwards", [*KEY_COLUMNS, "kind", "weight_version"]):
        codes = _codes(index, batch)
        version = batch.column("weight_version")
        keep = version.is_valid().to_numpy(zero_copy_only=False)
        keep &= pc.not_equal(batch.column("kind"), "dummy").to_numpy(zero_copy_only=False)
        values = version.fill_null(0).to_numpy()[keep]
        np.minimum.at(totals.columns["version_min"], codes[keep], values)
        np.maximum.at(totals.columns["version_max"], codes[keep], values)


def _count_gaps(tape: Tape, index: Index, totals: _Totals) -> None:
    requests = {(k.engine, k.request, k.sample): c for k, c in index.codes.items() if not k.scoring}
    for _, _, batch in tape.batches("events", ["kind", "engine", "request", "sample"]):
        for row in batch.filter(pc.equal(batch.column("kind"), "gap")).to_pylist():
            code = requests.get((row["engine"], row["request"], row["sample"]))
            if code is not None:
                totals.columns["gaps"][code] += 1


def _overlapping(tape: Tape, index: Index, table: str) -> Iterator[Key]:
    """Keys whose fragments in a table may cover a position twice."""
    entries = index.entries(table)
    code, start, end = entries.code, entries.start, entries.end
    if not len(code):
        return
    order = np.lexsort((start, code))
    same = code[order][1:] == code[order][:-1]
    meets = start[order][1:] < end[order][:-1]
    suspects = set(code[order][1:][same & meets].tolist())
    # several rows of one sequence in one batch: their spans are not in the index
    suspects |= set(code[entries.rows > 1].tolist())
    by_code = {c: key for key, c in index.codes.items()}
    for suspect in sorted(suspects):
        rows = tape.select(table, by_code[suspect])
        roles = rows.column("role").to_pylist() if table == "routes" else [""] * len(rows)
        spans = sorted(
            zip(roles, rows.column("start").to_pylist(), rows.column("n").to_pylist(), strict=True)
        )
        if any(a[0] == b[0] and b[1] < a[1] + a[2] for a, b in itertools.pairwise(spans)):
            yield by_code[suspect]


def _recount_tokens(sequence: Sequence, code: int, totals: _Totals) -> None:
    mask = sequence.loss_mask
    totals.columns["loss_tokens"][code] = int((mask.values & mask.valid).sum())
    prompts = np.zeros(code + 1, np.int64)
    prompts[code] = sequence.prompt_len
    for name in LOGPROBS:
        column: Masked = sequence.logprob(name)
        positions = np.arange(len(column))
        owner = np.full(len(column), code)
        _add_logprobs(totals, name, owner, positions, column.values, column.valid, prompts)


def _recount_routes(sequence: Sequence, code: int, totals: _Totals) -> None:
    for role, rows in (("used", "route_rows"), ("live", "live_rows")):
        routes = sequence.routes(role)
        if routes is not None:
            totals.columns[rows][code] = int(routes.valid.sum())
            if role == "used":
                totals.columns["routed"][code] = int(routes.valid.any(axis=1).sum())


def _recount_supports(sequence: Sequence, code: int, totals: _Totals) -> None:
    supports = sequence.supports()
    if supports is not None:
        sizes = np.diff(supports.offsets)[supports.state == SUPPORT_EXPLICIT]
        totals.columns["explicit"][code] = len(sizes)
        totals.columns["kept_sum"][code] = int(sizes.sum())
        totals.columns["kept_max"][code] = int(sizes.max(initial=0))


def _table(tape: Tape, index: Index, totals: _Totals) -> pa.Table:
    keys = sorted(index.codes, key=lambda key: index.codes[key])
    sequences = {s.key: s for s in tape}
    facts: dict[str, list[Any]] = {
        name: [] for name in ("group", "origin", "prompt_len", "finish", "digest", "closed_ns")
    }
    table = tape.table("sequences")
    stored = {name: table.column(name).to_pylist() for name in facts}
    rows = tape.sequence_rows
    for key in keys:
        row = rows.get(key)
        for name, values in facts.items():
            values.append(None if row is None else stored[name][row[0]])
    known = tape.index.lengths
    opened = [rows[key][1] if key in rows else None for key in keys]
    columns: dict[str, Any] = {
        "engine": [key.engine for key in keys],
        "request": [key.request for key in keys],
        "sample": [key.sample for key in keys],
        "pass": [key.scoring for key in keys],
        **facts,
        "prompt_len": [value or 0 for value in facts["prompt_len"]],
        "finish": ["unknown" if value is None else value for value in facts["finish"]],
        "length": [sequences[k].length if k in sequences else known.get(k, 0) for k in keys],
        "opened_ns": opened,
    }
    for name, numbers in totals.columns.items():
        field = _SCHEMA.field(name)
        none = np.zeros(len(numbers), bool)
        if name.endswith("_min"):
            none = ~np.isfinite(numbers) if numbers.dtype.kind == "f" else numbers > 2**62
        elif name.endswith("_min_at"):
            none = (numbers < 0) | (numbers > 2**62)
        elif name == "version_max":
            none = numbers < -(2**62)
        elif name.endswith("_sum") and name != "kept_sum":
            none = totals.columns[name.replace("_sum", "_count")] == 0
        columns[name] = pa.array(np.where(none, 0, numbers), field.type, mask=none, safe=False)
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, type=_SCHEMA.field(name).type)
        for name, values in ((name, columns[name]) for name in _SCHEMA.names)
    ]
    return pa.table(arrays, schema=_SCHEMA)


def write_index(place: LocalPlace | ObjectPlace) -> dict[str, Any]:
    """Write the roll-ups and the offsets of what a seal lists, as shards of their own.

    Returns:
        For the seal: `covers`, the number of shards it lists, and `shards`, the files written.
    """
    tape = Tape(place, skip_damaged=True)
    tape.seal = {**(tape.seal or {}), "index": None}
    listed = [str(entry["shard"]) for entry in tape.seal.get("shards", [])]
    number = {name: i for i, name in enumerate(listed)}
    for table in TAPE_TABLES:
        tape.only(table, [n.partition("/")[2] for n in listed if n.startswith(f"{table}/")])
    table = count(tape)
    writer = TapeWriter(place)
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        writer.write_batch("rollups", batch)
    for name in INDEXED:
        entries = tape.index.entries(name)
        shards = np.array([number[f"{name}/{file}"] for file in entries.files], np.int32)
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
