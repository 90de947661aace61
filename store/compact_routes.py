"""Routes of a compacted tape: whole sequences side by side, in packed blocks or plain rows."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rolltape.store import codecs
from rolltape.store.columns import make_batch
from rolltape.store.errors import UsageError
from rolltape.store.keys import Key
from rolltape.store.packed import MAX_TOKENS, block_tokens, encode_block
from rolltape.store.planes import encode_split
from rolltape.store.routes import Routes, join_routes, overlap, read_missing
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.sequences import Sequence, Tape
from rolltape.store.writer import TapeWriter

# positions of a plain row: few enough for a window, many enough for zstd
_PLAIN_TOKENS = 4096
# A batch of plain rows. They are not compressed (zstd would save 13 %), so that a reader only maps
# and checks them; a batch is as large as to make the cost of a batch small.
_PLAIN_BYTES = 1 << 20
# Combine weights and margins hardly compress, and whoever reads a sequence reads its whole batch:
# where they were recorded a batch holds fewer tokens.
_FLOAT_BYTES = 4 << 20


@dataclass(frozen=True)
class _Part:
    """Routes of the positions [start, end) of one sequence and role: a row of the table.

    Args:
        key: of the sequence.
        role: used or live.
        start: first position.
        end: one behind the last.
        prompt_end: first position of the sequence that is not prompt.
        routes: of these positions alone; `missing` of them too.
        tokens: uint32 [end - start].
        merged: the recorded fragments that reach into it, cut to it.
    """

    key: Key
    role: str
    start: int
    end: int
    prompt_end: int
    routes: Routes
    tokens: np.ndarray
    merged: list[Mapping[str, Any]]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What all rows of a block have in common."""
        routes = self.routes
        return routes.layers, routes.num_experts, routes.ids.shape[2], routes.order

    @property
    def float_bytes(self) -> int:
        """Bytes of weights and margins of one position."""
        routes = self.routes
        k = int(routes.ids.shape[2])
        each = k * (routes.weights is not None) + (routes.margin is not None)
        return 4 * len(routes.layers) * each

    def split(self, *cuts: int) -> list[_Part]:
        """The part in pieces that end at these positions and at its end."""
        ends = sorted({cut for cut in cuts if self.start < cut < self.end} | {self.end})
        starts = [self.start, *ends[:-1]]
        said = _placed(self.routes.missing, starts)
        return [
            replace(
                self,
                start=a,
                end=b,
                routes=replace(_rows(self.routes, a - self.start, b - self.start), missing=missing),
                tokens=self.tokens[a - self.start : b - self.start],
                merged=_merged(self.merged, a, b),
            )
            for a, b, missing in zip(starts, ends, said, strict=True)
        ]


