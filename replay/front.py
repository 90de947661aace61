"""Divergence front: the first site and position whose error is above the noise floor.

The noise floor of a site is the largest relative L2 error seen between executions that should
agree: the same model and tokens in another batch, or once more. It is measured, for one model,
dtype and machine, and kept as JSON with the size of its sample. Without one every bit counts, and
the verdict is never `within-noise`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.site_errors import SpanError
from rolltape.replay.value_floor import ValueFloor
from rolltape.store.errors import UsageError
from rolltape.store.sites import site_order

#: How far above the largest error of the sample an error has to be: a maximum over a finite sample
#: is too small for the next one.
MARGIN = 2.0
_FORMAT = "rolltape noise floor 1"
_IDENTITY = ("model_fingerprint", "dtype", "device", "host")


@dataclass(frozen=True, kw_only=True)
class SiteFloor:
    """What was seen at one site.

    Args:
        max: largest relative L2 error between executions that should agree.
        positions: compared.
        unequal: of those, not bitwise equal.
    """

    max: float
    positions: int
    unequal: int


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A measured noise floor.

    Args:
        model_fingerprint: of the architecture, as in the `engines` table.
        dtype: torch dtype name of the model.
        device: `cpu` or `cuda`.
        host: name of the machine.
        sites: by name.
        executions: what was compared with what.
        sequences: in the sample.
        margin: an error is above the floor if it is larger than margin * max.
        model: as the job names it.
        versions: of the libraries.
        values: noise of logprobs and routes; None where only sites were measured.
    """

    model_fingerprint: str | None
    dtype: str | None
    device: str | None
    host: str | None
    sites: Mapping[str, SiteFloor]
    executions: tuple[str, ...]
    sequences: int
    margin: float = MARGIN
    model: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    values: ValueFloor | None = None

    def threshold(self, site: str) -> float | None:
        """Errors up to here are noise; None for a site that was not measured."""
        found = self.sites.get(site)
        return None if found is None else self.margin * found.max

    def unlike(self, engines: Iterable[Mapping[str, Any]]) -> list[str]:
        """Why it is not the floor of these rows of `engines`; empty if it is."""
        rows = list(engines)
        problems = []
        for name in _IDENTITY:
            found = {_device(row.get(name)) if name == "device" else row.get(name) for row in rows}
            mine = getattr(self, name)
            # between two dtypes the noise is that of the coarser one
            fits = mine in found if name == "dtype" else found <= {mine}
            if mine is None or not fits:
                values = ", ".join(sorted(map(str, found))) or "unknown"
                problems.append(f"{name} {values}, the floor's is {mine}")
        return problems

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=False)
        path.write_text(text + "\n")

    @classmethod
    def load(cls, path: Path) -> Floor:
        """Read what `save` wrote.

        Raises:
            UsageError: it is something else.
        """
        try:
            found = json.loads(path.read_text())
            if found.pop("format", None) != _FORMAT:
                raise UsageError(f"{path}: not a noise floor", hint=f'"format": "{_FORMAT}"')
            sites = {site: SiteFloor(**row) for site, row in found.pop("sites").items()}
            values = found.pop("values", None)
            return cls(
                sites=sites,
                executions=tuple(found.pop("executions")),
                values=None if values is None else ValueFloor.load(values),
                **found,
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path}: not a noise floor: {error}") from error


def floor_of(
    tallies: Mapping[str, SiteTally],
    engines: Iterable[Mapping[str, Any]],
    *,
    sequences: int,
    values: ValueFloor | None = None,
) -> Floor:
    """The floor from comparisons of executions that should agree.

    Args:
        tallies: what was compared with what -> its errors.
        engines: rows of `engines` of all of them, which must agree on model, dtype and machine.
        sequences: in the sample.
        values: what was seen beside sites.

    Raises:
        UsageError: nothing was compared, values that are not finite, or engines that differ.
    """
    spans: dict[str, list[SpanError]] = {}
    for tally in tallies.values():
        for site, found in tally.spans.items():
            spans.setdefault(site, []).extend(found)
    if not spans and not (values and (values.logprobs or values.routes)):
        raise UsageError("no noise floor: no site, logprob or route on both sides")
    rows = list(engines)
    same = {name: {_value(row, name) for row in rows} for name in _IDENTITY}
    for name, held in same.items():
        if len(held) > 1:
            raise UsageError(
                f"no noise floor: {name} differs: {', '.join(sorted(map(str, held)))}",
                hint="executions of one model, dtype and machine",
            )
    first = rows[0] if rows else {}
    return Floor(
        **{name: _value(first, name) for name in _IDENTITY},
        model=first.get("model"),
        versions=first.get("versions") or {},
        sites={site: _site_floor(site, spans[site]) for site in sorted(spans, key=site_order)},
        executions=tuple(tallies),
        sequences=sequences,
        values=values,
    )


