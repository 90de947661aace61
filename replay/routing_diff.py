"""Routing agreement: did both sides choose the same experts, at the same position and layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.replay.measures import BUCKET_NAMES, bucket_of, same_bits
from rolltape.replay.value_floor import RouteFloor
from rolltape.store.columns import Masked
from rolltape.store.routes import Routes
from rolltape.store.sequences import Sequence

_ROWS = 4096  # positions at a time: bounds memory, not the result

_FIELDS = (
    "decisions",
    "disagree",
    "order_only",
    "top1_n",
    "top1_disagree",
    "weight_n",
    "weight_finite",
    "weight_l1",
    "weight_equal",
    "flip_n",
    "flip_margin",
    "agree_n",
    "agree_margin",
)
#: Reasons of missing routes that nobody could have recorded.
_NO_FAULT = ("cached", "dense", "last")
_AT = {name: i for i, name in enumerate(_FIELDS)}


@dataclass(frozen=True)
class Choice:
    """What a side would have chosen itself.

    Args:
        routes: its `live` choice where another was forced on it, else what it used.
        role: live or used.
        used: what it used; the same object unless something was forced.
    """

    routes: Routes
    role: str
    used: Routes | None


@dataclass(frozen=True)
class PairRouting:
    """Routing of one pair of sequences.

    Args:
        flips: int32 [n], layers that disagree at each position; missing without a route.
        decisions: (position, layer) choices compared.
        disagree: of those, another set of experts.
        tokens: positions with a compared choice.
        tokens_any: of those, where any layer disagrees.
    """

    flips: Masked
    decisions: int
    disagree: int
    tokens: int
    tokens_any: int


def own_choice(sequence: Sequence) -> Choice | None:
    """The choice of a side, None if no routes are there."""
    used, live = sequence.routes("used"), sequence.routes("live")
    if live is not None:
        return Choice(live, "live", used)
    return None if used is None else Choice(used, "used", used)


class RoutingTally:
    """Adds up routing agreement over pairs, by layer and by slice."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(len(_FIELDS)))
        self._flip_max: dict[tuple[str, int], float] = {}
        self._weight_max = 0.0
        self._roles: tuple[set[str], set[str]] = (set(), set())
        self._margin_sides: set[str] = set()
        self._used = [0, 0]
        self._missing = [0, 0]
        self.sequences = 0
        self.tokens = 0
        self.tokens_any = 0

    @property
    def decisions(self) -> int:
        """Choices compared."""
        return int(self._total("all")[_AT["decisions"]])

    @property
    def differences(self) -> dict[str, int]:
        """Choices that are not equal: in experts, slot order, weights, or forced ids."""
        total = self._total("all")
        return {
            "routes": int(total[_AT["disagree"]]),
            "route_order": int(total[_AT["order_only"]]),
            "route_weights": int(total[_AT["weight_n"]] - total[_AT["weight_equal"]]),
            "used_routes": self.used_differ,
        }

    @property
    def seen(self) -> RouteFloor | None:
        """What is measured of noise; None if nothing was compared."""
        total = self._total("all")
        if not self.decisions:
            return None
        weights = int(total[_AT["weight_n"]])
        return RouteFloor(
            decisions=self.decisions,
            disagree=int(total[_AT["disagree"]]),
            order_only=int(total[_AT["order_only"]]),
            weights=weights,
            weight_max=self._weight_max if weights else None,
        )

    @property
    def weights_non_finite(self) -> int:
        """Decisions with the same experts and a weight that is not finite."""
        total = self._total("all")
        return int(total[_AT["weight_n"]] - total[_AT["weight_finite"]])

    @property
    def used_differ(self) -> int:
        """Choices used that are not equal on both sides; 0 where nothing was forced."""
        return self._used[0] - self._used[1]

    def add(
        self, a: Sequence, b: Sequence, first: Choice, second: Choice, *, version: Masked
    ) -> tuple[PairRouting | None, list[Problem]]:
        """Compare the routes of one pair.

        Args:
            a: sequence of tape A.
            b: its partner.
            first: choice of a.
            second: choice of b.
            version: int64 [n], weight version of the forward that each position was input to.

        Returns:
            The pair's own counts (None if nothing is comparable) and what does not fit.
        """
        x, y = first.routes, second.routes
        shapes = [(r.num_experts, r.ids.shape[2]) for r in (x, y)]
        if shapes[0] != shapes[1]:
            text = " against ".join(f"{k} of {experts} experts" for experts, k in shapes)
            fields = {"sequence": a.id, "values": [list(s) for s in shapes]}
            return None, [
                Problem("experts", f"{a.id}: routes of {text}; not compared", fields=fields)
            ]
        problems = _layer_problems(a, x, y)
        layers = sorted(set(x.layers) & set(y.layers))
        if not layers:
            return None, problems
        n = min(a.length, b.length)
        columns_a = [x.layers.index(layer) for layer in layers]
        columns_b = [y.layers.index(layer) for layer in layers]
        self._roles[0].add(first.role)
        self._roles[1].add(second.role)
        margin_side, margins = _margins(x, y, columns_a, columns_b)
        if margin_side:
            self._margin_sides.add(margin_side)
        flips = np.zeros(n, np.int32)
        any_valid = np.zeros(n, bool)
        decisions = disagree = 0
        absent = np.zeros(2, np.int64)
        slices = _slices(np.arange(n) - a.prompt_len, version)
        excused = [_excused(x, layers, n), _excused(y, layers, n)]
        for start in range(0, n, _ROWS):
            span = slice(start, min(n, start + _ROWS))
            valid_a, valid_b = x.valid[span][:, columns_a], y.valid[span][:, columns_b]
            stack = _compare(
                _part(x, span, columns_a),
                _part(y, span, columns_b),
                valid_a & valid_b,
                None if margins is None else margins[span],
            )
            flips[span] = stack[..., _AT["disagree"]].sum(1)
            any_valid[span] = (valid_a & valid_b).any(1)
            self._weight_max = max(
                self._weight_max, float(stack[..., _AT["weight_l1"]].max(initial=0.0))
            )
            decisions += int(stack[..., _AT["decisions"]].sum())
            disagree += int(flips[span].sum())
            inner = np.arange(span.start, span.stop)[:, None] < max(a.length, b.length) - 1
            absent += [
                int((~valid_a & valid_b & inner & ~excused[0][span]).sum()),
                int((valid_a & ~valid_b & inner & ~excused[1][span]).sum()),
            ]
            flip_margin = None
            if margins is not None:
                wrong = (stack[..., _AT["disagree"]] > 0) & np.isfinite(margins[span])
                flip_margin = np.where(wrong, margins[span], -np.inf)
            for name, rows in slices:
                self._add(name, layers, stack, flip_margin, rows[span])
        if "live" in (first.role, second.role) and first.used and second.used:
            self._count_used(first.used, second.used, layers, n)
        for side in range(2):
            self._missing[side] += int(absent[side])
        self.sequences += 1
        tokens, tokens_any = int(any_valid.sum()), int((flips > 0).sum())
        self.tokens += tokens
        self.tokens_any += tokens_any
        found = PairRouting(Masked(flips, any_valid), decisions, disagree, tokens, tokens_any)
        return found, problems

    def _add(
        self,
        name: str,
        layers: list[int],
        stack: np.ndarray,
        flip_margin: np.ndarray | None,
        rows: np.ndarray,
    ) -> None:
        sums = stack[rows].sum(0)
        top = None if flip_margin is None else flip_margin[rows].max(0, initial=-np.inf)
        for i, layer in enumerate(layers):
            if not sums[i, 0]:
                continue
            self._sums[name, layer] += sums[i]
            if top is not None:
                self._flip_max[name, layer] = max(
                    self._flip_max.get((name, layer), -np.inf), top[i]
                )

    def _count_used(self, x: Routes, y: Routes, layers: list[int], n: int) -> None:
        columns = [[r.layers.index(v) for v in layers if v in r.layers] for r in (x, y)]
        if len(columns[0]) != len(layers) or len(columns[1]) != len(layers):
            return
        both = x.valid[:n][:, columns[0]] & y.valid[:n][:, columns[1]]
        equal = (x.ids[:n][:, columns[0]] == y.ids[:n][:, columns[1]]).all(-1)
        self._used[0] += int(both.sum())
        self._used[1] += int((both & equal).sum())

    def _total(self, name: str) -> np.ndarray:
        rows = [sums for (slice_name, _), sums in self._sums.items() if slice_name == name]
        return np.sum(rows, axis=0) if rows else np.zeros(len(_FIELDS))

    def problems(self, *, b_replays_a: bool) -> list[Problem]:
        """Routes that are missing on one side only, and forced routes that are not the recorded."""
        found = []
        for side, count in zip("ab", self._missing, strict=True):
            if count:
                message = f"{side} lacks {count:,} routing decisions that the other side has"
                found.append(
                    Problem("routes_missing", message, fields={"side": side, "count": count})
                )
        if b_replays_a and self.used_differ:
            message = (
                f"{self.used_differ:,} of {self._used[0]:,} routes used by b are not those of a"
            )
            found.append(Problem("used_routes", message, fields={"count": self.used_differ}))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the report's `routing` table."""
        order = sorted(self._sums, key=lambda key: (key[0] != "all", key[0], key[1]))
        names = (
            "decisions", "disagree", "order_only", "top1_disagree", "weight_l1",
            "flip_margin_mean", "flip_margin_max", "agree_margin_mean",
        )  # fmt: skip
        return [
            {
                "layer": layer,
                "slice": name,
                **{k: v for k, v in self._row([(name, layer)]).items() if k in names},
            }
            for name, layer in order
        ]

    def summary(self) -> dict[str, Any] | None:
        """The `routing` object of a report, None if nothing was compared."""
        if not self.decisions:
            return None
        keys = list(self._sums)
        layers = sorted({layer for name, layer in keys if name == "all"})
        slices = sorted({name for name, _ in keys if name != "all"}, key=_slice_order)
        by_slice = {name: self._row([k for k in keys if k[0] == name]) for name in slices}
        return {
            **self._row([k for k in keys if k[0] == "all"]),
            "sequences": self.sequences,
            "tokens": self.tokens,
            "tokens_any": self.tokens_any,
            "missing_a": self._missing[0],
            "missing_b": self._missing[1],
            "a_role": "+".join(sorted(self._roles[0])),
            "b_role": "+".join(sorted(self._roles[1])),
            "used": {"decisions": self._used[0], "equal": self._used[1]} if self._used[0] else None,
            "margin_side": "+".join(sorted(self._margin_sides)) or None,
            "per_layer": [{"layer": layer, **self._row([("all", layer)])} for layer in layers],
            "by_position": _named(by_slice, "position:"),
            "by_version": _named(by_slice, "version:"),
        }

    def _row(self, keys: list[tuple[str, int]]) -> dict[str, Any]:
        s = np.sum([self._sums[key] for key in keys], axis=0)
        tops = [self._flip_max[key] for key in keys if key in self._flip_max]
        top = max(tops, default=-np.inf)
        counts = {name: int(s[_AT[name]]) for name in ("decisions", "disagree", "order_only")}
        known = int(s[_AT["top1_n"]])
        return {
            **counts,
            "frac_disagree": counts["disagree"] / counts["decisions"],
            "top1_compared": known,
            "top1_disagree": int(s[_AT["top1_disagree"]]) if known else None,
            "weights_compared": int(s[_AT["weight_n"]]),
            "weights_equal": int(s[_AT["weight_equal"]]),
            "weight_l1": _mean(s, "weight_l1", "weight_finite"),
            "weights_non_finite": int(s[_AT["weight_n"]] - s[_AT["weight_finite"]]),
            "flip_margin_mean": _mean(s, "flip_margin", "flip_n"),
            "flip_margin_max": float(top) if np.isfinite(top) else None,
            "agree_margin_mean": _mean(s, "agree_margin", "agree_n"),
        }


