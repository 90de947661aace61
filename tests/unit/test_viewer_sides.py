"""Two reports of one tape side by side: arrays, counts, what has no match."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from tests.e2e.viewer_client import Api, Json, decode
from tests.e2e.viewer_data import Case, Scene, add_replay, build, diff_case, make_cases

NAME = "0-0.1"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, list[Case], list[Case], Api]:
    """A second replay: bits kept up to position 60, moved by half the difference behind it."""
    cases = make_cases(long=5000)
    scene = build(tmp_path_factory.mktemp("sides"), cases=cases)
    second = copy.deepcopy(cases)
    for case in second:
        late = np.arange(case.length) >= 60
        half = case.a.values + (case.b.values - case.a.values) / 2
        case.b.values[late] = half[late]
    # what the second report did not compare
    left = [c for c in second if c.name != "0-1.0"]
    add_replay(scene, "second", left, switches={"routing": "ids"})
    return scene, cases, second, Api(scene.a.parent)


def reports(api: Api) -> dict[str, str]:
    (run,) = (r for r in api.get("/api/runs")["runs"] if r["id"] == api.run)
    return {
        "a": next(str(r["id"]) for r in run["reports"] if r["name"] == "report"),
        "b": next(str(r["id"]) for r in run["reports"] if r["name"] == "second-report"),
    }


def window(api: Api, seq: str, start: int, end: int) -> tuple[Json, Json]:
    answer = api.raw(api.at("seqs", seq, "sides"), **reports(api), start=start, end=end)
    assert answer.status_code == 200, answer.text
    return decode(answer.content)


def case_of(cases: list[Case], name: str) -> Case:
    return next(c for c in cases if c.name == name)


def test_both_deltas_and_their_difference(two: Any) -> None:
    _, cases, second, api = two
    one, other = case_of(cases, NAME), case_of(second, NAME)
    arrays, metadata = window(api, one.key_a.id, 0, one.length)
    bits = {name: 1 << k for k, name in enumerate(metadata["flags"].split(","))}
    for name, case in (("delta_a", one), ("delta_b", other)):
        want = diff_case(case)["delta"]
        assert ((arrays["flags"] & bits[name]) > 0).tolist() == want.valid.tolist()
        assert arrays[name][want.valid].tolist() == want.values[want.valid].tolist()
    both = diff_case(one)["delta"].valid
    want = (one.b.values.astype(np.float64) - other.b.values)[both].astype(np.float32)
    assert arrays["difference"][both].tolist() == want.tolist()
    equal = one.b.values.view(np.uint32) == other.b.values.view(np.uint32)
    assert ((arrays["flags"] & bits["equal"]) > 0).tolist() == (both & equal).tolist()


def test_counts_first_difference_and_settings(two: Any) -> None:
    _, cases, second, api = two
    one, other = case_of(cases, NAME), case_of(second, NAME)
    info = api.get(api.at("seqs", one.key_a.id, "sides", "info"), **reports(api))
    both = diff_case(one)["delta"].valid
    differs = both & (one.b.values != other.b.values)
    size = np.abs(one.b.values.astype(np.float64) - other.b.values)[both]
    counts = info["counts"]
    assert counts["both"] == both.sum()
    assert counts["equal"] == (both & ~differs).sum()
    assert counts["max"] == pytest.approx(size.max(), rel=1e-6)
    assert counts["mean_difference"] == pytest.approx(size.mean(), rel=1e-6)
    assert info["first"] == int(differs.argmax()) >= 60
    assert info["settings"]["rows"] == [{"name": "switch routing", "a": "live", "b": "ids"}]
    assert info["settings"]["equal"] > 0
    assert (info["a"]["here"], info["b"]["here"]) == (True, True)
    assert info["unmatched"] == []


def test_a_sequence_that_one_report_lacks_is_shown_alone(two: Any) -> None:
    _, cases, _, api = two
    case = case_of(cases, "0-1.0")
    info = api.get(api.at("seqs", case.key_a.id, "sides", "info"), **reports(api))
    assert (info["a"]["here"], info["b"]["here"]) == (True, False)
    assert info["first"] is None
    assert info["counts"]["both"] == 0
    assert info["counts"]["only_a"] == diff_case(case)["delta"].valid.sum()
    arrays, metadata = window(api, case.key_a.id, 0, 20)
    states = metadata["states"].split(",")
    assert {states[s] for s in arrays["state_b"]} == {"not_diffed"}


def test_layers_that_one_report_lacks_are_listed(two: Any, tmp_path: Any) -> None:
    cases = make_cases(long=200)[:2]
    scene = build(tmp_path, cases=cases)
    report = add_replay(scene, "second", cases, switches={"routing": "ids"})
    for shard in (report / "routing").iterdir():
        shard.unlink()
    api = Api(tmp_path)
    info = api.get(api.at("seqs", cases[0].key_a.id, "sides", "info"), **reports(api))
    assert {
        "what": "layers with routes",
        "only": "a",
        "names": [str(n) for n in range(6)],
    } in info["unmatched"]


def test_walking_what_is_over_a_threshold(two: Any) -> None:
    _, cases, second, api = two
    one, other = case_of(cases, NAME), case_of(second, NAME)
    path = api.at("seqs", one.key_a.id, "sides", "over")
    both = diff_case(one)["delta"].valid
    size = np.where(both, np.abs(one.b.values.astype(np.float64) - other.b.values), 0)
    want = np.flatnonzero(size.astype(np.float32) > 1e-2).tolist()
    assert len(want) > 3
    found, at = [], -1
    while True:
        answer = api.get(path, **reports(api), threshold=1e-2, **{"from": at})
        assert answer["of"] == len(want)
        if answer["position"] is None:
            break
        at = answer["position"]
        found.append(at)
    assert found == want
    back = api.get(path, **reports(api), threshold=1e-2, back=True, **{"from": want[-1]})
    assert back["position"] == want[-2]
    of_b = api.get(path, **reports(api), threshold=1e-2, show="b", **{"from": -1})
    delta = diff_case(other)["delta"]
    assert of_b["of"] == (delta.valid & (np.abs(delta.values) > np.float32(1e-2))).sum()


def test_bad_requests_name_what_is_wrong(two: Any) -> None:
    _, cases, _, api = two
    path = api.at("seqs", case_of(cases, "0-2.1").key_a.id, "sides")
    both = reports(api)
    assert api.fails(400, path, a=both["a"], start=0, end=9)["field"] == "b"
    assert api.fails(413, path, **both, start=0, end=4097)["limit"] == 4096
    assert api.fails(400, path, **both, start=0 + 4999, end=5050)["field"] == "end"
    assert api.fails(400, path, **both, start=-1, end=5)["field"] == "start"
    assert api.fails(404, path, a="none", b=both["b"], start=0, end=5)["what"] == "report"
    nobody = api.at("seqs", "1f0c29ab.none.0", "sides", "info")
    assert api.fails(404, nobody, **both)["what"] == "sequence"
    over = api.fails(400, f"{path}/over", **both, threshold=0.1, show="x", **{"from": 0})
    assert over["field"] == "show"


def test_an_answer_has_a_tag(two: Any) -> None:
    _, cases, _, api = two
    path = api.at("seqs", case_of(cases, NAME).key_a.id, "sides", "info")
    first = api.raw(path, **reports(api))
    tag = first.headers["etag"]
    again = api.client.get(path, params=reports(api), headers={"if-none-match": tag})
    assert again.status_code == 304
    assert json.loads(first.content)["run"]["id"] == api.run
