"""The numbers of a logprob comparison. d = log p_B - log p_A in nats; formulas in docs/diff.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store.columns import Masked

#: First response position of each bucket.
BUCKETS = (0, 16, 64, 256, 1024)
BUCKET_NAMES = ("0-15", "16-63", "64-255", "256-1023", "1024+")

#: Edges of the histogram of |d|: two bins a decade, 1e-9 to 100 nats.
EDGES = np.logspace(-9, 2, 23)


@dataclass(frozen=True)
class Deltas:
    """Every compared token of one logprob column, flat, all arrays [N].

    Args:
        delta: float64, log p_B - log p_A.
        bitwise: the two float32 have the same bits.
        pair: index of the pair of sequences.
        position: position in the sequence.
        response: position in the response.
        version: weight version of side A, or of B where A says none.
    """

    delta: np.ndarray
    bitwise: np.ndarray
    pair: np.ndarray
    position: np.ndarray
    response: np.ndarray
    version: Masked

    def __len__(self) -> int:
        return len(self.delta)


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two float32 arrays have the same bits: NaN equals itself, 0.0 and -0.0 differ."""
    bits = (np.ascontiguousarray(x, "<f4").view("<u4") for x in (a, b))
    same: np.ndarray = np.equal(*bits)
    return same


#: Dtypes by the size of their unit in the last place of 1, smallest first.
_GRIDS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def coarser(a: str, b: str) -> str:
    """The dtype, of two torch names, with fewer bits of mantissa; float32 for one not known."""
    known = [name if name in _GRIDS and name != "float64" else "float32" for name in (a, b)]
    return min(known, key=lambda name: _GRIDS[name])


def ulp_distance(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """How many representable numbers lie between two values: int64, 0 if they are the same number.

    Args:
        a: float32.
        b: float32, same shape.
        dtype: float32, float16 or bfloat16: whose numbers are counted; values are rounded to it.
    """
    first, second = (_ordered(np.ascontiguousarray(x, "<f4"), dtype) for x in (a, b))
    distance: np.ndarray = np.abs(first - second)
    return distance


def _ordered(values: np.ndarray, dtype: str) -> np.ndarray:
    """int64 that count up with the values; 0.0 and -0.0 are both 0."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            bits, sign = values.astype("<f2").view("<u2").astype(np.int64), 1 << 15
    else:
        bits, sign = values.view("<u4").astype(np.int64), 1 << 31
        if dtype == "bfloat16":  # to the nearest, ties to even; NaN stays one
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            bits, sign = np.where(np.isnan(values), bits >> 16, rounded), 1 << 15
    ordered: np.ndarray = np.where(bits >= sign, sign - bits, bits)
    return ordered


def bucket_of(response: np.ndarray) -> np.ndarray:
    """Index into `BUCKET_NAMES` of response positions; -1 for prompt positions."""
    bucket: np.ndarray = np.searchsorted(np.array(BUCKETS), response, side="right") - 1
    return bucket


def k3_terms(delta: np.ndarray) -> np.ndarray:
    """e^d - 1 - d for each d, without cancellation near 0; inf where e^d overflows."""
    small = np.abs(delta) < 1e-4
    with np.errstate(over="ignore"):
        exact = np.expm1(delta) - delta
    series = delta * delta * (0.5 + delta * (1 / 6 + delta / 24))
    terms: np.ndarray = np.where(small, series, exact)
    return terms


def effective_sample_size(delta: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of the weights w = e^d: 1 if all are equal, 1/n if one dominates."""
    weights = np.exp(delta - delta.max())  # the ratio does not change when all w are scaled
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def measure(delta: np.ndarray, bitwise: np.ndarray) -> dict[str, Any]:
    """All measures of a set of tokens.

    Args:
        delta: float64 [n], finite.
        bitwise: bool [n].

    Returns:
        `tokens_compared` and the measures by name; all None when n is 0, k3 may be inf.
    """
    n = len(delta)
    if not n:
        return {"tokens_compared": 0, **dict.fromkeys(_MEASURES)}
    return {"tokens_compared": n, **{name: f(delta, bitwise) for name, f in _MEASURES.items()}}


def _percentile(q: float) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda delta, _: float(np.percentile(np.abs(delta), q))


_MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mean_abs": lambda delta, _: float(np.abs(delta).mean()),
    "max_abs": lambda delta, _: float(np.abs(delta).max()),
    "p50_abs": _percentile(50),
    "p90_abs": _percentile(90),
    "p99_abs": _percentile(99),
    "k1": lambda delta, _: float(-delta.mean()) + 0.0,  # never -0.0
    "k3": lambda delta, _: float(k3_terms(delta).mean()),
    "frac_ratio_gt_2": lambda delta, _: float((np.abs(delta) > math.log(2)).mean()),
    "ess": lambda delta, _: effective_sample_size(delta),
    "frac_bitwise": lambda _, bitwise: float(bitwise.mean()),
}


