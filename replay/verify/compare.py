"""Compares sequences of two executions bit by bit: sampled-token logprobs, and routes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow as pa

from rolltape.replay.bitwise import (
    CHOICE,
    OUTPUT,
    Findings,
    PairComparison,
    Place,
    bits_differ,
)
from rolltape.replay.verify.cases import Comparison
from rolltape.store import Routes, Sequence
from rolltape.store.columns import Masked


@dataclass(frozen=True, kw_only=True)
class Values:
    """What one execution computed for one sequence; stands in for a `Sequence` of a tape.

    Args:
        id: for messages.
        tokens: ids [T].
        raw: float32 [T], logprob of each token at temperature 1 over the whole vocabulary.
        step: int64 [T], the step that produced it.
        forwards: rows of `forwards`.
        chosen: routes, or None.
    """

    id: str
    tokens: Masked
    raw: Masked
    step: Masked
    forwards: pa.Table
    chosen: Routes | None

    @classmethod
    def of(cls, sequence: Sequence) -> Values:
        """Those of a sequence of a tape, for the tokens that were sampled."""
        raw = sequence.logprob("raw")
        sampled = np.arange(sequence.length) >= sequence.prompt_len
        return cls(
            id=sequence.id,
            tokens=sequence.tokens,
            raw=Masked(raw.values, raw.valid & sampled),
            step=sequence.step,
            forwards=sequence.forwards,
            chosen=sequence.routes(),
        )

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tokens)

    def routes(self) -> Routes | None:
        """Of every position, or None."""
        return self.chosen

    def without_routes(self) -> Values:
        """The logprobs alone."""
        return replace(self, chosen=None)

    def where_computed(self, other: Values) -> Values:
        """Without routes of positions that `other` took from a cache and did not compute."""
        mine, theirs = self.chosen, other.chosen
        if mine is None or theirs is None or mine.valid.shape != theirs.valid.shape:
            return self
        both = mine.valid & theirs.valid
        return replace(
            self, chosen=replace(mine, valid=both, weighted=mine.weighted & theirs.valid)
        )


class _Sampled(PairComparison):
    """Tokens, logprobs and routes alone.

    The suite samples at temperature 1 from everything: `scaled` and `processed` are `raw`.
    """

    def run(self) -> None:
        a, b = cast(Values, self._a), cast(Values, self._b)
        self._column("tokens", a.tokens, b.tokens, CHOICE, np.not_equal)
        self._column("raw", a.raw, b.raw, OUTPUT, bits_differ)
        self._routes()


def compare(
    pairs: Iterable[tuple[Values, Values]], variant: str, *, problem: str | None = None
) -> Comparison:
    """Compare pairs of base and other execution.

    Args:
        pairs: both sides of each sequence, in row order.
        variant: for the result.
        problem: why nothing can be said, for the result.
    """
    everything, logprobs = Findings(), Findings()
    for row, (a, b) in enumerate(pairs):
        first = int(a.step.values[a.step.valid].min(initial=1 << 60)) if a.step.valid.any() else 0
        place = Place(engine=0, row=row, first_step=first)
        for findings, left in ((everything, a), (logprobs, a.without_routes())):
            sides = cast(Sequence, left), cast(Sequence, b)
            _Sampled(*sides, place=place, findings=findings).run()
    compared = {name: n for name, n in everything.compared.items() if n and name != "tokens"}
    if not logprobs.compared["raw"]:
        problem = problem or "no logprob could be compared"
    if everything.differ["tokens"]:
        problem = problem or "it has other tokens: they could not be forced"
    for findings in (everything, logprobs):
        if findings.first is not None and findings.first.found is None:
            problem = problem or f"{findings.first.what} is missing in it"
    return Comparison(
        variant=variant,
        compared=compared,
        differ=dict(everything.differ),
        first=None if problem or everything.first is None else everything.first.as_dict(),
        token=None if problem or logprobs.first is None else logprobs.first.as_dict(),
        sequences_differ=len(everything.sequences),
        problem=problem,
    )
