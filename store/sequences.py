"""The joins: a `Tape` gives whole sequences from the fragments that its writers recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store import codecs
from rolltape.store.cells import Cells, Fragment, place
from rolltape.store.columns import Masked
from rolltape.store.distributions import Distributions, join_distributions
from rolltape.store.errors import DamagedShardError, NotATapeError, SchemaError, UsageError
from rolltape.store.flat import FlatTable, flat_rows, table_rows
from rolltape.store.index import Index
from rolltape.store.keys import Key
from rolltape.store.late import aliases, by_external, meant_by, overrides
from rolltape.store.lives import join_lives, overridden
from rolltape.store.packed import PackedBlock, decode_block
from rolltape.store.places import LocalPlace, ObjectPlace, Place, place_of
from rolltape.store.processes import merge_processes, read_processes
from rolltape.store.readers import Cache
from rolltape.store.routes import Routes, join_routes, overlap
from rolltape.store.scan import Rows
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.shards import COMPACTING
from rolltape.store.sketches import Sketched, read_sketches
from rolltape.store.supports import Supports, join_supports
from rolltape.store.tape import TAPE_HEADER, Folder

LOGPROBS = ("processed", "scaled", "raw")

# A reader holds at most this much: batches that were read last, and decoded blocks of packed
# routes, so that the sequences of a block do not each decode it.
_BATCH_BYTES = 64 << 20
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Sequence:
    """One sequence of a tape. Everything is read when it is asked for.

    Args:
        key: its identity; `id` is the short form.
        length: number of positions T known so far.
        span: of a window, first position and one behind the last; else the whole sequence. Arrays
            have an entry for each position of the span.
        closed: whether the length is final. Fragments may reach further than the length: an
            asynchronous engine runs forwards that nobody needs, and of an open sequence not all
            tokens are written yet. What is beyond the length is left out.
    """

    tape: Tape = field(repr=False)
    key: Key
    length: int
    span: tuple[int, int] = (0, 0)
    closed: bool = True

    @property
    def id(self) -> str:
        """Short id, unique within the tape."""
        return self.key.id

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The `sequences` row: group, prompt_len, length, finish, sampling (a dict), ..."""
        return self.tape.info(self.key)

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return int(self.info["prompt_len"])

    @property
    def finish(self) -> str:
        """stop, length, abort, error, open or scored."""
        return str(self.info["finish"])

    @property
    def origin(self) -> Key | None:
        """Key of the sequence that this one replays, if any."""
        origin = self.info["origin"]
        return Key.parse(origin) if origin else None

    def window(self, start: int, stop: int) -> Sequence:
        """The positions [start, stop) alone: only the fragments that reach into them are read.

        Raises:
            UsageError: not within the sequence.
        """
        if not 0 <= start <= stop <= self.length:
            raise UsageError(
                f"{self.id} has no positions {start}:{stop}", hint=f"it has 0:{self.length}"
            )
        return Sequence(self.tape, self.key, self.length, (start, stop), self.closed)

    def _rows(self, table: str) -> list[Fragment]:
        whole = self.span == (0, self.length)
        return self.tape.fragments(table, self.key, None if whole else self.span)

    @cached_property
    def _tokens(self) -> list[Fragment]:
        return self._rows("tokens")

    @cached_property
    def tokens(self) -> Masked:
        """Token ids, uint32 [T]; invalid where a fragment is missing."""
        return self._joined("ids", np.uint32)

    @cached_property
    def loss_mask(self) -> Masked:
        """True where the trainer's loss counts, bool [T]; invalid where unknown."""
        return self._joined("loss_mask", np.bool_)

    def logprob(self, column: str) -> Masked:
        """`raw`, `scaled` or `processed` logprobs, float32 [T]; invalid where not recorded."""
        if column not in LOGPROBS:
            raise UsageError(f"no logprob column {column!r}", hint=" | ".join(LOGPROBS))
        return self._joined(column, np.float32)

    @property
    def semantics(self) -> list[tuple[int, int, dict[str, Any]]]:
        """(start, n, semantics) of every span that has logprobs, by start."""
        spans = [
            (f["start"], min(f["n"], self.length - f["start"]), f["semantics"])
            for f in self._tokens
            if f["start"] < self.length or f["n"] == 0
        ]
        return sorted((s for s in spans if s[2] is not None), key=lambda span: span[:2])

    def _joined(self, column: str, dtype: Any) -> Masked:
        begin, end = self.span
        if len(self._tokens) == 1:  # the usual case after `compact`
            cell = self._tokens[0][column]
            only = self._tokens[0]
            whole = (only["start"], only["n"]) == (begin, end - begin)
            if cell is not None and whole and len(cell) == end - begin:
                if isinstance(cell, Masked):
                    return Masked(cell.values.astype(dtype), cell.valid.copy())
                return Masked.full(cell.astype(dtype))
        out = Masked.empty(end - begin, dtype)
        for fragment in self._tokens:
            cell = fragment[column]
            if cell is not None:
                where = f"tokens.{column} of {self.id}"
                place(out, begin, fragment, cell, where=where)
        return out

    def routes(
        self, role: str = "used", layers: Items[int] | None = None, *, again: int = 0
    ) -> Routes | None:
        """Routes that were `used`, or the `live` choice where another was forced.

        Args:
            role: `used` or `live`.
            layers: model layer numbers, in the order in which they are wanted; None is all that
                were recorded. Others are not decoded.
            again: which of several forwards over a position and layer, in step order. 0 is the
                record of what happened; 1 what was chosen when it was run again (after a
                preemption, say), and so on.

        Returns:
            None when the tape holds no routes of that role for the sequence (or none of that
            forward); a dense model is told apart by
            `tape.engine(key.engine)["moe_layers"] == []`.
        """
        rows = [r for r in self._rows("routes") if r["role"] == role]
        if not rows or (again and not overlap(rows)):
            return None
        found = join_routes(
            rows,
            self.span,
            self.id,
            unpack=self.tape.unpack,
            layers=layers,
            again=again,
        )
        return None if again and not found.valid.any() else found

    def supports(self) -> Supports | None:
        """Kept sets, or None when the tape holds none for the sequence."""
        rows = self._rows("supports")
        return join_supports(rows, self.span, self.id) if rows else None

    def distributions(self) -> Distributions | None:
        """The most probable tokens of each position, or None when the tape holds none."""
        rows = self._rows("distributions")
        if not rows:
            return None
        found = join_distributions(rows, self.length, self.id)
        part = slice(*self.span)
        return replace(
            found,
            valid=found.valid[part],
            ids=found.ids[part],
            logprobs=found.logprobs[part],
            tail=found.tail[part],
        )

    def activations(self) -> dict[str, list[tuple[int, str, np.ndarray]]]:
        """Per site the recorded spans: (start, dtype name, float32 [n, width])."""
        out: dict[str, list[tuple[int, str, np.ndarray]]] = {}
        rows = (row for row in self._rows("activations") if row["encoding"] is None)
        for row in sorted(rows, key=lambda row: int(row["start"])):
            shape, left = (row["n"], row["width"]), self.length - row["start"]
            if left <= 0 < row["n"]:
                continue
            data = codecs.decode_floats(row["data"], shape, field=f"activations.data of {self.id}")
            out.setdefault(row["site"], []).append((row["start"], row["dtype"], data[:left]))
        return out

    def sketches(self) -> dict[str, list[Sketched]]:
        """Per site the spans of which sketches were recorded, see `rolltape.recorder.sketch`."""
        return read_sketches(self._rows("activations"), self.length, self.id)

    @cached_property
    def annotations(self) -> dict[str, float | str]:
        """Late facts by name: rewards, advantages, filters; the last one written counts.

        Also those that were written under the id that the caller knows, see `rolltape.store.late`.
        """
        rows = list(self.tape.fragments("annotations", self.key))
        for alias in aliases(self.key, self.info["external"]):
            for row in self.tape.fragments("annotations", alias):
                if self.key in meant_by(alias, row["name"], self.tape.externals)[0]:
                    rows.append(row)
        rows.sort(key=lambda row: int(row["t_ns"]))
        return {r["name"]: r["text"] if r["number"] is None else r["number"] for r in rows}

    @cached_property
    def forwards(self) -> pa.Table:
        """Rows of `forwards` of this sequence, in step order."""
        return self.tape.select("forwards", self.key).sort_by("step")

    @cached_property
    def step(self) -> Masked:
        """The step that produced `logprob[p]`, int64 [T]: the first whose input ended at p-1."""
        return self._from_forwards("step")

    @cached_property
    def weight_version(self) -> Masked:
        """The weight version that produced `logprob[p]`, int64 [T]."""
        return self._from_forwards("weight_version")

    def _from_forwards(self, column: str) -> Masked:
        out = Masked.empty(self.length, np.int64)
        table = self.forwards
        for start, n, kind, value in zip(
            *(table.column(c).to_pylist() for c in ("start", "n", "kind", column)), strict=True
        ):
            if kind == "dummy" or value is None:
                continue
            if kind == "prefill" and start + n < self.prompt_len:
                continue  # an unfinished chunk gives no logprob
            span = (
                slice(start + 1, start + n + 1)
                if kind == "score"
                else slice(start + n, start + n + 1)
            )
            fresh = ~out.valid[span]
            out.values[span][fresh] = value
            out.valid[span] = True
        return out[slice(*self.span)]


