"""Everything that is known about one token: both logprobs to the last bit, step, routes."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    sequence = pair.find(name)
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
        "drawn_by": _routes(sequence, partner, position - 1) if position else None,
        "routes": _routes(sequence, partner, position),
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
    here = _at(sequence, position)
    for start, n, found in here.semantics if here is not None else []:
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
    here = _at(sequence, position)
    out["support"] = _support(here)
    out |= {"weight_version": None, "step": None}
    if here is None:
        return out
    if here.weight_version.valid[0]:
        out["weight_version"] = int(here.weight_version.values[0])
    if here.step.valid[0]:
        number = int(here.step.values[0])
        made = {"step": number, "engine": sequence.key.engine}
        out["step"] = {**made, **_step(sequence.tape, sequence.key, number)}
    return out


def _at(sequence: Sequence | None, position: int) -> Sequence | None:
    """That position alone; None beyond the end of this side."""
    if sequence is None or position >= sequence.length:
        return None
    return sequence.window(position, position + 1)


def _support(here: Sequence | None) -> dict[str, Any]:
    supports = here.supports() if here is not None else None
    if here is None or supports is None:
        return {"state": "unrecorded", "size": None, "derived": False, "holds_token": None}
    state = int(supports.state[0])
    if state != SUPPORT_EXPLICIT:
        name = "full" if state == SUPPORT_FULL else "unrecorded"
        return {"state": name, "size": None, "derived": supports.derived, "holds_token": None}
    kept = supports.ids[supports.offsets[0] : supports.offsets[1]]
    ids = here.tokens
    return {
        "state": "explicit",
        "size": len(kept),
        "derived": supports.derived,
        "holds_token": bool((kept == ids.values[0]).any()) if ids.valid[0] else None,
    }


_FACTS = ("kind", "rows", "columns", "tokens", "padded_tokens", "graph", "attention", "experts")
_FORWARD = ("engine", "request", "sample", "pass", "row", "start", "n", "kind")


def _step(tape: Tape, key: Key, step: int) -> dict[str, Any]:
    names = [*_FACTS, "sdpa", "cache"]
    steps = tape.between("steps", engine=key.engine, first=step, last=step, columns=names)
    batch = tape.step_rows(key.engine, step, _FORWARD)
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
    facts = steps.slice(0, 1).to_pylist()[0] if len(steps) else {}
    return {"facts": facts, "batch": rows, "batch_size": batch.num_rows}


def _routes(a: Sequence | None, b: Sequence | None, position: int) -> dict[str, Any]:
    """Expert ids per layer when the token at `position` was the input.

    Side B shows its own choice: `live` where another one was forced on it, else `used`.
    """
    left, right = _at(a, position), _at(b, position)
    ours = left.routes("used") if left is not None else None
    theirs, role = None, None
    if right is not None:
        for role in ("live", "used"):
            theirs = right.routes(role)
            if theirs is not None:
                break
    if ours is None and theirs is None:
        missing = _why_no_routes(a)
        return {"layers": [], "differ": 0, "comparable": False, "b_role": None, "missing": missing}
    layers = sorted({*(ours.layers if ours else ()), *(theirs.layers if theirs else ())})
    rows = []
    for layer in layers:
        x, y = _route_of(ours, layer, position), _route_of(theirs, layer, position)
        same = order_only = None
        if x["ids"] is not None and y["ids"] is not None:
            same = sorted(x["ids"]) == sorted(y["ids"])
            order_only = same and x["ids"] != y["ids"]
        rows.append({"layer": layer, "a": x, "b": y, "same": same, "order_only": order_only})
    return {
        "layers": rows,
        "differ": sum(row["same"] is False for row in rows),
        "comparable": any(row["same"] is not None for row in rows),
        "b_role": role if theirs is not None else None,
        "missing": "",
        "num_experts": (ours or theirs).num_experts,  # type: ignore[union-attr]
    }


def _route_of(routes: Routes | None, layer: int, position: int) -> dict[str, Any]:
    nothing = {"ids": None, "margin": None, "reason": None}
    if routes is None or layer not in routes.layers:
        return nothing
    column = routes.layers.index(layer)
    if not routes.valid[0, column]:
        for start, n, where, reason in routes.missing:
            if start <= position < start + n and where in (None, layer):
                return nothing | {"reason": reason}
        return nothing
    margin = None
    if routes.margin is not None and not np.isnan(routes.margin[0, column]):
        margin = float_text(routes.margin[0, column])
    return {"ids": routes.ids[0, column].tolist(), "margin": margin, "reason": None}


def _why_no_routes(a: Sequence | None) -> str:
    if a is None:
        return "the tape is not open, so there are no routes to show"
    if a.tape.engine(a.key.engine).get("moe_layers") == []:
        return "a dense model: it has no routes"
    return "no routes were recorded for this sequence"
