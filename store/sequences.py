"""The joins: a `Tape` gives whole sequences from the fragments that its writers recorded."""

from __future__ import annotations

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
from rolltape.store.facts import StoredFacts, stored_facts
from rolltape.store.flat import FlatTable, flat_rows, table_rows
from rolltape.store.index import KEY_COLUMNS, Index
from rolltape.store.jsonable import read_object
from rolltape.store.keys import Key
from rolltape.store.late import aliases, by_external, meant_by, overrides
from rolltape.store.links import BASE, viewer_url
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
from rolltape.store.steps import StepSpans, rows_between, step_spans
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

    def token_columns(self, names: Items[str]) -> dict[str, Masked]:
        """Some columns of `tokens` alone, the others left unread.

        Args:
            names: of `ids`, `loss_mask` and the logprobs.
        """
        whole = self.span == (0, self.length)
        span = None if whole else self.span
        rows = self.tape.fragments("tokens", self.key, span, names)
        kinds: dict[str, Any] = {"ids": np.uint32, "loss_mask": np.bool_}
        return {name: self._joined(name, kinds.get(name, np.float32), rows) for name in names}

    def _joined(self, column: str, dtype: Any, rows: list[Fragment] | None = None) -> Masked:
        begin, end = self.span
        fragments = self._tokens if rows is None else rows
        if len(fragments) == 1:  # the usual case after `compact`
            only = fragments[0]
            cell = only[column]
            whole = (only["start"], only["n"]) == (begin, end - begin)
            if cell is not None and whole and len(cell) == end - begin:
                if isinstance(cell, Masked):
                    return Masked(cell.values.astype(dtype), cell.valid.copy())
                return Masked.full(cell.astype(dtype))
        out = Masked.empty(end - begin, dtype)
        for fragment in fragments:
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
        """Rows of `forwards` of this sequence, in step order.

        Of a window those that read one of its positions or made the logprob of one.
        """
        whole = self.span == (0, self.length)
        span = None if whole else (self.span[0] - 1, self.span[1])
        return self.tape.select("forwards", self.key, span).sort_by("step")

    @cached_property
    def step(self) -> Masked:
        """The step that produced `logprob[p]`, int64 [T]: the first whose input ended at p-1."""
        return self._from_forwards("step")

    @cached_property
    def weight_version(self) -> Masked:
        """The weight version that produced `logprob[p]`, int64 [T]."""
        return self._from_forwards("weight_version")

    def _from_forwards(self, column: str) -> Masked:
        begin, end = self.span
        out = Masked.empty(end - begin, np.int64)
        table = self.forwards
        for start, n, kind, value in zip(
            *(table.column(c).to_pylist() for c in ("start", "n", "kind", column)), strict=True
        ):
            if kind == "dummy" or value is None:
                continue
            if kind == "prefill" and start + n < self.prompt_len:
                continue  # an unfinished chunk gives no logprob
            first = start + 1 if kind == "score" else start + n
            span = slice(max(0, first - begin), max(0, start + n + 1 - begin))
            fresh = ~out.valid[span]
            out.values[span][fresh] = value
            out.valid[span] = True
        return out


