"""Routing agreement of one sequence in a window of positions: by layer, by token, by margin.

Each side stands with its own choice: `live` where another one was forced on it, else `used`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store.routes import Routes
from rolltape.store.sequences import Sequence
from rolltape.viewer.answers import Problem
from rolltape.viewer.arrays import encode
from rolltape.viewer.detail import float_text
from rolltape.viewer.heat import bin_starts
from rolltape.viewer.library import Pair

#: Of what lies in a bin the last one counts.
STATES = (
    *("missing", "missing_a", "missing_b", "agree", "order_only"),
    *("near_tie", "margin_unknown", "not_near_tie"),
)
_CODE = {name: code for code, name in enumerate(STATES)}

MAX_WINDOW = 4096
#: Half-decades of the margin histogram; the first and last also hold what is beyond.
EDGES = 10.0 ** (np.arange(-18, 5) / 2)
#: The limit of a near tie, where the reader gives none, needs so many margins to be taken from.
_ENOUGH = 100
_FACTOR, _NOISE, _RANK = 2.0, 0.99, 0.01

RULES = {
    "given": "as given in the address",
    "noise": "2 x the 99th percentile of |margin A - margin B| over decisions that agree with "
    "margins that do not, by layer",
    "rank": "1st percentile of the margins of decisions that agree, by layer: of flips that have "
    "nothing to do with ties, 1 % would lie below it",
    "none": "no margins, or fewer than 100 agreeing decisions with one",
}


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
        recorded = {int(x) for row in rows if row["role"] == role for x in row["layers"]}
        wanted = recorded if layers is None else recorded & layers
        if wanted:
            found = sequence.window(start, stop).routes(role, layers=sorted(wanted))
            if found is not None:
                return Side(role, found)
    return None


@dataclass(frozen=True)
class Both:
    """Choices of both sides over the same layers, arrays [n, layers(, k)].

    Args:
        layers: of any side.
        ids: of a and b; undefined where not valid.
        valid: of a and b.
        weights: float32 of a and b, NaN where there is none; None if nowhere.
        margins: likewise, without k.
    """

    layers: list[int]
    ids: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]
    weights: tuple[np.ndarray | None, np.ndarray | None]
    margins: tuple[np.ndarray | None, np.ndarray | None]
    num_experts: int

    @property
    def decided(self) -> np.ndarray:
        """Where both sides chose."""
        both: np.ndarray = self.valid[0] & self.valid[1]
        return both


def align(a: Routes, b: Routes, n: int) -> Both:
    """Bring two sides to the same layers and `n` positions.

    Raises:
        Problem: 409, they have other numbers of experts.
    """
    shapes = [(r.ids.shape[2], r.num_experts) for r in (a, b)]
    if shapes[0] != shapes[1]:
        text = " against ".join(f"{k} of {experts} experts" for k, experts in shapes)
        raise Problem(409, "routes cannot be compared", f"{text}; these are other models")
    layers = sorted({*a.layers, *b.layers})
    sides = [_spread(r, layers, n) for r in (a, b)]
    return Both(
        layers,
        (sides[0][0], sides[1][0]),
        (sides[0][1], sides[1][1]),
        (sides[0][2], sides[1][2]),
        (sides[0][3], sides[1][3]),
        a.num_experts,
    )


def _spread(
    routes: Routes, layers: list[int], n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    if list(routes.layers) == layers and len(routes.valid) == n:
        return routes.ids, routes.valid, routes.weights, routes.margin
    at = [layers.index(layer) for layer in routes.layers]
    m = min(n, len(routes.valid))

    def put(values: np.ndarray | None, empty: Any) -> np.ndarray | None:
        if values is None:
            return None
        out = np.full((n, len(layers), *values.shape[2:]), empty, values.dtype)
        out[:m, at] = values[:m]
        return out

    ids, valid = put(routes.ids, 0), put(routes.valid, False)
    assert ids is not None and valid is not None
    return ids, valid, put(routes.weights, np.nan), put(routes.margin, np.nan)


@dataclass(frozen=True)
class Agreement:
    """What was found in a window, [n, layers] or by layer.

    Args:
        state: uint8, index into `STATES`.
        margin: float32, the margin that flips are judged by: A's, else B's; None without any.
        eps: float64 [layers], limit of a near tie; NaN where there is none.
        rule: key of `RULES`.
        by_layer: named arrays [layers].
        load: int64 [layers, experts], choices of B minus choices of A.
    """

    state: np.ndarray
    margin: np.ndarray | None
    eps: np.ndarray
    rule: str
    by_layer: dict[str, np.ndarray]
    load: np.ndarray


def compare(both: Both, eps: float | None) -> Agreement:
    """Compare the choices.

    Args:
        both: from `align`.
        eps: a flip with a smaller margin is a near tie; None takes it from the decisions that
            agree, see `RULES`.
    """
    a, b = both.ids
    decided = both.decided
    k = a.shape[2]
    # most rows are equal to the last slot: only the others are looked at closely
    odd = np.nonzero(decided & _any_slot(a, b))
    x, y = a[odd], b[odd]
    common = _common(x, y)
    other_set = common < k
    flip = np.zeros(decided.shape, bool)
    flip[odd] = other_set
    order = np.zeros(decided.shape, bool)
    order[odd] = ~other_set
    lost = 1 - common / (2 * k - common)
    jaccard = decided.sum(0) - np.bincount(odd[1], lost, minlength=len(both.layers))
    load = _load(x, y, odd[1], len(both.layers), both.num_experts)
    margin = next((m for m in both.margins if m is not None), None)
    limit, rule = _limit(both.margins, decided & ~flip, eps)
    state = np.zeros(decided.shape, np.uint8)
    state[both.valid[1] & ~both.valid[0]] = _CODE["missing_a"]
    state[both.valid[0] & ~both.valid[1]] = _CODE["missing_b"]
    state[decided] = _CODE["agree"]
    state[order] = _CODE["order_only"]
    state[flip] = _judge(flip, margin, limit)
    count = decided.sum(0)
    codes = ("order_only", "near_tie", "margin_unknown", "not_near_tie", "missing_a", "missing_b")
    by_layer = {
        "decisions": count.astype(np.uint32),
        "flips": flip.sum(0).astype(np.uint32),
        "jaccard": _share(jaccard, count),
        "load_tv": _share(0.5 * np.abs(load).sum(1), count * k),
        **{name: (state == _CODE[name]).sum(0).astype(np.uint32) for name in codes},
        **_weighted(both, decided, flip, order),
    }
    return Agreement(state, margin, limit, rule, by_layer, load)


def _any_slot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [n, layers], where any slot differs; slot by slot, since a short axis is slow."""
    out = np.zeros(a.shape[:2], bool)
    for i in range(a.shape[2]):
        out |= a[..., i] != b[..., i]
    return out


