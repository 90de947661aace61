"""Errors of a site from sketches: of what a job recorded in 72 bytes a row, against a replay."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rolltape.recorder.sketch import sketch, squared_distance
from rolltape.replay.site_errors import SpanError, common_stretches
from rolltape.store.columns import Masked
from rolltape.store.sketches import Sketched


def sketches_of(
    sketches: Iterable[Sketched], tensors: Iterable[tuple[int, str, np.ndarray]]
) -> list[Sketched]:
    """What was recorded of a site as sketches; tensors (start, dtype, rows) are sketched now."""
    made = [Sketched(start, dtype, r.shape[1], *sketch(r)) for start, dtype, r in tensors]
    return [*sketches, *made]


def compare_sketches(
    sequence: str,
    site: str,
    a: list[Sketched],
    b: list[Sketched],
    known: list[tuple[int, int]],
) -> list[SpanError]:
    """Compare one site of two sequences by sketches.

    Args:
        sequence: id in tape A.
        site: its name.
        a: reference side; all of one width, which is that of b.
        b: other side.
        known: spans (start, n) that were compared already, from the tensors of both.
    """
    done = {p for start, n in known for p in range(start, start + n)}
    errors = []
    spans = [[(s.start, len(s.hashes)) for s in side] for side in (a, b)]
    for start, stop, i, j in common_stretches(*spans):
        for begin, end in _left(start, stop, done):
            x, y = _cut(a[i], begin, end), _cut(b[j], begin, end)
            errors.append(_errors(sequence, site, x, y))
    return errors


def _cut(span: Sketched, start: int, stop: int) -> Sketched:
    where = slice(start - span.start, stop - span.start)
    return Sketched(start, span.dtype, span.width, span.hashes[where], span.projections[where])


def _left(start: int, stop: int, done: set[int]) -> list[tuple[int, int]]:
    """Runs of positions that are not in `done`."""
    runs: list[tuple[int, int]] = []
    for position in range(start, stop):
        if position in done:
            continue
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def _errors(sequence: str, site: str, a: Sketched, b: Sketched) -> SpanError:
    equal = a.hashes == b.hashes
    n = len(equal)
    finite = np.isfinite(a.projections).all(1) & np.isfinite(b.projections).all(1)
    squared = np.where(equal, 0.0, squared_distance(a.projections, b.projections))
    norm = squared_distance(np.zeros_like(a.projections), a.projections)
    some = (norm > 0) & finite
    with np.errstate(invalid="ignore"):
        rel = np.sqrt(np.divide(squared, norm, out=np.zeros(n), where=some))
    return SpanError(
        sequence=sequence,
        site=site,
        start=a.start,
        max_abs=np.full(n, np.nan, np.float32),
        rel_l2=Masked(rel.astype(np.float32), some),
        cosine=Masked.empty(n, np.float32),
        equal=equal,
        column=np.zeros(n, np.int32),
        ulp=np.zeros(n, np.int64),
        non_finite=(~finite & ~equal).astype(np.int32),
        sketched=True,
    )
