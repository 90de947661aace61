"""Two replays of one tape side by side: what each made of one sequence, and their difference.

Both reports have the same side A, so that the difference of their deltas is that of the two
replays' logprobs. `a` and `b` are the two replays here, in words R1 and R2: elsewhere A is the tape
and B a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.store.columns import Masked
from rolltape.store.tape import Report
from rolltape.viewer.answers import unknown
from rolltape.viewer.arrays import encode
from rolltape.viewer.columns import (
    _CELLS,
    COMPARED,
    NON_FINITE,
    NOT_DIFFED,
    NOT_SCORED,
    STATES,
    _report_cells,
)
from rolltape.viewer.library import Pair
from rolltape.viewer.paired import conditions

SHOWN = ("a", "b", "diff")

#: Bits of the `flags` array.
FLAGS = ("delta_a", "delta_b", "difference", "equal")


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Dense columns of one sequence in two reports, positions 0..n-1.

    Args:
        n: positions, of the longer one.
        in_a: whether the first report has the sequence.
        in_b: whether the second one has.
        state_a: uint8 [n], index into `rolltape.viewer.columns.STATES`.
        state_b: likewise.
        delta_a: float32 [n], the first replay minus the tape.
        delta_b: float32 [n], the second replay minus the tape.
        difference: float32 [n], `delta_a` minus `delta_b`, where both were compared.
        equal: bool [n], both replays have the same 32 bits.
    """

    n: int
    in_a: bool
    in_b: bool
    state_a: np.ndarray
    state_b: np.ndarray
    delta_a: Masked
    delta_b: Masked
    difference: Masked
    equal: np.ndarray

    def shown(self, which: str) -> Masked:
        """The values that a strip shows: of `a`, `b` or `diff`."""
        return {"a": self.delta_a, "b": self.delta_b, "diff": self.difference}[which]

    def over(self, which: str, threshold: float) -> np.ndarray:
        """Positions with a larger |value|, or not finite in a report that is shown."""
        found = self.shown(which)
        big = found.valid & (np.abs(found.fill(0)) > threshold)
        if which != "b":
            big |= self.state_a == NON_FINITE
        if which != "a":
            big |= self.state_b == NON_FINITE
        return np.flatnonzero(big)


def load_sides(one: Pair, other: Pair, name: str) -> Sides:
    """Columns of a sequence in the reports of two pairs of the same tape.

    Raises:
        Problem: 404, neither the tape nor a report has it.
    """
    cells = [_cells(pair, name) for pair in (one, other)]
    sequence = one.find(name)
    if sequence is None and cells[0] is None and cells[1] is None:
        raise unknown("sequence", name, "the sequence list has all of them")
    n = max(
        sequence.length if sequence is not None else 0,
        *(len(c["state"]) if c is not None else 0 for c in cells),
    )
    states, deltas, logprobs = [], [], []
    for found in cells:
        state = np.full(n, NOT_DIFFED, np.uint8)
        delta = logprob = Masked.empty(n, np.float32)
        if found is not None:
            given = found["state"]
            known = given.valid & (given.values < NOT_DIFFED)
            state[: len(given)][known] = given.values[known]
            delta, logprob = found["delta"].resized(n), found["b_logprob"].resized(n)
        states.append(state)
        deltas.append(Masked(delta.values, delta.valid & (state == COMPARED)))
        logprobs.append(logprob)
    both = deltas[0].valid & deltas[1].valid
    # of the logprobs where they are there: rounded deltas have lost what is below their last bit
    pairs = ([v.fill(0).astype(np.float64) for v in side] for side in (logprobs, deltas))
    (x, y), (rounded_x, rounded_y) = pairs
    known = logprobs[0].valid & logprobs[1].valid
    with np.errstate(invalid="ignore"):  # infinities, which are not compared
        exact = np.where(both, np.where(known, x - y, rounded_x - rounded_y), 0)
    bits = [np.ascontiguousarray(v.fill(0), np.float32).view(np.uint32) for v in logprobs]
    return Sides(
        n=n,
        in_a=cells[0] is not None,
        in_b=cells[1] is not None,
        state_a=states[0],
        state_b=states[1],
        delta_a=deltas[0],
        delta_b=deltas[1],
        difference=Masked(exact.astype(np.float32), both),
        equal=both & known & (bits[0] == bits[1]),
    )


def _cells(pair: Pair, name: str) -> dict[str, Masked] | None:
    rows = pair.report_rows("tokens", name, list(_CELLS))
    return _report_cells(rows) if rows.num_rows else None


def window(sides: Sides, *, start: int, end: int) -> bytes:
    """Positions [start, end) as safetensors bytes.

    Arrays: `delta_a`, `delta_b`, `difference` f32, `state_a`, `state_b` u8 (index into the
    metadata `states`), `flags` u8 (bits named by the metadata `flags`).
    """
    span = slice(start, end)
    flags = np.zeros(end - start, np.uint8)
    for bit, where in enumerate(
        (sides.delta_a.valid, sides.delta_b.valid, sides.difference.valid, sides.equal)
    ):
        flags |= where[span].astype(np.uint8) << bit
    arrays = {
        "delta_a": sides.delta_a[span].fill(np.nan).astype(np.float32),
        "delta_b": sides.delta_b[span].fill(np.nan).astype(np.float32),
        "difference": sides.difference[span].fill(np.nan).astype(np.float32),
        "state_a": sides.state_a[span],
        "state_b": sides.state_b[span],
        "flags": flags,
    }
    metadata = {
        "states": ",".join(STATES),
        "flags": ",".join(FLAGS),
        "start": str(start),
        "end": str(end),
    }
    return encode(arrays, metadata=metadata)


