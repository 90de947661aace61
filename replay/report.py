"""A diff as a folder of Arrow tables, so that the viewer needs no tape arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.replay.pair import (
    MASKED,
    MISSING_A,
    MISSING_B,
    NON_FINITE,
    PairResult,
    PairTokens,
)
from rolltape.replay.site_errors import SpanError
from rolltape.store import TapeWriter, create_report, seal
from rolltape.store.columns import Masked
from rolltape.store.errors import TapeExistsError

#: Pairs of which the header has a row each.
IN_HEADER = 1000
#: Stretches of a sequence in its `spark`, at most.
SPARKS = 32
_MEASURES = ("mean_abs", "max_abs", "p99_abs", "max_at", "k1", "k3", "first_over")


def refuse_existing(out: Path) -> None:
    """Before the work rather than after it.

    Raises:
        TapeExistsError: `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapeExistsError(f"{out} is not empty", hint="choose another -o, or remove it")


def write_report(
    out: Path,
    *,
    summary: dict[str, Any],
    results: list[PairResult],
    by_pair: list[dict[str, Any]],
    column: str | None,
    routing: list[dict[str, Any]],
    activations: Iterable[SpanError],
) -> None:
    """Write the folder, and seal it: what reads it need not hash whole shards first.

    Args:
        out: where.
        summary: ready for JSON; of more than `IN_HEADER` pairs written without `by_sequence`.
        results: the pairs.
        by_pair: their measures, in the same order.
        column: the headline column.
        routing: rows of the `routing` table.
        activations: errors of every site and span.
    """
    if len(results) > IN_HEADER:  # the table has a row a sequence; the header has to stay small
        summary = {name: value for name, value in summary.items() if name != "by_sequence"}
    create_report(out, summary=summary)
    with TapeWriter(out) as writer:
        for result, measures in zip(results, by_pair, strict=True):
            writer.append("sequences", _one(_sequence(result, measures, column)))
            if result.tokens is not None:
                writer.append("tokens", _one(_tokens(result, column)))
        if routing:
            writer.append("routing", {name: [r[name] for r in routing] for name in routing[0]})
        # sequence by sequence, so that a page about one reads few record batches
        order = {result.a.id: i for i, result in enumerate(results)}
        for span in sorted(activations, key=lambda s: order.get(s.sequence, len(order))):
            row = {
                "a": span.sequence,
                "site": span.site,
                "start": span.start,
                "n": len(span.equal),
                "max_abs": span.max_abs,
                "rel_l2": span.rel_l2,
                "cosine": span.cosine,
                "equal": span.equal,
                "ulp": None if span.sketched else span.ulp,
                "non_finite": span.non_finite,
                "sketched": span.sketched,
            }
            writer.append("activations", _one(row))
    seal(out)


def _one(row: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in row.items()}


def _sequence(result: PairResult, measures: dict[str, Any], column: str | None) -> dict[str, Any]:
    a, tokens, routing = result.a, result.tokens, result.routing
    group = a.info["group"] if a.info["group"] is not None else result.b.info["group"]
    row: dict[str, Any] = {
        "a": a.id,
        "b": result.b.id,
        "group": group,
        "prompt_len": a.prompt_len,
        "length": max(a.length, result.b.length),
        "finish": a.finish,
        "paired_by": result.pair.by,
        "compared": measures["tokens_compared"],
        **{name: measures[name] for name in _MEASURES},
    }
    if tokens is not None:
        states = np.bincount(tokens.states(column), minlength=6)
        versions = np.unique(tokens.version.values[tokens.version.valid & tokens.counted])
        row |= {
            "masked": int(states[MASKED]),
            "missing": int(states[MISSING_A] + states[MISSING_B]),
            "non_finite": int(states[NON_FINITE]),
            # of a sequence that several versions made, the per-token answer is in the tape
            "weight_version": int(versions[0]) if len(versions) == 1 else None,
            "spark": spark(_delta(tokens, column)),
        }
    if routing is not None:
        row |= {
            "decisions": routing.decisions,
            "disagree": routing.disagree,
            "tokens_any": routing.tokens_any,
            "routed_tokens": routing.tokens,
        }
    return row


def _tokens(result: PairResult, column: str | None) -> dict[str, Any]:
    tokens = result.tokens
    assert tokens is not None
    n = tokens.n
    if column is None:
        a = b = Masked.empty(n, np.float32)
    else:
        a, b = tokens.scored_a.columns[column], tokens.scored_b.columns[column]
    empty = Masked.empty(n, np.int32)
    return {
        "a": result.a.id,
        "n": n,
        "state": tokens.states(column),
        "a_logprob": a,
        "b_logprob": b,
        "delta": _delta(tokens, column),
        "flips": empty if result.routing is None else result.routing.flips.resized(n),
        "ids": result.a.tokens.resized(n),
    }


def _delta(tokens: PairTokens, column: str | None) -> Masked:
    """float32 [n], b - a where it is compared."""
    if column is None:
        return Masked.empty(tokens.n, np.float32)
    compared = tokens.compared(column)
    a, b = tokens.scored_a.columns[column].values, tokens.scored_b.columns[column].values
    difference = np.zeros(tokens.n, np.float32)
    exact = b[compared].astype(np.float64) - a[compared]
    with np.errstate(over="ignore"):
        difference[compared] = exact.astype(np.float32)
    return Masked(difference, compared)


def spark(delta: Masked) -> Masked:
    """Largest |d| of each of at most 32 equal stretches; none where nothing was compared.

    Args:
        delta: float32 [n].
    """
    count = min(SPARKS, len(delta))
    if not count:
        return Masked.empty(0, np.float32)
    starts = np.arange(count) * len(delta) // count
    peak = np.maximum.reduceat(np.where(delta.valid, np.abs(delta.values), -1), starts)
    return Masked(peak.astype(np.float32), peak >= 0)
