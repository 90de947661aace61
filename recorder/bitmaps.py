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


def set_ids(packed: np.ndarray) -> np.ndarray:
    """The ids of bitmaps [cells, bytes], cell by cell and ascending: uint32."""
    where = _nonzero_bytes(packed)
    bits = np.unpackbits(packed.reshape(-1)[where, None], axis=1, bitorder="little")
    found = np.flatnonzero(bits)
    first = (where % packed.shape[-1] * 8).astype(np.uint32)
    ids: np.ndarray = first[found >> 3] + (found & 7).astype(np.uint32)
    return ids


def _nonzero_bytes(packed: np.ndarray) -> np.ndarray:
    """Flat indexes of the bytes that are not zero: few, found eight at a time."""
    flat = packed.reshape(-1)
    whole = flat.size // 8 * 8
    words = np.flatnonzero(flat[:whole].view(np.uint64) != 0)
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
