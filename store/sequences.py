"""The joins: a `Tape` gives whole sequences from the fragments that its writers recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import codecs
from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED, TAPE_TABLES
from rolltape.store.tape import Folder, check_seal, read_seal
from rolltape.store.writer import TAPE_HEADER

LOGPROBS = ("processed", "scaled", "raw")


@dataclass(frozen=True)
class Routes:
    """Expert choices of one sequence. Row p was chosen when token p was the input.

    Args:
        layers: model layer number of each column; only MoE layers.
        num_experts: experts a layer.
        ids: uint8 or uint16 [T, layers, k], slot order kept; see `valid`.
        valid: bool [T, layers]; false where nothing was recorded.
        weights: float32 [T, layers, k] combine weights, or None; see `weighted`.
        weighted: bool [T, layers]; where weights were recorded. A NaN there is a recorded NaN.
        margin: float32 [T, layers], k-th minus (k+1)-th choice score, NaN where there is none;
            or None.
        missing: (start, n, layer or None, reason) of the ranges without a route.
    """

    layers: tuple[int, ...]
    num_experts: int
    ids: np.ndarray
    valid: np.ndarray
    weights: np.ndarray | None
    weighted: np.ndarray
    margin: np.ndarray | None
    missing: tuple[tuple[int, int, int | None, str], ...]


@dataclass(frozen=True)
class Supports:
    """Kept token ids a position, as CSR over all T positions.

    Args:
        state: uint8 [T]: full, explicit or unrecorded (`rolltape.store.schema.SUPPORT_*`).
        offsets: int64 [T + 1]; position p owns ids[offsets[p]:offsets[p + 1]].
        ids: uint32 token ids, ascending within a position.
        derived: true if recomputed rather than seen.
    """

    state: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    derived: bool

    def at(self, position: int) -> np.ndarray | None:
        """Ids kept at a position; None unless the state there is explicit."""
        if self.state[position] != SUPPORT_EXPLICIT:
            return None
        return self.ids[self.offsets[position] : self.offsets[position + 1]]


@dataclass(frozen=True)
class Sequence:
    """One sequence of a tape. Dense columns are read when they are asked for.

    Args:
        key: its identity; `id` is the short form.
        info: the `sequences` row: group, prompt_len, length, finish, sampling (a dict), ...
        length: number of positions T known so far.
    """

    tape: Tape = field(repr=False)
    key: Key
    info: Mapping[str, Any]
    length: int

    @property
    def id(self) -> str:
        """Short id, unique within the tape."""
        return self.key.id

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

    @cached_property
    def _tokens(self) -> list[dict[str, Any]]:
        return self.tape.fragments("tokens", self.key)

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
        spans = [(f["start"], f["n"], f["semantics"]) for f in self._tokens]
        return sorted((s for s in spans if s[2] is not None), key=lambda span: span[:2])

    def _joined(self, column: str, dtype: Any) -> Masked:
        out = Masked.empty(self.length, dtype)
        for fragment in self._tokens:
            cell = fragment[column]
            if cell is not None:
                _place(out, fragment["start"], cell, where=f"tokens.{column} of {self.id}")
        return out

    def routes(self, role: str = "used") -> Routes | None:
        """Routes that were `used`, or the `live` choice where another was forced.

        Returns:
            None when the tape holds no routes of that role for the sequence; a dense model is
            told apart by `tape.engine(key.engine)["moe_layers"] == []`.
        """
        rows = [r for r in self.tape.fragments("routes", self.key) if r["role"] == role]
        return _join_routes(rows, self.length, self.id) if rows else None

    def supports(self) -> Supports | None:
        """Kept sets, or None when the tape holds none for the sequence."""
        rows = self.tape.fragments("supports", self.key)
        return _join_supports(rows, self.length, self.id) if rows else None

    def activations(self) -> dict[str, list[tuple[int, str, np.ndarray]]]:
        """Per site the recorded spans: (start, dtype name, float32 [n, width])."""
        out: dict[str, list[tuple[int, str, np.ndarray]]] = {}
        rows = self.tape.fragments("activations", self.key)
        for row in sorted(rows, key=lambda row: int(row["start"])):
            shape = (row["n"], row["width"])
            data = codecs.decode_floats(row["data"], shape, field=f"activations.data of {self.id}")
            out.setdefault(row["site"], []).append((row["start"], row["dtype"], data))
        return out

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
        return out


class Tape(Folder):
    """A recording. Iterate it, or ask for one sequence by its id; tables are there as Arrow."""

    def __init__(self, path: Path, *, skip_damaged: bool = False) -> None:
        super().__init__(path, header=TAPE_HEADER, schemas=TAPE_TABLES, skip_damaged=skip_damaged)
        self.seal = read_seal(path)
        if self.seal is not None and not skip_damaged:
            check_seal(path, self.seal)
        self._indexes: dict[str, dict[Key, np.ndarray]] = {}

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
    def engines(self) -> dict[str, dict[str, Any]]:
        """`engines` rows by engine id, JSON columns decoded."""
        out: dict[str, dict[str, Any]] = {}
        for row in self.rows("engines"):
            for name in ("ranks", "requested", "effective", "versions"):
                row[name] = json.loads(row[name]) if row[name] else {}
            out.setdefault(row["engine"], row)
        return out

    def engine(self, engine: str) -> dict[str, Any]:
        """The `engines` row of an engine; an empty dict if it never wrote one."""
        return self.engines.get(engine, {})

    @cached_property
    def _sequences(self) -> dict[Key, Sequence]:
        lengths: dict[Key, int] = {}
        tokens = self.table("tokens")
        ends = pc.add(tokens.column("start"), tokens.column("n")).to_numpy()
        for key, index in self._index("tokens").items():
            lengths[key] = int(ends[index].max(initial=0))
        latest: dict[Key, dict[str, Any]] = {}
        for row in self.rows("sequences"):
            key = Key(row["engine"], row["request"], row["sample"], row["pass"])
            # a closing row wins over an opening one, whatever the order of the shards
            before = latest.get(key)
            if before is None or row["finish"] != "open":
                if before is not None and row["opened_ns"] is None:
                    row["opened_ns"] = before["opened_ns"]
                latest[key] = row
            elif before["opened_ns"] is None:
                before["opened_ns"] = row["opened_ns"]
        orphans = [key for key in lengths if key not in latest]
        if orphans:
            self.problems.append(
                f"{self.path}/tokens: {len(orphans)} sequences have no row in the sequences table, "
                f"the first is {orphans[0].id}; they are left out"
            )
        opened = sorted(latest.items(), key=lambda item: item[1]["opened_ns"] or 0)
        out = {}
        for key, row in opened:
            row["sampling"] = json.loads(row["sampling"]) if row["sampling"] else {}
            length = row["length"]
            known = max(lengths.get(key, 0), row["prompt_len"])
            out[key] = Sequence(self, key, row, known if length is None else int(length))
        return out

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def keys(self) -> list[Key]:
        """Keys of all sequences, in the order they were opened."""
        return list(self._sequences)

    @cached_property
    def _by_id(self) -> dict[str, Key]:
        return {key.id: key for key in self._sequences}

    def sequence(self, which: str | Key) -> Sequence:
        """One sequence by its key, its id, or the part of the id after the engine.

        Raises:
            UsageError: none, or more than one, has that name.
        """
        if isinstance(which, Key):
            if which in self._sequences:
                return self._sequences[which]
            raise UsageError(f"{self.path} has no sequence {which.id}")
        if which in self._by_id:
            return self._sequences[self._by_id[which]]
        found = [key for id_, key in self._by_id.items() if id_.partition(".")[2] == which]
        if len(found) == 1:
            return self._sequences[found[0]]
        problem = f"{len(found)} sequences named" if found else "no sequence"
        raise UsageError(
            f"{self.path} has {problem} {which!r}", hint=f"`rolltape show {self.path}` lists them"
        )

    def _index(self, table: str) -> dict[Key, np.ndarray]:
        if table not in self._indexes:
            self._indexes[table] = _group_rows(self.table(table))
        return self._indexes[table]

    def select(self, table: str, key: Key) -> pa.Table:
        """Rows of a keyed table that belong to one sequence."""
        rows = self._index(table).get(key)
        whole = self.table(table)
        if rows is None:
            return whole.slice(0, 0)
        if any(column.num_chunks > 1 for column in whole.columns):  # too large for one chunk
            return pa.concat_tables([whole.slice(int(row), 1) for row in rows])
        return whole.take(pa.array(rows, pa.int64()))

    def fragments(self, table: str, key: Key) -> list[dict[str, Any]]:
        """Those rows as dicts, list columns as `Masked` or numpy arrays.

        In the order in which each writer wrote them: where spans overlap, the first is the record
        of what happened.
        """
        selected = self.select(table, key)
        columns = {name: _cells(selected.column(name)) for name in selected.column_names}
        return [{name: cells[i] for name, cells in columns.items()} for i in range(len(selected))]


def open_tape(path: str | os.PathLike[str], *, skip_damaged: bool = False) -> Tape:
    """Open a tape for reading.

    Args:
        path: folder of the tape; it may still be written to.
        skip_damaged: leave damaged shards out and name them in `problems`.

    Raises:
        NotATapeError: `path` is not a tape.
        NewerFormatError: written by a newer major version of the format.
        DamagedShardError: a shard is missing or not what was written.
    """
    return Tape(Path(path), skip_damaged=skip_damaged)


def _group_rows(table: pa.Table) -> dict[Key, np.ndarray]:
    if not table.num_rows:
        return {}
    parts = [table.column(c).cast(pa.string()) for c in ("engine", "request", "sample", "pass")]
    coded = pc.binary_join_element_wise(*parts, "/").combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(coded.dictionary) + 1))
    return {
        Key.parse(text): order[bounds[i] : bounds[i + 1]]
        for i, text in enumerate(coded.dictionary.to_pylist())
    }


def _cells(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_list(column.type) or pa.types.is_string(column.type.value_type):
        values: list[Any] = column.to_pylist()
        return values
    return [None if not s.is_valid else _array(s.values) for s in column]


def _array(values: pa.Array) -> np.ndarray | Masked:
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    if values.null_count:
        zero = False if pa.types.is_boolean(values.type) else 0
        return Masked(values.fill_null(zero).to_numpy(zero_copy_only=False), valid)
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array


def _place(out: Masked, start: int, cell: np.ndarray | Masked, *, where: str) -> None:
    values, valid = (
        (cell.values, cell.valid) if isinstance(cell, Masked) else (cell, np.ones(len(cell), bool))
    )
    end = start + len(values)
    if start < 0 or end > len(out):
        raise SchemaError(f"{where} covers [{start}, {end}) of a sequence of {len(out)} tokens")
    fresh = valid & ~out.valid[start:end]
    out.values[start:end][fresh] = values[fresh]
    out.valid[start:end] |= fresh


def _join_routes(rows: list[dict[str, Any]], length: int, name: str) -> Routes:
    layers = tuple(int(x) for x in rows[0]["layers"])
    k, experts = rows[0]["k"], rows[0]["num_experts"]
    shape = (length, len(layers), k)
    ids = np.zeros(shape, codecs.route_dtype(experts))
    valid = np.zeros(shape[:2], bool)
    weights = margin = None
    weighted = np.zeros(shape[:2], bool)
    missing: list[tuple[int, int, int | None, str]] = []
    for row in rows:
        where = f"routes of {name} at {row['start']}"
        if (tuple(row["layers"]), row["k"], row["num_experts"]) != (layers, k, experts):
            raise SchemaError(f"{where}: layers, k or num_experts differ from the first fragment")
        codec = codecs.ROUTE_CODECS.get(row["encoding"])
        if codec is None:
            raise SchemaError(
                f"{where}: unknown encoding {row['encoding']!r}", hint="upgrade rolltape"
            )
        start, n = row["start"], row["n"]
        if start < 0 or start + n > length:
            raise SchemaError(f"{where}: {n} rows in a sequence of {length} tokens")
        span = slice(start, start + n)
        block = codec.decode(row["ids"], n, len(layers), k, experts)
        mask = codecs.decode_bits(row["valid"], (n, len(layers)), field=where)
        fresh = mask & ~valid[span]
        ids[span][fresh] = block[fresh]
        valid[span] |= fresh
        if row["weights"] is not None:
            weights = np.full(shape, np.nan, np.float32) if weights is None else weights
            got = codecs.decode_floats(row["weights"], (n, len(layers), k), field=where)
            weights[span][fresh] = got[fresh]
            weighted[span] |= fresh
        if row["margin"] is not None:
            margin = np.full(shape[:2], np.nan, np.float32) if margin is None else margin
            got = codecs.decode_floats(row["margin"], (n, len(layers)), field=where)
            margin[span][fresh] = got[fresh]
        for entry in json.loads(row["missing"]) if row["missing"] else []:
            missing.append((int(entry[0]), int(entry[1]), entry[2], str(entry[3])))
    return Routes(layers, experts, ids, valid, weights, weighted, margin, tuple(missing))


def _join_supports(rows: list[dict[str, Any]], length: int, name: str) -> Supports:
    state = np.full(length, SUPPORT_UNRECORDED, np.uint8)
    counts = np.zeros(length, np.int64)
    pieces: dict[int, np.ndarray] = {}
    for row in rows:
        start, n = row["start"], row["n"]
        where = f"supports of {name} at {start}"
        sizes = np.asarray(row["counts"], np.int64)
        if len(row["state"]) != n or len(sizes) != n or sizes.sum() != len(row["ids"]):
            raise SchemaError(f"{where}: state, counts and ids do not belong together")
        if start < 0 or start + n > length or (sizes < 0).any():
            raise SchemaError(f"{where}: {n} positions in a sequence of {length} tokens")
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        for i in np.flatnonzero(state[start : start + n] == SUPPORT_UNRECORDED):
            state[start + i] = row["state"][i]
            counts[start + i] = sizes[i]
            pieces[start + int(i)] = row["ids"][bounds[i] : bounds[i + 1]]
    ids = [pieces[p] for p in sorted(pieces)]
    return Supports(
        state=state,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        ids=np.concatenate(ids).astype(np.uint32) if ids else np.zeros(0, np.uint32),
        derived=any(row["derived"] for row in rows),
    )
