"""Per-site error of recorded activations: how far apart the same tensor is on both sides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.replay.measures import coarser
from rolltape.replay.site_errors import SpanError, common_stretches, row_errors
from rolltape.replay.sketch_diff import compare_sketches, sketches_of
from rolltape.store.columns import Masked
from rolltape.store.sequences import Sequence
from rolltape.store.sites import site_order


@dataclass
class SiteTally:
    """Adds up the errors of every site."""

    spans: dict[str, list[SpanError]] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Positions compared, over all sites."""
        return sum(len(s.equal) for spans in self.spans.values() for s in spans)

    @property
    def differences(self) -> int:
        """Positions that are not bitwise equal."""
        return sum(int((~s.equal).sum()) for spans in self.spans.values() for s in spans)

    def add(self, a: Sequence, b: Sequence) -> list[Problem]:
        """Compare the sites that both sequences have; returns what does not fit."""
        found, other = a.activations(), b.activations()
        problems = []
        for site in found.keys() & other.keys():
            for start, mine, theirs in _overlaps(found[site], other[site]):
                if mine.rows.shape[1] != theirs.rows.shape[1]:
                    problems.append(_widths(a.id, site, mine.rows.shape[1], theirs.rows.shape[1]))
                    break
                grid = coarser(mine.dtype, theirs.dtype)
                error = row_errors(a.id, site, start, mine.rows, theirs.rows, grid=grid)
                self.spans.setdefault(site, []).append(error)
        return problems + add_sketched(self, a, b)

    def rows(self) -> Iterable[SpanError]:
        """Every span, by site in layer order."""
        for site in sorted(self.spans, key=site_order):
            yield from self.spans[site]

    def summary(self) -> list[dict[str, Any]]:
        """One entry a site, in layer order."""
        return [
            _site_summary(site, self.spans[site]) for site in sorted(self.spans, key=site_order)
        ]


@dataclass(frozen=True)
class _Rows:
    dtype: str
    rows: np.ndarray


def _overlaps(
    a: list[tuple[int, str, np.ndarray]], b: list[tuple[int, str, np.ndarray]]
) -> Iterable[tuple[int, _Rows, _Rows]]:
    """(start, rows of a, rows of b) of every stretch that both recorded, each position once."""
    spans_a = [(start, len(data)) for start, _, data in a]
    spans_b = [(start, len(data)) for start, _, data in b]
    for start, stop, i, j in common_stretches(spans_a, spans_b):
        first, second = (
            _Rows(dtype, data[start - begin : stop - begin]) for begin, dtype, data in (a[i], b[j])
        )
        yield start, first, second


def add_sketched(tally: SiteTally, a: Sequence, b: Sequence) -> list[Problem]:
    """Compare by sketches what one side, or both, has no tensors of; returns what does not fit."""
    sketches = a.sketches(), b.sketches()
    if not any(sketches):
        return []
    tensors = a.activations(), b.activations()
    sites = [set(s) | set(t) for s, t in zip(sketches, tensors, strict=True)]
    problems = []
    for site in sites[0] & sites[1]:
        known = [(s.start, len(s.equal)) for s in tally.spans.get(site, ()) if s.sequence == a.id]
        mine, theirs = (
            sketches_of(s.get(site, ()), t.get(site, ()))
            for s, t in zip(sketches, tensors, strict=True)
        )
        if mine[0].width != theirs[0].width:
            problems.append(_widths(a.id, site, mine[0].width, theirs[0].width))
        elif errors := compare_sketches(a.id, site, mine, theirs, known):
            tally.spans.setdefault(site, []).extend(errors)
    return problems


def _widths(sequence: str, site: str, a: int, b: int) -> Problem:
    message = f"{sequence}: {site} is {a} wide in a, {b} in b; not compared"
    return Problem("width", message, fields={"sequence": sequence, "site": site, "values": [a, b]})


def _site_summary(site: str, spans: list[SpanError]) -> dict[str, Any]:
    max_abs = np.concatenate([s.max_abs for s in spans])
    equal = np.concatenate([s.equal for s in spans])
    bad = np.concatenate([s.non_finite for s in spans])
    column = np.concatenate([s.column for s in spans])
    at = [(s.sequence, s.start + i) for s in spans for i in range(len(s.equal))]
    sketched = np.concatenate([np.full(len(s.equal), s.sketched) for s in spans])
    finite = (bad == 0) & ~sketched
    rel = _known([s.rel_l2 for s in spans])
    cosine = _known([s.cosine for s in spans])
    ulp = np.concatenate([s.ulp for s in spans])[finite]
    worst = int(np.where(finite, max_abs, -1).argmax())
    first, broken = int(equal.argmin()), int(bad.argmax())
    known = bool(finite.any())
    return {
        "site": site,
        "positions": len(equal),
        "equal": int(equal.sum()),
        "sketched": int(sketched.sum()),
        "non_finite": int((bad > 0).sum()),
        "non_finite_at": {**_place(at[broken]), "column": int(column[broken])}
        if bad.any()
        else None,
        "max_abs": float(max_abs[worst]) if known else None,
        "max_at": {**_place(at[worst]), "column": int(column[worst])} if known else None,
        "mean_max_abs": float(max_abs[finite].mean()) if known else None,
        "rel_l2_mean": float(rel.mean()) if rel.size else None,
        "rel_l2_max": float(rel.max()) if rel.size else None,
        "cosine_mean": float(cosine.mean()) if cosine.size else None,
        "cosine_min": float(cosine.min()) if cosine.size else None,
        "ulp_max": int(ulp.max()) if ulp.size else None,
        "first_unequal": None if equal.all() else _place(at[first]),
    }


def _known(columns: list[Masked]) -> np.ndarray:
    values = np.concatenate([c.values[c.valid] for c in columns]).astype(np.float64)
    return values[np.isfinite(values)]


def _place(at: tuple[str, int]) -> dict[str, Any]:
    return {"sequence": at[0], "position": at[1]}