class RouteWriter:
    """Takes sequence after sequence, and writes blocks as they get full.

    Args:
        source: the tape that is read.
        writer: of the copy.
        packed: blocks; else plain rows.
        order: keep the slot order; else only sets, without combine weights.

    Attributes:
        shared: positions whose routes are those of another sequence of the block, stored once.
    """

    def __init__(self, source: Tape, writer: TapeWriter, *, packed: bool, order: bool) -> None:
        self._source, self._writer = source, writer
        self._packed, self._order = packed, order
        self._block: _Block | None = None
        self._rows: list[pa.RecordBatch] = []
        self.shared = 0

    def add(self, sequence: Sequence) -> None:
        """Take the routes of a sequence, of both roles."""
        for part in self._parts(sequence):
            if not self._packed:
                if not part.routes.order:
                    raise UsageError(
                        f"{sequence.id} has sets of experts, plain routes are in slot order",
                        hint="routes=packed",
                    )
                self._rows.append(_row(part, _plain(part.routes)))
                if sum(row.nbytes for row in self._rows) >= _PLAIN_BYTES:
                    self.flush()
                continue
            if self._block is None or not self._block.takes(part):
                self.flush()
                self._block = _Block(part.shape)
            self._block.add(part)

    def flush(self) -> None:
        """Write what was collected."""
        if self._rows:
            self._writer.write_batch("routes", pa.concat_batches(self._rows))
            self._rows = []
        if self._block is not None:
            self.shared += self._block.shared
            self._writer.write_batch("routes", self._block.batch(order=self._order))
            self._block = None

    def _parts(self, sequence: Sequence) -> Iterator[_Part]:
        # window by window, so that the longest sequence does not have to fit into memory
        for begin in range(0, max(sequence.length, 1), MAX_TOKENS):
            end = min(begin + MAX_TOKENS, sequence.length)
            # one position before: a fragment without positions that begins here would be left out
            span = (begin - 1, end) if (begin, end) != (0, sequence.length) else None
            rows = self._source.fragments("routes", sequence.key, span)
            for role in ("used", "live"):
                mine = [row for row in rows if row["role"] == role]
                for again in range(len(mine)):
                    if again and not overlap(mine):
                        break
                    parts = self._window(sequence, role, mine, begin, end, again=again)
                    if again and not parts:
                        break
                    yield from parts

    def _window(
        self,
        sequence: Sequence,
        role: str,
        rows: Items[Mapping[str, Any]],
        begin: int,
        end: int,
        *,
        again: int,
    ) -> list[_Part]:
        routes = join_routes(
            rows,
            (begin, end),
            sequence.id,
            unpack=self._source.unpack,
            again=again,
        )
        if again and not routes.valid.any():
            return []
        if not self._order:
            routes = replace(routes, weights=None, weighted=np.zeros_like(routes.weighted))
        covered = np.asarray(routes.valid.any(axis=1))
        for row in rows if not again else ():
            low, high = max(row["start"], begin), min(row["start"] + row["n"], end)
            covered[low - begin : max(low, high) - begin] = True
        # a fragment belongs to the window in which it begins, also one without positions; what
        # begins beyond the end belongs to the last one
        last = end == sequence.length
        own = [r for r in rows if begin <= r["start"] < end or (last and r["start"] >= end)]
        spans = spans_of(covered) or ([(0, 0)] if own else [])
        tokens = sequence.window(begin, end).tokens.fill(0).astype(np.uint32)
        parts = []
        for low, high, part_routes in (p for span in spans for p in _even(routes, *span)):
            part = _Part(
                key=sequence.key,
                role=role,
                start=begin + low,
                end=begin + high,
                prompt_end=sequence.prompt_len,
                routes=replace(part_routes, missing=()),
                tokens=tokens[low:high],
                merged=_merged(rows, begin + low, begin + high),
            )
            most = _PLAIN_TOKENS
            if self._packed:
                most = _most(part)
            parts += part.split(*range(part.start, part.end, most))
        own = [] if again else own
        missing = [entry for r in own for entry in read_missing(r["missing"], "routes.missing")]
        said = _placed(missing, [part.start for part in parts])
        return [
            replace(part, routes=replace(part.routes, missing=here))
            for part, here in zip(parts, said, strict=True)
        ]


class _Block:
    """Parts that are packed together, as rows of one record batch.

    The first row holds the block. Where a prompt was routed before, bit for bit, its rows point to
    what is there: the key-value cache was reused, or the engine did the same again.
    """

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self._shape = shape
        self._rows: list[tuple[_Part, int]] = []
        self._stored: list[_Part] = []
        self._prompts: dict[bytes, list[tuple[int, _Part]]] = {}
        self._tokens = 0
        self._floats = 0
        self.shared = 0

    def takes(self, part: _Part) -> bool:
        """Whether there is room for it."""
        if not self._rows:
            return True
        most = block_tokens(len(part.routes.layers), part.routes.ids.shape[2])
        size = (part.end - part.start) * part.float_bytes
        return (
            part.shape == self._shape
            and self._tokens + part.end - part.start <= most
            and self._floats + size <= _FLOAT_BYTES
        )

    def add(self, part: _Part) -> None:
        """Take it in."""
        self._floats += (part.end - part.start) * part.float_bytes
        if part.start < min(part.prompt_end, part.end):
            head, *rest = part.split(part.prompt_end)
            digest = xxhash.xxh3_128(head.tokens.tobytes())
            digest.update(head.routes.ids.tobytes())
            digest.update(head.routes.valid.tobytes())
            before = self._prompts.setdefault(digest.digest(), [])
            for at, other in before:
                if _same(head, other):
                    self._rows.append((head, at))
                    self.shared += head.end - head.start
                    for tail in rest:
                        self._store(tail)
                    return
            before.append((self._tokens, head))
        self._store(part)

    def _store(self, part: _Part) -> None:
        self._rows.append((part, self._tokens))
        self._stored.append(part)
        self._tokens += part.end - part.start

    def batch(self, *, order: bool) -> pa.RecordBatch:
        """Its rows."""
        first = self._rows[0][0].routes
        block = encode_block(
            np.concatenate([part.routes.ids for part in self._stored]),
            np.concatenate([part.tokens for part in self._stored]),
            np.concatenate([part.routes.valid for part in self._stored]),
            num_experts=first.num_experts,
            order=order and first.order,
        )
        rows = []
        for i, (part, at) in enumerate(self._rows):
            routes = part.routes
            cells: dict[str, Any] = {
                "encoding": "packed",
                "ids": [block if i == 0 else None],
                "back": i,
                "at": at,
                # the block has it too; here it is for those who count without decoding
                "valid": [codecs.encode_bits(routes.valid)],
            }
            if routes.weights is not None:
                cells["weights"] = [encode_split(routes.weights)]
            if routes.margin is not None:
                cells["margin"] = [encode_split(routes.margin)]
            rows.append(_row(part, cells))
        return pa.concat_batches(rows) if len(rows) > 1 else rows[0]


