"""Rewriting a tape for keeping: fragments joined per sequence, routes and kept sets packed.

What a reader gets is the same before and after: every joined column of every sequence, bit for bit.
What goes is how it was cut into fragments; of routes the cuts stay, in `merged`, with their steps.
Fragments that cannot be joined without a change are copied as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rolltape.store import codecs
from rolltape.store.columns import make_batch
from rolltape.store.equality import differences
from rolltape.store.errors import DamagedShardError, UsageError
from rolltape.store.kept import encode_kept
from rolltape.store.keys import Key
from rolltape.store.packed import block_tokens, encode_block
from rolltape.store.places import Place, place_of
from rolltape.store.planes import encode_split
from rolltape.store.routes import Routes
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.seal import seal
from rolltape.store.sequences import LOGPROBS, Sequence, Tape, open_tape
from rolltape.store.writer import TapeWriter, create_tape

ENCODINGS = ("packed", "plain")

# Tables whose rows are joined per sequence; all others are copied row by row.
_JOINED = ("tokens", "routes", "supports")
# sorted by sequence and step, the columns of `forwards` compress several times better
_SORTED = {
    "forwards": ["engine", "request", "sample", "pass", "step", "row"],
    "sequences": ["engine", "request", "sample", "pass"],
}
_SORT_ROWS = 1 << 20


@dataclass(frozen=True)
class Compacted:
    """What `compact` did.

    Args:
        before: bytes of all shards of the source.
        after: bytes of all shards of the result.
        sequences: number of sequences.
        route_rows: valid (position, layer) pairs.
        route_bytes: bytes of the shards of `routes` of the result.
        shared: positions whose routes another sequence of the block holds too.
        checked: whether the copy was compared with the source.
    """

    before: int
    after: int
    sequences: int
    route_rows: int
    route_bytes: int
    shared: int
    checked: bool


def compact(
    tape: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    routes: str = "packed",
    sets: bool = False,
    check: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Compacted:
    """Write a compact copy of a sealed tape. It keeps the uuid: it is the same recording.

    Args:
        tape: path or URL of a tape without live shards.
        out: path or URL of the copy; must not exist.
        routes: `packed`, or `plain`, which is larger and decodes several times faster.
        sets: with `packed`: give up the slot order of experts and keep their set. Lossy; combine
            weights, which stand in slot order, are left out.
        check: read both afterwards and compare every column of every sequence.
        storage_options: of both URLs.

    Raises:
        DamagedShardError: `check`, and the copy says something else.
        UsageError: the tape is still being written, or an option does not exist.
        TapeExistsError: there is something at `out`.
    """
    if routes not in ENCODINGS:
        raise UsageError(f"routes {routes!r} does not exist", hint=" | ".join(ENCODINGS))
    if sets and routes != "packed":
        raise UsageError("sets need routes=packed")
    source = open_tape(tape, storage_options=storage_options)
    live = [f for t in TAPE_TABLES for f in source.files(t) if not f.endswith(".arrow")]
    if live or source.seal is None:
        raise UsageError(f"{tape} is not sealed", hint="`rolltape fsck --repair` seals it")
    place = place_of(
        create_tape(
            out,
            role=source.role,
            parent=source.parent,
            provenance={
                **source.header.get("provenance", {}),
                "compacted": {"routes": routes, "sets": sets, "format": source.header["format"]},
            },
            storage_options=storage_options,
            uuid=source.uuid,
        )
    )
    shared = 0
    with TapeWriter(place) as writer:
        for table in TAPE_TABLES:
            if table not in (*_JOINED, *DERIVED_TABLES):
                _copy(source, writer, table)
        for batch in _token_rows(source):
            writer.append_batch("tokens", batch)
        for batch in _support_rows(source):
            writer.append_batch("supports", batch)
        blocks = _RouteBlocks(source, writer, packed=routes == "packed", order=not sets)
        for sequence in _by_group(source):
            blocks.add(sequence)
        blocks.flush()
        shared = blocks.shared
        _copy_orphans(source, writer)
    seal(place, status=source.seal.get("status", {}))
    result = open_tape(place)
    if check:
        for difference in differences(source, result, sets=sets):
            raise DamagedShardError(f"{place}: {difference}", hint="a bug: keep the original")
    rollups = result.rollups()
    return Compacted(
        before=_shard_bytes(source.place),
        after=_shard_bytes(place),
        sequences=len(source),
        route_rows=int(pc.sum(rollups.column("route_rows")).as_py() or 0),
        route_bytes=sum(place.files("routes").values()),
        shared=shared,
        checked=check,
    )


def _shard_bytes(place: Place) -> int:
    return sum(sum(place.files(table).values()) for table in TAPE_TABLES)


def _by_group(tape: Tape) -> Iterator[Sequence]:
    """Samples of a group beside each other: they share prompts."""
    groups: dict[Any, list[Sequence]] = {}
    rollups = tape.rollups()
    for sequence, group in zip(tape, rollups.column("group").to_pylist(), strict=True):
        groups.setdefault(group if group is not None else sequence.key, []).append(sequence)
    for members in groups.values():
        yield from members


def _copy(source: Tape, writer: TapeWriter, table: str) -> None:
    keys = _SORTED.get(table)
    held: list[pa.RecordBatch] = []
    rows = 0
    for _, _, batch in source.batches(table):
        if keys is None:
            writer.append_batch(table, batch)
            continue
        held.append(batch)
        rows += batch.num_rows
        if rows >= _SORT_ROWS:
            _write_sorted(writer, table, held, keys)
            held, rows = [], 0
    if held and keys is not None:
        _write_sorted(writer, table, held, keys)


def _write_sorted(
    writer: TapeWriter, table: str, held: list[pa.RecordBatch], keys: list[str]
) -> None:
    # Arrow's sort is not stable, and the order of equal rows means something
    whole = pa.Table.from_batches(held).append_column("_row", pa.array(np.arange(_total(held))))
    ordered = whole.sort_by([(name, "ascending") for name in [*keys, "_row"]])
    for batch in ordered.drop_columns(["_row"]).combine_chunks().to_batches(1 << 16):
        writer.append_batch(table, batch)


def _total(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def _copy_orphans(source: Tape, writer: TapeWriter) -> None:
    """Rows of sequences that have no row in `sequences` stay as they are."""
    known = set(source.keys())
    for table in _JOINED:
        source.index.entries(table)
        for key in source.index.codes:
            if key not in known:
                rows = source.select(table, key)
                for batch in rows.combine_chunks().to_batches():
                    if table == "routes" and "packed" in batch.column("encoding").to_pylist():
                        raise UsageError(
                            f"{source.place}: packed routes of {key.id}, which is unknown",
                            hint="compact the tape that this one was made from",
                        )
                    writer.append_batch(table, batch)


def _key_columns(key: Key) -> dict[str, Any]:
    return {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": key.scoring}


def _spans(known: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


# -- tokens -------------------------------------------------------------------------------


def _token_rows(tape: Tape) -> Iterator[pa.RecordBatch]:
    schema = TAPE_TABLES["tokens"]
    for sequence in tape:
        rows = tape.fragments("tokens", sequence.key)
        if not rows:
            continue
        if _overlap(rows):
            yield from tape.select("tokens", sequence.key).combine_chunks().to_batches()
            continue
        cells = {
            "ids": sequence.tokens,
            "loss_mask": sequence.loss_mask,
            **{name: sequence.logprob(name) for name in LOGPROBS},
        }
        for start, end, semantics, held in _token_spans(rows, sequence.length):
            # a column that no fragment of the span had stays null, not a list of nulls
            part = {n: [c[start:end]] if n in held else [None] for n, c in cells.items()}
            yield make_batch(
                "tokens",
                schema,
                {
                    **_key_columns(sequence.key),
                    "start": start,
                    "n": end - start,
                    **part,
                    "semantics": pa.array([semantics], schema.field("semantics").type),
                },
            )


def _token_spans(
    rows: list[dict[str, Any]], length: int
) -> list[tuple[int, int, Any, frozenset[str]]]:
    """Ranges of positions whose fragments say the same: (start, end, semantics, columns held)."""
    owner = np.full(length, -1, np.int64)
    for i, row in enumerate(rows):
        span = owner[row["start"] : row["start"] + row["n"]]
        span[span < 0] = i
    said = []
    kinds: dict[str, int] = {}
    for row in rows:
        held = frozenset(n for n in ("ids", "loss_mask", *LOGPROBS) if row[n] is not None)
        text = json.dumps([row["semantics"], sorted(held)], sort_keys=True)
        said.append((kinds.setdefault(text, len(kinds)), row["semantics"], held))
    kind = np.array([said[i][0] if i >= 0 else -1 for i in owner])
    found = []
    for start, end in _spans(owner >= 0):
        cuts = [start, *(start + 1 + np.flatnonzero(np.diff(kind[start:end]))), end]
        for a, b in zip(cuts[:-1], cuts[1:], strict=True):
            _, semantics, held = said[owner[a]]
            found.append((int(a), int(b), semantics, held))
    return found


def _overlap(rows: list[dict[str, Any]]) -> bool:
    spans = sorted((r["start"], r["n"]) for r in rows)
    return any(b[0] < a[0] + a[1] for a, b in zip(spans[:-1], spans[1:], strict=True))


# -- supports -----------------------------------------------------------------------------


def _support_rows(tape: Tape) -> Iterator[pa.RecordBatch]:
    schema = TAPE_TABLES["supports"]
    for sequence in tape:
        rows = tape.fragments("supports", sequence.key)
        supports = sequence.supports()
        if supports is None:
            continue
        if len({row["derived"] for row in rows}) > 1:
            yield from tape.select("supports", sequence.key).combine_chunks().to_batches()
            continue
        covered = np.zeros(sequence.length, bool)
        for row in rows:
            covered[row["start"] : row["start"] + row["n"]] = True
        vocab = tape.engine(sequence.key.engine).get("vocab_size")
        counts = np.diff(supports.offsets)
        for start, end in _spans(covered):
            ids = supports.ids[supports.offsets[start] : supports.offsets[end]]
            yield make_batch(
                "supports",
                schema,
                {
                    **_key_columns(sequence.key),
                    "start": start,
                    "n": end - start,
                    "derived": supports.derived,
                    "state": [supports.state[start:end]],
                    "counts": [counts[start:end]],
                    "ids": [np.zeros(0, np.uint32)],
                    "encoding": "kept",
                    "data": [encode_kept(counts[start:end], ids, vocab_size=vocab)],
                },
            )


# -- routes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """Routes of one sequence and role: its rows of a block, or of a plain fragment."""

    sequence: Sequence
    role: str
    routes: Routes
    merged: list[dict[str, Any]]
    start: int
    end: int
    last: bool  # carries `missing`, which is said once


class _RouteBlocks:
    """Collects whole sequences until a block is full, then writes it as one record batch."""

    def __init__(self, source: Tape, writer: TapeWriter, *, packed: bool, order: bool) -> None:
        self._source, self._writer = source, writer
        self._packed, self._order = packed, order
        self._spans: list[_Span] = []
        self._shape: tuple[Any, ...] | None = None
        self._tokens = 0
        self.shared = 0

    def add(self, sequence: Sequence) -> None:
        """Take the routes of a sequence, of both roles."""
        rows = self._source.fragments("routes", sequence.key)
        for role in ("used", "live"):
            mine = [r for r in rows if r["role"] == role]
            routes = sequence.routes(role) if mine else None
            if routes is None:
                continue
            covered = np.zeros(sequence.length, bool)
            for row in mine:
                covered[row["start"] : row["start"] + row["n"]] = True
            spans = _spans(covered) or [(0, 0)]
            if routes.weights is not None:
                uneven = routes.weighted.any(axis=1) & (routes.weighted != routes.valid).any(axis=1)
                if uneven.any():
                    self._keep(sequence, role)
                    continue
                spans = [s for span in spans for s in _even(routes, *span)]
            shape = (routes.layers, routes.num_experts, routes.ids.shape[2], routes.order)
            if shape != self._shape:
                self.flush()
                self._shape = shape
            most = block_tokens(len(routes.layers), routes.ids.shape[2]) if self._packed else 4096
            for start, end in spans:
                cuts = [*range(start, end, most), end] if end > start else [start, end]
                for a, b in zip(cuts[:-1], cuts[1:], strict=True):
                    if self._packed and self._tokens + b - a > most:
                        self.flush()
                    merged = _merged(mine, a, b)
                    last = (b == spans[-1][1]) and a == cuts[-2]
                    self._spans.append(_Span(sequence, role, routes, merged, a, b, last))
                    self._tokens += b - a
            if not self._packed:
                self.flush()

    def _keep(self, sequence: Sequence, role: str) -> None:
        rows = self._source.select("routes", sequence.key)
        rows = rows.filter(pc.equal(rows.column("role"), role)).combine_chunks()
        if "plain" not in rows.column("encoding").to_pylist():
            raise UsageError(f"routes of {sequence.id} are packed and cannot be packed again")
        for batch in rows.to_batches():
            self._writer.append_batch("routes", batch)

    def flush(self) -> None:
        """Write what was collected."""
        spans, self._spans, self._tokens = self._spans, [], 0
        if not spans:
            return
        if self._packed:
            self._writer.write_batch("routes", self._block(spans))
        else:
            for span in spans:
                self._writer.append_batch("routes", _row(span, _plain(span)))

    def _block(self, spans: list[_Span]) -> pa.RecordBatch:
        placed: list[tuple[_Span, int]] = []
        seen: dict[str, tuple[int, int]] = {}
        ids: list[np.ndarray] = []
        valid: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        at = 0
        for span in spans:
            routes = span.routes
            begin = span.start
            prompt = min(max(span.sequence.prompt_len, span.start), span.end)
            if prompt > begin:
                # the same tokens with the same routes, bit for bit: stored once
                digest = xxhash.xxh3_128(span.sequence.tokens.values[begin:prompt].tobytes())
                digest.update(np.ascontiguousarray(routes.ids[begin:prompt]))
                digest.update(np.ascontiguousarray(routes.valid[begin:prompt]))
                name = f"{begin}-{prompt}-{digest.hexdigest()}"
                if name in seen:
                    placed.append((_cut(span, begin, prompt, first=True), seen[name][0]))
                    self.shared += prompt - begin
                    begin = prompt
                else:
                    seen[name] = (at, prompt - begin)
            if begin < span.end or begin == span.start:
                part = _cut(span, begin, span.end, first=False)
                placed.append((part, at))
                ids.append(routes.ids[begin : span.end])
                valid.append(routes.valid[begin : span.end])
                tokens.append(span.sequence.tokens.fill(0)[begin : span.end].astype(np.uint32))
                at += span.end - begin
            elif span.last:  # all of it is shared: what is missing must still be said
                placed[-1] = (_cut(span, span.start, span.end, first=False), placed[-1][1])
        first = spans[0].routes
        block = encode_block(
            np.concatenate(ids),
            np.concatenate(tokens),
            np.concatenate(valid),
            num_experts=first.num_experts,
            order=self._order and first.order,
        )
        rows = []
        for i, (span, where) in enumerate(placed):
            cells = {
                "encoding": "packed",
                "ids": [block if i == 0 else None],
                "back": i,
                "at": where,
                **self._floats(span),
            }
            rows.append(_row(span, cells))
        return pa.concat_batches(rows) if len(rows) > 1 else rows[0]

    def _floats(self, span: _Span) -> dict[str, Any]:
        routes, part = span.routes, slice(span.start, span.end)
        cells: dict[str, Any] = {}
        if routes.weights is not None and routes.weighted[part].any() and self._order:
            cells["weights"] = [encode_split(routes.weights[part])]
        if routes.margin is not None:
            cells["margin"] = [encode_split(routes.margin[part])]
        return cells


def _even(routes: Routes, start: int, end: int) -> list[tuple[int, int]]:
    """The range, cut where positions with combine weights meet positions without."""
    known = np.flatnonzero(routes.valid[start:end].any(axis=1))
    if not len(known):
        return [(start, end)]
    weighted = routes.weighted[start:end].any(axis=1)[known]
    cuts = [start, *(start + known[1:][np.diff(weighted.astype(np.int8)) != 0]), end]
    return [(int(a), int(b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def _cut(span: _Span, start: int, end: int, *, first: bool) -> _Span:
    merged = _merged(span.merged, start, end)
    last = span.last and not first
    return _Span(span.sequence, span.role, span.routes, merged, start, end, last)


def _merged(rows: list[dict[str, Any]], start: int, end: int) -> list[dict[str, Any]]:
    """The recorded fragments that reach into [start, end), cut to it."""
    found = []
    for row in rows:
        for piece in row.get("merged") or [row]:
            low, high = max(piece["start"], start), min(piece["start"] + piece["n"], end)
            if low < high:
                kept = {name: piece[name] for name in ("step", "weight_version")}
                found.append({"start": low, "n": high - low, **kept})
    return found


def _plain(span: _Span) -> dict[str, Any]:
    routes, part = span.routes, slice(span.start, span.end)
    cells: dict[str, Any] = {
        "encoding": "plain",
        "ids": [codecs.encode_plain(routes.ids[part], routes.num_experts)],
        "valid": [codecs.encode_bits(routes.valid[part])],
    }
    if routes.weights is not None and routes.weighted[part].any():
        cells["weights"] = [codecs.encode_floats(routes.weights[part])]
    if routes.margin is not None:
        cells["margin"] = [codecs.encode_floats(routes.margin[part])]
    return cells


def _row(span: _Span, cells: Mapping[str, Any]) -> pa.RecordBatch:
    schema = TAPE_TABLES["routes"]
    routes = span.routes
    versions = {piece["weight_version"] for piece in span.merged}
    steps = [piece["step"] for piece in span.merged if piece["step"] is not None]
    missing = [list(entry) for entry in routes.missing] if span.last else []
    return make_batch(
        "routes",
        schema,
        {
            **_key_columns(span.sequence.key),
            "start": span.start,
            "n": span.end - span.start,
            "role": span.role,
            "step": min(steps) if steps else None,
            "weight_version": versions.pop() if len(versions) == 1 else None,
            "layers": [np.asarray(routes.layers, np.int32)],
            "k": routes.ids.shape[2],
            "num_experts": routes.num_experts,
            "missing": json.dumps(missing) if missing else None,
            "merged": pa.array([span.merged], schema.field("merged").type),
            **cells,
        },
    )
