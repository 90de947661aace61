"""Sequences of a tape that is being written, each once, as soon as it is closed and whole."""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rolltape.store.cells import Cells
from rolltape.store.errors import SchemaError
from rolltape.store.follow import Arrival, Follower, offsets_of
from rolltape.store.index import grouped
from rolltape.store.keys import Key
from rolltape.store.places import Place
from rolltape.store.readers import Cache
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.sequences import BLOCK_BYTES, Tape
from rolltape.store.sequences import Sequence as TapeSequence

STATE = "rolltape.follow/1"


class _Rows(NamedTuple):
    """Rows of one sequence in a batch."""

    file: str
    number: int
    batch: pa.RecordBatch
    rows: np.ndarray


@dataclass
class Pending:
    """What has arrived of one sequence.

    Args:
        key: its identity.
        rows: by table, in the order they were read.
        closing: the `sequences` row that closed it.
        opened_ns: of the row that opened it.
        first: by (table, writer), shard and batch of its first row.
        last: of its last row.
    """

    key: Key
    rows: dict[str, list[_Rows]] = field(default_factory=dict)
    closing: dict[str, Any] | None = None
    opened_ns: int | None = None
    first: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def column(self, table: str, name: str) -> list[Any]:
        """Values of a column in its rows of a table."""
        return [
            value
            for found in self.rows.get(table, [])
            for value in found.batch.column(name).take(pa.array(found.rows)).to_pylist()
        ]

    def covered(self, table: str, length: int) -> np.ndarray:
        """Which positions its rows of a table account for, bool [length].

        Those of routes that were `used` also account for what their `missing` says of all layers,
        such as a prefix whose KV was reused: no row of it will come.
        """
        spans = list(zip(self.column(table, "start"), self.column(table, "n"), strict=True))
        if table == "routes":
            used = [role == "used" for role in self.column(table, "role")]
            spans = list(itertools.compress(spans, used))
            for said in itertools.compress(self.column(table, "missing"), used):
                spans += _without_routes(said, self.key)
        seen = np.zeros(max(length, 0), bool)
        for start, n in spans:
            seen[max(start, 0) : max(start + n, 0)] = True
        return seen


def _without_routes(said: str | None, key: Key) -> list[tuple[int, int]]:
    """(start, n) of the ranges that a cell of `routes.missing` names for all layers."""
    try:
        entries = json.loads(said) if said else []
        return [(int(start), int(n)) for start, n, layer, _ in entries if layer is None]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SchemaError(
            f"routes.missing of {key.id}: not a list of [start, n, layer, reason]: {error}"
        ) from error


class _Arrived(Tape):
    """The joins of a tape, over what has arrived and is held in memory."""

    def __init__(self, place: Place, pending: Mapping[Key, Pending]) -> None:
        self.place = place
        self.schemas = TAPE_TABLES
        self._pending = pending
        self._blocks = Cache(BLOCK_BYTES)
        self._packed: weakref.WeakValueDictionary[tuple[str, int], pa.RecordBatch] = (
            weakref.WeakValueDictionary()
        )

    def hold(self, arrival: Arrival, file: str) -> None:
        """Note a batch of routes: a fragment may have its block in the row of another one."""
        self._packed[file, arrival.batch_index] = arrival.batch

    def info(self, key: Key) -> dict[str, Any]:
        """The closing row, `sampling` as a dict."""
        pending = self._pending[key]
        info = dict(pending.closing or {})
        info["sampling"] = json.loads(info["sampling"]) if info.get("sampling") else {}
        info["opened_ns"] = pending.opened_ns
        return info

    def cells(
        self, table: str, file: str, number: int, columns: tuple[str, ...] | None = None
    ) -> Cells:
        """A batch of routes that is still held."""
        return Cells(self._packed[file, number])

    def _found(
        self,
        table: str,
        key: Key,
        span: tuple[int, int] | None,
        columns: tuple[str, ...] | None = None,
    ) -> Iterator[tuple[str, int, Cells, np.ndarray]]:
        for found in self._pending[key].rows.get(table, []):
            yield found.file, found.number, Cells(found.batch), found.rows


