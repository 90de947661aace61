"""The divergence front of one sequence: at each position the first site that is over the noise.

The same rule as `rolltape diff --layers`: an error is over if it is larger than the threshold of
its site; a row that is not finite, or whose error is relative to zeros, is over any; where no noise
was measured, other bits are enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltape.viewer.answers import number
from rolltape.viewer.arrays import encode
from rolltape.viewer.heat import SiteRows, site_rows
from rolltape.viewer.library import Pair

NONE = 0xFFFF
#: Without a measured floor and without a wish: a choice, said on the screen.
DEFAULT = 1e-3
_COLUMNS = ("equal", "rel_l2", "non_finite")


def floor_thresholds(pair: Pair) -> dict[str, float] | None:
    """Thresholds by site of the noise floor that the report was judged by; None without one."""
    found = _floor(pair).get("thresholds")
    if not isinstance(found, Mapping):
        return None
    known = {str(site): number(value) for site, value in found.items()}
    return {site: value for site, value in known.items() if value is not None}


def floor_sample(pair: Pair) -> dict[str, Any] | None:
    """What the floor was measured on: executions, sequences, positions, margin."""
    found = _floor(pair)
    kept = ("executions", "sequences", "positions", "margin")
    return {name: found.get(name) for name in kept} if found else None


def _floor(pair: Pair) -> dict[str, Any]:
    activations = pair.summary.get("activations")
    found = activations.get("floor") if isinstance(activations, dict) else None
    return found if isinstance(found, dict) else {}


def front(pair: Pair, name: str, n: int, *, threshold: float | None) -> bytes:
    """The front of a sequence as safetensors bytes.

    Args:
        pair: where it lies.
        name: sequence id on side A.
        n: positions.
        threshold: relative L2 error; 0 counts every other bit. None is the floor of the report,
            or `DEFAULT` without one.

    Returns:
        `front` uint16 [n], index of the first site over the threshold, 65535 none; by site uint32
        `compared`, `unequal`, `over` (positions), `first` (the first position over, 2^32 - 1 none)
        and `leads` (positions where it is the front). The metadata has `sites`, a JSON list,
        `rule` (floor or threshold) and `threshold`.
    """
    floor = floor_thresholds(pair) if threshold is None else None
    given = DEFAULT if threshold is None else threshold
    rows = site_rows(pair, name, _COLUMNS)
    counts = {key: np.zeros(len(rows.sites), np.uint32) for key in ("compared", "unequal", "over")}
    first = np.full(len(rows.sites), 0xFFFFFFFF, np.uint32)
    found = np.full(n, NONE, np.uint16)
    for i, site in enumerate(rows.sites[:NONE]):
        limit = given if floor is None else floor.get(site, 0.0)
        there, unequal, over = _over(rows, site, n, limit)
        counts["compared"][i], counts["unequal"][i] = there, unequal
        counts["over"][i] = np.count_nonzero(over)
        if counts["over"][i]:
            first[i] = over.argmax()
            found[over & (found == NONE)] = i
    leads = np.bincount(found[found != NONE], minlength=len(rows.sites)).astype(np.uint32)
    arrays: dict[str, np.ndarray] = {"front": found, "first": first, "leads": leads, **counts}
    metadata = {
        "sites": json.dumps(rows.sites),
        "rule": "threshold" if floor is None else "floor",
        "threshold": repr(float(given)) if floor is None else "",
    }
    return encode(arrays, metadata=metadata)


def _over(rows: SiteRows, site: str, n: int, limit: float) -> tuple[int, int, np.ndarray]:
    """Positions compared, of those unequal, and bool [n] where the error is over the limit."""
    over = np.zeros(n, bool)
    there = unequal = 0
    for where, got in rows.cells(site, 0, n, _COLUMNS):
        other = ~got["equal"]
        there += len(other)
        unequal += int(np.count_nonzero(other))
        if limit > 0:  # a comparison with NaN is false: not within the noise
            other = other & (~(got["rel_l2"] <= limit) | (got["non_finite"] > 0))
        over[where] |= other
    return there, unequal, over
