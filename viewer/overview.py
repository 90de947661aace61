"""The run overview: the verdict in words first, then what stands behind it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.store.tape import Report
from rolltape.viewer.answers import number
from rolltape.viewer.library import Pair
from rolltape.viewer.provenance import provenance

#: |delta| over which a token counts as different in the headline, nats.
THRESHOLD = 0.1

_MEANING = {
    "identical": "every compared token is equal to the last bit",
    "within-noise": "the two sides differ by no more than the measured noise floor",
    "divergent": "the two sides differ",
    "not-reproduced": "the replay did not reproduce the recording",
    "inconclusive": "the comparison could not decide",
    "not-run": "nothing was compared, so nothing is known",
}


def overview(pair: Pair) -> dict[str, Any]:
    """What never changes of `GET /api/runs/{run}` as long as the pair is the same."""
    deltas = _abs_deltas(pair.report)
    return {
        "verdict": pair.summary.get("verdict"),
        "reason": pair.summary.get("reason"),
        "headline": headline(pair, deltas),
        "identity": [_message(item) for item in _list(pair.summary.get("identity"))],
        "warnings": [_message(item) for item in _list(pair.summary.get("warnings"))],
        "coverage": coverage(pair),
        "numbers": _numbers(pair, deltas),
        "by_semantics": pair.summary.get("by_semantics"),
        "threshold": THRESHOLD,
        "histogram": histogram(pair, deltas),
        "routing": routing(pair),
        "provenance": provenance(pair),
        "recording": recording(pair.tape),
    }


def run_summary(pair: Pair) -> dict[str, Any]:
    """The part that every page of a run shows."""
    run, tape = pair.run, pair.tape
    return {
        "id": run.id,
        "name": run.name,
        "path": str(tape.path) if tape is not None else None,
        "open": tape is not None,
        "role": tape.role if tape is not None else None,
        "parent": pair.parent.path.name if pair.parent is not None else None,
        "as_b": len(pair.as_b),
        "sealed": tape.seal is not None if tape is not None else None,
        "report": pair.report.uuid if pair.report is not None else None,
        "reports": [
            {
                "id": report.uuid,
                "name": report.path.name,
                "created": report.header.get("created"),
                "verdict": report.summary.get("verdict"),
                "b": _side_name(report, "b"),
            }
            for report in run.reports
        ],
    }


def headline(pair: Pair, deltas: np.ndarray) -> list[dict[str, Any]]:
    """The verdict line as pieces of text; a piece with `seq` and `tok` is a link to that token."""
    if pair.report is None:
        why = "this tape is side B" if pair.as_b else "no diff report of this tape is open"
        return [{"text": f"not compared: {why}"}]
    summary = pair.summary
    verdict = str(summary.get("verdict"))
    compared = number(summary.get("tokens_compared"))
    total = int(compared) if compared is not None else len(deltas)
    if not total:
        return [{"text": f"{verdict}: no token was compared"}]
    if not len(deltas):
        said = _MEANING.get(verdict, "")
        return [{"text": f"{verdict}: {total:,} tokens compared" + (f"; {said}" if said else "")}]
    over = int((deltas > THRESHOLD).sum())
    equal = int((deltas == 0).sum())
    if equal == len(deltas):
        text = f"{verdict}: all {total:,} compared tokens have equal logprobs"
    else:
        text = (
            f"{verdict}: {percent(over, len(deltas))} of {total:,} compared tokens differ by more "
            f"than {THRESHOLD:g} nat"
        )
    pieces: list[dict[str, Any]] = [{"text": text}]
    worst = _worst(pair)
    if worst is not None and equal != len(deltas):
        seq, tok, size = worst
        pieces += [
            {"text": "; worst is "},
            {"text": f"{size:.3g} nat in sequence {seq} at position {tok}", "seq": seq, "tok": tok},
        ]
    non_finite = number(summary.get("non_finite"))
    if non_finite:
        pieces.append({"text": f"; {int(non_finite):,} not finite"})
    routes = summary.get("routing")
    if isinstance(routes, dict) and routes.get("decisions"):
        decisions = percent(routes.get("disagree"), routes.get("decisions"))
        tokens = percent(routes.get("tokens_any"), routes.get("tokens"))
        pieces.append({"text": f"; routing: {decisions} of decisions, {tokens} of tokens"})
    return pieces


def percent(part: Any, whole: Any) -> str:
    """`12.3 %`; never rounds something to nothing or nearly all to all."""
    if not isinstance(part, int | float) or not isinstance(whole, int | float) or not whole:
        return "an unknown share"
    value = 100 * part / whole
    if part in (0, whole):
        return f"{value:.0f} %"
    if value > 99.9:
        return "over 99.9 %"
    return "under 0.001 %" if value < 1e-3 else f"{value:.3g} %"


def coverage(pair: Pair) -> dict[str, Any]:
    """How much was compared and what was not."""
    rows = list(pair.compared.values())
    counts = {
        name: sum(r[name] or 0 for r in rows)
        for name in ("compared", "masked", "missing", "non_finite")
    }
    return {
        "sequences": len(pair.sequences) if pair.tape is not None else None,
        "sequences_compared": len(rows),
        "tokens": counts if pair.report is not None else None,
        "compared": pair.summary.get("compared"),
        "not_compared": pair.summary.get("not_compared"),
    }


def histogram(pair: Pair, deltas: np.ndarray) -> dict[str, Any] | None:
    """|delta| on a log axis: edges [n + 1], counts [n], and the bitwise equal ones apart."""
    if pair.report is None:
        return None
    given = pair.summary.get("histogram")
    if isinstance(given, dict):
        edges = [number(x) for x in _list(given.get("edges"))]
        counts = [number(x) for x in _list(given.get("counts"))]
        whole = None not in edges and None not in counts
        if whole and len(edges) == len(counts) + 1 and len(counts) > 0:
            return {
                "edges": edges,
                "counts": [int(c or 0) for c in counts],
                "equal": number(given.get("bitwise_equal", given.get("bitwise"))),
                "below": int(number(given.get("below")) or 0),
                "above": int(number(given.get("above")) or 0),
            }
    if not len(deltas):
        return None
    edges_array = np.logspace(-8, 2, 41)
    different = deltas[deltas > 0]
    found, _ = np.histogram(different, edges_array)
    return {
        "edges": edges_array,
        "counts": found,
        "equal": int((deltas == 0).sum()),
        "below": int((different < edges_array[0]).sum()),
        "above": int((different > edges_array[-1]).sum()),
    }


def routing(pair: Pair) -> dict[str, Any] | None:
    """Per layer: decisions, disagreements, margins."""
    if pair.report is None:
        return None
    layers = [r for r in pair.report.rows("routing") if r["slice"] == "all"]
    total = pair.summary.get("routing")
    if not layers and isinstance(total, dict):
        layers = [r for r in _list(total.get("per_layer")) if isinstance(r, dict)]
    if not layers:
        return None
    shown = (
        {k: v for k, v in total.items() if k != "per_layer"} if isinstance(total, dict) else None
    )
    layers.sort(key=lambda r: r.get("layer") or 0)
    return {"total": shown, "layers": layers}


def recording(tape: Tape | None) -> dict[str, Any] | None:
    """Seal, gaps and hook errors of the tape."""
    if tape is None:
        return None
    seal = tape.seal
    kinds = pc.value_counts(tape.table("events").column("kind")).to_pylist()
    return {
        "created": tape.header.get("created"),
        "format": tape.header.get("format"),
        "sealed": seal.get("sealed") if seal else None,
        "status": seal.get("status") if seal else None,
        "recovered": seal.get("recovered", []) if seal else [],
        "live": seal.get("live", []) if seal else [],
        "shards": len(seal.get("shards", [])) if seal else None,
        "bytes": sum(int(s.get("bytes", 0)) for s in seal.get("shards", [])) if seal else None,
        "events": {row["values"]: row["counts"] for row in kinds},
    }


def _numbers(pair: Pair, deltas: np.ndarray) -> dict[str, Any]:
    names = ("column", "tokens_compared", "mean_abs", "max_abs", "p99_abs", "k1", "k3", "ess")
    out = {
        name: pair.summary.get(name)
        for name in (*names, "frac_ratio_gt_2", "frac_bitwise", "non_finite")
    }
    out["over_share"] = float((deltas > THRESHOLD).mean()) if len(deltas) else None
    return out


def _abs_deltas(report: Report | None) -> np.ndarray:
    """|delta| of every compared and finite token."""
    if report is None:
        return np.zeros(0, np.float32)
    column = report.table("tokens").column("delta")
    parts = [c.flatten().drop_null().to_numpy(zero_copy_only=False) for c in column.chunks]
    values = np.abs(np.concatenate(parts)) if parts else np.zeros(0, np.float32)
    return np.asarray(values[np.isfinite(values)])


def _worst(pair: Pair) -> tuple[str, int, float] | None:
    at, size = pair.summary.get("max_at"), number(pair.summary.get("max_abs"))
    if isinstance(at, dict) and size is not None:
        seq, tok = at.get("sequence"), at.get("position")
        if isinstance(seq, str) and isinstance(tok, int):
            return seq, tok, size
    rows = [
        r for r in pair.compared.values() if r["max_at"] is not None and r["max_abs"] is not None
    ]
    rows = [r for r in rows if not math.isnan(r["max_abs"])]
    if not rows:
        return None
    row = max(rows, key=lambda r: r["max_abs"])
    return row["a"], row["max_at"], row["max_abs"]


def _side_name(report: Report, side: str) -> str | None:
    facts = report.summary.get(side)
    path = facts.get("path") if isinstance(facts, dict) else None
    return str(path) if path else None


def _message(item: Any) -> str:
    return str(item["message"]) if isinstance(item, dict) and "message" in item else str(item)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