class Tape(FlatTable, Folder):
    """A recording. Iterate it, or ask for one sequence by its id; tables are there as Arrow.

    Args:
        place: where it lies.
        skip_damaged: leave damaged shards out and name them in `problems`.
        version: as it was at that seal.
        columns: of the flat table; None is all.
        cache_bytes: of batches that were read last, so much is kept.

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
        cache_bytes: int = _BATCH_BYTES,
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
        self._cells: Cache[Cells] = Cache(cache_bytes)

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

    @cached_property
    def stored_facts(self) -> StoredFacts | None:
        """Facts of all sequences from the seal; None if it does not cover all that is read."""
        return stored_facts(self)

    @cached_property
    def _told(self) -> bool:
        """Whether some annotation may replace a fact of a sequence."""
        names = {
            name for _, _, b in self.batches("annotations", ["name"]) for name in b[0].unique()
        }
        return bool({name.as_py() for name in names} & {"group", "turn"})

    def _own_rows(self, key: Key) -> pa.Table | None:
        """A row with the facts of one sequence, if only its own rows need be read for that."""
        if "_lives" in self.__dict__ or self.stored_facts is None or self._told:
            return None
        _, facts = join_lives(self.select("sequences", key))
        return facts if len(facts) == 1 else None  # an older seal has no offsets of `sequences`

    def info(self, key: Key) -> dict[str, Any]:
        """The facts of a sequence, `sampling` as a dict."""
        own = self._own_rows(key)
        if own is None and key not in self.sequence_rows:
            raise DamagedShardError(
                f"{self.place}/sequences: the row of {key.id} cannot be read",
                hint="; ".join(self.problems) or f"`rolltape fsck {self.place}` says why",
            )
        found = self.facts.slice(self.sequence_rows[key], 1) if own is None else own
        info: dict[str, Any] = found.to_pylist()[0]
        info["sampling"] = read_object(info["sampling"])
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

    def find(self, id_: str) -> Sequence | None:
        """The sequence with exactly that id, or None."""
        if "_lives" in self.__dict__ or self.stored_facts is None:
            key = self._by_id.get(id_)
            if key is not None:
                return self._sequence(key)
        # the seal knows also of one whose row is in a damaged shard
        stored = self.stored_facts
        row = None if stored is None else stored.row(id_)
        if stored is None or row is None:
            return None
        length, finish = (stored.table.column(name)[row].as_py() for name in ("length", "finish"))
        return Sequence(self, stored.key(row), length, (0, length), finish != "open")

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

    def url(
        self,
        seq: str | Key | Sequence | None = None,
        tok: int | None = None,
        layer: int | None = None,
        *,
        base: str = BASE,
    ) -> str:
        """The viewer's address of this tape, a sequence, a token, or a token in a layer.

        Made of ids alone: nothing is read, and no viewer has to run.

        Args:
            seq: a sequence, its key or its whole id.
            tok: position over prompt + response.
            layer: number of a layer; the page is then that of the layers.
            base: where `rolltape view` listens.

        Raises:
            UsageError: a token or layer without a sequence, or a negative one.
        """
        name = seq.id if isinstance(seq, Key | Sequence) else seq
        return viewer_url(self.uuid, seq=name, tok=tok, layer=layer, base=base)

    def _found(
        self,
        table: str,
        key: Key,
        span: tuple[int, int] | None,
        columns: tuple[str, ...] | None = None,
    ) -> Iterator[tuple[str, int, Cells, np.ndarray]]:
        """(file, batch number, batch, rows in it) of a sequence, in written order."""
        start, stop = span if span is not None else (None, None)
        for file, number in self.index.find(table, key, start, stop):
            with self.damage():
                cells = self.cells(table, file, number, columns)
                rows = cells.rows_of(key)
                if rows is not None:
                    yield file, number, cells, rows

    def cells(
        self, table: str, file: str, number: int, columns: tuple[str, ...] | None = None
    ) -> Cells:
        """One batch of a table, or some columns of it, taken apart, kept for a while."""

        def make() -> tuple[Cells, int]:
            schema = self.schemas[table]
            if columns is not None:
                schema = pa.schema([schema.field(name) for name in columns])
            cells = Cells(self.shard(table, file).read(number, schema))
            return cells, cells.nbytes

        return self._cells.get((table, file, number, columns), make)

    def select(self, table: str, key: Key, span: tuple[int, int] | None = None) -> pa.Table:
        """Rows of a keyed table that belong to one sequence.

        Args:
            table: one of `rolltape.store.index.INDEXED`.
            key: the sequence.
            span: only rows that reach into these positions.
        """
        parts = [cells.batch.take(rows) for _, _, cells, rows in self._found(table, key, span)]
        found = pa.Table.from_batches(parts, self.schemas[table])
        if span is None or "start" not in found.schema.names:
            return found
        start = found.column("start").to_numpy().astype(np.int64)
        end = start + found.column("n").to_numpy()
        return found.filter(pa.array((start < span[1]) & (end > span[0])))

    @cached_property
    def _step_spans(self) -> dict[str, StepSpans]:
        return {}

    def step_spans(self, table: str) -> pa.Table:
        """Which record batches of `steps` or `forwards` hold which steps: small, and kept.

        Returns:
            A row a batch and engine in it: file, batch, engine, first and last step, and of `steps`
            t0_ns and t1_ns (null where some row has no time).
        """
        return self._spans_of(table).table()

    def _spans_of(self, table: str) -> StepSpans:
        if table not in self._step_spans:
            self._step_spans[table] = step_spans(self, table)
        return self._step_spans[table]

    def between(
        self,
        table: str,
        *,
        engine: str | None = None,
        first: int | None = None,
        last: int | None = None,
        t0_ns: int | None = None,
        t1_ns: int | None = None,
        columns: Items[str] | None = None,
    ) -> pa.Table:
        """Rows of `steps` or `forwards` of some steps; only batches that may hold them are read.

        Args:
            table: `steps` or `forwards`.
            engine: of this engine; None is any.
            first: from this step on.
            last: up to this one, it included.
            t0_ns: of `steps`: from this time on.
            t1_ns: up to this one, it included.
            columns: only these, in this order; None is all.

        Returns:
            Table, rows in written order.

        Raises:
            UsageError: a time for `forwards`, whose rows have none, or another table.
        """
        if table != "steps" and (t0_ns is not None or t1_ns is not None):
            raise UsageError(f"rows of {table} have no time", hint="look it up in steps")
        return rows_between(
            self,
            self._spans_of(table),
            table,
            engine=engine,
            first=first,
            last=last,
            t0_ns=t0_ns,
            t1_ns=t1_ns,
            columns=columns,
        )

    def step_rows(self, engine: str, step: int, columns: Items[str] | None = None) -> pa.Table:
        """The rows of `forwards` of one step of an engine, by row: what ran together.

        Args:
            engine: its id.
            step: its number.
            columns: only these; None is all.
        """
        order = ("row", "request", "sample", "pass")
        names = list(TAPE_TABLES["forwards"].names if columns is None else columns)
        read = list(dict.fromkeys([*names, *order]))
        found = self.between("forwards", engine=engine, first=step, last=step, columns=read)
        return found.sort_by([(name, "ascending") for name in order]).select(names)

    def fragments(
        self,
        table: str,
        key: Key,
        span: tuple[int, int] | None = None,
        columns: Items[str] | None = None,
    ) -> list[Fragment]:
        """Those rows, list columns as `Masked` or numpy arrays that must not be written to.

        In the order in which each writer wrote them: where spans overlap, the first is the record
        of what happened.

        Args:
            table: one of `rolltape.store.index.INDEXED`.
            key: the sequence.
            span: only rows that reach into these positions.
            columns: only these, besides the key, `start` and `n`; None is all.
        """
        out = []
        some = None if columns is None else _with_span(self.schemas[table], columns)
        for file, number, cells, rows in self._found(table, key, span, some):
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
    cache_bytes: int = _BATCH_BYTES,
) -> Tape:
    """Open a tape for reading. Nothing but its header and its seal is read before it is needed.

    Args:
        uri: folder of the tape, or its URL in an object store; it may still be written to.
        columns: of the flat table that Arrow tools see; None is all.
        version: read it as it was at that seal (1, 2, ...); None is now.
        storage_options: see `rolltape.store.places.place_of`.
        skip_damaged: leave damaged shards out and name them in `problems`.
        cache_bytes: of batches that were read last, so much is kept.

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
        cache_bytes=cache_bytes,
    )


def _again(place: Place, skip_damaged: bool, version: int | None, columns: list[str]) -> Tape:
    return Tape(place, skip_damaged=skip_damaged, version=version, columns=columns)


def _with_span(schema: pa.Schema, columns: Items[str]) -> tuple[str, ...]:
    first = [name for name in (*KEY_COLUMNS, "start", "n") if name in schema.names]
    return tuple(dict.fromkeys([*first, *columns]))


def _reaches(fragment: Fragment, span: tuple[int, int]) -> bool:
    if "start" not in fragment:
        return True
    start = fragment["start"]
    return bool(start < span[1] and start + fragment["n"] > span[0])