def info(one: Pair, other: Pair, sides: Sides, name: str) -> dict[str, Any]:
    """What stands above the strips: counts, settings that differ, what has no match."""
    reports = [_report(pair) for pair in (one, other)]
    return {
        "seq": name,
        "n": sides.n,
        "a": {"here": sides.in_a, **_side(one)},
        "b": {"here": sides.in_b, **_side(other)},
        "settings": _settings(one, other),
        "counts": _counts(sides),
        "first": _first(sides),
        "unmatched": _unmatched(one, other, reports[0], reports[1], sides, name),
    }


def _report(pair: Pair) -> Report:
    assert pair.report is not None
    return pair.report


def _side(pair: Pair) -> dict[str, Any]:
    report, replay = _report(pair), conditions(pair)
    names = ("column", "verdict", "mean_abs", "k3", "tokens_compared")
    return {
        "rep": report.uuid,
        "name": report.path.name,
        "mode": replay.mode if replay is not None else None,
        **{name: report.summary.get(name) for name in names},
    }


def _settings(one: Pair, other: Pair) -> dict[str, Any]:
    """Conditions of the two sides B that differ, and how many are equal."""
    sides = [_conditions(pair) for pair in (one, other)]
    names = sorted({*sides[0], *sides[1]}, key=lambda n: (not n.startswith("switch "), n))
    rows = [
        {"name": n, "a": sides[0].get(n), "b": sides[1].get(n)}
        for n in names
        if sides[0].get(n) != sides[1].get(n)
    ]
    return {"rows": rows, "equal": len(names) - len(rows)}


def _conditions(pair: Pair) -> dict[str, str]:
    replay = conditions(pair)
    if replay is not None:
        beside = {"layout", "tokens_per_batch"}
        switches = {k if k in beside else f"switch {k}": v for k, v in replay.switches.items()}
        return {"mode": replay.mode, **switches, **replay.around}
    # no replay: what is in force in it, as far as the tape or the report says
    if pair.b is not None:
        found = {"role": pair.b.role}
        for engine in pair.b.engines.values():
            found |= {str(k): str(v) for k, v in (engine.get("effective") or {}).items()}
        return found
    settings = pair.summary.get("settings")
    given = settings if isinstance(settings, dict) else {}
    return {k: str(v[1]) for k, v in given.items() if isinstance(v, list) and len(v) == 2}


def _counts(sides: Sides) -> dict[str, Any]:
    a, b = sides.delta_a.valid, sides.delta_b.valid
    both = a & b
    size = np.where(both, np.abs(sides.difference.fill(0)).astype(np.float64), -1)
    there = int(both.sum())
    worst = int(size.argmax()) if there else None
    found = {
        "both": there,
        "equal": int(sides.equal.sum()),
        "only_a": int((a & ~b).sum()),
        "only_b": int((b & ~a).sum()),
        "max": float(size[worst]) if worst is not None else None,
        "max_at": worst,
    }
    for name, values in (
        ("a", sides.delta_a),
        ("b", sides.delta_b),
        ("difference", sides.difference),
    ):
        mean = np.abs(values.fill(0)[both]).astype(np.float64).mean() if there else None
        found[f"mean_{name}"] = float(mean) if mean is not None else None
    return found


def _first(sides: Sides) -> int | None:
    """First position whose bits or whose state differ; None if there is none."""
    both = sides.delta_a.valid & sides.delta_b.valid
    scored = (NOT_SCORED, NOT_DIFFED)
    there = ~np.isin(sides.state_a, scored) | ~np.isin(sides.state_b, scored)
    differs = (both & ~sides.equal) | (there & (sides.state_a != sides.state_b))
    if not sides.in_a or not sides.in_b or not differs.any():
        return None
    return int(differs.argmax())


def _unmatched(
    one: Pair, other: Pair, a: Report, b: Report, sides: Sides, name: str
) -> list[dict[str, Any]]:
    """Layers and sites that only one report compares, and positions; never left out."""
    found: list[dict[str, Any]] = []
    layers = [
        {r["layer"] for r in report.rows("routing") if r["slice"] == "all"} for report in (a, b)
    ]
    sites = [
        set(pc.unique(pair.report_rows("activations", name, ["site"]).column("site")).to_pylist())
        for pair in (one, other)
    ]
    for what, (left, right) in (("layers with routes", layers), ("sites", sites)):
        for side, only in (("a", left - right), ("b", right - left)):
            if only:
                names = sorted(only, key=lambda x: (isinstance(x, str), x))
                found.append({"what": what, "only": side, "names": [str(n) for n in names]})
    columns = [report.summary.get("column") for report in (a, b)]
    if columns[0] != columns[1]:
        for side, column in zip("ab", columns, strict=True):
            found.append({"what": "logprobs", "only": side, "names": [str(column)]})
    states = (sides.state_a != sides.state_b) & (sides.state_a < NOT_DIFFED)
    states &= sides.state_b < NOT_DIFFED
    if states.any():
        at = np.flatnonzero(states)
        pairs = sorted({(STATES[sides.state_a[p]], STATES[sides.state_b[p]]) for p in at[:4096]})
        names = [f"{_state_words(x)} in R1, {_state_words(y)} in R2" for x, y in pairs]
        found.append(
            {"what": f"{len(at):,} positions", "only": None, "names": names, "tok": int(at[0])}
        )
    return found


def _state_words(name: str) -> str:
    words = {"missing_a": "missing in the tape", "missing_b": "missing"}
    return words.get(name, name.replace("_", " "))