class Inbox:
    """Sequences of a tape as they close, each once.

    A sequence is there when its closing row is, its tokens are whole, and of the tables wanted

    - `routes` of an MoE model account for every token before the last: with routes, or by saying
      in `missing` that there are none, such as those of a reused KV prefix;
    - `supports` reach over its response, and `forwards` that gave its logprobs are there, except
      for tokens that do not count in the loss (of a tool, for example).

    In a tape that has ended, whatever is closed and has all its tokens is there.

    Args:
        uri: path or URL of the tape.
        tables: wanted, besides `sequences` and `tokens`.
        wait_for: annotations without which a sequence is not there yet.
        state: of an earlier inbox.
        storage_options: see `rolltape.store.places.place_of`.

    The state points at the earliest batch that something not yet given needs, so that going on
    reads those again and nothing else; sequences given since then are named in it.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        tables: Sequence[str] = (),
        wait_for: Sequence[str] = (),
        state: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        extra = ["annotations"] if wait_for else []
        # `sequences` first: what its writer committed before a closing row is seen with it
        wanted = dict.fromkeys(["sequences", "engines", "tokens", *tables, *extra])
        self._follower = Follower(uri, state, tables=tuple(wanted), storage_options=storage_options)
        self._wait_for = frozenset(wait_for)
        self._tables = frozenset(wanted)
        self._pending: dict[Key, Pending] = {}
        self._given: dict[Key, dict[tuple[str, str], tuple[int, int]]] = {}
        self._ready: set[Key] = set()
        self._dense: dict[str, bool] = {}
        self._tape = _Arrived(self._follower.place, self._pending)
        # until their rows are read again, as if those were the last ones of every table
        low = self._follower.positions
        self._given |= {Key.parse(text): dict(low) for text in (state or {}).get("given", [])}

    @property
    def place(self) -> Place:
        """Where the tape lies."""
        return self._follower.place

    @property
    def ended(self) -> bool:
        """Whether nothing more can come."""
        return self._follower.ended

    @property
    def incomplete(self) -> list[Key]:
        """Sequences whose `sequences` row has arrived and that are not there."""
        # rows of other tables alone may be late ones of a sequence that was given before `state`
        return [
            key
            for key, pending in self._pending.items()
            if "sequences" in pending.rows and key not in self._ready
        ]

    def group(self, key: Key) -> str | None:
        """Name of the group of one of `incomplete`."""
        name: str | None = self._pending[key].column("sequences", "group")[-1]
        return name

    def poll(self) -> tuple[bool, list[Pending]]:
        """Whether anything arrived, and the sequences that are there since."""
        arrivals = self._follower.poll()
        touched: dict[Key, Pending] = {}
        for arrival in arrivals:
            if arrival.table == "engines":
                for row in arrival.batch.select(["engine", "moe_layers"]).to_pylist():
                    self._dense[row["engine"]] = not row["moe_layers"]
            else:
                self._take(arrival, touched)
        if self.ended:
            touched = self._pending
        ready = []
        for key, pending in list(touched.items()):
            if key not in self._ready and self._complete(pending):
                self._ready.add(key)
                ready.append(pending)
        return bool(arrivals), ready

    def _take(self, arrival: Arrival, touched: dict[Key, Pending]) -> None:
        where = (arrival.table, arrival.writer)
        at = (arrival.number, arrival.batch_index)
        # one name for the live and the finished file
        file = f"{arrival.writer}-{arrival.number}"
        if arrival.table == "routes":
            self._tape.hold(arrival, file)
        for key, rows in grouped(arrival.batch):
            if key in self._given:  # of a state, or a late row
                self._given[key][where] = at
                continue
            pending = self._pending.setdefault(key, Pending(key))
            touched[key] = pending
            pending.first.setdefault(where, at)
            pending.last[where] = at
            held = _Rows(file, arrival.batch_index, arrival.batch, rows)
            pending.rows.setdefault(arrival.table, []).append(held)
            if arrival.table == "sequences":
                _note_state(pending, arrival.batch.take(pa.array(rows)).to_pylist())

    def _complete(self, pending: Pending) -> bool:
        if pending.closing is None:
            return False
        length = pending.closing["length"]
        if not pending.covered("tokens", length).all():
            return False
        if self._wait_for and not self._wait_for <= set(pending.column("annotations", "name")):
            return False
        if self.ended:
            return True
        routed = "routes" in self._tables and not self._dense.get(pending.key.engine, False)
        if routed and not pending.covered("routes", length)[:-1].all():
            return False
        if not self._tables & {"supports", "forwards"}:
            return True
        scored = self._scored(pending)
        if "supports" in self._tables and not pending.covered("supports", length)[scored].all():
            return False
        # by step: a forward of unknown version is there too
        return "forwards" not in self._tables or bool(
            self.sequence(pending).step.valid[scored].all()
        )

    def _scored(self, pending: Pending) -> np.ndarray:
        """Tokens of the response that may count in the loss, bool [T]; the first never has one."""
        assert pending.closing is not None
        mask = self.sequence(pending).loss_mask
        scored: np.ndarray = mask.values | ~mask.valid
        scored[: max(pending.closing["prompt_len"], 1)] = False
        return scored

    def sequence(self, pending: Pending) -> TapeSequence:
        """A sequence that is there, to be read before it is given."""
        assert pending.closing is not None
        length = int(pending.closing["length"])
        return TapeSequence(self._tape, pending.key, length, (0, length))

    def give(self, keys: Sequence[Key]) -> None:
        """Note that these went out; their data is let go."""
        for key in keys:
            self._given[key] = self._pending.pop(key).last
            self._ready.discard(key)

    @property
    def state(self) -> dict[str, Any]:
        """JSON-able; see the class."""
        low = self._follower.positions
        for pending in self._pending.values():
            for where, at in pending.first.items():
                low[where] = min(low[where], at)
        needed = [
            key.text
            for key, last in self._given.items()
            if any(at >= low[where] for where, at in last.items())
        ]
        # `engines` are few, and whoever goes on needs all of them
        offsets = offsets_of({where: at for where, at in low.items() if where[0] != "engines"})
        tape = self._follower.uuid
        return {"kind": STATE, "tape": tape, "offsets": offsets, "given": needed}


def _note_state(pending: Pending, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if row["opened_ns"] is not None:
            pending.opened_ns = row["opened_ns"]
        if row["finish"] != "open" and row["length"] is not None:
            pending.closing = dict(row)
