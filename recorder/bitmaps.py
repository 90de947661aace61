"""Bitmaps of kept token ids on the host: how many they hold, and which, a bounded part at a time.

The hooks keep a set as one bit a token, whatever its size; as a list of ids it may be 32 times
that. A block of bitmaps is therefore never turned into lists as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: Ids that are listed at a time; what it takes to find them is about 30 times these 4 bytes each.
IDS_AT_A_TIME = 1 << 19

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)

#: (row, first step, stop step).
Span = tuple[int, int, int]


def set_sizes(packed: np.ndarray) -> np.ndarray:
    """Bits set in each cell: int64 [rows, steps] of bitmaps [steps, rows, bytes]."""
    sizes = np.empty(packed.shape[1::-1], np.int64)
    for step, cells in enumerate(packed):  # one by one: the counts are as large as the bitmaps
        sizes[:, step] = _count_bits(cells).sum(-1, dtype=np.int64)
    return sizes


def _count_bits(packed: np.ndarray) -> np.ndarray:
    """Bits set in each byte; numpy 1 has no function for it, and looking up holds the lock."""
    count: np.ndarray = np.bitwise_count(packed) if hasattr(np, "bitwise_count") else _BITS[packed]
    return count


def listed(
    packed: np.ndarray, *, limit: int = IDS_AT_A_TIME
) -> tuple[np.ndarray, np.ndarray] | None:
    """All sets of a block at once, the fastest way where they are small.

    Args:
        packed: bitmaps [steps, rows, bytes].
        limit: ids that may be listed.

    Returns:
        int64 [rows, steps] sizes, and uint32 ids by row, then step, ascending within a set; None
        if there may be more than `limit`.
    """
    where = _nonzero_bytes(packed, most=limit)
    if where is None or int(_count_bits(packed.reshape(-1)[where]).sum(dtype=np.int64)) > limit:
        return None
    steps, rows, width = packed.shape
    bits = np.unpackbits(packed.reshape(-1)[where, None], axis=1, bitorder="little")
    found = np.flatnonzero(bits)
    byte = where[found >> 3]
    cell, column = np.divmod(byte, width)
    step, row = np.divmod(cell, rows)
    place = row * steps + step
    sizes = np.bincount(place, minlength=rows * steps).reshape(rows, steps)
    ids = (column * 8 + (found & 7)).astype(np.uint32)
    return sizes, ids[np.argsort(place, kind="stable")]


def set_ids(packed: np.ndarray) -> np.ndarray:
    """The ids of bitmaps [cells, bytes], cell by cell and ascending: uint32."""
    where = _nonzero_bytes(packed)
    assert where is not None
    bits = np.unpackbits(packed.reshape(-1)[where, None], axis=1, bitorder="little")
    found = np.flatnonzero(bits)
    first = (where % packed.shape[-1] * 8).astype(np.uint32)
    ids: np.ndarray = first[found >> 3] + (found & 7).astype(np.uint32)
    return ids


def _nonzero_bytes(packed: np.ndarray, most: int | None = None) -> np.ndarray | None:
    """Flat indexes of the bytes that are not zero, found eight at a time.

    None if more than `most` such eights are not zero.
    """
    flat = packed.reshape(-1)
    whole = flat.size // 8 * 8
    words = np.flatnonzero(flat[:whole].view(np.uint64) != 0)
    if most is not None and len(words) > most:
        return None
    near = (words[:, None] * 8 + np.arange(8)).reshape(-1)
    near = np.concatenate([near, np.arange(whole, flat.size)])
    found: np.ndarray = near[flat[near] != 0]
    return found


def pieces(
    sizes: np.ndarray, counts: np.ndarray, *, limit: int = IDS_AT_A_TIME
) -> Iterator[list[Span]]:
    """Cut the sets of a block into pieces, row by row.

    Args:
        sizes: int64 [rows, steps], ids of each set.
        counts: [rows], steps of each row that count.
        limit: ids of a piece; only a single set may have more.

    Yields:
        Spans that together cover the steps of every row once, in order.
    """
    piece: list[Span] = []
    room = limit
    for row, count in enumerate(counts.tolist()):
        ends = np.concatenate([[0], np.cumsum(sizes[row, :count])])
        first = 0
        while first < count:
            stop = int(np.searchsorted(ends, ends[first] + room, side="right")) - 1
            if stop == first and piece:
                yield piece
                piece, room = [], limit
                continue
            stop = max(stop, first + 1)
            piece.append((row, first, stop))
            room = max(0, room - int(ends[stop] - ends[first]))
            first = stop
    if piece:
        yield piece