def _common(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """int64 [m], experts in both of two sets [m, k]."""
    ours, theirs = np.ascontiguousarray(x.T), np.ascontiguousarray(y.T)
    hit = np.zeros((2, *ours.shape), bool)
    for i, mine in enumerate(ours):
        for j, other in enumerate(theirs):
            same = mine == other
            hit[0, i] |= same
            hit[1, j] |= same
    found: np.ndarray = hit.sum(1).min(0)
    return found


def _judge(flip: np.ndarray, margin: np.ndarray | None, limit: np.ndarray) -> np.ndarray:
    """Code of each flip, in the order of `np.nonzero(flip)`."""
    layer = np.nonzero(flip)[1]
    if margin is None:
        return np.full(len(layer), _CODE["margin_unknown"], np.uint8)
    known = ~np.isnan(margin[flip]) & ~np.isnan(limit[layer])
    judged = np.where(margin[flip] < limit[layer], _CODE["near_tie"], _CODE["not_near_tie"])
    return np.where(known, judged, _CODE["margin_unknown"]).astype(np.uint8)


def _limit(
    margins: tuple[np.ndarray | None, np.ndarray | None], agree: np.ndarray, eps: float | None
) -> tuple[np.ndarray, str]:
    layers = agree.shape[1]
    if eps is not None:
        return np.full(layers, eps), "given"
    first, second = margins
    with np.errstate(invalid="ignore"):
        if first is not None and second is not None:
            found = _quantile(np.abs(first - second), agree & (first != second), _NOISE)
            if not np.isnan(found).any():
                return found * _FACTOR, "noise"
    one = first if first is not None else second
    found = np.full(layers, np.nan) if one is None else _quantile(one, agree, _RANK)
    return found, "none" if np.isnan(found).all() else "rank"


def _quantile(values: np.ndarray, where: np.ndarray, q: float) -> np.ndarray:
    """Of each layer, float64 [layers]; of all layers together where one has too few."""
    use = where & np.isfinite(values)
    count = use.sum(0)
    columns = np.sort(np.where(use, values, np.inf).T, axis=1)
    out = np.full(len(count), np.nan)
    rank = (q * (count - 1)).astype(np.int64)
    enough = count >= _ENOUGH
    out[enough] = columns[enough, rank[enough]]
    if not enough.all() and count.sum() >= _ENOUGH:
        out[~enough] = np.sort(values[use])[int(q * (int(count.sum()) - 1))]
    return out


def _load(x: np.ndarray, y: np.ndarray, layer: np.ndarray, layers: int, experts: int) -> np.ndarray:
    """Choices of b minus choices of a; rows that are equal cancel."""
    size = layers * experts

    def counts(ids: np.ndarray) -> np.ndarray:
        # an id beyond the experts is damage: it must not count for the next layer
        flat = layer[:, None] * experts + np.minimum(ids.astype(np.int64), experts - 1)
        found: np.ndarray = np.bincount(flat.ravel(), minlength=size)[:size]
        return found

    moved: np.ndarray = counts(y) - counts(x)
    return moved.reshape(layers, experts)


def _share(values: np.ndarray, count: np.ndarray) -> np.ndarray:
    """float32, NaN where there is nothing to divide by."""
    out = np.full(len(count), np.nan)
    np.divide(values, count, out=out, where=count > 0)
    return out.astype(np.float32)


def _weighted(
    both: Both, decided: np.ndarray, flip: np.ndarray, order: np.ndarray
) -> dict[str, np.ndarray]:
    """Top-1 agreement and mean L1 distance of the combine weights; NaN without weights."""
    wa, wb = both.weights
    nothing = np.full(decided.shape[1], np.nan, np.float32)
    if wa is None or wb is None:
        return {"top1": nothing, "weight_l1": nothing}
    (total_a, top_a), (total_b, top_b) = (
        _top1(i, w) for i, w in zip(both.ids, (wa, wb), strict=True)
    )
    finite = decided & np.isfinite(total_a) & np.isfinite(total_b)
    same_set = finite & ~flip
    distance = np.zeros(decided.shape)
    with np.errstate(invalid="ignore"):
        for slot in range(wa.shape[2]):
            distance += np.abs(wa[..., slot] - wb[..., slot])
    moved = np.nonzero(same_set & order)
    ranks = [np.argsort(i[moved], -1, kind="stable") for i in both.ids]
    first, second = (
        np.take_along_axis(w[moved], r, -1) for w, r in zip((wa, wb), ranks, strict=True)
    )
    distance[moved] = np.abs(first - second).sum(-1)
    total = np.where(same_set, distance, 0).sum(0)
    return {
        "top1": _share((finite & (top_a == top_b)).sum(0), finite.sum(0)),
        "weight_l1": _share(total, same_set.sum(0)),
    }


def _top1(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the weights, and the expert with the largest one, [n, layers] each."""
    total, best, top = weights[..., 0].copy(), weights[..., 0].copy(), ids[..., 0].copy()
    for slot in range(1, weights.shape[2]):
        weight = weights[..., slot]
        total += weight
        larger = weight > best
        np.copyto(best, weight, where=larger)
        np.copyto(top, ids[..., slot], where=larger)
    return total, top


def margin_histogram(found: Agreement) -> np.ndarray:
    """uint32 [layers, 2, bins of `EDGES`]: decisions that agree, and flips, by margin."""
    layers, bins = found.state.shape[1], len(EDGES) - 1
    out = np.zeros((layers, 2, bins), np.uint32)
    if found.margin is None:
        return out
    known = (found.state >= _CODE["agree"]) & ~np.isnan(found.margin)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.floor((np.log10(found.margin) + 9) * 2)
    place = np.clip(np.nan_to_num(place, nan=0, neginf=0, posinf=bins), 0, bins - 1)
    flipped = found.state >= _CODE["near_tie"]
    flat = (np.arange(layers) * 2 + flipped) * bins + place.astype(np.int64)
    counted = np.bincount(flat[known], minlength=out.size)
    out[:] = counted.reshape(out.shape)
    return out


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
        Problem: 404, no such sequence; 409, routes of two kinds.
    """
    wanted = None if layers is None else set(layers)
    found_sides = [
        own_choice(s, start, end, wanted) if s is not None else None
        for s in (pair.find(name), pair.partner(name))
    ]
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
