"""Kept sets of one sequence, joined from its fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store.errors import SchemaError
from rolltape.store.kept import decode_kept
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED


@dataclass(frozen=True)
class Supports:
    """Kept token ids a position, as CSR over all T positions, or over those of a window.

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


def join_supports(rows: Sequence[Mapping[str, Any]], span: tuple[int, int], name: str) -> Supports:
    """Kept sets over the positions of a span; what reaches beyond it is cut.

    Args:
        rows: rows of `supports` of one sequence, in written order.
        span: first position, and one behind the last.
        name: of the sequence, for messages.

    Raises:
        SchemaError: fragments that do not fit.
    """
    begin, end = span
    state = np.full(end - begin, SUPPORT_UNRECORDED, np.uint8)
    counts = np.zeros(end - begin, np.int64)
    first = np.zeros(end - begin, np.int64)  # index of the position's ids in all ids
    pieces: list[np.ndarray] = []
    total = 0
    for row in rows:
        start, n = row["start"], row["n"]
        where = f"supports of {name} at {start}"
        states = np.asarray(row["state"], np.uint8)
        sizes = np.asarray(row["counts"], np.int64)
        if len(states) != n or len(sizes) != n or (sizes < 0).any():
            raise SchemaError(f"{where}: state, counts and ids do not belong together")
        if start < 0:
            raise SchemaError(f"{where}: there is no such position")
        ids = _ids(row, sizes, where)
        low, high = max(start, begin), min(start + n, end)
        if low < high:
            inner, outer = slice(low - start, high - start), slice(low - begin, high - begin)
            fresh = state[outer] == SUPPORT_UNRECORDED
            at = total + np.cumsum(sizes) - sizes
            state[outer][fresh] = states[inner][fresh]
            counts[outer][fresh] = sizes[inner][fresh]
            first[outer][fresh] = at[inner][fresh]
            pieces.append(ids)
            total += len(ids)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    flat = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
    if len(flat) != offsets[-1] or (first[1:] < first[:-1]).any():
        index = np.repeat(first - offsets[:-1], counts) + np.arange(offsets[-1])
        flat = flat[index]
    derived = any(row["derived"] for row in rows)
    return Supports(state, offsets, flat.astype(np.uint32, copy=False), derived)


def _ids(row: Mapping[str, Any], sizes: np.ndarray, where: str) -> np.ndarray:
    if row["encoding"] is None:
        ids = np.asarray(row["ids"], np.uint32)
        if len(ids) != int(sizes.sum()):
            raise SchemaError(f"{where}: state, counts and ids do not belong together")
        return ids
    if row["encoding"] != "kept" or row["data"] is None:
        raise SchemaError(f"{where}: unknown encoding {row['encoding']!r}", hint="upgrade rolltape")
    return decode_kept(row["data"], sizes, field=where)