def input_version(sequence: Sequence, n: int) -> Masked:
    """Weight version of the first forward that each position was input to, int64 [n]."""
    out = Masked.empty(n, np.int64)
    table = sequence.forwards
    columns = ("start", "n", "kind", "weight_version")
    for start, count, kind, value in zip(
        *(table.column(c).to_pylist() for c in columns), strict=True
    ):
        if kind != "dummy" and value is not None:
            span = slice(start, start + count)
            fresh = ~out.valid[span]
            out.values[span][fresh] = value
            out.valid[span] = True
    return out


@dataclass(frozen=True)
class _Part:
    ids: np.ndarray  # [c, L, k]
    weights: np.ndarray | None
    weighted: np.ndarray  # [c, L]


def _part(routes: Routes, span: slice, columns: list[int]) -> _Part:
    weights = None if routes.weights is None else routes.weights[span][:, columns]
    return _Part(routes.ids[span][:, columns], weights, routes.weighted[span][:, columns])


def _compare(a: _Part, b: _Part, valid: np.ndarray, margin: np.ndarray | None) -> np.ndarray:
    """One number a (position, layer, field of `_FIELDS`)."""
    out = np.zeros((*valid.shape, len(_FIELDS)))
    by_id_a, by_id_b = np.argsort(a.ids, -1, kind="stable"), np.argsort(b.ids, -1, kind="stable")
    sorted_a = np.take_along_axis(a.ids, by_id_a, -1)
    sorted_b = np.take_along_axis(b.ids, by_id_b, -1)
    same_set = (sorted_a == sorted_b).all(-1)
    disagree = valid & ~same_set
    out[..., _AT["decisions"]] = valid
    out[..., _AT["disagree"]] = disagree
    out[..., _AT["order_only"]] = valid & same_set & ~(a.ids == b.ids).all(-1)
    (first_a, known_a), (first_b, known_b) = _top1(a), _top1(b)
    out[..., _AT["top1_n"]] = known = valid & known_a & known_b
    out[..., _AT["top1_disagree"]] = known & (first_a != first_b)
    if a.weights is not None and b.weights is not None:
        wa = np.take_along_axis(a.weights, by_id_a, -1)
        wb = np.take_along_axis(b.weights, by_id_b, -1)
        known = valid & same_set & a.weighted & b.weighted
        finite = known & np.isfinite(wa).all(-1) & np.isfinite(wb).all(-1)
        distance = np.abs(np.where(finite[..., None], wa, 0).astype(np.float64)
                          - np.where(finite[..., None], wb, 0)).sum(-1)  # fmt: skip
        out[..., _AT["weight_n"]] = known
        out[..., _AT["weight_finite"]] = finite
        out[..., _AT["weight_l1"]] = distance
        out[..., _AT["weight_equal"]] = known & same_bits(wa, wb).all(-1)
    if margin is not None:
        finite = valid & np.isfinite(margin)
        for rows, count, total in (
            (finite & disagree, "flip_n", "flip_margin"),
            (finite & ~disagree, "agree_n", "agree_margin"),
        ):
            out[..., _AT[count]] = rows
            out[..., _AT[total]] = np.where(rows, margin, 0)
    return out


