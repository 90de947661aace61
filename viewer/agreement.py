"""Whether two sides chose the same experts: sets, order, weights, load, and near ties by margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store.routes import Routes
from rolltape.viewer.answers import Problem

#: Of what lies in a bin the last one counts.
STATES = (
    *("missing", "missing_a", "missing_b", "agree", "order_only"),
    *("near_tie", "margin_unknown", "not_near_tie"),
)
_CODE = {name: code for code, name in enumerate(STATES)}

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
    # by layer from here on: what is counted lies together then
    a, b = (ids.transpose(2, 1, 0) for ids in both.ids)
    valid_a, valid_b = (valid.T for valid in both.valid)
    decided = valid_a & valid_b
    layers, k = len(both.layers), len(a)
    # most rows are equal to the last slot: only the others are looked at closely
    odd = np.nonzero(decided & _any_slot(a, b))
    x, y = a[:, odd[0], odd[1]], b[:, odd[0], odd[1]]
    common = _common(x, y)
    other_set = common < k
    flip = np.zeros(decided.shape, bool)
    flip[odd] = other_set
    order = np.zeros(decided.shape, bool)
    order[odd] = ~other_set
    lost = 1 - common / (2 * k - common)
    count = np.count_nonzero(decided, axis=1)
    jaccard = count - np.bincount(odd[0], lost, minlength=layers)
    load = _load(x, y, odd[0], layers, both.num_experts)
    margins = tuple(None if m is None else m.T for m in both.margins)
    margin = next((m for m in margins if m is not None), None)
    limit, rule = _limit(margins, decided & ~flip, eps)
    state = np.zeros(decided.shape, np.uint8)
    if not decided.all():
        state[valid_b & ~valid_a] = _CODE["missing_a"]
        state[valid_a & ~valid_b] = _CODE["missing_b"]
    np.copyto(state, np.uint8(_CODE["agree"]), where=decided)
    state[odd] = _CODE["order_only"]
    flips = tuple(where[other_set] for where in odd)
    state[flips] = _judge(flips, margin, limit)
    codes = ("order_only", "near_tie", "margin_unknown", "not_near_tie", "missing_a", "missing_b")
    by_layer = {
        "decisions": count.astype(np.uint32),
        "flips": np.bincount(flips[0], minlength=layers).astype(np.uint32),
        "jaccard": _share(jaccard, count),
        "load_tv": _share(0.5 * np.abs(load).sum(1), count * k),
        **{
            name: np.count_nonzero(state == _CODE[name], axis=1).astype(np.uint32) for name in codes
        },
        **_weighted(both, decided, flip, order),
    }
    return Agreement(state.T, None if margin is None else margin.T, limit, rule, by_layer, load)


def _any_slot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [layers, n], where any slot of [k, layers, n] differs."""
    out = np.zeros(a.shape[1:], bool)
    for mine, other in zip(a, b, strict=True):
        out |= mine != other
    return out