class Tape(FlatTable, Folder):
    """A recording. Iterate it, or ask for one sequence by its id; tables are there as Arrow.

    Args:
        place: where it lies.
        skip_damaged: leave damaged shards out and name them in `problems`.
        version: as it was at that seal.
        columns: of the flat table; None is all.

    To Arrow tools it is a table with a row a sequence (`schema`, `to_table`, `to_batches`,
    `scanner`, `count_rows`, `take`, `head`, `to_pandas`, `to_ray`, and the Arrow C stream);
    `dataset(name)` is a stored table in the same way.
    """

    def __init__(
        self,
        place: Place,
        *,
        skip_damaged: bool = False,
        version: int | None = None,
        columns: Items[str] | None = None,
    ) -> None:
        super().__init__(
            place,
            header=TAPE_HEADER,
            schemas=TAPE_TABLES,
            skip_damaged=skip_damaged,
            version=version,
        )
        self.flat = flat_rows(self, columns)
        self._rollups: pa.Table | None = None
        self._blocks: Cache[PackedBlock] = Cache(BLOCK_BYTES)
        self._cells: Cache[Cells] = Cache(_BATCH_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.place, self.skip_damaged, self.version, self.schema.names)

    # -- the flat table -------------------------------------------------------------------

    def dataset(self, table: str) -> Rows:
        """A stored table, as `rolltape.store.schema.TAPE_TABLES` has it, for Arrow tools.

        Raises:
            UsageError: there is no such table in the format.
        """
        return table_rows(self, table)

    def __repr__(self) -> str:
        return f"<{self.role} tape {self.place}: {len(self):,} sequences>"

    # -- sequences ------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """rollout, trainer, reference or draft."""
        return str(self.header.get("role", "rollout"))

    @property
    def parent(self) -> str | None:
        """uuid of the tape that this one replays."""
        parent = self.header.get("parent")
        return str(parent) if parent else None

    @cached_property
    def processes(self) -> list[dict[str, Any]]:
        """The `engines` rows, one a process and engine, JSON columns decoded."""
        return read_processes(self.rows("engines"))

    @cached_property
    def engines(self) -> dict[str, dict[str, Any]]:
        """What each engine is, by engine id: the rows of its processes in one.

        Where they disagree, `disagreements` says so; see `rolltape.store.processes`.
        """
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in self.processes:
            rows.setdefault(row["engine"], []).append(row)
        return {engine: merge_processes(mine) for engine, mine in rows.items()}

    def engine(self, engine: str) -> dict[str, Any]:
        """The merged `engines` row of an engine; an empty dict if it never wrote one."""
        return self.engines.get(engine, {})

    @cached_property
    def index(self) -> Index:
        """Which batches hold rows of which sequence."""
        return Index(self)

    @cached_property
    def _lives(self) -> tuple[dict[Key, int], pa.Table]:
        return join_lives(self.table("sequences"))

    @property
    def sequence_rows(self) -> dict[Key, int]:
        """Per key its row of `facts`, in the order in which the sequences were opened."""
        return self._lives[0]

    @cached_property
    def facts(self) -> pa.Table:
        """A row a sequence with the schema of `sequences`: its rows joined, annotations over it."""
        keys, facts = self._lives
        said = overrides(self, self.externals)
        return overridden(facts, {keys[key]: v for key, v in said.items() if key in keys})

    @cached_property
    def externals(self) -> dict[str, list[Key]]:
        """The sequences of each request id that a caller knows them by."""
        keys, facts = self._lives
        return by_external(list(keys), facts.column("external"))

    def info(self, key: Key) -> dict[str, Any]:
        """The facts of a sequence, `sampling` as a dict."""
        info: dict[str, Any] = self.facts.slice(self.sequence_rows[key], 1).to_pylist()[0]
        info["sampling"] = json.loads(info["sampling"]) if info["sampling"] else {}
        return info

    @cached_property
    def lengths(self) -> dict[Key, tuple[int, bool]]:
        """Positions of each sequence, and whether that is final."""
        known = self.index.lengths
        orphans = [key for key in known if key not in self.sequence_rows]
        if orphans:
            self.note(
                f"{self.place}/tokens: {len(orphans)} sequences have no row in the sequences "
                f"table, the first is {orphans[0].id}; they are left out"
            )
        facts = self._lives[1].select(["length", "prompt_len"])
        lengths, prompts = (column.to_pylist() for column in facts.columns)
        out = {}
        for key, row in self.sequence_rows.items():
            length = lengths[row]
            if length is None:
                out[key] = max(known.get(key, 0), prompts[row]), False
            else:
                out[key] = length, True
        return out

    def _sequence(self, key: Key) -> Sequence:
        # new each time: a sequence keeps what it has read
        length, closed = self.lengths[key]
        return Sequence(self, key, length, (0, length), closed)

    def rollups(self) -> pa.Table:
        """A row of facts a sequence, in the order of `keys()`: counts, sums, extremes, versions.

        Written at seal; counted now, with one pass over the tape, where the seal does not have it.

        Returns:
            Table with the schema `rolltape.store.schema.TAPE_TABLES["rollups"]`.
        """
        if self._rollups is None:
            from rolltape.store.rollups import rollups  # it reads through this class

            self._rollups = rollups(self)
        return self._rollups

    def __len__(self) -> int:
        return len(self.sequence_rows)

    def __iter__(self) -> Iterator[Sequence]:
        return map(self._sequence, self.lengths)

    def keys(self) -> list[Key]:
        """Keys of all sequences, in the order they were opened."""
        return list(self.sequence_rows)

    @cached_property
    def _by_id(self) -> dict[str, Key]:
        return {key.id: key for key in self.sequence_rows}

    def sequence(self, which: str | Key) -> Sequence:
        """One sequence by its key, its id, the part of the id after the engine, or `external`.

        Raises:
            UsageError: none, or more than one, has that name.
        """
        if isinstance(which, Key):
            if which in self.lengths:
                return self._sequence(which)
            raise UsageError(f"{self.place} has no sequence {which.id}")
        if which in self._by_id:
            return self._sequence(self._by_id[which])
        found = [key for id_, key in self._by_id.items() if id_.partition(".")[2] == which]
        found = found or self.externals.get(which, [])
        if len(found) == 1:
            return self._sequence(found[0])
        problem = f"{len(found)} sequences named" if found else "no sequence"
        hint = f"`rolltape show {self.place}` lists them"
        if found:
            hint = "one of " + ", ".join(key.id for key in found[:4])
        raise UsageError(f"{self.place} has {problem} {which!r}", hint=hint)

    def _found(
        self, table: str, key: Key, span: tuple[int, int] | None
    ) -> Iterator[tuple[str, int, Cells, np.ndarray]]:
        """(file, batch number, batch, rows in it) of a sequence, in written order."""
        start, stop = span if span is not None else (None, None)
        for file, number in self.index.find(table, key, start, stop):
            with self.damage():
                cells = self.cells(table, file, number)
                rows = cells.rows.get(key)
                if rows is not None:
                    yield file, number, cells, rows

    def cells(self, table: str, file: str, number: int) -> Cells:
        """One batch of a table, taken apart, kept for a while."""

        def make() -> tuple[Cells, int]:
            cells = Cells(self.shard(table, file).read(number, self.schemas[table]))
            return cells, cells.nbytes

        return self._cells.get((table, file, number), make)

    def select(self, table: str, key: Key) -> pa.Table:
        """Rows of a keyed table that belong to one sequence."""
        parts = [cells.batch.take(rows) for _, _, cells, rows in self._found(table, key, None)]
        return pa.Table.from_batches(parts, self.schemas[table])

    def fragments(
        self, table: str, key: Key, span: tuple[int, int] | None = None
    ) -> list[Fragment]:
        """Those rows, list columns as `Masked` or numpy arrays that must not be written to.

        In the order in which each writer wrote them: where spans overlap, the first is the record
        of what happened.

        Args:
            table: one of `rolltape.store.index.INDEXED`.
            key: the sequence.
            span: only rows that reach into these positions.
        """
        out = []
        for file, number, cells, rows in self._found(table, key, span):
            found = [Fragment(cells, row, (file, number)) for row in rows.tolist()]
            if span is not None:
                found = [f for f in found if _reaches(f, span)]
            out += found
        return out

    def unpack(self, row: Fragment, columns: tuple[int, ...] | None) -> PackedBlock:
        """The block of a packed fragment of routes, decoded, kept for a while.

        Args:
            row: a fragment, from `fragments`.
            columns: indices of the layers that are wanted; None is all.
        """
        file, number = row.where
        at = row.row - int(row["back"] or 0)

        def make() -> tuple[PackedBlock, int]:
            cells = self.cells("routes", file, number)
            where = f"{self.place}/routes/{file}: batch {number}, row {at}"
            if not 0 <= at < cells.batch.num_rows:
                raise SchemaError(f"{where}: its block would stand outside the batch")
            data = cells.column("ids")(at)
            if data is None:
                raise SchemaError(f"{where}: no block there")
            try:
                block = decode_block(data, layers=columns)
            except DamagedShardError as error:
                raise DamagedShardError(f"{where}: {error}") from error
            except SchemaError as error:
                raise SchemaError(f"{where}: {error}") from error
            return block, block.ids.nbytes + block.valid.nbytes + block.token_ids.nbytes

        return self._blocks.get((file, number, at, columns), make)


