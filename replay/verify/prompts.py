"""The prompts of the determinism suite: random token ids from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rolltape.store.errors import UsageError

#: Shortest and longest prompt where no length is given. Kernels change with the length of the
#: cache, often at 128: some sequences begin below and some above it, some grow across it.
SHORTEST, LONGEST = 16, 160


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is run.

    Args:
        prompts: sequences.
        tokens: sampled for each.
        length: of every prompt; None for different ones.
        seed: of prompts and sampling.
    """

    prompts: int
    tokens: int
    length: int | None
    seed: int

    def __post_init__(self) -> None:
        if self.prompts < 2:
            raise UsageError(f"{self.prompts} prompts", hint="at least 2, to compare batches")
        if self.tokens < 2:
            raise UsageError(f"{self.tokens} tokens", hint="at least 2, so that one is decoded")
        if self.length is not None and self.length < 2:
            raise UsageError(f"prompts of {self.length} tokens", hint="at least 2")

    def ids(self, vocabulary: int, longest: int | None, special: Iterable[int]) -> list[np.ndarray]:
        """The prompts, int64 each.

        Args:
            vocabulary: ids are below it.
            longest: positions that the model has; None if that is not known.
            special: ids that are not used.

        Raises:
            UsageError: the model has too few positions, or ids.
        """
        rng = np.random.default_rng(self.seed)
        room = (longest or self.tokens + LONGEST) - self.tokens
        if room < max(self.length or 2, 2):
            raise UsageError(
                f"{self.tokens} tokens behind a prompt: the model has {longest} positions",
                hint="fewer --tokens, or a smaller --length",
            )
        usable = np.setdiff1d(np.arange(vocabulary), list(special))
        if len(usable) < 2:
            raise UsageError(f"a vocabulary of {vocabulary} tokens")
        if self.length is None:
            ends = min(SHORTEST, room), min(LONGEST, room)
            lengths = rng.permutation(np.linspace(*ends, self.prompts).round().astype(int))
        else:
            lengths = np.full(self.prompts, self.length)
        return [rng.choice(usable, n).astype(np.int64) for n in lengths.tolist()]

    def sizes(self) -> list[int]:
        """Batch sizes below the whole: 1, 2, 4 and half of it."""
        return sorted({n for n in (1, 2, 4, self.prompts // 2) if 0 < n < self.prompts})
