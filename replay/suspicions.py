"""Signs that arrays of the right shape are not what they claim to be.

Zeros, repeated experts, one choice at every position, rows off by some positions, or the rows of
another request: each has the right shape and dtype, and would pass for a disagreement or, if it is
the same on both sides, for agreement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.replay.pair import PairTokens
from rolltape.store.routes import Routes
from rolltape.store.sequences import Sequence

#: Below this many positions nothing is concluded from a pattern over time.
ENOUGH = 8

#: Share of equal choices under which a pair is searched for rows of another place.
DOUBT = 0.5

_MAX_SHIFT = 64
_MAX_SUSPECTS = 16
_MAX_OTHERS = 1024
_LAYERS_LOOKED_AT = 4


def route_problems(side: str, sequence: Sequence, routes: Routes) -> list[Problem]:
    """What one side's routes show by themselves."""
    fields = {"side": side, "sequence": sequence.id}
    where = f"{side} {sequence.id}"
    ids, valid = routes.ids, routes.valid
    k = ids.shape[2]
    if not valid.any():
        return []
    chosen = ids[valid]
    found = []
    if not chosen.any() and (k > 1 or valid.any(1).sum() >= ENOUGH):
        return [Problem("zero_routes", f"{where}: every recorded expert is 0", fields=fields)]
    ordered = np.sort(chosen, -1)
    repeated = int((ordered[:, 1:] == ordered[:, :-1]).any(-1).sum())
    if repeated:
        message = f"{where}: {repeated:,} of {len(chosen):,} decisions name an expert twice"
        found.append(Problem("repeated_experts", message, fields={**fields, "decisions": repeated}))
    if k < routes.num_experts:
        found += _constant_layers(where, fields, sequence, routes)
    return found


def _constant_layers(
    where: str, fields: dict[str, str], sequence: Sequence, routes: Routes
) -> list[Problem]:
    looked_at, constant = 0, []
    for column, layer in enumerate(routes.layers):
        at = np.flatnonzero(routes.valid[:, column])
        at = at[at < sequence.length]
        if len(np.unique(sequence.tokens.values[at])) < ENOUGH:
            continue
        looked_at += 1
        rows = np.sort(routes.ids[at, column], -1)
        if (rows == rows[0]).all():
            constant.append(layer)
    if not constant:
        return []
    everywhere = len(constant) == looked_at
    what = "every layer" if everywhere else f"layers {constant}"
    message = f"{where}: the same experts at every position in {what}"
    return [Problem("constant_routes", message, everywhere, {**fields, "layers": constant})]


@dataclass(frozen=True)
class Agreement:
    """How often two sides chose the same experts.

    Args:
        rate: share of decisions with the same set, at the same position.
        shift: where they agree more often, b[p] with a[p - shift]; 0 if there is no such place.
        shifted_rate: share there.
        positions: positions compared.
    """

    rate: float
    shift: int
    shifted_rate: float
    positions: int


def agreement(a: Routes, b: Routes, n: int) -> Agreement | None:
    """Agreement over the first n positions and a better shift; None if too little is there."""
    shared = [layer for layer in a.layers if layer in b.layers][:_LAYERS_LOOKED_AT]
    if not shared or a.ids.shape[2] != b.ids.shape[2]:
        return None
    x, valid_x = _sets(a, shared, n)
    y, valid_y = _sets(b, shared, n)
    positions, rate = _rate(x, valid_x, y, valid_y, 0)
    if positions < ENOUGH:
        return None
    furthest = 1 if rate >= DOUBT else min(_MAX_SHIFT, n - ENOUGH)
    best, best_rate = 0, rate
    for size in range(1, furthest + 1):
        for shift in (size, -size):
            seen, shifted = _rate(x, valid_x, y, valid_y, shift)
            if seen >= ENOUGH and shifted > max(best_rate, DOUBT):
                best, best_rate = shift, shifted
    return Agreement(rate, best, best_rate, positions)


def shift_problem(sequence: Sequence, what: str, found: Agreement) -> Problem | None:
    """b's routes are a's of some positions before or after."""
    if not found.shift:
        return None
    message = (
        f"{sequence.id}: {what} of b equal those of a shifted by {found.shift:+d} more often "
        f"({found.shifted_rate:.1%}) than at their own position ({found.rate:.1%})"
    )
    fields = {
        "sequence": sequence.id,
        "shift": found.shift,
        "rate": found.rate,
        "shifted_rate": found.shifted_rate,
    }
    return Problem("shifted_routes", message, fields=fields)


