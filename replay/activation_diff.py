"""Per-site error of recorded activations: how far apart the same tensor is on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.replay.measures import same_bits
from rolltape.store.columns import Masked
from rolltape.store.sequences import Sequence

_NUMBER = re.compile(r"(\d+)")


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
    """

    sequence: str
    site: str
    start: int
    max_abs: np.ndarray
    rel_l2: Masked
    cosine: Masked
    equal: np.ndarray


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
                if mine.shape[1] != theirs.shape[1]:
                    widths = [mine.shape[1], theirs.shape[1]]
                    message = (
                        f"{a.id}: {site} is {widths[0]} wide in a, {widths[1]} in b; not compared"
                    )
                    fields = {"sequence": a.id, "site": site, "values": widths}
                    problems.append(Problem("width", message, fields=fields))
                    break
                error = _error(a.id, site, start, mine, theirs)
                self.spans.setdefault(site, []).append(error)
        return problems

    def rows(self) -> Iterable[SpanError]:
        """Every span, by site in layer order."""
        for site in sorted(self.spans, key=site_order):
            yield from self.spans[site]

    def summary(self) -> list[dict[str, Any]]:
        """One entry a site, in layer order."""
        return [
            _site_summary(site, self.spans[site]) for site in sorted(self.spans, key=site_order)
        ]


def site_order(site: str) -> tuple[Any, ...]:
    """Sort key: `layers.10.out` after `layers.9.out`, `embed` first, `norm` and `logits` last."""
    rank = {"embed": 0, "norm": 2, "logits": 3}.get(site, 1)
    return (rank, *(int(p) if p.isdecimal() else p for p in _NUMBER.split(site)))


def _overlaps(
    a: list[tuple[int, str, np.ndarray]], b: list[tuple[int, str, np.ndarray]]
) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    """(start, rows of a, rows of b) of every stretch that both recorded, each position once."""
    done: set[int] = set()
    for start_a, _, data_a in a:
        for start_b, _, data_b in b:
            start = max(start_a, start_b)
            end = min(start_a + len(data_a), start_b + len(data_b))
            while start < end and start in done:
                start += 1
            stop = next((p for p in range(start, end) if p in done), end)
            if start < stop:
                done.update(range(start, stop))
                yield (
                    start,
                    data_a[start - start_a : stop - start_a],
                    data_b[start - start_b : stop - start_b],
                )


def _error(sequence: str, site: str, start: int, a: np.ndarray, b: np.ndarray) -> SpanError:
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = y - x
        norm_a, norm_b = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
        distance = np.linalg.norm(difference, axis=1)
        dot = (x * y).sum(1)
        some, both = norm_a != 0, (norm_a != 0) & (norm_b != 0)
        rel = np.divide(distance, norm_a, out=np.zeros_like(distance), where=some)
        cosine = np.divide(dot, norm_a * norm_b, out=np.zeros_like(dot), where=both)
        return SpanError(
            sequence=sequence,
            site=site,
            start=start,
            max_abs=np.abs(difference).max(1, initial=0).astype(np.float32),
            rel_l2=Masked(rel.astype(np.float32), some),
            cosine=Masked(np.clip(cosine, -1, 1).astype(np.float32), both),
            equal=np.asarray(same_bits(a, b).all(1)),
        )


def _site_summary(site: str, spans: list[SpanError]) -> dict[str, Any]:
    max_abs = np.concatenate([s.max_abs for s in spans])
    equal = np.concatenate([s.equal for s in spans])
    at = [(s.sequence, s.start + i) for s in spans for i in range(len(s.equal))]
    finite = np.isfinite(max_abs)
    rel = _known([s.rel_l2 for s in spans])
    cosine = _known([s.cosine for s in spans])
    worst = int(np.where(finite, max_abs, -1).argmax())
    first = int(equal.argmin())
    return {
        "site": site,
        "positions": len(equal),
        "equal": int(equal.sum()),
        "non_finite": int((~finite).sum()),
        "max_abs": float(max_abs[worst]) if finite.any() else None,
        "max_at": _place(at[worst]) if finite.any() else None,
        "mean_max_abs": float(max_abs[finite].mean()) if finite.any() else None,
        "rel_l2_mean": float(rel.mean()) if rel.size else None,
        "rel_l2_max": float(rel.max()) if rel.size else None,
        "cosine_mean": float(cosine.mean()) if cosine.size else None,
        "cosine_min": float(cosine.min()) if cosine.size else None,
        "first_unequal": None if equal.all() else _place(at[first]),
    }


def _known(columns: list[Masked]) -> np.ndarray:
    values = np.concatenate([c.values[c.valid] for c in columns]).astype(np.float64)
    return values[np.isfinite(values)]


def _place(at: tuple[str, int]) -> dict[str, Any]:
    return {"sequence": at[0], "position": at[1]}