def _common(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """int64 [m], experts in both of two sets [k, m]."""
    hit = np.zeros((2, *x.shape), bool)
    for i, mine in enumerate(x):
        for j, other in enumerate(y):
            same = mine == other
            hit[0, i] |= same
            hit[1, j] |= same
    found: np.ndarray = hit.sum(1).min(0)
    return found


def _judge(
    flips: tuple[np.ndarray, ...], margin: np.ndarray | None, limit: np.ndarray
) -> np.ndarray:
    """Code of each flip; `flips` are its layer and position, `margin` is [layers, n]."""
    layer = flips[0]
    if margin is None:
        return np.full(len(layer), _CODE["margin_unknown"], np.uint8)
    mine = margin[flips]
    known = ~np.isnan(mine) & ~np.isnan(limit[layer])
    judged = np.where(mine < limit[layer], _CODE["near_tie"], _CODE["not_near_tie"])
    return np.where(known, judged, _CODE["margin_unknown"]).astype(np.uint8)


def _limit(
    margins: tuple[np.ndarray | None, ...], agree: np.ndarray, eps: float | None
) -> tuple[np.ndarray, str]:
    """Limit of a near tie by layer, and the rule; arrays [layers, n]."""
    layers = len(agree)
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
    """Of each layer of [layers, n], float64; of all layers together where one has too few."""
    use = where & np.isfinite(values)
    count = np.count_nonzero(use, axis=1)
    columns = np.sort(np.where(use, values, np.float32(np.inf)), axis=1)
    out = np.full(len(count), np.nan)
    rank = (q * (count - 1)).astype(np.int64)
    enough = count >= _ENOUGH
    out[enough] = columns[enough, rank[enough]]
    if not enough.all() and count.sum() >= _ENOUGH:
        out[~enough] = np.sort(values[use])[int(q * (int(count.sum()) - 1))]
    return out


def _load(x: np.ndarray, y: np.ndarray, layer: np.ndarray, layers: int, experts: int) -> np.ndarray:
    """Choices of b minus choices of a, [k, m] each; rows that are equal cancel."""
    size = layers * experts

    def counts(ids: np.ndarray) -> np.ndarray:
        # an id beyond the experts is damage: it must not count for the next layer
        flat = layer * experts + np.minimum(ids.astype(np.int64), experts - 1)
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
    """Top-1 agreement and mean L1 distance of the combine weights; NaN without weights.

    Args:
        both: the choices.
        decided: bool [layers, n], where both sides chose.
        flip: likewise, where the sets differ.
        order: likewise, where the order alone differs.
    """
    nothing = np.full(len(decided), np.nan, np.float32)
    if both.weights[0] is None or both.weights[1] is None:
        return {"top1": nothing, "weight_l1": nothing}
    wa, wb = (w.transpose(2, 1, 0) for w in both.weights if w is not None)
    sides = [ids.transpose(2, 1, 0) for ids in both.ids]
    (total_a, top_a), (total_b, top_b) = (_top1(i, w) for i, w in zip(sides, (wa, wb), strict=True))
    finite = decided & np.isfinite(total_a) & np.isfinite(total_b)
    same_set = finite & ~flip
    distance = np.zeros(decided.shape)
    with np.errstate(invalid="ignore"):
        for mine, other in zip(wa, wb, strict=True):
            distance += np.abs(mine - other)
    moved = np.nonzero(same_set & order)
    ranks = [np.argsort(i[:, moved[0], moved[1]], 0, kind="stable") for i in sides]
    first, second = (
        np.take_along_axis(w[:, moved[0], moved[1]], r, 0)
        for w, r in zip((wa, wb), ranks, strict=True)
    )
    distance[moved] = np.abs(first - second).sum(0)
    total = np.where(same_set, distance, 0).sum(1)
    return {
        "top1": _share((finite & (top_a == top_b)).sum(1), finite.sum(1)),
        "weight_l1": _share(total, same_set.sum(1)),
    }


def _top1(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of [k, layers, n] the sum of the weights, and the expert with the largest one."""
    total, best, top = weights[0].copy(), weights[0].copy(), ids[0].copy()
    for expert, weight in zip(ids[1:], weights[1:], strict=True):
        total += weight
        larger = weight > best
        np.copyto(best, weight, where=larger)
        np.copyto(top, expert, where=larger)
    return total, top


def margin_histogram(found: Agreement) -> np.ndarray:
    """uint32 [layers, 2, bins of `EDGES`]: decisions that agree, and flips, by margin."""
    layers, bins = found.state.shape[1], len(EDGES) - 1
    out = np.zeros((layers, 2, bins), np.uint32)
    if found.margin is None:
        return out
    state, margin = found.state.T, found.margin.T
    known = (state >= _CODE["agree"]) & ~np.isnan(margin)
    margin = np.clip(margin[known], np.float32(EDGES[0]), np.float32(EDGES[-1]))
    place = np.minimum(((np.log10(margin) + 9) * 2).astype(np.int32), bins - 1)
    flipped = state >= _CODE["near_tie"]
    first = (np.arange(layers, dtype=np.int32)[:, None] * 2 + flipped) * np.int32(bins)
    counted = np.bincount(first[known] + place, minlength=out.size)
    out[:] = counted.reshape(out.shape)
    return out
