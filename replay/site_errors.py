"""How far apart the same tensor is on both sides, row by row: the numbers of one span of a site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rolltape.replay.measures import same_bits, ulp_distance
from rolltape.store.columns import Masked


@dataclass(frozen=True)
class SpanError:
    """Error of one site over positions [start, start + n) of one sequence, arrays [n].

    Args:
        sequence: id in tape A.
        site: for example `layers.3.out`.
        start: first position.
        max_abs: float32, largest |b - a|; NaN if a value is.
        rel_l2: |b - a| / |a|; missing where a is 0.
        cosine: missing where a or b is 0.
        equal: all values have the same bits.
        column: int32, index into the row of `max_abs`, or of the first value that is not finite.
        ulp: int64, largest number of representable values between a and b, in the coarser dtype.
        non_finite: int32, values of the row whose difference is not finite.
        sketched: it comes from sketches: `rel_l2` is an estimate, `max_abs` is not known (NaN).
    """

    sequence: str
    site: str
    start: int
    max_abs: np.ndarray
    rel_l2: Masked
    cosine: Masked
    equal: np.ndarray
    column: np.ndarray
    ulp: np.ndarray
    non_finite: np.ndarray
    sketched: bool = False


def common_stretches(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> Iterable[tuple[int, int, int, int]]:
    """Stretches of positions that spans (start, n) of both sides hold, each position once.

    Yields:
        start, stop, index of the span of a, index of the span of b.
    """
    done: set[int] = set()
    for i, (start_a, n_a) in enumerate(a):
        for j, (start_b, n_b) in enumerate(b):
            start, end = max(start_a, start_b), min(start_a + n_a, start_b + n_b)
            while start < end:
                while start < end and start in done:
                    start += 1
                stop = next((p for p in range(start, end) if p in done), end)
                if start < stop:
                    done.update(range(start, stop))
                    yield start, stop, i, j
                start = stop


def row_errors(
    sequence: str, site: str, start: int, a: np.ndarray, b: np.ndarray, *, grid: str = "float32"
) -> SpanError:
    """Errors of rows.

    Args:
        sequence: id in tape A.
        site: its name.
        start: position of the first row.
        a: float32 [n, width].
        b: float32 [n, width].
        grid: dtype whose units in the last place are counted.
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = y - x
        size = np.abs(difference)
        norm_a, norm_b = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
        distance = np.linalg.norm(difference, axis=1)
        dot = (x * y).sum(1)
        some, both = norm_a != 0, (norm_a != 0) & (norm_b != 0)
        rel = np.divide(distance, norm_a, out=np.zeros_like(distance), where=some)
        cosine = np.divide(dot, norm_a * norm_b, out=np.zeros_like(dot), where=both)
        empty = np.zeros(len(a), np.int32)
        wide = a.shape[1] > 0
        return SpanError(
            sequence=sequence,
            site=site,
            start=start,
            max_abs=size.max(1, initial=0).astype(np.float32),
            rel_l2=Masked(rel.astype(np.float32), some),
            cosine=Masked(np.clip(cosine, -1, 1).astype(np.float32), both),
            equal=np.asarray(same_bits(a, b).all(1)),
            column=size.argmax(1).astype(np.int32) if wide else empty,  # a NaN is the maximum
            ulp=ulp_distance(a, b, grid).max(1, initial=0),
            non_finite=(~np.isfinite(difference)).sum(1).astype(np.int32),
        )
