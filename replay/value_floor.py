"""Noise floor of what a diff compares beside sites: logprobs, slot order and combine weights.

Like that of sites it is the largest difference between executions that should agree. It decides
whether a whole diff is `within-noise`:

- logprobs: every finite |d| of every column is at most margin times the largest |d| measured for
  that column, and no value that differs is NaN or infinite;
- combine weights: the same with the largest sum over experts of |w_B - w_A| of a decision;
- slot order of the same experts: noise if the executions that should agree had such, too;
- another set of experts, other forced routes and other kept sets never are: they are other choices,
  not roundings.

What was not measured has no noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rolltape.store.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LogprobFloor:
    """What was seen of one logprob column.

    Args:
        max: largest |d| between executions that should agree, nats.
        tokens: compared.
        unequal: of those, not bitwise equal.
    """

    max: float
    tokens: int
    unequal: int


@dataclass(frozen=True, kw_only=True)
class RouteFloor:
    """What was seen of routes.

    Args:
        decisions: (position, layer) choices compared.
        disagree: of those, another set of experts.
        order_only: the same set in another slot order.
        weights: decisions with the same set and combine weights on both sides.
        weight_max: largest sum over experts of |w_B - w_A| of one of those; None without weights.
    """

    decisions: int
    disagree: int
    order_only: int
    weights: int
    weight_max: float | None


@dataclass(frozen=True, kw_only=True)
class ValueFloor:
    """Noise of values; empty where nothing was measured.

    Args:
        logprobs: by column: processed, scaled, raw.
        routes: None where none were compared.
    """

    logprobs: Mapping[str, LogprobFloor]
    routes: RouteFloor | None = None

    @classmethod
    def load(cls, found: Mapping[str, Any]) -> ValueFloor:
        """From the JSON of a floor file."""
        routes = found["routes"]
        return cls(
            logprobs={name: LogprobFloor(**row) for name, row in found["logprobs"].items()},
            routes=None if routes is None else RouteFloor(**routes),
        )


@dataclass(frozen=True, kw_only=True)
class ColumnSeen:
    """One logprob column of a diff.

    Args:
        max: largest |d| of the tokens that are compared; 0.0 of none.
        tokens: compared.
        unequal: values with other bits, non-finite ones included.
        non_finite: of those, where a side is NaN or infinite.
    """

    max: float
    tokens: int
    unequal: int
    non_finite: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a diff found beside sites.

    Args:
        logprobs: by column, of those that were compared.
        routes: as in a floor; None where none were compared.
        weights_differ: decisions whose combine weights have other bits.
        weights_non_finite: decisions with a NaN or infinite weight.
        choices: other kept sets and other forced routes: kind -> count.
    """

    logprobs: Mapping[str, ColumnSeen]
    routes: RouteFloor | None
    weights_differ: int
    weights_non_finite: int
    choices: Mapping[str, int]


def floor_of_values(seen: Seen) -> ValueFloor:
    """The floor from a diff of two executions that should agree.

    Raises:
        UsageError: values that differ and are not finite.
    """
    for column, found in seen.logprobs.items():
        if found.non_finite:
            raise UsageError(
                f"no noise floor: {found.non_finite:,} {column} logprobs that differ are not finite"
            )
    if seen.weights_non_finite and seen.weights_differ:
        raise UsageError("no noise floor: combine weights that are not finite")
    return ValueFloor(
        logprobs={
            column: LogprobFloor(max=found.max, tokens=found.tokens, unequal=found.unequal)
            for column, found in seen.logprobs.items()
            if found.tokens
        },
        routes=seen.routes,
    )


def above_floor(seen: Seen, floor: ValueFloor, margin: float) -> list[str]:
    """What of a diff is more than noise, in words; empty if nothing is.

    Args:
        seen: the diff.
        floor: what was measured.
        margin: how far above the largest of the sample a difference has to be.
    """
    return [
        *_logprobs(seen, floor, margin),
        *_routes(seen, floor.routes, margin),
        *(f"{n:,} other {what.replace('_', ' ')}" for what, n in seen.choices.items() if n),
    ]


def _logprobs(seen: Seen, floor: ValueFloor, margin: float) -> Iterator[str]:
    for column, found in seen.logprobs.items():
        if not found.unequal:
            continue
        known = floor.logprobs.get(column)
        if known is None:
            yield f"{column} logprobs, of which no noise was measured"
        elif found.non_finite:
            yield f"{found.non_finite:,} {column} logprobs that are not finite"
        elif found.max > (limit := margin * known.max):
            yield f"{column} logprobs up to |d| {found.max:.3g}, noise up to {limit:.3g}"


def _routes(seen: Seen, known: RouteFloor | None, margin: float) -> Iterator[str]:
    found = seen.routes
    if found is None:
        return
    if found.disagree:
        yield f"{found.disagree:,} other choices of experts"
    if found.order_only and (known is None or not known.order_only):
        yield f"{found.order_only:,} other slot orders, of which the floor has none"
    if not seen.weights_differ:
        return
    limit = None if known is None or known.weight_max is None else margin * known.weight_max
    if limit is None:
        yield "combine weights, of which no noise was measured"
    elif seen.weights_non_finite:
        yield f"{seen.weights_non_finite:,} combine weights that are not finite"
    elif found.weight_max is not None and found.weight_max > limit:
        yield f"combine weights up to {found.weight_max:.3g}, noise up to {limit:.3g}"
