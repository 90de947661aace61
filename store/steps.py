"""Rows of an engine step: which record batches hold which steps, and what is in them.

An index has the least and greatest step of each sequence in each batch of `forwards`. Where it has
not, and for `steps`, whose rows belong to no sequence, `engine` and `step` are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.errors import UsageError
from rolltape.store.schema import TAPE_TABLES

if TYPE_CHECKING:
    from rolltape.store.sequences import Tape

_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class StepSpans:
    """One entry a record batch and engine in it, in written order. Arrays [m].

    Args:
        files: names of shards.
        engines: ids of engines.
        file: int32, index into `files`.
        batch: int32.
        engine: int32, index into `engines`.
        first: int64, least step.
        last: int64, greatest step.
        t0: int64, least `t_ns` of those rows; the least int64 where there is none.
        t1: int64, greatest `t_ns`; the greatest int64 where there is none.
    """

    files: list[str]
    engines: list[str]
    file: np.ndarray
    batch: np.ndarray
    engine: np.ndarray
    first: np.ndarray
    last: np.ndarray
    t0: np.ndarray
    t1: np.ndarray

    def table(self) -> pa.Table:
        """The entries as Arrow; times that are not known are null."""

        def time(values: np.ndarray, none: int) -> pa.Array:
            return pa.array(values, pa.int64(), mask=values == none)

        return pa.table(
            {
                "file": pa.array([self.files[i] for i in self.file], pa.string()),
                "batch": pa.array(self.batch, pa.int32()),
                "engine": pa.array([self.engines[i] for i in self.engine], pa.string()),
                "first": pa.array(self.first, pa.int64()),
                "last": pa.array(self.last, pa.int64()),
                "t0_ns": time(self.t0, _LEAST),
                "t1_ns": time(self.t1, _MOST),
            }
        )


def step_spans(tape: Tape, table: str) -> StepSpans:
    """The spans of `steps` or `forwards`.

    Raises:
        UsageError: another table.
    """
    if table not in ("steps", "forwards"):
        raise UsageError(f"{table} has no rows of engine steps", hint="steps or forwards")
    entries = tape.index.entries("forwards") if table == "forwards" else None
    if entries is not None and entries.steps is not None:
        keys = list(tape.index.codes)
        number = {name: i for i, name in enumerate(dict.fromkeys(key.engine for key in keys))}
        engine = np.array([number[key.engine] for key in keys], np.int32)[entries.code]
        columns = [entries.file, entries.batch, engine, *entries.steps.T]
        none = np.zeros(len(engine), np.int64)
        return _folded(entries.files, list(number), [*columns, none + _LEAST, none + _MOST])
    files = tape.files(table)
    engines: dict[str, int] = {}
    parts = []
    names = ["engine", "step", *(["t_ns"] if table == "steps" else [])]
    for file, batch_number, batch in tape.batches(table, names):
        if not batch.num_rows:
            continue
        of = batch.column("engine").dictionary_encode()
        codes = [engines.setdefault(name, len(engines)) for name in of.dictionary.to_pylist()]
        engine = np.array(codes, np.int32)[of.indices.to_numpy()]
        step = batch.column("step").to_numpy()
        t0, t1 = np.full(len(step), _LEAST), np.full(len(step), _MOST)
        if table == "steps":
            times = batch.column("t_ns")
            t0, t1 = (times.fill_null(x).to_numpy() for x in (_LEAST, _MOST))
        where = np.full(len(step), files.index(file), np.int32)
        number_ = np.full(len(step), batch_number, np.int32)
        folded = _folded(files, [], [where, number_, engine, step, step, t0, t1])
        parts.append([getattr(folded, name) for name in _COLUMNS])
    empty = [np.zeros(0, np.int64)] * len(_COLUMNS)
    columns = [np.concatenate(p) for p in zip(*parts, strict=True)] if parts else empty
    return _folded(files, list(engines), columns)


_COLUMNS = ("file", "batch", "engine", "first", "last", "t0", "t1")


def _folded(files: list[str], engines: list[str], columns: Sequence[np.ndarray]) -> StepSpans:
    """Rows of the same batch and engine in one; a time that one of them lacks is not known."""
    file, batch, engine, first, last, t0, t1 = columns
    if not len(file):
        return StepSpans(files, engines, *columns)
    order = np.lexsort((engine, batch, file))
    key = np.stack([file, batch, engine], axis=1)[order]
    new = np.append(True, (key[1:] != key[:-1]).any(1))
    at = np.flatnonzero(new)
    of_file, of_batch, of_engine = key[at].T.astype(np.int32)
    return StepSpans(
        files=files,
        engines=engines,
        file=of_file,
        batch=of_batch,
        engine=of_engine,
        first=np.minimum.reduceat(first[order], at),
        last=np.maximum.reduceat(last[order], at),
        t0=np.minimum.reduceat(t0[order], at),
        t1=np.maximum.reduceat(t1[order], at),
    )


def rows_between(
    tape: Tape,
    spans: StepSpans,
    table: str,
    *,
    engine: str | None = None,
    first: int | None = None,
    last: int | None = None,
    t0_ns: int | None = None,
    t1_ns: int | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Rows of some steps, in written order; see `Tape.between`."""
    names = list(TAPE_TABLES[table].names if columns is None else columns)
    schema = pa.schema([TAPE_TABLES[table].field(name) for name in names])
    keep = np.ones(len(spans.file), bool)
    wanted: list[tuple[str, str, object]] = []
    if engine is not None:
        known = spans.engines.index(engine) if engine in spans.engines else -1
        keep &= spans.engine == known
        wanted.append(("engine", "equal", engine))
    if first is not None:
        keep &= spans.last >= first
        wanted.append(("step", "greater_equal", first))
    if last is not None:
        keep &= spans.first <= last
        wanted.append(("step", "less_equal", last))
    if t0_ns is not None:
        keep &= spans.t1 >= t0_ns
        wanted.append(("t_ns", "greater_equal", t0_ns))
    if t1_ns is not None:
        keep &= spans.t0 <= t1_ns
        wanted.append(("t_ns", "less_equal", t1_ns))
    read = [*names, *dict.fromkeys(n for n, _, _ in wanted if n not in names)]
    reading = pa.schema([TAPE_TABLES[table].field(name) for name in read])
    found = []
    for file, number in np.unique(np.stack([spans.file, spans.batch], 1)[keep], axis=0).tolist():
        with tape.damage():
            batch = tape.shard(table, spans.files[file]).read(number, reading)
            mask = None
            for name, test, value in wanted:
                each = pc.call_function(test, [batch.column(name), pa.scalar(value)])
                mask = each if mask is None else pc.and_(mask, each)
            found.append((batch if mask is None else batch.filter(mask)).select(names))
    return pa.Table.from_batches(found, schema)
