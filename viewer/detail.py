"""Everything that is known about one token: both logprobs to the last bit, step, routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.columns import Masked
from rolltape.store.keys import Key
from rolltape.store.routes import Routes
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL
from rolltape.store.sequences import Sequence, Tape
from rolltape.viewer.columns import STATES, Columns
from rolltape.viewer.library import Pair

#: What each state means and, where that helps, why it is so.
STATE_WORDS = {
    "compared": "compared",
    "masked": "masked: the trainer's loss does not count this token, so it is not compared",
    "missing_a": "missing in A: this side recorded no logprob here",
    "missing_b": "missing in B: this side recorded no logprob here",
    "non_finite": "not finite: NaN or infinite on a side; counted, and kept out of the means",
    "not_scored": "not scored: no logprob is expected here (position 0, or a prompt token)",
    "not_diffed": "not compared: no report covers this position",
}

_MAX_BATCH = 64


def token_detail(pair: Pair, name: str, columns: Columns, position: int) -> dict[str, Any]:
    """The panel of one token.

    Args:
        pair: where it lies.
        name: sequence id on side A.
        columns: the columns of that sequence.
        position: 0 <= position < columns.n.
    """
    sequence = pair.sequences.get(name)
    partner = pair.partner(name)
    state = STATES[columns.state[position]]
    piece = None
    if columns.ids.valid[position] and pair.tokenizer[0] is not None:
        piece = pair.tokenizer[0].get(int(columns.ids.values[position]))
    return {
        "position": position,
        "part": "prompt" if position < columns.prompt_len else "response",
        "id": int(columns.ids.values[position]) if columns.ids.valid[position] else None,
        "bytes": list(piece) if piece is not None else None,
        "state": state,
        "state_words": STATE_WORDS[state],
        "equal": bool(columns.equal[position]),
        "column": columns.column,
        "a": _logprob(columns.a, position, sequence, columns.column),
        "b": _logprob(columns.b, position, partner, columns.column),
        **_difference(columns, position),
        "flips": int(columns.flips.values[position]) if columns.flips.valid[position] else None,
        "sides": {
            "a": _side(sequence, position),
            "b": _side(partner, position),
        },
        # what drew the token, and what it went through itself as the next input
        "drawn_by": _routes(pair, sequence, partner, position - 1) if position else None,
        "routes": _routes(pair, sequence, partner, position),
    }


def float_text(value: float | np.floating[Any]) -> str:
    """The fewest digits that give the same float32 back."""
    return str(np.float32(value))


def ulp_distance(a: float | np.floating[Any], b: float | np.floating[Any]) -> int | None:
    """How many float32 values lie between, signed zeros being one; None if one is NaN."""
    pair = np.array([a, b], np.float32)
    if np.isnan(pair).any():
        return None
    low, high = pair.view(np.int32).astype(np.int64)
    low, high = (x if x >= 0 else -(x & 0x7FFFFFFF) for x in (low, high))
    return abs(int(high) - int(low))


def _logprob(
    values: Masked, position: int, sequence: Sequence | None, column: str | None
) -> dict[str, Any] | None:
    if not values.valid[position]:
        return None
    value = values.values[position]
    semantics = None
    for start, n, found in sequence.semantics if sequence is not None else []:
        if start <= position < start + n:
            semantics = found
            break
    return {
        "text": float_text(value),
        "hex": f"0x{int(np.float32(value).view(np.uint32)):08x}",
        "column": column,
        "semantics": semantics,
    }


def _difference(columns: Columns, position: int) -> dict[str, Any]:
    out: dict[str, Any] = {"delta": None, "ratio": None, "ulp": None}
    if columns.a.valid[position] and columns.b.valid[position]:
        out["ulp"] = ulp_distance(columns.a.values[position], columns.b.values[position])
    if columns.delta.valid[position]:
        delta = columns.delta.values[position]
        with np.errstate(over="ignore"):
            ratio = np.exp(np.float64(delta))
        out |= {"delta": float_text(delta), "delta_value": delta, "ratio": f"{ratio:.9g}"}
    return out


def _side(sequence: Sequence | None, position: int) -> dict[str, Any] | None:
    """Support, step, batch and weight version of a position on one side."""
    if sequence is None:
        return None
    out: dict[str, Any] = {"seq": sequence.id, "tape": sequence.tape.uuid}
    out["support"] = _support(sequence, position)
    step, version = sequence.step, sequence.weight_version
    out["weight_version"] = int(version.values[position]) if version.valid[position] else None
    out["step"] = None
    if step.valid[position]:
        number = int(step.values[position])
        out["step"] = {"step": number, **_step(sequence.tape, sequence.key, number)}
    return out


def _support(sequence: Sequence, position: int) -> dict[str, Any]:
    supports = sequence.supports()
    if supports is None:
        return {"state": "unrecorded", "size": None, "derived": False, "holds_token": None}
    state = int(supports.state[position])
    if state != SUPPORT_EXPLICIT:
        name = "full" if state == SUPPORT_FULL else "unrecorded"
        return {"state": name, "size": None, "derived": supports.derived, "holds_token": None}
    kept = supports.ids[supports.offsets[position] : supports.offsets[position + 1]]
    ids = sequence.tokens
    holds = bool((kept == ids.values[position]).any()) if ids.valid[position] else None
    return {
        "state": "explicit",
        "size": len(kept),
        "derived": supports.derived,
        "holds_token": holds,
    }


def _step(tape: Tape, key: Key, step: int) -> dict[str, Any]:
    steps = _where(tape.table("steps"), key.engine, step).to_pylist()
    batch = _where(tape.table("forwards"), key.engine, step)
    rows = []
    for row in batch.slice(0, _MAX_BATCH).to_pylist():
        other = Key(row["engine"], row["request"], row["sample"], row["pass"])
        rows.append(
            {
                "row": row["row"],
                "seq": other.id,
                "own": other == key,
                "dummy": row["kind"] == "dummy",
                "kind": row["kind"],
                "start": row["start"],
                "n": row["n"],
            }
        )
    shown = ("kind", "rows", "columns", "tokens", "padded_tokens", "graph", "attention", "experts")
    facts = {name: steps[0][name] for name in (*shown, "sdpa", "cache")} if steps else {}
    rows.sort(key=lambda r: r["row"])
    return {"facts": facts, "batch": rows, "batch_size": batch.num_rows}


def _where(table: pa.Table, engine: str, step: int) -> pa.Table:
    same = pc.and_(pc.equal(table.column("step"), step), pc.equal(table.column("engine"), engine))
    return table.filter(same)


def _routes(pair: Pair, a: Sequence | None, b: Sequence | None, position: int) -> dict[str, Any]:
    """Expert ids per layer when the token at `position` was the input.

    Side B shows its own choice: `live` where another one was forced on it, else `used`.
    """
    ours = pair.routes(a, "used") if a is not None else None
    theirs, role = None, None
    if b is not None:
        for role in ("live", "used"):
            theirs = pair.routes(b, role)
            if theirs is not None:
                break
    if ours is None and theirs is None:
        missing = _why_no_routes(a)
        return {"layers": [], "differ": 0, "comparable": False, "b_role": None, "missing": missing}
    layers = sorted({*(ours.layers if ours else ()), *(theirs.layers if theirs else ())})
    rows = []
    for layer in layers:
        left, right = _route_at(ours, layer, position), _route_at(theirs, layer, position)
        same = order_only = None
        if left["ids"] is not None and right["ids"] is not None:
            same = sorted(left["ids"]) == sorted(right["ids"])
            order_only = same and left["ids"] != right["ids"]
        rows.append({"layer": layer, "a": left, "b": right, "same": same, "order_only": order_only})
    return {
        "layers": rows,
        "differ": sum(row["same"] is False for row in rows),
        "comparable": any(row["same"] is not None for row in rows),
        "b_role": role if theirs is not None else None,
        "missing": "",
        "num_experts": (ours or theirs).num_experts,  # type: ignore[union-attr]
    }


def _route_at(routes: Routes | None, layer: int, position: int) -> dict[str, Any]:
    nothing = {"ids": None, "margin": None, "reason": None}
    if routes is None or layer not in routes.layers or position >= len(routes.valid):
        return nothing
    column = routes.layers.index(layer)
    if not routes.valid[position, column]:
        for start, n, where, reason in routes.missing:
            if start <= position < start + n and where in (None, layer):
                return nothing | {"reason": reason}
        return nothing
    margin = None
    if routes.margin is not None and not np.isnan(routes.margin[position, column]):
        margin = float_text(routes.margin[position, column])
    return {"ids": routes.ids[position, column].tolist(), "margin": margin, "reason": None}


def _why_no_routes(a: Sequence | None) -> str:
    if a is None:
        return "the tape is not open, so there are no routes to show"
    if a.tape.engine(a.key.engine).get("moe_layers") == []:
        return "a dense model: it has no routes"
    return "no routes were recorded for this sequence"