def open_tape(
    uri: str | os.PathLike[str] | LocalPlace | ObjectPlace,
    *,
    columns: Items[str] | None = None,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    skip_damaged: bool = False,
) -> Tape:
    """Open a tape for reading. Nothing but its header and its seal is read before it is needed.

    Args:
        uri: folder of the tape, or its URL in an object store; it may still be written to.
        columns: of the flat table that Arrow tools see; None is all.
        version: read it as it was at that seal (1, 2, ...); None is now.
        storage_options: see `rolltape.store.places.place_of`.
        skip_damaged: leave damaged shards out and name them in `problems`.

    Raises:
        NotATapeError: `uri` is not a tape.
        NewerFormatError: written by a newer major version of the format.
        DamagedShardError: a shard is missing or not what was written.
    """
    place = place_of(uri, storage_options)
    if place.exists(COMPACTING):
        raise NotATapeError(
            f"{place}: a compact copy that was cut short", hint="remove it and compact again"
        )
    return Tape(
        place,
        skip_damaged=skip_damaged,
        version=version,
        columns=columns,
    )


def _again(place: Place, skip_damaged: bool, version: int | None, columns: list[str]) -> Tape:
    return Tape(place, skip_damaged=skip_damaged, version=version, columns=columns)


def _reaches(fragment: Fragment, span: tuple[int, int]) -> bool:
    if "start" not in fragment:
        return True
    start = fragment["start"]
    return bool(start < span[1] and start + fragment["n"] > span[0])
