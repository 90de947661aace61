"""Routing in the viewer: agreement, margins and near ties, against a second computation in plain
loops from the choices that went into the tapes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.store import TapeWriter
from rolltape.store.codecs import encode_floats
from rolltape.store.routes import Routes
from rolltape.viewer.agreement import EDGES, STATES, align, compare, margin_histogram
from tests.e2e import viewer_data
from tests.e2e.viewer_client import Api, Json, decode
from tests.e2e.viewer_data import EXPERTS, LAYERS, Case, K, Scene, build, make_cases


def window(api: Api, seq: str, **params: Any) -> tuple[Json, Json]:
    answer = api.raw(api.at("seqs", seq, "routing"), **params)
    assert answer.status_code == 200, answer.text
    return decode(answer.content)


def state_of(case: Case, p: int, layer: int, eps: float) -> str:
    if p >= case.length - 1 or (case.name == "0-1.1" and 3 <= p < 5):
        return "missing"
    a, b = case.routes[p, layer].tolist(), case.live[p, layer].tolist()
    if set(a) == set(b):
        return "agree" if a == b else "order_only"
    return "near_tie" if case.margin[p, layer] < eps else "not_near_tie"


@pytest.mark.parametrize("name", ["0-0.1", "0-0.2", "0-1.1", "0-2.1"])
@pytest.mark.parametrize("eps", [0.01, 0.03])
def test_a_window_is_what_the_tapes_hold(api: Api, scene: Scene, name: str, eps: float) -> None:
    case = scene.cases[name]
    start, end, bins = 2, min(case.length, 400), 37
    arrays, metadata = window(api, case.key_a.id, start=start, end=end, bins=bins, eps=eps)
    assert arrays["layers"].tolist() == list(range(LAYERS))
    assert metadata["states"].split(",") == list(STATES)
    assert (metadata["rule"], metadata["role_a"], metadata["role_b"]) == ("given", "used", "used")
    edges = [*arrays["starts"].tolist(), end]
    for layer in range(LAYERS):
        states = {p: state_of(case, p, layer, eps) for p in range(start, end)}
        count = Counter(states.values())
        both = [p for p, s in states.items() if s != "missing"]
        flips = [p for p in both if "tie" in states[p]]
        assert arrays["decisions"][layer] == len(both)
        assert arrays["flips"][layer] == len(flips)
        for kind in ("order_only", "near_tie", "not_near_tie", "margin_unknown"):
            assert arrays[kind][layer] == count[kind], kind
        shares: list[float] = []
        loads: list[Counter[int]] = [Counter(), Counter()]
        for p in both:
            a, b = set(case.routes[p, layer].tolist()), set(case.live[p, layer].tolist())
            shares.append(len(a & b) / len(a | b))
            loads[0].update(a)
            loads[1].update(b)
        assert arrays["jaccard"][layer] == pytest.approx(np.mean(shares), rel=1e-6)
        tv = sum(abs(loads[0][e] - loads[1][e]) for e in range(EXPERTS)) / 2 / (len(both) * K)
        assert arrays["load_tv"][layer] == pytest.approx(tv, rel=1e-6)
        for i in range(bins):
            inside = [states[p] for p in range(edges[i], edges[i + 1])]
            assert STATES[arrays["map"][layer, i]] == max(inside, key=STATES.index)
        for row, chosen in enumerate((set(both) - set(flips), flips)):
            margins = [float(case.margin[p, layer]) for p in chosen]
            want = np.histogram(margins, EDGES)[0]
            assert arrays["margins"][layer, row].tolist() == want.tolist()
        one, _ = window(api, case.key_a.id, start=start, end=end, eps=eps, layers=layer)
        assert one["layers"].tolist() == [layer]
        got = one["load"].tolist()
        assert got == [[loads[s][e] for e in range(EXPERTS)] for s in (0, 1)]
        assert np.array_equal(one["map"][0], [STATES.index(states[p]) for p in range(start, end)])
    assert np.isnan(arrays["top1"]).all() and np.isnan(arrays["weight_l1"]).all()
    assert "load" not in arrays


def test_flips_are_those_of_the_report(api: Api, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    arrays, _ = window(api, case.key_a.id)
    row = next(r for r in api.rows() if r["id"] == case.key_a.id)
    assert arrays["flips"].sum() == round(row["disagree_share"] * arrays["decisions"].sum())


@pytest.mark.parametrize(
    ("params", "status", "field"),
    [
        ({"start": -1}, 400, "start"),
        ({"start": 5, "end": 4}, 400, "end"),
        ({"end": 99999}, 400, "end"),
        ({"eps": "nan"}, 400, "eps"),
        ({"eps": -1}, 400, "eps"),
        ({"layers": "one"}, 400, "layers"),
        ({"layers": "1,,2"}, 400, "layers"),
        ({"bins": 0}, 400, "bins"),
        ({"start": 0, "end": 5000}, 413, "end"),
    ],
)
def test_a_bad_parameter_is_named(
    api: Api, scene: Scene, params: Json, status: int, field: str
) -> None:
    path = api.at("seqs", scene.id("0-2.1"), "routing")
    assert api.fails(status, path, **params)["field"] == field


def test_layers_that_nobody_recorded_are_not_there(api: Api, scene: Scene) -> None:
    arrays, _ = window(api, scene.id("0-0.1"), layers="3,77")
    assert arrays["layers"].tolist() == [3]
    path = api.at("seqs", scene.id("0-0.1"), "routing")
    problem = api.fails(400, path, layers="77")
    assert problem["field"] == "layers"
    assert "no routes of layer 77; recorded are" in problem["detail"]


def test_an_empty_window(api: Api, scene: Scene) -> None:
    arrays, _ = window(api, scene.id("0-0.1"), start=7, end=7)
    assert arrays["decisions"].sum() == 0


# ---- one token ----------------------------------------------------------------------------


def test_the_experts_of_a_token_stand_side_by_side(api: Api, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    for position in (0, 83, 155):
        rows = api.get(api.at("seqs", case.key_a.id, "routing", str(position)))["layers"]
        assert [r["layer"] for r in rows] == list(range(LAYERS))
        for row in rows:
            a, b = (x[position, row["layer"]].tolist() for x in (case.routes, case.live))
            assert (row["a"]["ids"], row["b"]["ids"]) == (a, b)
            assert row["same"] is (set(a) == set(b))
            assert row["order_only"] is (set(a) == set(b) and a != b)
            assert np.float32(row["a"]["margin"]) == case.margin[position, row["layer"]]
            assert row["a"]["weights"] is None and row["a"]["used"] is None


def test_a_token_without_routes_says_why(api: Api, scene: Scene) -> None:
    rows = api.get(api.at("seqs", scene.id("0-1.1"), "routing", "4"))["layers"]
    assert {r["a"]["reason"] for r in rows} == {"cached"}
    assert all(r["a"]["ids"] is None and r["same"] is None for r in rows)
    path = api.at("seqs", scene.id("0-1.1"), "routing", "9999")
    assert api.fails(400, path)["field"] == "position"


# ---- margins and near ties ----------------------------------------------------------------


def routes(ids: np.ndarray, margin: np.ndarray | None, weights: Any = None) -> Routes:
    n, layers, _ = ids.shape
    valid = np.ones((n, layers), bool)
    there = np.full((n, layers), weights is not None)
    return Routes(tuple(range(layers)), 16, ids, valid, weights, there, margin, ())


def pair(n: int, *, noise: float, seed: int = 0) -> tuple[Routes, Routes]:
    """Two routers whose scores differ by noise: all their flips are ties at heart."""
    rng = np.random.default_rng(seed)
    scores = rng.random((n, 2, 16))
    sides = []
    for shift in (0.0, noise):
        mine = scores + shift * rng.standard_normal(scores.shape)
        order = np.argsort(-mine, -1)
        ranked = np.take_along_axis(mine, order, -1)
        margin = (ranked[..., 3] - ranked[..., 4]).astype(np.float32)
        sides.append(routes(order[..., :4].astype(np.uint8), margin))
    return sides[0], sides[1]


def judged(a: Routes, b: Routes, eps: float | None = None) -> tuple[Counter[str], str, np.ndarray]:
    found = compare(align(a, b, len(a.ids)), eps)
    return Counter(STATES[s] for s in found.state.ravel().tolist()), found.rule, found.eps


def test_flips_of_noise_are_near_ties_and_others_are_not() -> None:
    a, b = pair(2000, noise=1e-3)
    count, rule, eps = judged(a, b)
    assert rule == "noise"
    assert ((eps > 1e-3) & (eps < 2e-2)).all()
    assert count["near_tie"] > 20
    assert count["not_near_tie"] <= 1
    rng = np.random.default_rng(5)
    broken = b.ids.copy()
    at = rng.choice(2000, 50, replace=False)
    broken[at, 1] = (broken[at, 1] + 5) % 16
    other, rule, _ = judged(a, routes(broken, b.margin))
    assert rule == "noise"
    assert other["not_near_tie"] >= 40


def test_the_rule_asks_how_far_agreeing_margins_are_apart() -> None:
    a, b = pair(3000, noise=1e-3)
    _, _, eps = judged(a, b)
    same = (np.sort(a.ids, -1) == np.sort(b.ids, -1)).all(-1)
    for layer in range(2):
        apart = np.abs(a.margin - b.margin)[same[:, layer], layer]
        want = 2 * np.quantile(apart[apart > 0], 0.99)
        assert eps[layer] == pytest.approx(want, rel=0.05)


def test_with_margins_of_one_side_the_rank_decides() -> None:
    a, b = pair(3000, noise=1e-3)
    for x, y in ((a, routes(b.ids, None)), (routes(a.ids, None), b)):
        _, rule, eps = judged(x, y)
        assert rule == "rank"
        margin = x.margin if x.margin is not None else y.margin
        same = (np.sort(a.ids, -1) == np.sort(b.ids, -1)).all(-1)
        below = (margin < eps)[same].mean()
        assert below == pytest.approx(0.01, abs=0.002)


def test_margins_that_are_bitwise_equal_say_nothing_of_noise() -> None:
    a, _ = pair(500, noise=0)
    flipped = a.ids.copy()
    flipped[7, 0, 3] = next(e for e in range(16) if e not in a.ids[7, 0])
    _, rule, _ = judged(a, routes(flipped, a.margin))
    assert rule == "rank"


def test_without_margins_nothing_is_called_a_tie() -> None:
    a, b = pair(2000, noise=1e-3)
    count, rule, eps = judged(routes(a.ids, None), routes(b.ids, None))
    assert rule == "none" and np.isnan(eps).all()
    assert count["margin_unknown"] > 20
    assert not count["near_tie"] and not count["not_near_tie"]
    few, rule, _ = judged(*pair(30, noise=0.2))
    assert rule == "none"
    assert few["margin_unknown"] and not few["near_tie"]
    given, rule, _ = judged(*pair(30, noise=0.2), eps=1.0)
    assert rule == "given"
    assert given["near_tie"] and not given["margin_unknown"]


def test_a_margin_that_is_missing_is_unknown_even_with_eps() -> None:
    a, b = pair(500, noise=0.05)
    holes = a.margin.copy()
    holes[:250] = np.nan
    found = compare(align(routes(a.ids, holes), b, 500), 0.5)
    first, second = (Counter(STATES[s] for s in half.ravel()) for half in np.split(found.state, 2))
    assert first["margin_unknown"] and not first["near_tie"]
    assert second["near_tie"] and not second["margin_unknown"]
    assert margin_histogram(found).sum() == 500


@given(seed=st.integers(0, 10_000), n=st.integers(1, 40))
def test_weights_top_1_and_sets_against_plain_loops(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    ids = [np.stack([rng.permutation(6)[:3] for _ in range(n)])[:, None] for _ in "ab"]
    ids = [i.astype(np.uint8) for i in ids]
    ids[1][: n // 2] = ids[0][: n // 2][:, :, rng.permutation(3)]
    weights = [rng.random((n, 1, 3)).astype(np.float32) for _ in "ab"]
    weights[0][rng.random((n, 1)) < 0.2] = np.nan
    a, b = (routes(i, None, w) for i, w in zip(ids, weights, strict=True))
    found = compare(align(a, b, n), None)
    same, tops, distances, shares = 0, [], [], []
    for p in range(n):
        x, y = (dict(zip(i[p, 0].tolist(), w[p, 0], strict=True)) for i, w in
                zip(ids, weights, strict=True))  # fmt: skip
        shares.append(len(x.keys() & y.keys()) / len(x.keys() | y.keys()))
        same += x.keys() == y.keys()
        if np.isnan([*x.values(), *y.values()]).any():
            continue
        tops.append(max(x, key=x.get) == max(y, key=y.get))
        if x.keys() == y.keys():
            distances.append(sum(abs(float(x[e]) - float(y[e])) for e in x))
    assert found.by_layer["flips"][0] == n - same
    assert found.by_layer["jaccard"][0] == pytest.approx(np.mean(shares), rel=1e-5)
    for name, values in (("top1", tops), ("weight_l1", distances)):
        got = found.by_layer[name][0]
        assert got == pytest.approx(np.mean(values), rel=1e-5) if values else np.isnan(got)
    order = ((ids[0] != ids[1]).any(-1) & (np.sort(ids[0]) == np.sort(ids[1])).all(-1)).sum()
    assert found.by_layer["order_only"][0] == order


def test_layers_of_one_side_are_missing_on_the_other() -> None:
    a, b = pair(10, noise=0)
    other = Routes((1, 5), 16, b.ids, b.valid, None, b.weighted, None, ())
    both = align(a, other, 12)
    found = compare(both, None)
    assert both.layers == [0, 1, 5]
    states = np.array(STATES)[found.state]
    assert (states[:10, 0] == "missing_b").all()
    assert (states[:10, 2] == "missing_a").all()
    assert (states[10:] == "missing").all()
    assert found.by_layer["decisions"].tolist() == [0, 10, 0]
    assert np.isnan(found.by_layer["jaccard"][[0, 2]]).all()


# ---- states -------------------------------------------------------------------------------


def info(api: Api, seq: str) -> Json:
    return api.get(api.at("seqs", seq, "routes"))


def test_both_sides_recorded_routes(api: Api, scene: Scene) -> None:
    found = info(api, scene.id("0-0.1"))
    assert found["comparable"] and found["notices"] == []
    assert found["a"]["layers"] == list(range(LAYERS))
    assert (found["a"]["k"], found["a"]["num_experts"]) == (K, EXPERTS)


def test_each_reason_for_no_comparison_has_its_own_words(scene: Scene, tmp_path: Path) -> None:
    seq = scene.id("0-0.1")
    titles = {
        "No report": Api(scene.a),
        "B not open": Api(scene.a, scene.report),
        "report only": Api(scene.report),
    }
    found = {k: info(a, seq) for k, a in titles.items()}
    assert not any(f["comparable"] for f in found.values())
    assert {k: f["notices"][0]["title"] for k, f in found.items()} == {
        "No report": "Nothing to compare with",
        "B not open": "Tape B is not open",
        "report only": "The tape is not open",
    }
    assert f"rolltape view {scene.a} {scene.b}" in found["B not open"]["notices"][0]["commands"][0]
    open_one = info(Api(scene.a, scene.b, scene.report), scene.id("0-2.2"))
    assert open_one["notices"][0]["title"] == "Not in the report"


def test_a_dense_model_has_no_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = TapeWriter.append

    def dense(self: TapeWriter, table: str, columns: Any) -> None:
        if table == "engines":
            columns = {**columns, "moe_layers": [[]], "num_experts": None}
        if table != "routes":
            append(self, table, columns)

    monkeypatch.setattr(TapeWriter, "append", dense)
    scene = build(tmp_path, cases=make_cases()[:1])
    found = info(Api(scene.a, scene.b, scene.report), scene.id("0-0.0"))
    assert found["notices"][0]["title"] == "A dense model"
    assert found["a"]["dense"] and not found["comparable"]


@pytest.mark.parametrize(("silent", "title"), [("a", "No routes were recorded"),
                                               ("b", "The other side lacks routes")])  # fmt: skip
def test_a_side_without_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str, title: str
) -> None:
    write = viewer_data._write_routes

    def some(writer: TapeWriter, case: Case, key: Any, ids: Any, **more: Any) -> None:
        if (key.engine == viewer_data.ENGINE_A) != (silent == "a"):
            write(writer, case, key, ids, **more)

    monkeypatch.setattr(viewer_data, "_write_routes", some)
    scene = build(tmp_path, cases=make_cases()[:1])
    api = Api(scene.a, scene.b, scene.report)
    found = info(api, scene.id("0-0.0"))
    assert found["notices"][0]["title"] == title
    assert found["notices"][0]["commands"]
    arrays, _ = window(api, scene.id("0-0.0"))  # asked all the same
    assert arrays["decisions"].sum() == 0
    assert arrays[f"missing_{silent}"].sum() == (scene.cases["0-0.0"].length - 1) * LAYERS


def test_where_routes_were_forced_the_own_choice_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = viewer_data._write_routes

    def forced(writer: TapeWriter, case: Case, key: Any, ids: Any, **more: Any) -> None:
        if key.engine == viewer_data.ENGINE_B:
            write(writer, case, key, ids, **{**more, "role": "live"})
        write(writer, case, key, case.routes, **more)

    monkeypatch.setattr(viewer_data, "_write_routes", forced)
    scene = build(tmp_path, cases=[c for c in make_cases() if c.name == "0-0.1"])
    case, api = scene.cases["0-0.1"], Api(scene.a, scene.b, scene.report)
    found = info(api, case.key_a.id)
    assert found["comparable"]
    assert found["notices"][0]["title"] == "Forced routes on side B"
    arrays, metadata = window(api, case.key_a.id)
    assert (metadata["role_a"], metadata["role_b"]) == ("used", "live")
    flips = (np.sort(case.routes, -1) != np.sort(case.live, -1)).any(-1)
    assert arrays["flips"].tolist() == flips.sum(0).tolist()
    position, layer = np.argwhere(flips)[0].tolist()
    rows = api.get(api.at("seqs", case.key_a.id, "routing", str(position)))["layers"]
    assert rows[layer]["b"]["ids"] == case.live[position, layer].tolist()
    assert rows[layer]["b"]["used"] == case.routes[position, layer].tolist()
    assert rows[layer]["a"]["used"] is None


def test_routes_of_another_number_of_experts_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = TapeWriter.append

    def wider(self: TapeWriter, table: str, columns: Any) -> None:
        if table == "routes" and columns["engine"][0] == viewer_data.ENGINE_B:
            columns = {**columns, "num_experts": [EXPERTS * 2]}
        append(self, table, columns)

    monkeypatch.setattr(TapeWriter, "append", wider)
    scene = build(tmp_path, cases=make_cases()[:1])
    api = Api(scene.a, scene.b, scene.report)
    found = info(api, scene.id("0-0.0"))
    assert found["notices"][0]["title"] == "Routes of two kinds"
    assert not found["comparable"]
    problem = api.fails(409, api.at("seqs", scene.id("0-0.0"), "routing"))
    assert "4 of 16 experts against 4 of 32" in problem["detail"]


def test_recorded_weights_reach_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = TapeWriter.append
    rng = np.random.default_rng(3)
    kept: dict[str, np.ndarray] = {}

    def weighted(self: TapeWriter, table: str, columns: Any) -> None:
        if table == "routes":
            shape = (columns["n"][0], LAYERS, K)
            kept[columns["engine"][0]] = rng.random(shape).astype(np.float32)
            weights = encode_floats(kept[columns["engine"][0]])
            columns = {**columns, "weights": [weights]}
        append(self, table, columns)

    monkeypatch.setattr(TapeWriter, "append", weighted)
    scene = build(tmp_path, cases=make_cases()[:1])
    case, api = scene.cases["0-0.0"], Api(scene.a, scene.b, scene.report)
    arrays, _ = window(api, case.key_a.id)
    a, b = kept[viewer_data.ENGINE_A], kept[viewer_data.ENGINE_B]
    top = [np.take_along_axis(i, w.argmax(-1)[..., None], -1)[..., 0] for i, w in
           ((case.routes, a), (case.live, b))]  # fmt: skip
    assert arrays["top1"] == pytest.approx((top[0] == top[1]).mean(0), rel=1e-6)
    assert not np.isnan(arrays["weight_l1"]).any()
    row = api.get(api.at("seqs", case.key_a.id, "routing", "9"))["layers"][2]
    assert np.array(row["a"]["weights"], np.float32).tolist() == a[9, 2].tolist()
    assert json.dumps(row)
