"""Layer errors of the viewer's scene: six layers, a front, holes, and what is not finite.

Made up like the rest of the scene. What stands here as plain arrays is what the tests count on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store import Key, TapeWriter
from rolltape.store.codecs import encode_floats
from rolltape.store.columns import Masked

PARTS = ("attn", "router", "experts", "out")
SITES = ("embed", *(f"layers.{i}.{part}" for i in range(6) for part in PARTS), "norm", "logits")
#: Stand in one tape only, for every sequence with layers.
ONLY_A, ONLY_B = "layers.2.q", "layers.3.mlp"
#: Thresholds of the noise floor that the report was judged by; `embed` was not measured.
FLOOR = dict.fromkeys(SITES[1:], 1e-4)
#: Where the front begins, by sequence: (position, index of the site).
FRONT = {
    "0-0.1": (71, SITES.index("layers.3.router")),
    "0-2.1": (4000, SITES.index("layers.1.attn")),
}


@dataclass
class Errors:
    """One site, arrays over all positions of a sequence.

    Args:
        there: where the report has a row.
        rel_l2: NaN is null.
        cosine: NaN is null.
        sketched: then there is no ulp, and `max_abs` is NaN.
    """

    there: np.ndarray
    equal: np.ndarray
    rel_l2: np.ndarray
    max_abs: np.ndarray
    cosine: np.ndarray
    ulp: np.ndarray
    non_finite: np.ndarray
    sketched: bool = False


def layer_errors(name: str, length: int) -> dict[str, Errors]:
    """Errors by site of one sequence of the scene; empty for those without layers."""
    if name not in ("0-0.1", "0-0.2", "0-1.0", "0-1.1", "0-2.1"):
        return {}
    rng = np.random.default_rng(length)
    return {site: _site(name, i, length, rng) for i, site in enumerate(SITES)}


def _site(name: str, index: int, n: int, rng: np.random.Generator) -> Errors:
    rel = (10 ** rng.uniform(-6.5, -4.5, n)).astype(np.float32)
    equal = rng.random(n) < 0.3
    at, first = FRONT.get(name, (n, 0))
    if index >= first:  # behind the front attention carries the error on
        span = max(0, min(60, n - at))
        rel[at : at + span] = 0.03 * 0.93 ** np.arange(span) * (1 + 0.1 * (index - first))
        equal[at : at + span] = False
    if name == "0-0.2":
        equal[:] = True
    if SITES[index] == "embed":  # not measured, so that every other bit counts
        equal[:] = True
        equal[12:14] = name != "0-1.0"
    rel[equal] = 0
    errors = Errors(
        there=np.ones(n, bool),
        equal=equal,
        rel_l2=rel,
        max_abs=rel * 3,
        cosine=np.where(equal, 1, 1 - rel.astype(np.float64) ** 2 / 2).astype(np.float32),
        ulp=np.where(equal, 0, np.maximum(1, rel * 1e6)).astype(np.int64),
        non_finite=np.zeros(n, np.int32),
    )
    if name == "0-1.1":
        errors.there[40:52] = False
        if index == 5:
            errors.there[:] = False
            errors.there[60:64] = True
    if name == "0-1.0" and index >= 6 and n > 47:
        errors.non_finite[45], errors.max_abs[45], errors.rel_l2[45] = 3, np.nan, np.nan
        errors.equal[45] = False
        errors.rel_l2[47], errors.equal[47] = np.nan, False  # A's row is zeros
        errors.cosine[47] = np.nan
    if name == "0-2.1" and index % 4 == 0:
        errors.sketched = True
        errors.max_abs[:] = np.nan
        errors.cosine[:] = np.nan
    return errors


def report_rows(sequence: str, errors: dict[str, Errors]) -> list[dict[str, Any]]:
    """Rows of the report's `activations` table: a row a stretch, long ones in pieces."""
    rows = []
    for site, e in errors.items():
        edges = np.flatnonzero(np.diff(e.there.astype(np.int8), prepend=0, append=0))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            for start in range(low, high, 2500):
                span = slice(start, min(high, start + 2500))
                rows.append(
                    {
                        "a": sequence,
                        "site": site,
                        "start": start,
                        "n": span.stop - span.start,
                        "max_abs": e.max_abs[span],
                        "rel_l2": Masked(e.rel_l2[span], ~np.isnan(e.rel_l2[span])),
                        "cosine": Masked(e.cosine[span], ~np.isnan(e.cosine[span])),
                        "equal": e.equal[span],
                        "ulp": None if e.sketched else e.ulp[span],
                        "non_finite": e.non_finite[span],
                        "sketched": e.sketched,
                    }
                )
    return rows


def summary(sequences: dict[str, str]) -> dict[str, Any]:
    """The report's `activations` object, as far as the viewer reads it.

    Args:
        sequences: id by name.
    """
    position, site = FRONT["0-0.1"]
    place = {"site": SITES[site], "sequence": sequences.get("0-0.1"), "position": position}
    return {
        "verdict": "divergent",
        "reason": "many rows have other bits",
        "front": place if "0-0.1" in sequences else None,
        "earliest": None,
        "above": {},
        "floor": {
            "executions": ["one sequence a batch against batches"],
            "sequences": 16,
            "positions": 4096,
            "margin": 2.0,
            "thresholds": FLOOR,
        },
        "sites": [],
    }


def write_tensors(writer: TapeWriter, key: Key, name: str, length: int, *, side: str) -> None:
    """One row of each site into a tape: enough to know which sites it has."""
    if not layer_errors(name, length):
        return
    extra = ONLY_A if side == "a" else ONLY_B
    sites = [*SITES, extra]
    writer.append(
        "activations",
        {
            "engine": [key.engine] * len(sites),
            "request": [key.request] * len(sites),
            "sample": [key.sample] * len(sites),
            "pass": [key.scoring] * len(sites),
            "start": [0] * len(sites),
            "n": [1] * len(sites),
            "site": sites,
            "dtype": ["bfloat16"] * len(sites),
            "width": [2] * len(sites),
            "data": [encode_floats(np.zeros((1, 2), np.float32))] * len(sites),
        },
    )
