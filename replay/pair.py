"""One pair of sequences, read and judged position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltape.replay.align import Pair
from rolltape.replay.measures import same_bits
from rolltape.replay.routing_diff import PairRouting
from rolltape.replay.semantics import (
    Comparison,
    Scored,
    compare_meanings,
    kept_sets_equal,
    read_scored,
)
from rolltape.store.columns import Masked
from rolltape.store.schema import TOKEN_STATES
from rolltape.store.sequences import LOGPROBS, Sequence

COMPARED, MASKED, MISSING_A, MISSING_B, NON_FINITE, NOT_SCORED = range(len(TOKEN_STATES))


@dataclass(frozen=True)
class PairTokens:
    """The tokens of one pair over positions 0..n-1, n the length of the longer side.

    Args:
        pair: how the two were joined.
        a: sequence of tape A; only its identity is used later.
        b: its partner.
        n: positions.
        counted: bool [n], response positions that no side masks.
        mask_differs: positions that only one side masks.
        scored_a: logprobs of a.
        scored_b: logprobs of b.
        comparison: which of them may be compared.
        kept: whether the kept sets are equal, at counted positions; None without supports.
        version: int64 [n], weight version of a, or of b where a says none.
    """

    pair: Pair
    a: Sequence
    b: Sequence
    n: int
    counted: np.ndarray
    mask_differs: int
    scored_a: Scored
    scored_b: Scored
    comparison: Comparison
    kept: Masked | None
    version: Masked

    def compared(self, column: str) -> np.ndarray:
        """Positions whose values of a column enter the measures, bool [n]."""
        where: np.ndarray = self._held(column) & ~self._non_finite(column)
        return where

    def non_finite(self, column: str) -> np.ndarray:
        """Positions where both sides hold a comparable value and one is not finite, bool [n]."""
        where: np.ndarray = self._held(column) & self._non_finite(column)
        return where

    def held(self, column: str) -> int:
        """Counted positions where both sides hold a comparable value."""
        return int(self._held(column).sum())

    def differ(self, column: str) -> int:
        """Comparable values that do not have the same bits, non-finite ones included."""
        where = self._held(column)
        x, y = self.scored_a.columns[column].values, self.scored_b.columns[column].values
        return int((where & ~same_bits(x, y)).sum())

    def states(self, column: str | None) -> np.ndarray:
        """uint8 [n], `TOKEN_STATES` of every position with respect to a column.

        With no column, a side has a value where it has one of any column.
        """
        columns = LOGPROBS if column is None else (column,)
        has_a, has_b = (
            np.logical_or.reduce([s.columns[c].valid for c in columns])
            for s in (self.scored_a, self.scored_b)
        )
        out = np.full(self.n, NOT_SCORED, np.uint8)
        out[~self.counted] = MASKED
        out[: self.a.prompt_len] = NOT_SCORED
        out[self.counted & has_b & ~has_a] = MISSING_A
        out[self.counted & has_a & ~has_b] = MISSING_B
        if column is not None:
            out[self.compared(column)] = COMPARED
            out[self.non_finite(column)] = NON_FINITE
        return out

    def _held(self, column: str) -> np.ndarray:
        where: np.ndarray = self.comparison.usable[column] & self.counted
        return where

    def _non_finite(self, column: str) -> np.ndarray:
        x, y = self.scored_a.columns[column].values, self.scored_b.columns[column].values
        where: np.ndarray = ~(np.isfinite(x) & np.isfinite(y))
        return where


@dataclass(frozen=True)
class PairResult:
    """Everything that a report says of one pair.

    Args:
        tokens: None if the two are not the same tokens.
        routing: None if there are no routes to compare.
    """

    pair: Pair
    a: Sequence
    b: Sequence
    tokens: PairTokens | None
    routing: PairRouting | None


def read_pair(pair: Pair, a: Sequence, b: Sequence) -> PairTokens:
    """Read both sides; the tokens must have been found equal."""
    n = max(a.length, b.length)
    response = np.arange(n) >= a.prompt_len
    mask_a, mask_b = a.loss_mask.resized(n), b.loss_mask.resized(n)
    counts = response & mask_a.fill(True) & mask_b.fill(True)
    both = response & mask_a.valid & mask_b.valid
    scored_a, scored_b = read_scored(a, n), read_scored(b, n)
    same_tape = a.tape.uuid == b.tape.uuid and a.key == b.key
    kept = _kept(a, b, n)
    comparison = compare_meanings(scored_a, scored_b, where=counts, kept=kept, same_tape=same_tape)
    version_a, version_b = a.weight_version.resized(n), b.weight_version.resized(n)
    return PairTokens(
        pair=pair,
        a=a,
        b=b,
        n=n,
        counted=counts,
        mask_differs=int((both & (mask_a.values != mask_b.values)).sum()),
        scored_a=scored_a,
        scored_b=scored_b,
        comparison=comparison,
        kept=None if kept is None else Masked(kept.values, kept.valid & counts),
        version=Masked(
            np.where(version_a.valid, version_a.values, version_b.values),
            version_a.valid | version_b.valid,
        ),
    )


def _kept(a: Sequence, b: Sequence, n: int) -> Masked | None:
    first = a.supports()
    second = b.supports() if first is not None else None
    if first is None or second is None:
        return None
    sizes = {s.tape.engine(s.key.engine).get("vocab_size") for s in (a, b)}
    return kept_sets_equal(first, second, n, vocab_size=sizes.pop() if len(sizes) == 1 else None)