def front_of(tally: SiteTally, floor: Floor | None) -> dict[str, Any]:
    """The verdict on the errors of a diff, and where they begin.

    Args:
        tally: the errors.
        floor: None if none was measured.

    Returns:
        JSON-able: `verdict` (identical, within-noise, divergent, not-run) and `reason`; `front`:
        the first site in the order in which sites run, at its first position; `earliest`: the first
        position with any such site, at the first of its sites; `above`: positions above the floor,
        by site; `floor`: its sample, or None. A place has site, sequence, position, rel_l2,
        max_abs, column, ulp, non_finite, threshold.
    """
    found = {
        site: _above(tally.spans[site], floor, site) for site in sorted(tally.spans, key=site_order)
    }
    above = {site: count for site, (count, _) in found.items() if count}
    firsts = [place for _, place in found.values() if place is not None]
    first = firsts[0] if firsts else None
    earliest = min(firsts, key=lambda place: int(place["position"]), default=None)
    return {
        **_verdict(tally, floor, bool(above)),
        "front": first,
        "earliest": earliest,
        "above": above,
        "floor": None if floor is None else _sample(floor),
    }


def _verdict(tally: SiteTally, floor: Floor | None, above: bool) -> dict[str, str]:
    if not tally.positions:
        return {"verdict": "not-run", "reason": "no site and position on both sides"}
    count = f"{tally.positions:,} rows of {len(tally.spans)} sites compared"
    if not tally.differences:
        return {"verdict": "identical", "reason": f"{count}, all bitwise equal"}
    unequal = f"{count}, {tally.differences:,} have other bits"
    if above or floor is None:
        return {"verdict": "divergent", "reason": unequal}
    return {"verdict": "within-noise", "reason": f"{unequal}, none above the noise floor"}


def _above(
    spans: Sequence[SpanError], floor: Floor | None, site: str
) -> tuple[int, dict[str, Any] | None]:
    """How many rows are above the floor, and the one at the first position."""
    threshold = 0.0 if floor is None else floor.threshold(site)
    count, first = 0, None
    for span in spans:
        # of a row of zeros no relative error is known, and of a site that was not measured no noise
        error = np.where(span.rel_l2.valid, span.rel_l2.values.astype(np.float64), np.inf)
        error = np.where(span.non_finite > 0, np.inf, error)
        over = ~span.equal & (error > threshold) if threshold else ~span.equal
        if over.any():
            i = int(over.argmax())
            count += int(over.sum())
            if first is None or span.start + i < first[0].start + first[1]:
                first = span, i
    if first is None:
        return 0, None
    return count, _place(*first, threshold if floor else None)


def _place(span: SpanError, i: int, threshold: float | None) -> dict[str, Any]:
    rel, known = float(span.rel_l2.values[i]), bool(span.rel_l2.valid[i])
    exact = not span.sketched
    return {
        "site": span.site,
        "sequence": span.sequence,
        "position": span.start + i,
        "rel_l2": rel if known else None,
        "max_abs": float(span.max_abs[i]) if exact else None,
        "column": int(span.column[i]) if exact else None,
        "ulp": int(span.ulp[i]) if exact else None,
        "non_finite": int(span.non_finite[i]),
        "threshold": threshold,
    }


def _site_floor(site: str, spans: Sequence[SpanError]) -> SiteFloor:
    equal = np.concatenate([s.equal for s in spans])
    bad = np.concatenate([s.non_finite for s in spans])
    known = np.concatenate([s.rel_l2.valid for s in spans])
    rel = np.concatenate([s.rel_l2.values for s in spans]).astype(np.float64)
    if bool((~equal & ((bad > 0) | ~known)).any()):
        raise UsageError(
            f"no noise floor: {site} has rows without a relative error",
            hint="values that are not finite, or a row of zeros on one side only",
        )
    return SiteFloor(
        max=float(rel[known & ~equal].max(initial=0.0)),
        positions=len(equal),
        unequal=int((~equal).sum()),
    )


def _sample(floor: Floor) -> dict[str, Any]:
    return {
        "executions": list(floor.executions),
        "sequences": floor.sequences,
        "positions": max((s.positions for s in floor.sites.values()), default=0),
        "margin": floor.margin,
        "thresholds": {site: floor.threshold(site) for site in floor.sites},
    }


def _value(row: Mapping[str, Any], name: str) -> Any:
    return _device(row.get(name)) if name == "device" else row.get(name)


def _device(device: Any) -> Any:
    return device.partition(":")[0] if isinstance(device, str) else device
