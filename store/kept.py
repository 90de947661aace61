"""Kept sets (`supports`) in few bytes: per position a delta list, its complement, or a bitmap.

Nearly all sets have a few ids, and are written as lists: the first id, and the gaps between the
others. A list of the ids that are *not* kept (complement) is smaller when nearly the whole
vocabulary is, and a bitmap in between. How many ids a position has is not repeated here; it stands
in `supports.counts`.

Some tokens are kept far more often than others. Where at least half of the listed ids are
repetitions, the lists of kept ids hold indices into a table instead: the distinct ids, by the power
of two of how often they occur, frequent ones first, then by id. So frequent ids are small numbers,
while the table is mostly ascending.

All integers little-endian; byte planes hold the lowest bytes of all values, then the next ones, so
that the zstd of the IPC file sees like beside like:

    0   "rtk"       magic
    3   version     1
    4   vocab_size  uint32; 0 is unknown, and then there are only lists
    8   n           uint32, positions
    12  firsts      uint32, lists that are not empty
    16  gaps        uint32, listed ids that are not the first
    20  large       uint32, gaps of 255 or more
    24  special     uint32, positions that are no delta list
    28  bitmaps     uint32, of those
    32  table       uint32, entries of the table; 0 is none
    36  differences of the table modulo 2^32 (4 planes), special positions (4 planes), their kinds
        (uint8: 1 complement, 2 bitmap), first ids (4 planes), gaps (uint8: ids left out between
        two; 255 is a large one), large gaps less 255 (4 planes), bitmaps of
        ceil(vocab_size / 8) bytes, bit 0 first
    ..  padding, zeros: as few as give the whole one byte per `MAX_IDS_PER_BYTE` kept ids

Memory: lengths are compared with the data and with the counts before anything is allocated. There
are at most `MAX_IDS_PER_BYTE` kept ids per byte of data (the encoder pads it). Decoding needs at
most 64 bytes per byte of data, 64 per position and 12 per id, so 48 KiB per byte and 64 per
position.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from rolltape.store.errors import DamagedShardError, SchemaError

VERSION = 1
_MAGIC = b"rtk"
_HEADER = struct.Struct("<3sB8I")
_LARGE = 255
_LIST, _COMPLEMENT, _BITMAP = 0, 1, 2
_MAX_IDS = 1 << 32
#: Whole vocabularies take next to nothing, so the encoder pads where there are more ids a byte.
MAX_IDS_PER_BYTE = 4096


def encode_kept(counts: np.ndarray, ids: np.ndarray, *, vocab_size: int | None) -> bytes:
    """Pack kept sets, exactly.

    Args:
        counts: int64 [n], ids of each position.
        ids: uint32 [sum of counts], ascending within a position, none twice.
        vocab_size: ids are usually below it. None is unknown; then, or if an id is not below it,
            every position is a list.

    Raises:
        SchemaError: counts and ids do not fit each other, or the ids are not ascending.
    """
    counts = np.asarray(counts)
    n = len(counts)
    if n and (int(counts.min()) < 0 or int(counts.sum(dtype=np.int64)) != len(ids)):
        raise SchemaError(f"supports: counts of {n} positions do not add up to {len(ids)} ids")
    if n >= _MAX_IDS or len(ids) >= _MAX_IDS or (not n and len(ids)):
        raise SchemaError(f"supports: {n} positions with {len(ids)} ids do not fit a row")
    counts = counts.astype(np.int64)
    values = np.asarray(ids).astype(np.int64)
    if values.size and (int(values.min()) < 0 or int(values.max()) >= _MAX_IDS):
        raise SchemaError("supports.ids do not fit uint32")
    gaps, first = _gaps(values, counts)
    if gaps.size and int(gaps.min()) < 0:
        at = int(np.repeat(np.arange(n), counts)[np.flatnonzero(~first)[gaps < 0][0]])
        raise SchemaError(
            f"supports.ids of position {at} of the row are not ascending",
            hint="sort them, or leave the row plain",
        )

    vocab = vocab_size or 0
    if not 0 < vocab < _MAX_IDS or (values.size and int(values.max()) >= vocab):
        vocab = 0
    kinds, complements, bitmaps = _special_sets(values, counts, vocab)
    special = np.flatnonzero(kinds)
    lengths = np.where(kinds == _LIST, counts, 0)
    plain = values[np.repeat(kinds == _LIST, counts)] if special.size else values
    table = np.zeros(0, np.int64)
    distinct, index, uses = np.unique(plain, return_inverse=True, return_counts=True)
    if 2 * len(distinct) <= len(plain):
        by_use = np.lexsort((distinct, -np.frexp(uses)[1]))
        table = distinct[by_use]
        rank = np.empty(len(table), np.int64)
        rank[by_use] = np.arange(len(table))
        plain = _sorted_within(rank[index], lengths)
    parts: list[np.ndarray] = []
    at = 0
    for p, absent, stop in zip(
        np.flatnonzero(kinds == _COMPLEMENT),
        complements,
        np.cumsum(lengths)[kinds == _COMPLEMENT],
        strict=True,
    ):
        parts += [plain[at:stop], absent]
        at = stop
        lengths[p] = len(absent)
    values = np.concatenate([*parts, plain[at:]])
    gaps, first = _gaps(values, lengths)
    large = gaps[gaps >= _LARGE] - _LARGE
    head = _HEADER.pack(
        _MAGIC,
        VERSION,
        vocab if special.size else 0,
        n,
        int(np.count_nonzero(first)),
        len(gaps),
        len(large),
        len(special),
        len(bitmaps),
        len(table),
    )
    kept = b"".join(
        [
            head,
            _planes(np.diff(table, prepend=0) % _MAX_IDS),
            _planes(special),
            kinds[special].tobytes(),
            _planes(values[first]),
            np.minimum(gaps, _LARGE).astype(np.uint8).tobytes(),
            _planes(large),
            *bitmaps,
        ]
    )
    return kept.ljust(_fewest_bytes(int(counts.sum())), b"\0")


def _fewest_bytes(ids: int) -> int:
    """Bytes that a row with so many kept ids has at least."""
    return -(-ids // MAX_IDS_PER_BYTE)


def decode_kept(data: bytes | memoryview, counts: np.ndarray, *, field: str) -> np.ndarray:
    """Inverse of `encode_kept`.

    Args:
        data: what it returned.
        counts: int64 [n], ids of each position, from the table.
        field: name of the column for errors.

    Returns:
        uint32 [sum of counts], ascending within a position.

    Raises:
        DamagedShardError: the bytes are not those of kept sets with these counts.
        SchemaError: they are of a version that this reader refuses, or a count is negative.
    """
    counts = np.asarray(counts)
    n = len(counts)
    if n and (int(counts.min()) < 0 or int(counts.max()) > _MAX_IDS):
        raise SchemaError(f"{field}: a position has {counts.min()} to {counts.max()} ids")
    counts = counts.astype(np.int64)
    parts = _split(data, counts, field)
    vocab = parts.vocab
    kinds = np.zeros(n, np.uint8)
    if parts.special.size:
        where = parts.special
        if int(where.max()) >= n or (np.diff(where) <= 0).any():
            raise DamagedShardError(f"{field}: special positions are not ascending below {n}")
        kinds[where] = parts.kinds
        most = int(counts[where].max())
        if vocab < most:
            raise DamagedShardError(f"{field}: {most} ids of a vocabulary of {vocab}")
    lengths = np.where(kinds == _LIST, counts, np.where(kinds == _COMPLEMENT, vocab - counts, 0))
    full = lengths > 0
    listed = int(lengths.sum())
    if int(np.count_nonzero(full)) != len(parts.firsts) or listed != len(parts.firsts) + len(
        parts.gaps
    ):
        raise DamagedShardError(f"{field}: {listed} ids are counted, others are listed")

    steps = np.empty(listed, np.int64)
    ends = np.cumsum(lengths)
    starts = (ends - lengths)[full]
    first = np.zeros(listed, bool)
    first[starts] = True
    steps[first] = parts.firsts
    steps[~first] = parts.gaps + 1
    values = np.cumsum(steps)
    values -= np.repeat((values - steps)[starts], lengths[full])
    in_list = np.repeat(kinds == _LIST, lengths)
    if parts.table.size:
        plain = values[in_list]
        if plain.size and int(plain.max()) >= len(parts.table):
            raise DamagedShardError(f"{field}: an index is outside the table")
        values[in_list] = _sorted_within(parts.table[plain], lengths[kinds == _LIST])
    if listed and int(values.max()) >= (vocab or _MAX_IDS):
        raise DamagedShardError(f"{field}: an id is at or above {vocab or _MAX_IDS}")
    if not parts.special.size:
        return values.astype(np.uint32)

    answer = np.empty(int(counts.sum()), np.uint32)
    answer[np.repeat(kinds == _LIST, counts)] = values[in_list]
    stops = np.cumsum(counts)
    bitmaps = iter(parts.bitmaps)
    for p in parts.special.tolist():
        if kinds[p] == _COMPLEMENT:
            kept = np.ones(vocab, bool)
            kept[values[ends[p] - lengths[p] : ends[p]]] = False
        else:
            bits = np.unpackbits(next(bitmaps), bitorder="little")
            kept = bits[:vocab].view(bool)
            if int(np.count_nonzero(bits)) != counts[p] or bits[vocab:].any():
                raise DamagedShardError(f"{field}: bitmap of position {p} has other ids")
        answer[stops[p] - counts[p] : stops[p]] = np.flatnonzero(kept)
    return answer


@dataclass(frozen=True)
class _Parts:
    """The streams of the encoded sets; `gaps` int64 with the large ones put in."""

    vocab: int
    table: np.ndarray
    special: np.ndarray
    kinds: np.ndarray
    firsts: np.ndarray
    gaps: np.ndarray
    bitmaps: np.ndarray


def _split(data: bytes | memoryview, counts: np.ndarray, field: str) -> _Parts:
    if len(data) < _HEADER.size:
        raise DamagedShardError(f"{field} of {len(data)} bytes is cut off")
    magic, version, vocab, rows, firsts, gaps, large, special, bitmaps, entries = (
        _HEADER.unpack_from(data)
    )
    if magic != _MAGIC:
        raise DamagedShardError(f"{field} does not begin with its magic bytes")
    if version != VERSION:
        raise SchemaError(f"{field} has version {version}", hint=f"this reads {VERSION}")
    if rows != len(counts):
        raise DamagedShardError(f"{field} is of {rows} positions, the row has {len(counts)}")
    stride = (vocab + 7) // 8
    sizes = (4 * entries, 4 * special, special, 4 * firsts, gaps, 4 * large, stride * bitmaps)
    end = _HEADER.size + sum(sizes)
    needed = max(end, _fewest_bytes(int(counts.sum())))
    if needed != len(data):
        raise DamagedShardError(
            f"{field} has {len(data)} bytes, its header and its counts say {needed}"
        )
    if any(data[end:]):
        raise DamagedShardError(f"{field} has padding that is not zero")
    ends = np.cumsum([_HEADER.size, *sizes]).tolist()
    pieces = [
        np.frombuffer(data, np.uint8, size, end) for size, end in zip(sizes, ends[:-1], strict=True)
    ]
    kinds = pieces[2]
    if kinds.size and not np.isin(kinds, (_COMPLEMENT, _BITMAP)).all():
        raise DamagedShardError(f"{field} has unknown kinds of sets")
    if int(np.count_nonzero(kinds == _BITMAP)) != bitmaps or (special and not vocab):
        raise DamagedShardError(f"{field} has bitmaps that belong to no position")
    steps = pieces[4].astype(np.int64)
    escaped = steps == _LARGE
    if int(np.count_nonzero(escaped)) != large:
        raise DamagedShardError(f"{field} has large gaps that belong to no id")
    steps[escaped] += _unplanes(pieces[5])
    table = np.cumsum(_unplanes(pieces[0])) % _MAX_IDS
    if len(np.unique(table)) != len(table):
        raise DamagedShardError(f"{field} has a table in which an id repeats")
    return _Parts(
        vocab,
        table,
        _unplanes(pieces[1]),
        kinds,
        _unplanes(pieces[3]),
        steps,
        pieces[6].reshape(bitmaps, stride),
    )


def _special_sets(
    values: np.ndarray, counts: np.ndarray, vocab: int
) -> tuple[np.ndarray, list[np.ndarray], list[bytes]]:
    """Kind of each position, the ids that complements list, and the bitmaps, in their order."""
    kinds = np.zeros(len(counts), np.uint8)
    complements: list[np.ndarray] = []
    bitmaps: list[bytes] = []
    if not vocab:
        return kinds, complements, bitmaps
    ends = np.cumsum(counts)
    # a list needs at most five bytes an id, so most positions are not worth a look
    for p in np.flatnonzero(5 * counts > (vocab + 7) // 8).tolist():
        here = values[ends[p] - counts[p] : ends[p]]
        kept = np.zeros(vocab, bool)
        kept[here] = True
        absent = np.flatnonzero(~kept)
        sizes = (_list_bytes(here), _list_bytes(absent) + 5, (vocab + 7) // 8 + 5)
        kinds[p] = int(np.argmin(sizes))
        if kinds[p] == _COMPLEMENT:
            complements.append(absent)
        elif kinds[p] == _BITMAP:
            bitmaps.append(np.packbits(kept, bitorder="little").tobytes())
    return kinds, complements, bitmaps


def _sorted_within(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Int64 values below 2^32, sorted within each position."""
    keys = np.repeat(np.arange(len(counts), dtype=np.uint64) << np.uint64(32), counts)
    keys |= values.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(_MAX_IDS - 1)).astype(np.int64)


def _gaps(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids left out before each that is not the first of its list; bool [ids], which are first."""
    first = np.zeros(len(values), bool)
    first[(np.cumsum(counts) - counts)[counts > 0]] = True
    steps = np.empty(len(values), np.int64)
    steps[1:] = values[1:] - values[:-1] - 1
    return steps[~first], first


def _list_bytes(values: np.ndarray) -> int:
    """Bytes that a list takes."""
    return (
        4 * bool(len(values))
        + max(0, len(values) - 1)
        + 4 * int(np.count_nonzero(np.diff(values) > _LARGE))
    )


def _planes(values: np.ndarray) -> bytes:
    """Four byte planes, lowest first."""
    return values.astype("<u4").view("u1").reshape(-1, 4).T.tobytes()


def _unplanes(part: np.ndarray) -> np.ndarray:
    planes = np.ascontiguousarray(part.reshape(4, -1).T)
    return planes.view("<u4").ravel().astype(np.int64)
