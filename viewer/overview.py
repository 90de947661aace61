"""The run overview: the verdict in words first, then what stands behind it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.tape import Report
from rolltape.viewer.answers import number
from rolltape.viewer.columns import PRESETS
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


@dataclass(frozen=True)
class Sizes:
    """|d| of all compared tokens, counted.

    Args:
        tokens: compared and finite.
        equal: of those, equal.
        over: tokens over each size in nats, by the size as text.
        histogram: `edges` [n + 1], `counts` [n], `equal`, `below`, `above`.
    """

    tokens: int
    equal: int
    over: Mapping[str, int]
    histogram: Mapping[str, Any]


def overview(pair: Pair, counted: Callable[[], Sizes]) -> dict[str, Any]:
    """What never changes of `GET /api/runs/{run}` as long as the pair is the same.

    Args:
        pair: the pair.
        counted: reads every token of a report whose summary does not say how large they are.
    """
    sizes = sizes_of(pair, counted)
    layers = routing(pair)
    first = first_divergent(pair, layers)
    return {
        "verdict": pair.summary.get("verdict"),
        "reason": pair.summary.get("reason"),
        "headline": headline(pair, sizes, first),
        "first_divergent": first,
        "identity": [_message(item) for item in _list(pair.summary.get("identity"))],
        "warnings": [_message(item) for item in _list(pair.summary.get("warnings"))],
        "coverage": coverage(pair),
        "numbers": _numbers(pair, sizes),
        "by_semantics": pair.summary.get("by_semantics"),
        "threshold": THRESHOLD,
        "over": sizes.over if sizes is not None else None,
        "histogram": sizes.histogram if sizes is not None and sizes.tokens else None,
        "drift": drift(pair),
        "routing": layers,
        "provenance": provenance(pair),
        "recording": recording(pair),
    }


def sizes_of(pair: Pair, counted: Callable[[], Sizes]) -> Sizes | None:
    """From the summary, else counted; None without a report."""
    if pair.report is None:
        return None
    given, over = _given_histogram(pair.summary), pair.summary.get("over")
    tokens = number(pair.summary.get("tokens_compared"))
    if given is None or not isinstance(over, dict) or tokens is None:
        return counted()
    counts = {str(size): int(number(n) or 0) for size, n in over.items()}
    if f"{THRESHOLD:g}" not in counts:
        return counted()
    return Sizes(int(tokens), int(given["equal"] or 0), counts, given)


def count_sizes(report: Report) -> Sizes:
    """Every token of a report, batch by batch."""
    edges = np.logspace(-8, 2, 41)
    slots = np.zeros(len(edges) + 1, np.int64)
    over = dict.fromkeys((f"{size:g}" for size in PRESETS), 0)
    tokens = equal = 0
    for _, _, batch in report.batches("tokens", ["delta"]):
        found = batch.column("delta").flatten().drop_null().to_numpy(zero_copy_only=False)
        size = np.abs(found)
        size = size[np.isfinite(size)]
        tokens += len(size)
        different = size[size > 0]
        equal += len(size) - len(different)
        slots += np.bincount(np.searchsorted(edges, different, "right"), minlength=len(slots))
        for limit in PRESETS:
            over[f"{limit:g}"] += int((size > limit).sum())
    given = _given_histogram(report.summary)
    made = {
        "edges": edges,
        "counts": slots[1:-1],
        "equal": equal,
        "below": int(slots[0]),
        "above": int(slots[-1]),
    }
    return Sizes(tokens, equal, over, given or made)


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


def headline(
    pair: Pair, sizes: Sizes | None, first: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The verdict line as pieces of text; a piece with `seq` and `tok` is a link to that token."""
    if sizes is None:
        why = "this tape is side B" if pair.as_b else "no diff report of this tape is open"
        return [{"text": f"not compared: {why}"}]
    summary = pair.summary
    verdict = str(summary.get("verdict"))
    compared = number(summary.get("tokens_compared"))
    known = compared is not None and math.isfinite(compared)
    total = int(compared or 0) if known else sizes.tokens
    if not total:
        return [{"text": f"{verdict}: no token was compared"}]
    if not sizes.tokens:
        said = _MEANING.get(verdict, "")
        return [{"text": f"{verdict}: {total:,} tokens compared" + (f"; {said}" if said else "")}]
    if sizes.equal == sizes.tokens:
        text = f"{verdict}: all {total:,} compared tokens have equal logprobs"
    else:
        text = (
            f"{verdict}: {percent(sizes.over[f'{THRESHOLD:g}'], sizes.tokens)} of {total:,} "
            f"compared tokens differ by more than {THRESHOLD:g} nat"
        )
    pieces: list[dict[str, Any]] = [{"text": text}]
    worst = _worst(pair)
    if worst is not None and sizes.equal != sizes.tokens:
        seq, tok, size = worst
        pieces += [
            {"text": "; worst is "},
            {"text": f"{size:.3g} nat in sequence {seq} at position {tok}", "seq": seq, "tok": tok},
        ]
    if first is not None:
        layer = "" if first["layer"] is None else f"layer {first['layer']}, "
        pieces.append({"text": f"; first divergent {layer}{first['site'] or first['by']}"})
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
    return {
        "sequences": len(pair.facts) if pair.tape is not None else None,
        "sequences_compared": len(pair.compared),
        "tokens": pair.counts if pair.report is not None else None,
        "compared": pair.summary.get("compared"),
        "not_compared": pair.summary.get("not_compared"),
    }