def histogram(delta: np.ndarray, bitwise: np.ndarray) -> dict[str, Any]:
    """|d| on fixed logarithmic bins; bit-equal tokens apart.

    Returns:
        `bitwise`, `edges` [E] in nats, `counts` [E - 1] (edge i <= |d| < edge i + 1), `below` the
        first edge, `above` or at the last one. The counts sum up to the number of tokens.
    """
    sizes = np.abs(delta[~bitwise])
    slot = np.searchsorted(EDGES, sizes, side="right")
    counts = np.bincount(slot, minlength=len(EDGES) + 1)
    return {
        "bitwise": int(bitwise.sum()),
        "edges": [float(f"{edge:.6g}") for edge in EDGES],
        "counts": counts[1:-1].tolist(),
        "below": int(counts[0]),
        "above": int(counts[-1]),
    }


def by_pair(deltas: Deltas, pairs: int) -> list[dict[str, Any]]:
    """Measures of each pair of sequences, with `max_at` (a position) and `first_over`."""
    found: list[dict[str, Any]] = [
        {**measure(np.zeros(0), np.zeros(0, bool)), "max_at": None, "first_over": None}
        for _ in range(pairs)
    ]
    for index, rows in _groups(deltas.pair):
        delta, position = deltas.delta[rows], deltas.position[rows]
        over = position[np.abs(delta) > 0.1]
        found[index] = {
            **measure(delta, deltas.bitwise[rows]),
            "max_at": int(position[np.abs(delta).argmax()]),
            "first_over": int(over.min()) if over.size else None,
        }
    return found


def by_position(deltas: Deltas) -> dict[str, dict[str, Any]]:
    """Measures by bucket of response position."""
    return {
        BUCKET_NAMES[index]: measure(deltas.delta[rows], deltas.bitwise[rows])
        for index, rows in _groups(bucket_of(deltas.response))
    }


def by_version(deltas: Deltas) -> dict[str, dict[str, Any]]:
    """Measures by weight version; `unknown` where neither side says."""
    return {
        "unknown" if version < 0 else str(version): measure(
            deltas.delta[rows], deltas.bitwise[rows]
        )
        for version, rows in _groups(deltas.version.fill(-1))
    }


def by_group(deltas: Deltas, group_of: list[str | None]) -> dict[str, dict[str, Any]]:
    """Measures by prompt group, given the group of each pair; pairs without one are left out."""
    names = sorted({name for name in group_of if name is not None})
    number = {name: i for i, name in enumerate(names)}
    codes = np.array([-1 if g is None else number[g] for g in group_of], np.int64)
    return {
        names[index]: measure(deltas.delta[rows], deltas.bitwise[rows])
        for index, rows in _groups(codes[deltas.pair] if len(deltas) else codes[:0])
        if index >= 0
    }


def _groups(codes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(code, its rows) for every code that occurs, ascending."""
    if not len(codes):
        return
    order = np.argsort(codes, kind="stable")
    values, starts = np.unique(codes[order], return_index=True)
    for value, rows in zip(values, np.split(order, starts[1:]), strict=True):
        yield int(value), rows


def non_finite_reason(value: float) -> str | None:
    """`NaN`, `Infinity` or `-Infinity`; None for a finite value."""
    if math.isfinite(value):
        return None
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
