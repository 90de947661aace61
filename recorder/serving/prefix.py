"""Where the tokens of a cached prefix were computed: the routes of positions nobody forwards again.

An engine that shares KV blocks does not run a shared prefix twice, so its routes are those of the
request that filled the blocks. Blocks are known by their number, which is exact where a hash of
tokens is not: weights may have changed between two requests of the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class History:
    """Routes of one life as they were recorded: (first position, [n, layers, k], valid)."""

    pieces: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)

    def read(self, start: int, ids: np.ndarray, valid: np.ndarray) -> None:
        """Put what is known of positions from `start` on into ids [n, layers, k] and valid.

        Of two recordings of a position the later one made what stands in the cache.
        """
        stop = start + len(ids)
        for first, block, there in self.pieces:
            low, high = max(start, first), min(stop, first + len(block))
            if low < high:
                ids[low - start : high - start] = block[low - first : high - first]
                valid[low - start : high - start] = there[low - first : high - first]


#: A block and who filled it: (history, first position of the block), or None.
Owner = tuple[History, int] | None


class Prefix:
    """Who filled which KV block.

    Args:
        block_size: tokens a block.

    What it keeps alive is the routes of every life that owns a block, so about as many tokens as
    the engine's KV cache has.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._owners: dict[int, tuple[History, int]] = {}
        self._histories: dict[int, History] = {}

    def filled(self, life: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """A life forwarded positions [start, end): the blocks that it completed are its own."""
        history, size = self.history(life), self.block_size
        for index in range(start // size, min(end // size, len(blocks))):
            self._owners[blocks[index]] = (history, index * size)

    def owners(self, cached: int, blocks: Sequence[int]) -> list[Owner]:
        """Who filled the blocks that hold the first `cached` positions."""
        return [self._owners.get(block) for block in blocks[: -(-cached // self.block_size)]]

    def history(self, life: int) -> History:
        """What has been recorded of a life."""
        return self._histories.setdefault(life, History())

    def lose(self) -> None:
        """Nobody knows any more who filled a block."""
        self._owners.clear()

    def forget(self, life: int) -> None:
        """The life is over; what it filled stays known as long as the blocks are its."""
        self._histories.pop(life, None)

    def read(self, owners: Sequence[Owner], ids: np.ndarray, valid: np.ndarray) -> None:
        """Routes of a cached prefix into ids [n, layers, k] and valid [n, layers]."""
        for index, owner in enumerate(owners):
            at = index * self.block_size
            part = slice(at, min(at + self.block_size, len(ids)))
            if owner is not None and at < len(ids):
                history, base = owner
                history.read(base, ids[part], valid[part])
