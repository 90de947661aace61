"""What an overview shows of a diff besides its headline: sizes, drift, where it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.replay.measures import Deltas, k3_terms
from rolltape.replay.pair import PairResult
from rolltape.store.index import KEY_COLUMNS
from rolltape.store.keys import Key
from rolltape.store.sequences import Tape
from rolltape.store.sites import site_order

#: Sizes of |d| that are counted, nats.
SIZES = (1e-3, 1e-2, 1e-1, 1.0)
#: Half the width of the band around 1 within which a ratio p_B / p_A counts as kept.
BAND = 0.2
#: Stretches of time that the tokens are divided into, at most.
TIMES = 64


def counts_over(delta: np.ndarray) -> dict[str, int]:
    """Tokens whose |d| is over each of `SIZES`, by the size as text."""
    size = np.abs(delta)
    return {f"{limit:g}": int((size > limit).sum()) for limit in SIZES}


def drift(deltas: Deltas, results: Sequence[PairResult], a: Tape, b: Tape) -> dict[str, Any]:
    """The difference by weight version, by training step, and by when a sequence was opened.

    Args:
        deltas: every compared token.
        results: the pairs.
        a: side A.
        b: side B.

    Returns:
        `by_version`: a row a version, ascending, tokens without one left out. `by_step`: a row an
        optimizer step that the trainer noted at its scoring of a sequence, empty if it did not.
        `by_time`: a row a stretch of time that has tokens, empty if all were opened at one time.
        Numbers: `tokens`, `mean`, `mean_abs`, `p99_abs`, `max_abs`, `k3`, `outside` (share of
        ratios outside 1 - 0.2 to 1 + 0.2), `worst_ratio` (e^d of the largest |d|).
    """
    labels = _labels(a)
    versions = [
        {"version": version, "label": labels.get(version), **_numbers(deltas.delta[rows])}
        for version, rows in _groups(deltas.version.values, deltas.version.valid)
    ]
    return {
        "by_version": versions,
        "by_step": _by_step(deltas, results, b),
        "by_time": _by_time(deltas, results),
    }


def _by_step(deltas: Deltas, results: Sequence[PairResult], b: Tape) -> list[dict[str, Any]]:
    steps: dict[Key, int] = {}
    for _, _, batch in b.batches("annotations", [*KEY_COLUMNS, "name", "number"]):
        mine = batch.filter(pc.equal(batch.column("name"), "optimizer_step"))
        for *key, _, number in zip(*(c.to_pylist() for c in mine.columns), strict=True):
            if number is not None and math.isfinite(number):
                steps[Key(*key)] = int(number)
    if not steps or not len(deltas):
        return []
    codes = np.array([steps.get(result.b.key, -1) for result in results], np.int64)[deltas.pair]
    return [
        {"step": step, **_numbers(deltas.delta[rows])} for step, rows in _groups(codes, codes >= 0)
    ]


def _by_time(deltas: Deltas, results: Sequence[PairResult]) -> list[dict[str, Any]]:
    opened = [result.a.info["opened_ns"] for result in results]
    known = [t for t in opened if t is not None]
    if not known or min(known) == max(known):
        return []
    first, width = min(known), -(-(max(known) - min(known) + 1) // TIMES)
    stretch = np.array([-1 if t is None else (t - first) // width for t in opened], np.int64)
    codes = stretch[deltas.pair] if len(deltas) else np.zeros(0, np.int64)
    return [
        {
            "t0_ns": first + code * width,
            "t1_ns": first + (code + 1) * width,
            **_numbers(deltas.delta[rows]),
        }
        for code, rows in _groups(codes, codes >= 0)
    ]


def _groups(codes: np.ndarray, valid: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    """(code, its rows) of every valid code, ascending."""
    there = np.flatnonzero(valid)
    there = there[np.argsort(codes[there], kind="stable")]
    values, starts = np.unique(codes[there], return_index=True)
    parts = np.split(there, starts[1:]) if len(there) else []
    return ((int(value), rows) for value, rows in zip(values, parts, strict=True))


def _numbers(delta: np.ndarray) -> dict[str, Any]:
    size = np.abs(delta)
    with np.errstate(over="ignore"):
        ratio = np.exp(delta)
    return {
        "tokens": len(delta),
        "mean": float(delta.mean()),
        "mean_abs": float(size.mean()),
        "p99_abs": float(np.percentile(size, 99)),
        "max_abs": float(size.max()),
        "k3": float(k3_terms(delta).mean()),
        "outside": float((np.abs(ratio - 1) > BAND).mean()),
        "worst_ratio": float(ratio[size.argmax()]),
    }


def _labels(tape: Tape) -> dict[int, str]:
    """The job's name of each weight version that has one."""
    found: dict[int, str] = {}
    for _, _, batch in tape.batches("weights", ["version", "label"]):
        named = batch.filter(batch.column("label").is_valid()).to_pylist()
        for row in named:
            found.setdefault(row["version"], row["label"])
    return found


def first_divergent(
    activations: Mapping[str, Any] | None, routing: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The first layer that is known to differ, and how that is known.

    Args:
        activations: as in the summary, with the `front`.
        routing: rows of the report's `routing` table.

    Returns:
        `layer` (None if the site has none), `site`, `by`: activations or routing; None if nothing
        differs, or nothing says where.
    """
    front = (activations or {}).get("front")
    site = None if front is None else str(front["site"])
    number = re.search(r"layers\.(\d+)", site or "")
    layers = [r["layer"] for r in routing if r["slice"] == "all" and r["disagree"]]
    by_routing = {"layer": min(layers), "site": None, "by": "routing"} if layers else None
    # experts are the first thing of a layer that the routing says anything of
    if site is None or (layers and site_order(f"layers.{min(layers)}.router") < site_order(site)):
        return by_routing
    return {"layer": int(number[1]) if number else None, "site": site, "by": "activations"}
