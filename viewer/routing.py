"""Routing of one sequence in a window of positions: both sides' choices, and how they agree.

Each side stands with its own choice: `live` where another one was forced on it, else `used`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store.routes import Routes, join_routes
from rolltape.store.sequences import Sequence
from rolltape.viewer.agreement import EDGES, RULES, STATES, Both, align, compare, margin_histogram
from rolltape.viewer.answers import bad_parameter
from rolltape.viewer.arrays import encode
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.detail import float_text
from rolltape.viewer.heat import bin_starts
from rolltape.viewer.library import Pair


@dataclass(frozen=True)
class Side:
    """One side's own choice in the window.

    Args:
        role: live or used.
        routes: rows are the positions of the window.
    """

    role: str
    routes: Routes


def own_choice(sequence: Sequence, start: int, end: int, layers: set[int] | None) -> Side | None:
    """What a side would have chosen itself; None if it recorded nothing there.

    Args:
        sequence: of that side.
        start: first position.
        end: one behind the last; what is beyond the sequence is missing.
        layers: only these, as far as they were recorded; None is all.
    """
    stop = min(end, sequence.length)
    if stop <= start:
        return None
    rows = sequence.tape.fragments("routes", sequence.key, (start, stop))
    for role in ("live", "used"):
        mine = [row for row in rows if row["role"] == role]
        recorded = {x for row in mine for x in np.asarray(row["layers"]).tolist()}
        wanted = recorded if layers is None else recorded & layers
        if wanted:
            found = join_routes(
                mine,
                (start, stop),
                sequence.id,
                unpack=sequence.tape.unpack,
                layers=sorted(wanted),
                planes=True,
            )
            return Side(role, found)
    return None


def _check_layers(pair: Pair, name: str, start: int, end: int, wanted: set[int]) -> None:
    """Nothing of these layers is there: whether others are."""
    known = {
        layer
        for s in (pair.find(name), pair.partner(name))
        if s is not None and (side := own_choice(s, start, end, None)) is not None
        for layer in side.routes.layers
    }
    if known:
        text = f"no routes of layer {min(wanted)}; recorded are {min(known)} to {max(known)}"
        raise bad_parameter("layers", text)


def routing(
    pair: Pair,
    name: str,
    *,
    start: int,
    end: int,
    layers: list[int] | None,
    bins: int | None,
    eps: float | None,
) -> bytes:
    """Routing agreement in positions [start, end) as safetensors bytes.

    Returns:
        By layer (`layers` uint32): counts uint32 `decisions`, `flips`, `order_only`, `near_tie`,
        `margin_unknown`, `not_near_tie`, `missing_a`, `missing_b`; float32 `jaccard`, `top1` and
        `weight_l1` (NaN without weights on both sides), `load_tv`, `eps`; `margins` uint32
        [layers, 2, bins of the metadata's `edges`]: decisions that agree, and flips. `map` uint8
        [layers, bins], index into the metadata's `states`; `starts` uint32 [bins]. Of one layer
        alone also `load` uint32 [2, experts], choices of A and B by expert.

    Raises:
        Problem: 404, no such sequence; 409, routes of two kinds; 400, no such layers.
    """
    wanted = None if layers is None else set(layers)
    found_sides = [
        own_choice(s, start, end, wanted) if s is not None else None
        for s in (pair.find(name), pair.partner(name))
    ]
    if wanted and not any(found_sides):
        _check_layers(pair, name, start, end, wanted)
    n = end - start
    like = next((s.routes for s in found_sides if s is not None), None)
    sides = [s if s is not None else Side("none", _nothing(like, n)) for s in found_sides]
    both = align(sides[0].routes, sides[1].routes, n)
    found = compare(both, eps)
    starts = bin_starts(n, min(n, MAX_WINDOW if bins is None else bins))
    arrays = {
        "layers": np.array(both.layers, np.uint32),
        "map": _binned(found.state, starts),
        "starts": (starts + start).astype(np.uint32),
        "margins": margin_histogram(found),
        "eps": found.eps.astype(np.float32),
        **found.by_layer,
    }
    if layers is not None and len(both.layers) == 1:
        arrays["load"] = _histograms(both)
    metadata = {
        "start": str(start),
        "end": str(end),
        "states": ",".join(STATES),
        "edges": json.dumps(EDGES.tolist()),
        "rule": found.rule,
        "rule_words": RULES[found.rule],
        "role_a": sides[0].role,
        "role_b": sides[1].role,
        "margin_side": _margin_side(both),
        "num_experts": str(both.num_experts),
        "k": str(both.ids[0].shape[2]),
        "only_a": json.dumps(sorted(set(sides[0].routes.layers) - set(sides[1].routes.layers))),
        "only_b": json.dumps(sorted(set(sides[1].routes.layers) - set(sides[0].routes.layers))),
        "order": str(int(sides[0].routes.order and sides[1].routes.order)),
    }
    return encode(arrays, metadata=metadata)


def _nothing(like: Routes | None, n: int) -> Routes:
    """A side that recorded nothing in the window, in the shape of the other one."""
    layers = () if like is None else like.layers
    k = 0 if like is None else like.ids.shape[2]
    shape = (n, len(layers))
    no = np.zeros(shape, bool)
    ids = np.zeros((*shape, k), np.uint8)
    return Routes(layers, 0 if like is None else like.num_experts, ids, no, None, no, None, ())


def _binned(state: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """uint8 [layers, bins]"""
    if not len(starts):
        return np.zeros((state.shape[1], 0), np.uint8)
    return np.maximum.reduceat(state, starts, axis=0).T


def _margin_side(both: Both) -> str:
    return "".join(s for s, m in zip("ab", both.margins, strict=True) if m is not None)


def _histograms(both: Both) -> np.ndarray:
    decided = both.decided[:, 0]
    experts = both.num_experts
    counts = [np.bincount(ids[decided, 0].ravel(), minlength=experts)[:experts] for ids in both.ids]
    return np.stack(counts).astype(np.uint32)


def token_routes(pair: Pair, name: str, position: int) -> dict[str, Any]:
    """Both sides' experts at one position, by layer, as they stand in the tapes.

    Returns:
        `layers`: rows with `layer` and, for `a` and `b`, the side's own choice: `ids` in slot
        order (None where nothing was recorded, then `reason`), `weights`, `margin`, and `used`
        where another route was forced; `same` and `order_only` are None unless both chose.
    """
    sides = [
        _token_side(s, position) if s is not None else {}
        for s in (pair.find(name), pair.partner(name))
    ]
    rows = []
    for layer in sorted({*sides[0], *sides[1]}):
        a, b = (side.get(layer, _EMPTY) for side in sides)
        same = order_only = None
        if a["ids"] is not None and b["ids"] is not None:
            same = sorted(a["ids"]) == sorted(b["ids"])
            order_only = same and a["ids"] != b["ids"]
        rows.append({"layer": layer, "a": a, "b": b, "same": same, "order_only": order_only})
    return {"position": position, "layers": rows}


_EMPTY: dict[str, Any] = dict.fromkeys(("ids", "weights", "margin", "reason", "used"))


def _token_side(sequence: Sequence, position: int) -> dict[int, dict[str, Any]]:
    own = own_choice(sequence, position, position + 1, None)
    if own is None:
        return {}
    routes = own.routes
    used = sequence.window(position, position + 1).routes("used") if own.role == "live" else None
    out = {}
    for i, layer in enumerate(routes.layers):
        cell = dict(_EMPTY)
        if routes.valid[0, i]:
            cell["ids"] = routes.ids[0, i].tolist()
            if routes.weights is not None and routes.weighted[0, i]:
                cell["weights"] = [float_text(w) for w in routes.weights[0, i]]
            if routes.margin is not None and not np.isnan(routes.margin[0, i]):
                cell["margin"] = float_text(routes.margin[0, i])
        else:
            cell["reason"] = _reason(routes, layer, position)
        if used is not None and layer in used.layers:
            at = used.layers.index(layer)
            cell["used"] = used.ids[0, at].tolist() if used.valid[0, at] else None
        out[layer] = cell
    return out


def _reason(routes: Routes, layer: int, position: int) -> str | None:
    for start, n, where, reason in routes.missing:
        if start <= position < start + n and where in (None, layer):
            return reason
    return None
