"""Layers in the viewer: tiles, the front and their states, against a second computation in plain
loops from the numbers that went into the report."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.replay.diff import diff_tapes
from rolltape.store import create_report
from rolltape.viewer.front import DEFAULT, NONE
from rolltape.viewer.heat import FIRST, METRICS, STATES, bin_starts
from tests.builders import random_samples, write_tape
from tests.e2e.viewer_client import Api, Json, decode
from tests.e2e.viewer_data import Scene, build, make_cases
from tests.e2e.viewer_layers_data import FLOOR, FRONT, ONLY_A, ONLY_B, SITES, Errors, layer_errors

WITH_LAYERS = ("0-0.1", "0-0.2", "0-1.0", "0-1.1", "0-2.1")


def tile(api: Api, seq: str, **params: Any) -> tuple[Json, Json]:
    answer = api.raw(api.at("seqs", seq, "heat"), **params)
    assert answer.status_code == 200, answer.text
    return decode(answer.content)


def front(api: Api, seq: str, **params: Any) -> tuple[Json, Json]:
    answer = api.raw(api.at("seqs", seq, "front"), **params)
    assert answer.status_code == 200, answer.text
    return decode(answer.content)


def cell(e: Errors, metric: str, p: int) -> tuple[str, float]:
    """State and value of one position, from the definition."""
    if not e.there[p]:
        return "missing", math.nan
    if metric == "non_finite":
        return ("value", float(e.non_finite[p])) if e.non_finite[p] else ("equal", 0.0)
    if e.equal[p]:
        return "equal", 0.0
    if metric == "equal":
        return "value", 1.0
    if e.non_finite[p]:
        return "not_finite", math.nan
    if metric == "ulp":
        return ("not_measured", math.nan) if e.sketched else ("value", float(e.ulp[p]))
    value = float(getattr(e, metric)[p])
    if math.isnan(value):
        return "not_measured" if e.sketched else "not_finite", math.nan
    return "value", value


def binned(e: Errors, metric: str, positions: range) -> tuple[str, float]:
    cells = [cell(e, metric, p) for p in positions]
    for state in ("not_finite", "value", "not_measured", "equal", "missing"):
        values = [v for s, v in cells if s == state]
        if values:
            return state, min(values) if metric == "cosine" else max(values)
    raise AssertionError("an empty bin")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_tile_is_what_went_into_the_report(
    api: Api, scene: Scene, name: str, metric: str
) -> None:
    case = scene.cases[name]
    errors = layer_errors(name, case.length)
    start, end = (3950, 4150) if case.length > 1000 else (7, case.length - 3)
    bins = 41
    common = {"metric": metric, "start": start, "end": end, "bins": bins, "sites": "*"}
    arrays, metadata = tile(api, case.key_a.id, **common)
    exact, _ = tile(api, case.key_a.id, **common, dtype="f32")
    assert json.loads(metadata["rows"]) == list(SITES)
    assert metadata["states"].split(",") == list(STATES)
    assert metadata["aggregate"] == ("min" if metric == "cosine" else "max")
    assert arrays["codes"].shape == exact["values"].shape == (len(SITES), bins)
    assert arrays["starts"][0] == start
    edges = [*arrays["starts"].tolist(), end]
    sizes = np.diff(edges)
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    for i, site in enumerate(SITES):
        for b in range(bins):
            state, value = binned(errors[site], metric, range(edges[b], edges[b + 1]))
            code = arrays["codes"][i, b]
            if state != "value":
                assert STATES[code] == state, (site, b)
                assert exact["states"][i, b] == code
                assert np.isnan(exact["values"][i, b])
                continue
            assert code >= FIRST and exact["states"][i, b] == FIRST
            assert exact["values"][i, b] == pytest.approx(value, rel=1e-6)
            coded = max(1 - value, 0) if metric == "cosine" else value
            scale = arrays["scale"]
            low, high = float(scale[FIRST]), float(scale[255])
            step = (high / low) ** (0.5 / (255 - FIRST)) * (1 + 1e-5)
            assert 1 / step <= scale[code] / min(max(coded, low), high) <= step


@given(
    values=st.lists(st.floats(1e-12, 1e9), min_size=1, max_size=40),
    metric=st.sampled_from(sorted(METRICS)),
)
def test_codes_and_values_differ_by_half_a_step_and_keep_their_order(
    values: list[float], metric: str
) -> None:
    scale = METRICS[metric]
    codes = scale.codes(np.array(values))
    assert codes.min() >= FIRST
    half = math.log(scale.high / scale.low) / (255 - FIRST) / 2
    for value, code in zip(values, codes.tolist(), strict=True):
        clipped = min(max(value, scale.low), scale.high)
        assert abs(math.log(float(scale.table[code]) / clipped)) <= half + 1e-5
    order = np.argsort(values, kind="stable")
    assert (np.diff(codes[order].astype(int)) >= 0).all()
    assert scale.codes(np.array([0.0]))[0] == FIRST
    assert np.isnan(scale.table[:FIRST]).all()
    back = scale.codes(scale.table[FIRST:].astype(np.float64))
    assert back.tolist() == list(range(FIRST, 256))


@given(n=st.integers(1, 3000), data=st.data())
def test_bins_cover_every_position_once_and_the_largest_of_bins_is_the_largest(
    n: int, data: st.DataObject
) -> None:
    bins = data.draw(st.integers(1, n))
    starts = bin_starts(n, bins)
    sizes = np.diff([*starts, n])
    assert starts[0] == 0 and len(starts) == bins
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    values = np.random.default_rng(n).random(n)
    best = np.maximum.reduceat(values, starts)
    assert best.max() == values.max()
    # coarser bins are made of finer ones only where they nest; the maximum is kept in any case
    for i, start in enumerate(starts):
        assert best[i] == values[start : start + sizes[i]].max()


def test_rows_are_chosen_by_patterns_and_stay_in_the_order_in_which_they_run(
    api: Api, scene: Scene
) -> None:
    seq = scene.id("0-0.1")
    _, metadata = tile(api, seq, sites="logits,layers.3.*, layers.*.out ,embed")
    want = [s for s in SITES if s in ("embed", "logits") or s[:8] == "layers.3" or s[-3:] == "out"]
    assert json.loads(metadata["rows"]) == want
    arrays, _ = tile(api, seq)
    assert len(arrays["codes"]) == 6


@pytest.mark.parametrize("sites", ["layers.99.out", "embed,layers.99.*", "*.gone", ""])
def test_sites_that_the_sequence_does_not_have_are_said(api: Api, scene: Scene, sites: str) -> None:
    path = api.at("seqs", scene.id("0-0.1"), "heat")
    problem = api.fails(400, path, sites=sites)
    assert problem["field"] == "sites"
    assert f"{SITES[0]} to {SITES[-1]}" in problem["detail"]


def test_the_scale_is_the_same_in_every_window(api: Api, scene: Scene) -> None:
    one, _ = tile(api, scene.id("0-0.1"), start=0, end=20)
    other, _ = tile(api, scene.id("0-2.1"), start=3990, end=4010)
    assert np.array_equal(one["scale"], other["scale"], equal_nan=True)


def test_an_empty_window_has_no_bins(api: Api, scene: Scene) -> None:
    arrays, _ = tile(api, scene.id("0-0.1"), start=5, end=5)
    assert arrays["codes"].shape == (6, 0)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"metric": "kl"}, "metric"),
        ({"dtype": "f64"}, "dtype"),
        ({"start": -1}, "start"),
        ({"start": 999}, "start"),
        ({"start": 9, "end": 8}, "end"),
        ({"end": 999}, "end"),
        ({"bins": 0}, "bins"),
        ({"bins": 5000}, "bins"),
    ],
)
def test_a_bad_parameter_is_named(api: Api, scene: Scene, params: Json, field: str) -> None:
    path = api.at("seqs", scene.id("0-0.1"), "heat")
    assert api.fails(400, path, **params)["field"] == field
    assert api.fails(404, api.at("seqs", "1f0c29ab.7-7.7", "heat"))["what"] == "sequence"


# ---- the front ----------------------------------------------------------------------------


def over(e: Errors, p: int, threshold: float) -> bool:
    if not e.there[p] or e.equal[p]:
        return False
    if threshold == 0 or e.non_finite[p] or math.isnan(e.rel_l2[p]):
        return True
    return bool(e.rel_l2[p] > np.float32(threshold))


@pytest.mark.parametrize("threshold", [None, 0, 1e-5, 1e-3])
@pytest.mark.parametrize("name", WITH_LAYERS[:4])
def test_the_front_is_the_first_site_over_the_threshold(
    api: Api, scene: Scene, name: str, threshold: float | None
) -> None:
    case = scene.cases[name]
    errors = layer_errors(name, case.length)
    params = {} if threshold is None else {"threshold": threshold}
    arrays, metadata = front(api, case.key_a.id, **params)
    assert json.loads(metadata["sites"]) == list(SITES)
    assert metadata["rule"] == ("floor" if threshold is None else "threshold")
    limits = [FLOOR.get(s, 0.0) if threshold is None else threshold for s in SITES]
    grid = np.array(
        [
            [over(errors[s], p, limit) for p in range(case.length)]
            for s, limit in zip(SITES, limits, strict=True)
        ]
    )
    want = [int(c.argmax()) if c.any() else NONE for c in grid.T]
    assert arrays["front"].tolist() == want
    assert arrays["over"].tolist() == grid.sum(1).tolist()
    first = [int(row.argmax()) if row.any() else 0xFFFFFFFF for row in grid]
    assert arrays["first"].tolist() == first
    assert arrays["leads"].tolist() == [want.count(i) for i in range(len(SITES))]
    assert arrays["compared"].tolist() == [int(errors[s].there.sum()) for s in SITES]
    unequal = [int((errors[s].there & ~errors[s].equal).sum()) for s in SITES]
    assert arrays["unequal"].tolist() == unequal


def test_the_scene_has_its_front_where_it_was_put(api: Api, scene: Scene) -> None:
    for name, (position, site) in FRONT.items():
        arrays, _ = front(api, scene.id(name))
        assert np.flatnonzero(arrays["front"] != NONE)[0] == position
        assert arrays["front"][position] == site


def test_without_a_floor_the_threshold_is_a_choice_that_is_told(small: Scene) -> None:
    header = json.loads((small.report / "report.json").read_text())
    header["summary"]["activations"]["floor"] = None
    header.pop("xxh3", None)
    (small.report / "report.json").write_text(json.dumps(header))
    api = Api(small.a, small.b, small.report)
    _, metadata = front(api, small.id("0-0.1"))
    assert metadata["rule"] == "threshold"
    assert float(metadata["threshold"]) == DEFAULT
    info = api.get(api.at("seqs", small.id("0-0.1"), "layers"))
    assert info["report"]["floor"] is None and info["report"]["by_site"] is False


def test_the_front_of_a_real_report_is_the_one_that_diff_found(tmp_path: Path) -> None:
    sites = ("layers.0.out", "layers.1.attn", "layers.1.out", "layers.10.out")
    samples = random_samples(3, sites=sites)
    noisy, broken = copy.deepcopy(samples), copy.deepcopy(samples)
    for sample in (*noisy, *broken):
        sample.activations["layers.1.out"] *= np.float32(1.001)
    for site in sites[1:]:
        broken[1].activations[site][7:] *= np.float32(1.1)
    facts = {"host": "here", "device": "cpu"}
    a = write_tape(tmp_path / "a", samples, facts=facts)
    same, b = (
        write_tape(tmp_path / name, other, replays=a, facts=facts)
        for name, other in (("same", noisy), ("b", broken))
    )
    floor = tmp_path / "floor.json"
    diff_tapes(a, same, layers=True, save_floor=floor)
    for used in (floor, None):
        out = tmp_path / f"report-{used is None}"
        found = diff_tapes(a, b, layers=True, floor=used, out=out)["activations"]
        api = Api(a.path, b.path, out)
        place = found["front"]
        arrays, metadata = front(api, place["sequence"], **({} if used else {"threshold": 0}))
        names = json.loads(metadata["sites"])
        assert names == list(sites)
        first = next(i for i in range(len(names)) if arrays["over"][i])
        assert (names[first], arrays["first"][first]) == (place["site"], place["position"])
        assert metadata["rule"] == ("floor" if used else "threshold")
        if used:
            assert (place["site"], place["position"]) == ("layers.1.attn", 7)
            assert dict(zip(names, arrays["over"].tolist(), strict=True)) == {
                **dict.fromkeys(sites, 0), **found["above"]}  # fmt: skip


@pytest.mark.parametrize("threshold", ["nan", "inf", "-1", "many"])
def test_a_threshold_is_a_number(api: Api, scene: Scene, threshold: str) -> None:
    path = api.at("seqs", scene.id("0-0.1"), "front")
    assert api.fails(400, path, threshold=threshold)["field"] == "threshold"


# ---- what there is ------------------------------------------------------------------------


def test_sites_that_one_side_lacks_are_named(api: Api, scene: Scene) -> None:
    info = api.get(api.at("seqs", scene.id("0-0.1"), "layers"))
    assert [s["site"] for s in info["sites"]] == list(SITES)
    assert info["lacking"] == {"only_a": [ONLY_A], "only_b": [ONLY_B], "not_compared": []}
    assert info["report"]["floor"]["sequences"] == 16
    assert info["notices"] == []


def test_without_the_tapes_nobody_knows_which_sites_are_lacking(scene: Scene) -> None:
    api = Api(scene.report)
    info = api.get(api.at("seqs", scene.id("0-0.1"), "layers"))
    assert info["lacking"]["only_a"] is None
    assert len(info["sites"]) == len(SITES)
    assert info["n"] == scene.cases["0-0.1"].length


def test_estimates_from_sketches_are_counted(api: Api, scene: Scene) -> None:
    sites = api.get(api.at("seqs", scene.id("0-2.1"), "layers"))["sites"]
    for i, row in enumerate(sites):
        assert row["positions"] == 6033
        assert row["sketched"] == (6033 if i % 4 == 0 else 0)


def test_every_measure_of_one_position(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.0"]
    errors = layer_errors("0-1.0", case.length)
    for position in (0, 45, 47, 50):
        rows = api.get(api.at("seqs", case.key_a.id, "layers", str(position)))["rows"]
        assert [r["site"] for r in rows] == list(SITES)
        for row in rows:
            e = errors[row["site"]]
            assert row["equal"] is bool(e.equal[position])
            assert row["non_finite"] == e.non_finite[position]
            assert row["ulp"] == e.ulp[position]
            for column in ("rel_l2", "max_abs", "cosine"):
                value = getattr(e, column)[position]
                got = row[column]
                assert (got is None) == bool(np.isnan(value))
                assert got is None or np.float32(got) == value
    rows = api.get(api.at("seqs", scene.id("0-1.1"), "layers", "45"))["rows"]
    assert rows == []  # nothing was recorded there
    assert api.fails(400, api.at("seqs", case.key_a.id, "layers", "9999"))["field"] == "position"


def state(api: Api, scene: Scene, name: str) -> tuple[str, str]:
    info = api.get(api.at("seqs", scene.id(name), "layers"))
    assert info["sites"] == []
    (notice,) = info["notices"]
    return notice["title"], " && ".join(notice["commands"])


def test_each_reason_for_no_layers_has_its_own_words_and_commands(
    scene: Scene, tmp_path: Path
) -> None:
    title, commands = state(Api(scene.a, scene.b, scene.report), scene, "0-0.0")
    assert title == "No layers of this sequence"
    assert f"--sequences {scene.id('0-0.0')}" in commands
    title, commands = state(Api(scene.a), scene, "0-0.1")
    assert title == "No report of this tape is open"
    assert "rolltape replay" in commands and "rolltape diff" in commands
    bare = build(tmp_path / "bare", cases=[c for c in make_cases() if c.name == "0-0.0"])
    title, commands = state(Api(bare.a, bare.b, bare.report), bare, "0-0.0")
    assert title == "No layer data was recorded"
    assert "--sketches 16" in commands
    header = json.loads((scene.report / "report.json").read_text())
    without = create_report(
        tmp_path / "without", summary={**header["summary"], "activations": None}
    )
    title, commands = state(Api(scene.a, scene.b, without), scene, "0-0.1")
    assert title == "Layers were recorded and not compared"
    assert commands.endswith(f"{scene.b} --layers -o {scene.a}-layers")
