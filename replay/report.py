"""A diff as a folder of Arrow tables, so that the viewer needs no tape arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.replay.pair import COMPARED, MASKED, MISSING_A, MISSING_B, NON_FINITE, PairResult
from rolltape.replay.site_errors import SpanError
from rolltape.store import TapeWriter, create_report
from rolltape.store.columns import Masked
from rolltape.store.errors import TapeExistsError


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
    """Write the folder.

    Args:
        out: where.
        summary: ready for JSON.
        results: the pairs.
        by_pair: their measures, in the same order.
        column: the headline column.
        routing: rows of the `routing` table.
        activations: errors of every site and span.
    """
    create_report(out, summary=summary)
    with TapeWriter(out) as writer:
        for result, measures in zip(results, by_pair, strict=True):
            writer.append("sequences", _one(_sequence(result, measures, column)))
            if result.tokens is not None:
                writer.append("tokens", _one(_tokens(result, column)))
        if routing:
            writer.append("routing", {name: [r[name] for r in routing] for name in routing[0]})
        for span in activations:
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
        **{k: measures[k] for k in ("mean_abs", "max_abs", "max_at", "k1", "k3", "first_over")},
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
    states = tokens.states(column)
    if column is None:
        a = b = delta = Masked.empty(n, np.float32)
    else:
        a, b = tokens.scored_a.columns[column], tokens.scored_b.columns[column]
        compared = states == COMPARED
        difference = np.zeros(n, np.float32)
        exact = b.values[compared].astype(np.float64) - a.values[compared]
        with np.errstate(over="ignore"):
            difference[compared] = exact.astype(np.float32)
        delta = Masked(difference, compared)
    empty = Masked.empty(n, np.int32)
    return {
        "a": result.a.id,
        "n": n,
        "state": states,
        "a_logprob": a,
        "b_logprob": b,
        "delta": delta,
        "flips": empty if result.routing is None else result.routing.flips.resized(n),
    }