def _given_histogram(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    given = summary.get("histogram")
    if not isinstance(given, dict):
        return None
    edges = [number(x) for x in _list(given.get("edges"))]
    counts = [number(x) for x in _list(given.get("counts"))]
    whole = None not in edges and None not in counts
    if not whole or len(edges) != len(counts) + 1 or not counts:
        return None
    return {
        "edges": edges,
        "counts": [int(c or 0) for c in counts],
        "equal": number(given.get("bitwise_equal", given.get("bitwise"))),
        "below": int(number(given.get("below")) or 0),
        "above": int(number(given.get("above")) or 0),
    }


def drift(pair: Pair) -> dict[str, Any] | None:
    """The difference over weight versions, training steps and time, as the diff counted it.

    Of a report that does not say, by weight version from its `sequences`: `exact` is false then,
    and sequences that several versions made are left out.
    """
    if pair.report is None:
        return None
    given = pair.summary.get("drift")
    if isinstance(given, dict):
        names = ("by_version", "by_step", "by_time")
        return {"exact": True, **{name: _list(given.get(name)) for name in names}}
    columns = ["weight_version", "compared", "mean_abs", "max_abs", "k1", "k3"]
    table = pair.report_columns(columns)
    known = pc.and_(
        table.column("weight_version").is_valid(), pc.greater(table.column("compared"), 0)
    )
    table = table.filter(known.fill_null(False))
    version, tokens, mean_abs, max_abs, k1, k3 = (
        table.column(name).cast(pa.float64()).fill_null(math.nan).to_numpy() for name in columns
    )
    rows = []
    for one in np.unique(version):
        at = version == one
        rows.append(
            {
                "version": int(one),
                "label": None,
                "tokens": int(tokens[at].sum()),
                "mean": -float(np.average(k1[at], weights=tokens[at])) + 0.0,
                "mean_abs": float(np.average(mean_abs[at], weights=tokens[at])),
                "p99_abs": None,
                "max_abs": float(max_abs[at].max()),
                "k3": float(np.average(k3[at], weights=tokens[at])),
                "outside": None,
                "worst_ratio": None,
            }
        )
    return {"exact": False, "by_version": rows, "by_step": [], "by_time": []}


def first_divergent(pair: Pair, layers: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The first layer that is known to differ: `layer`, `site`, `by` activations or routing."""
    given = pair.summary.get("first_divergent")
    if isinstance(given, dict) and {"layer", "site", "by"} <= given.keys():
        return {name: given[name] for name in ("layer", "site", "by")}
    activations = pair.summary.get("activations")
    front = activations.get("front") if isinstance(activations, dict) else None
    if isinstance(front, dict) and isinstance(front.get("site"), str):
        found = re.search(r"layers\.(\d{1,6})", front["site"])
        layer = int(found[1]) if found else None
        return {"layer": layer, "site": front["site"], "by": "activations"}
    for row in layers["layers"] if layers is not None else ():
        if row.get("disagree"):
            return {"layer": row.get("layer"), "site": None, "by": "routing"}
    return None


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


def recording(pair: Pair) -> dict[str, Any] | None:
    """Seal, gaps and hook errors of the tape."""
    tape = pair.tape
    if tape is None:
        return None
    seal = tape.seal
    return {
        "created": tape.header.get("created"),
        "format": tape.header.get("format"),
        "sealed": seal.get("sealed") if seal else None,
        "status": seal.get("status") if seal else None,
        "recovered": seal.get("recovered", []) if seal else [],
        "live": seal.get("live", []) if seal else [],
        "shards": len(seal.get("shards", [])) if seal else None,
        "bytes": sum(int(s.get("bytes", 0)) for s in seal.get("shards", [])) if seal else None,
        "events": {kind: count for kind, (count, _) in pair.events.items()},
    }


def _numbers(pair: Pair, sizes: Sizes | None) -> dict[str, Any]:
    names = ("column", "tokens_compared", "mean_abs", "max_abs", "p99_abs", "k1", "k3", "ess")
    out = {
        name: pair.summary.get(name)
        for name in (*names, "frac_ratio_gt_2", "frac_bitwise", "non_finite")
    }
    over = sizes.over[f"{THRESHOLD:g}"] if sizes is not None else 0
    out["over_share"] = over / sizes.tokens if sizes is not None and sizes.tokens else None
    return out


def _worst(pair: Pair) -> tuple[str, int, float] | None:
    at, size = pair.summary.get("max_at"), number(pair.summary.get("max_abs"))
    if isinstance(at, dict) and size is not None:
        seq, tok = at.get("sequence"), at.get("position")
        if isinstance(seq, str) and isinstance(tok, int):
            return seq, tok, size
    rows = pair.report_columns(["a", "max_at", "max_abs"])
    found = rows.column("max_abs").fill_null(math.nan).to_numpy()
    found = np.where(rows.column("max_at").is_valid().to_numpy(), found, math.nan)
    if not len(found) or np.isnan(found).all():
        return None
    row = rows.slice(int(np.nanargmax(found)), 1).to_pylist()[0]
    return row["a"], row["max_at"], row["max_abs"]


def _side_name(report: Report, side: str) -> str | None:
    facts = report.summary.get(side)
    path = facts.get("path") if isinstance(facts, dict) else None
    return str(path) if path else None


def _message(item: Any) -> str:
    return str(item["message"]) if isinstance(item, dict) and "message" in item else str(item)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
