"""Rewriting a tape for keeping: fragments joined per sequence, routes and kept sets packed.

What a reader gets is the same before and after: every joined column of every sequence, bit for bit.
What goes is how it was cut into fragments; of routes the cuts stay, in `merged`, with their steps.
Fragments that cannot be joined without a change are copied as they are.

A copy that was cut short never passes for a tape: in a folder it gets its name when it is whole,
and for as long as it is written it holds `compacting.json`, which `fsck` does not repair.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.columns import make_batch
from rolltape.store.compact_routes import RouteWriter, spans_of
from rolltape.store.equality import differences
from rolltape.store.errors import DamagedShardError, StorageError, TapeExistsError, UsageError
from rolltape.store.index import KEY_COLUMNS
from rolltape.store.kept import encode_kept
from rolltape.store.keys import Key
from rolltape.store.places import LocalPlace, ObjectPlace, Place, place_of
from rolltape.store.routes import overlap
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.seal import seal
from rolltape.store.sequences import LOGPROBS, Sequence, Tape, open_tape
from rolltape.store.shards import COMPACTING
from rolltape.store.supports import join_supports
from rolltape.store.writer import TapeWriter, create_tape, put_json

ENCODINGS = ("packed", "plain")

# Tables whose rows are joined per sequence; all others are copied row by row.
_JOINED = ("tokens", "routes", "supports")
# Rows of `forwards` that are sorted at once: by sequence and step its columns compress several
# times better.
_SORT_ROWS = 1 << 18


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
    out: str | os.PathLike[str] | LocalPlace | ObjectPlace,
    *,
    routes: str = "packed",
    sets: bool = False,
    check: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Compacted:
    """Write a compact copy of a sealed tape. It keeps the uuid: it is the same recording.

    Args:
        tape: path or URL of a tape without live shards.
        out: path or URL of the copy; must not exist, or be an empty folder.
        routes: `packed`, or `plain`, which is larger and decodes several times faster.
        sets: with `packed`: give up the slot order of experts and keep their set. Lossy; combine
            weights, which stand in slot order, are left out.
        check: read both afterwards and compare every column of every sequence.
        storage_options: of both URLs.

    Raises:
        DamagedShardError: `check`, and the copy says something else.
        UsageError: the tape is still being written, or an option does not exist.
        TapeExistsError: there is something at `out`.
        StorageError: it cannot be written.
    """
    if routes not in ENCODINGS:
        raise UsageError(f"routes {routes!r} does not exist", hint=" | ".join(ENCODINGS))
    if sets and routes != "packed":
        raise UsageError("sets need routes=packed")
    source = open_tape(tape, storage_options=storage_options)
    live = [f for t in TAPE_TABLES for f in source.files(t) if not f.endswith(".arrow")]
    if live or source.seal is None:
        raise UsageError(f"{tape} is not sealed", hint="`rolltape fsck --repair` seals it")
    target = place_of(out, storage_options)
    folder: Any = _beside(target) if isinstance(target, LocalPlace) else target
    place = place_of(
        create_tape(
            folder,
            role=source.role,
            parent=source.parent,
            provenance={
                **source.header.get("provenance", {}),
                "compacted": {"routes": routes, "sets": sets, "format": source.header["format"]},
            },
            uuid=source.uuid,
        )
    )
    try:
        put_json(place, COMPACTING, {"uuid": source.uuid})
        with TapeWriter(place, uncompressed=() if routes == "packed" else ("routes",)) as writer:
            shared = _write_tables(source, writer, packed=routes == "packed", order=not sets)
        seal(place, status=source.seal.get("status", {}))
        result = Tape(place)  # `open_tape` may refuse it for its `compacting.json`
        if check:
            for difference in differences(source, result, sets=sets):
                raise DamagedShardError(f"{target}: {difference}", hint="a bug: keep the original")
        done = Compacted(
            before=_shard_bytes(source.place),
            after=_shard_bytes(place),
            sequences=len(source),
            route_rows=int(pc.sum(result.rollups().column("route_rows")).as_py() or 0),
            route_bytes=sum(place.files("routes").values()),
            shared=shared,
            checked=check,
        )
        place.remove(COMPACTING)
        if isinstance(place, LocalPlace) and isinstance(target, LocalPlace):
            _rename(place.path, target)
    except BaseException:
        _remove(place)  # half a copy must not be taken for one
        raise
    return done


def _beside(target: LocalPlace) -> Path:
    """Where a copy is written until it is whole."""
    path = target.path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise _taken(target)
    return path.with_name(f".{path.name}.compact-{secrets.token_hex(4)}")


def _rename(whole: Path, target: LocalPlace) -> None:
    try:
        os.rename(whole, target.path.resolve())  # replaces nothing but an empty folder
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _taken(target) from error
        raise StorageError(f"{target}: {error.strerror or error}") from error


def _taken(target: LocalPlace) -> TapeExistsError:
    return TapeExistsError(f"{target} is not empty", hint="choose another -o, or remove it")


def _write_tables(source: Tape, writer: TapeWriter, *, packed: bool, order: bool) -> int:
    """Write all tables; gives the positions whose routes are stored once for several sequences."""
    for table in TAPE_TABLES:
        if table not in (*_JOINED, *DERIVED_TABLES):
            _copy(source, writer, table)
    for batch in _token_rows(source):
        writer.append_batch("tokens", batch)
    for batch in _support_rows(source):
        writer.append_batch("supports", batch)
    routes = RouteWriter(source, writer, packed=packed, order=order)
    for sequence in _by_group(source):
        routes.add(sequence)
    routes.flush()
    _copy_orphans(source, writer)
    return routes.shared


def _remove(place: LocalPlace | ObjectPlace) -> None:
    if isinstance(place, LocalPlace):
        shutil.rmtree(place.path, ignore_errors=True)
        return
    for folder in ["", *place.folders()]:
        for file in place.files(folder):
            if file != COMPACTING:
                place.remove(f"{folder}/{file}".lstrip("/"))
    place.remove(COMPACTING)  # the last: a removal may be cut short, too


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
    if table == "sequences":
        _copy_sequences(source, writer)
        return
    held: list[pa.RecordBatch] = []
    rows = 0
    for _, _, batch in source.batches(table):
        if table != "forwards":
            writer.append_batch(table, batch)
            continue
        held.append(batch)
        rows += batch.num_rows
        if rows >= _SORT_ROWS:
            _write_sorted(writer, table, held)
            held, rows = [], 0
    if held:
        _write_sorted(writer, table, held)


def _copy_sequences(source: Tape, writer: TapeWriter) -> None:
    """Rows of a sequence beside each other, sequences in their order: it stays what it is."""
    table = source.table("sequences")
    columns = (table.column(name).to_pylist() for name in KEY_COLUMNS)
    turn = {key: i for i, key in enumerate(source.keys())}
    turns = np.array([turn[Key(*row)] for row in zip(*columns, strict=True)], np.int64)
    _write(writer, "sequences", table.take(pa.array(np.argsort(turns, kind="stable"))))


def _write_sorted(writer: TapeWriter, table: str, held: list[pa.RecordBatch]) -> None:
    # Arrow's sort is not stable, and the order of equal rows means something
    whole = pa.Table.from_batches(held)
    whole = whole.append_column("_row", pa.array(np.arange(len(whole))))
    order = [(name, "ascending") for name in (*KEY_COLUMNS, "step", "_row")]
    _write(writer, table, whole.sort_by(order).drop_columns(["_row"]))


def _write(writer: TapeWriter, table: str, rows: pa.Table) -> None:
    for batch in rows.combine_chunks().to_batches(1 << 16):
        writer.append_batch(table, batch)


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


# -- tokens -------------------------------------------------------------------------------


def _token_rows(tape: Tape) -> Iterator[pa.RecordBatch]:
    schema = TAPE_TABLES["tokens"]
    for kept in tape:
        sequence = kept.window(0, kept.length)  # what is read of it is let go with it
        rows = tape.fragments("tokens", sequence.key)
        if not rows:
            continue
        if overlap(rows) or not all(row["n"] for row in rows):
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
    rows: Items[Mapping[str, Any]], length: int
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
    for start, end in spans_of(owner >= 0):
        cuts = [start, *(start + 1 + np.flatnonzero(np.diff(kind[start:end]))), end]
        for a, b in itertools.pairwise(cuts):
            _, semantics, held = said[owner[a]]
            found.append((int(a), int(b), semantics, held))
    return found


# -- supports -----------------------------------------------------------------------------


def _support_rows(tape: Tape) -> Iterator[pa.RecordBatch]:
    schema = TAPE_TABLES["supports"]
    for sequence in tape:
        rows = tape.fragments("supports", sequence.key)
        if not rows:
            continue
        supports = join_supports(rows, sequence.span, sequence.id)
        covered = np.zeros(sequence.length, bool)
        for row in rows:
            covered[row["start"] : row["start"] + row["n"]] = True
        if len({row["derived"] for row in rows}) > 1 or not covered.any():
            yield from tape.select("supports", sequence.key).combine_chunks().to_batches()
            continue
        vocab = tape.engine(sequence.key.engine).get("vocab_size")
        counts = np.diff(supports.offsets)
        for start, end in spans_of(covered):
            ids = supports.ids[supports.offsets[start] : supports.offsets[end]]
            sizes = counts[start:end]
            cells: dict[str, Any] = {"ids": [ids]}
            if _ascending(sizes, ids):
                data = encode_kept(sizes, ids, vocab_size=vocab)
                cells = {"ids": [ids[:0]], "encoding": "kept", "data": [data]}
            yield make_batch(
                "supports",
                schema,
                {
                    **_key_columns(sequence.key),
                    "start": start,
                    "n": end - start,
                    "derived": supports.derived,
                    "state": [supports.state[start:end]],
                    "counts": [sizes],
                    **cells,
                },
            )


def _ascending(counts: np.ndarray, ids: np.ndarray) -> bool:
    """Whether the ids of every position ascend; only those have a short form."""
    falls = np.diff(ids.astype(np.int64)) <= 0
    edges = np.cumsum(counts)
    falls[edges[(edges > 0) & (edges < len(ids))] - 1] = False
    return not falls.any()