def _top1(part: _Part) -> tuple[np.ndarray, np.ndarray]:
    """Expert with the largest combine weight [c, L], and where that is known, bool [c, L].

    Slot 0 does not tell it: engines order their slots by weight, by expert, or not at all.
    """
    if part.ids.shape[-1] == 1:
        return part.ids[..., 0], np.ones(part.ids.shape[:-1], bool)
    if part.weights is None:
        return part.ids[..., 0], np.zeros(part.ids.shape[:-1], bool)
    best = np.argmax(np.nan_to_num(part.weights, nan=-np.inf), -1)[..., None]
    top = np.take_along_axis(part.ids, best, -1)[..., 0]
    return top, part.weighted & np.isfinite(part.weights).all(-1)


def _margins(
    x: Routes, y: Routes, columns_a: list[int], columns_b: list[int]
) -> tuple[str | None, np.ndarray | None]:
    if x.margin is not None:
        return "a", x.margin[:, columns_a]
    if y.margin is not None:
        return "b", y.margin[:, columns_b]
    return None, None


def _excused(routes: Routes, layers: list[int], n: int) -> np.ndarray:
    """Where a route is missing for a reason that is no fault, bool [n, layers]."""
    out = np.zeros((n, len(layers)), bool)
    for start, count, layer, reason in routes.missing:
        if reason in _NO_FAULT and (layer is None or layer in layers):
            out[start : start + count, slice(None) if layer is None else layers.index(layer)] = True
    return out