def spans_of(known: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _most(part: _Part) -> int:
    """Positions of a row that still fits a block."""
    most = block_tokens(len(part.routes.layers), part.routes.ids.shape[2])
    return max(1, min(most, _FLOAT_BYTES // max(part.float_bytes, 1)))


def _same(a: _Part, b: _Part) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.routes.valid, b.routes.valid)
        and np.array_equal(a.routes.ids, b.routes.ids)
    )


def _rows(routes: Routes, start: int, end: int) -> Routes:
    """Some positions of routes."""
    part = slice(start, end)
    return replace(
        routes,
        ids=routes.ids[part],
        valid=routes.valid[part],
        weighted=routes.weighted[part],
        weights=None if routes.weights is None else routes.weights[part],
        margin=None if routes.margin is None else routes.margin[part],
    )


def _even(routes: Routes, start: int, end: int) -> Iterator[tuple[int, int, Routes]]:
    """Pieces of the positions [start, end) whose rows all have combine weights, or none of them.

    Where only some layers of a position have them, there are two pieces of the same positions.
    """
    here = _rows(routes, start, end)
    if routes.weights is None:
        yield start, end, here
        return
    some = here.weighted.any(axis=1)
    partly = some & (here.weighted != here.valid).any(axis=1)
    kind = some.astype(np.int8) + partly
    known = np.flatnonzero(here.valid.any(axis=1))  # a position without routes goes with others
    cuts = [0, *known[1:][np.diff(kind[known]) != 0].tolist(), end - start]
    for a, b in itertools.pairwise(cuts):
        piece = _rows(here, a, b)
        if piece.weighted.any():
            yield start + a, start + b, replace(piece, valid=piece.weighted)
        bare = piece.valid & ~piece.weighted
        if bare.any() or not piece.weighted.any():
            without = replace(piece, valid=bare, weights=None)
            yield start + a, start + b, without


def _placed(missing: Any, starts: list[int]) -> list[tuple[Any, ...]]:
    """What is missing, for each part: that of its positions, and of those up to the next part."""
    out: list[list[Any]] = [[] for _ in starts]
    for entry in missing:
        out[max(0, bisect_right(starts, int(entry[0])) - 1)].append(entry)
    return [tuple(entries) for entries in out]


def _merged(rows: Items[Mapping[str, Any]], start: int, end: int) -> list[Mapping[str, Any]]:
    """The recorded fragments that reach into [start, end), cut to it."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        for piece in row.get("merged") or [row]:
            low, high = max(piece["start"], start), min(piece["start"] + piece["n"], end)
            if low < high:
                kept = {name: piece[name] for name in ("step", "weight_version")}
                found.append({"start": low, "n": high - low, **kept})
    return found


def _plain(routes: Routes) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "encoding": "rows",
        "ids": [codecs.encode_rows(routes.ids, routes.num_experts)],
        "valid": [codecs.encode_bits(routes.valid)],
    }
    if routes.weights is not None:
        cells["weights"] = [codecs.encode_floats(routes.weights)]
    if routes.margin is not None:
        cells["margin"] = [codecs.encode_floats(routes.margin)]
    return cells


def _row(part: _Part, cells: Mapping[str, Any]) -> pa.RecordBatch:
    schema = TAPE_TABLES["routes"]
    key, routes = part.key, part.routes
    versions = {piece["weight_version"] for piece in part.merged}
    steps = [piece["step"] for piece in part.merged if piece["step"] is not None]
    return make_batch(
        "routes",
        schema,
        {
            "engine": key.engine,
            "request": key.request,
            "sample": key.sample,
            "pass": key.scoring,
            "start": part.start,
            "n": part.end - part.start,
            "role": part.role,
            "step": min(steps) if steps else None,
            "weight_version": versions.pop() if len(versions) == 1 else None,
            "layers": [np.asarray(routes.layers, np.int32)],
            "k": routes.ids.shape[2],
            "num_experts": routes.num_experts,
            "missing": json.dumps([list(e) for e in routes.missing]) if routes.missing else None,
            "merged": pa.array([part.merged], schema.field("merged").type),
            **cells,
        },
    )