def foreign_problems(
    suspects: Iterable[tuple[Sequence, Sequence]],
    all_of_a: Iterable[Sequence],
    *,
    role: str,
) -> list[Problem]:
    """Routes of b that are those of another sequence of a.

    Args:
        suspects: pairs whose routes disagree most of the time.
        all_of_a: every sequence they could belong to.
        role: which routes of b to look at, `used` or `live`.

    Only response positions count: sequences of one prompt share the rows before.
    """
    suspects = list(suspects)[:_MAX_SUSPECTS]
    if not suspects:
        return []
    others = [(s, s.routes("used")) for s in list(all_of_a)[:_MAX_OTHERS]]
    found = []
    for a, b in suspects:
        routes = b.routes(role)
        if routes is None:
            continue
        best: tuple[float, Sequence] | None = None
        own = 0.0
        for other, theirs in others:
            rate = _response_rate(theirs, routes, b.prompt_len, min(other.length, b.length))
            if other.key == a.key:
                own = rate
            elif best is None or rate > best[0]:
                best = rate, other
        if best is not None and best[0] > max(own, DOUBT):
            message = (
                f"{a.id}: the routes of b are those of {best[1].id} in a "
                f"({best[0]:.1%} equal, {own:.1%} with its own)"
            )
            fields = {"sequence": a.id, "other": best[1].id, "rate": best[0], "own_rate": own}
            found.append(Problem("foreign_routes", message, fields=fields))
    return found


def shifted_logprobs(pair: PairTokens, column: str) -> Problem | None:
    """b's logprobs are a's of one position before or after."""
    at = np.flatnonzero(pair.compared(column))
    x, y = (s.columns[column].values.astype(np.float64) for s in (pair.scored_a, pair.scored_b))
    if len(at) < 2 * ENOUGH:
        return None
    typical = float(np.median(np.abs(y[at] - x[at])))
    for shift in (1, -1):
        inner = at[np.isin(at - shift, at)]
        if len(inner) < ENOUGH:
            continue
        shifted = float(np.median(np.abs(y[inner] - x[inner - shift])))
        if shifted < typical / 10:
            message = (
                f"{pair.a.id}: {column} of b is that of a shifted by {shift:+d}: typical |d| "
                f"{shifted:.3g} there, {typical:.3g} at its own position"
            )
            fields = {"sequence": pair.a.id, "column": column, "shift": shift}
            return Problem("shifted_logprobs", message, fields=fields)
    return None


def _response_rate(a: Routes | None, b: Routes, prompt_len: int, n: int) -> float:
    if a is None or a.ids.shape[2] != b.ids.shape[2]:
        return 0.0
    shared = [layer for layer in a.layers if layer in b.layers][:_LAYERS_LOOKED_AT]
    if not shared:
        return 0.0
    x, valid_x = _sets(a, shared, n)
    y, valid_y = _sets(b, shared, n)
    positions, rate = _rate(
        x[prompt_len:], valid_x[prompt_len:], y[prompt_len:], valid_y[prompt_len:], 0
    )
    return rate if positions >= ENOUGH else 0.0


def _sets(routes: Routes, layers: list[int], n: int) -> tuple[np.ndarray, np.ndarray]:
    columns = [routes.layers.index(layer) for layer in layers]
    return np.sort(routes.ids[:n][:, columns], -1), routes.valid[:n][:, columns]


def _rate(
    x: np.ndarray, valid_x: np.ndarray, y: np.ndarray, valid_y: np.ndarray, shift: int
) -> tuple[int, float]:
    """Positions and share of decisions where y[p] is x[p - shift]."""
    end = len(y) - abs(shift)
    if end <= 0:
        return 0, 0.0
    i, j = (0, shift) if shift >= 0 else (-shift, 0)
    both = valid_x[i : i + end] & valid_y[j : j + end]
    same = (x[i : i + end] == y[j : j + end]).all(-1) & both
    decisions = int(both.sum())
    return int(both.any(1).sum()), float(same.sum() / decisions) if decisions else 0.0