def _slices(response: np.ndarray, version: Masked) -> list[tuple[str, np.ndarray]]:
    """(name, bool [n]) of every slice that has positions."""
    buckets = bucket_of(response)
    found = [("all", np.ones(len(response), bool))]
    for bucket in np.unique(buckets):
        name = "prompt" if bucket < 0 else BUCKET_NAMES[bucket]
        found.append((f"position:{name}", buckets == bucket))
    for value in np.unique(version.values[version.valid]):
        found.append((f"version:{value}", version.valid & (version.values == value)))
    return found


def _slice_order(name: str) -> tuple[str, int]:
    kind, _, value = name.partition(":")
    if kind == "position":
        return kind, -1 if value == "prompt" else BUCKET_NAMES.index(value)
    return kind, int(value)


def _named(rows: dict[str, dict[str, Any]], prefix: str) -> dict[str, dict[str, Any]]:
    return {k.removeprefix(prefix): v for k, v in rows.items() if k.startswith(prefix)}


def _mean(sums: np.ndarray, total: str, count: str) -> float | None:
    n = sums[_AT[count]]
    return float(sums[_AT[total]] / n) if n else None


def _layer_problems(a: Sequence, x: Routes, y: Routes) -> list[Problem]:
    only_a, only_b = sorted(set(x.layers) - set(y.layers)), sorted(set(y.layers) - set(x.layers))
    if not only_a and not only_b:
        return []
    sides = [
        f"only {side} has layers {only}" for side, only in (("a", only_a), ("b", only_b)) if only
    ]
    message = f"{a.id}: routes of other layers: {'; '.join(sides)}"
    return [Problem("route_layers", message, fields={"sequence": a.id, "values": [only_a, only_b]})]
