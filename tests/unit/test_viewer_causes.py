"""Causes: what two replays that differ in one switch show, and what a tape says by itself."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import Masked, TapeWriter
from rolltape.viewer.paired import FEWEST, RESAMPLES, interval, judge
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import Case, Scene, add_replay, build, diff_case, make_cases

ROUTED = {"routing": "live", "lm_head": "model"}


def many_cases(count: int = 12) -> list[Case]:
    """Short sequences whose side B is off by amounts of one size."""
    rng = np.random.default_rng(3)
    template = make_cases(long=200)[0]
    cases = []
    for k in range(count):
        case = copy.deepcopy(template)
        case.name, case.group = f"0-{k}.0", f"0-{k}"
        case.__post_init__()
        n, start = case.length, case.prompt_len
        size = rng.gamma(2.0, 0.02, n - start) * rng.choice([-1, 1], n - start)
        values = case.a.values.copy()
        values[start:] += size.astype(np.float32)
        case.b = Masked(values, case.a.valid.copy())
        cases.append(case)
    return cases


def scaled(cases: list[Case], factor: float, noise: float = 0.0) -> list[Case]:
    """The same with a fraction of the difference left."""
    rng = np.random.default_rng(5)
    out = copy.deepcopy(cases)
    for case in out:
        off = (case.b.values - case.a.values) * factor
        off *= 1 + noise * rng.standard_normal(len(off))
        case.b.values[:] = case.a.values + off.astype(np.float32)
    return out


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, list[Case], list[Case], Api]:
    """A base, routing forced (40 % is left), another head, and the engine alone, twice."""
    cases = many_cases()
    scene = build(tmp_path_factory.mktemp("causes"), cases=cases)
    ids = scaled(cases, 0.4, noise=0.2)
    base = {"routing": "live", "lm_head": "model"}
    add_replay(scene, "base", cases, switches=base)
    add_replay(scene, "ids", ids, switches={**base, "routing": "ids"})
    add_replay(scene, "head", scaled(cases, 1.01), switches={**base, "lm_head": "float32"})
    add_replay(scene, "one", scaled(cases, 0.3), switches={"batch": "one"}, mode="re-execute")
    add_replay(scene, "again", scaled(cases, 0), switches={}, mode="re-execute")
    report = scene.a.parent / "again-report" / "report.json"
    header = json.loads(report.read_text())
    header.pop("xxh3", None)
    header["summary"]["verdict"] = "identical"
    report.write_text(json.dumps(header))
    return scene, cases, ids, Api(scene.a.parent)


def row(answer: Json, cause: str) -> Json:
    return next(r for r in answer["rows"] if r["id"] == cause)


def effect(answer: Json, cause: str, before: str, after: str) -> Json:
    return next(
        e
        for e in row(answer, cause)["effects"]
        if (e["before"]["name"], e["after"]["name"]) == (before, after)
    )


def expected(cases: list[Case]) -> tuple[float, float, int]:
    """Sum of |d|, sum of k3 and tokens, from the arrays themselves."""
    size = k3 = 0.0
    tokens = 0
    for case in cases:
        found = diff_case(case)["delta"]
        d = found.values[found.valid].astype(np.float64)
        size += np.abs(d).sum()
        k3 += sum(math.expm1(x) - x for x in d)
        tokens += len(d)
    return size, k3, tokens


def test_the_share_that_goes_is_that_of_the_arrays(board: Any) -> None:
    _, cases, ids, api = board
    answer = api.get(api.at("causes"))
    found = effect(answer, "routing", "base-report", "ids-report")
    n = found["numbers"]
    (size, k3, tokens), (size_after, k3_after, _) = expected(cases), expected(ids)
    assert n["tokens"] == tokens
    assert n["sequences"] == len(cases)
    assert n["mean_before"] == pytest.approx(size / tokens, rel=1e-6)
    assert n["mean_after"] == pytest.approx(size_after / tokens, rel=1e-6)
    assert n["k3_before"] == pytest.approx(k3 / tokens, rel=1e-5)
    assert n["k3_after"] == pytest.approx(k3_after / tokens, rel=1e-5)
    assert n["share"] == pytest.approx(1 - size_after / size, rel=1e-6)
    assert n["low"] < n["share"] < n["high"]
    assert found["state"] == "supported"
    assert row(answer, "routing")["state"] == "supported"
    why = row(answer, "routing")["why"]
    assert f"{100 * n['share']:.3g} % of the gap goes" in why
    # the measure is named, and what goes of k3 is another number
    assert (
        f"in {answer['measure']}; of k3 {100 * (1 - n['k3_after'] / n['k3_before']):.3g} %" in why
    )


def test_a_switch_that_changes_next_to_nothing_is_refuted(board: Any) -> None:
    answer = board[3].get(board[3].at("causes"))
    found = effect(answer, "lm_head", "base-report", "head-report")
    assert found["numbers"]["share"] == pytest.approx(-0.01, abs=1e-4)
    assert found["state"] == "refuted"
    assert "grows" in found["why"]
    assert row(answer, "lm_head")["state"] == "refuted"


def test_the_engine_alone_is_set_against_the_gap_to_the_trainer(board: Any) -> None:
    answer = board[3].get(board[3].at("causes"))
    (found,) = row(answer, "batch")["effects"]
    assert found["kind"] == "size"
    assert found["numbers"]["share"] == pytest.approx(0.3, rel=1e-3)
    assert found["state"] == "supported"
    assert "at most so much" in found["why"]


def test_an_engine_that_does_not_repeat_itself_decides_nothing(board: Any, tmp_path: Path) -> None:
    scene = build(tmp_path, cases=many_cases())
    cases = many_cases()
    add_replay(scene, "again", cases, switches={}, mode="re-execute")
    add_replay(scene, "one", cases, switches={"batch": "one"}, mode="re-execute")
    api = Api(tmp_path)
    found = row(api.get(api.at("causes")), "batch")
    assert found["state"] == "inconclusive"
    assert "does not repeat itself: again-report is divergent" in found["why"]


def test_two_things_at_once_are_no_experiment(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "base", cases, switches=ROUTED)
    both = {"routing": "ids", "lm_head": "float32"}
    add_replay(scene, "both", scaled(cases, 0.1), switches=both)
    add_replay(
        scene, "threads", scaled(cases, 0.1), switches={**ROUTED, "routing": "ids"}, threads=1
    )
    api = Api(tmp_path)
    answer = api.get(api.at("causes"))
    pairs = [(e["before"]["name"], e["after"]["name"]) for e in row(answer, "routing")["effects"]]
    assert ("base-report", "both-report") not in pairs
    assert ("base-report", "threads-report") not in pairs
    assert any("threads-report" in u and "but in threads as well" in u for u in answer["unused"])


def test_too_few_sequences_are_inconclusive(tmp_path: Path) -> None:
    cases = many_cases(FEWEST - 1)
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "base", cases, switches=ROUTED)
    add_replay(scene, "ids", scaled(cases, 0.1), switches={**ROUTED, "routing": "ids"})
    api = Api(tmp_path)
    found = row(api.get(api.at("causes")), "routing")
    assert found["state"] == "inconclusive"
    assert "too few to decide" in found["why"]


def test_other_logprobs_are_not_subtracted(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "full", cases, switches={"support": "full"})
    report = add_replay(scene, "cut", scaled(cases, 0.1), switches={"support": "recorded"})
    header = json.loads((report / "report.json").read_text())
    header.pop("xxh3", None)
    header["summary"]["column"] = "raw"
    (report / "report.json").write_text(json.dumps(header))
    api = Api(tmp_path)
    answer = api.get(api.at("causes"), rep=_rep(api, "full-report"))
    found = row(answer, "support")
    assert found["state"] == "inconclusive"
    assert found["effects"][0]["numbers"] is None
    assert "not the same quantity" in found["why"]


def _rep(api: Api, name: str) -> str:
    (run,) = (r for r in api.get("/api/runs")["runs"] if r["id"] == api.run)
    return next(str(r["id"]) for r in run["reports"] if r["name"] == name)


def test_what_was_not_tested_says_how_to_test_it(board: Any) -> None:
    scene, _, _, api = board
    answer = api.get(api.at("causes"))
    found = row(answer, "router")
    assert found["state"] == "not_tested"
    replay, diff, view = found["commands"]
    assert replay == (
        f"rolltape replay {scene.a} -o {scene.a}.router-float32 --mode score --on transformers "
        "--switch router=float32"
    )
    assert diff == (
        f"rolltape diff {scene.a} {scene.a}.router-float32 -o {scene.a}.router-float32-report"
    )
    assert view == f"rolltape view {scene.a.parent}"


def test_without_a_report_the_commands_make_the_base_first(small: Scene) -> None:
    api = Api(small.a)
    found = row(api.get(api.at("causes")), "routing")
    assert found["state"] == "not_tested"
    assert [line.split()[1] for line in found["commands"]] == [
        "replay",
        "diff",
        "replay",
        "diff",
        "view",
    ]
    assert "--switch" not in found["commands"][0]
    assert "--switch routing=ids" in found["commands"][2]


def test_commands_can_be_run_as_they_are(board: Any) -> None:
    """Every option exists: the commands themselves parse each line, of a tape that is not there."""
    from click.testing import CliRunner

    from rolltape.replay.cli import diff, replay

    api = board[3]
    lines = {line for r in api.get(api.at("causes"))["rows"] for line in r["commands"]}
    assert lines
    for line in lines:
        words = line.split()[1:]
        if words[0] == "view":
            continue
        words = [w.replace(str(board[0].a), "/no/such/tape") for w in words]
        command = {"replay": replay, "diff": diff}[words[0]]
        done = CliRunner().invoke(command, words[1:])
        said = done.output + str(done.exception or "")
        assert "No such option" not in said, line
        assert "no such file" in said or "No such file" in said or "not a tape" in said, said


def test_states_always_come_with_a_reason(board: Any) -> None:
    answer = board[3].get(board[3].at("causes"))
    assert {r["id"] for r in answer["rows"]} >= {
        *("batch", "routing", "lm_head", "router", "attention", "support", "weights"),
        *("parallel", "quant", "tokenizer", "recording"),
    }
    for found in answer["rows"]:
        assert found["state"] in answer["state_words"]
        assert found["why"]


def test_problems_of_identity_settle_their_hypothesis(tmp_path: Path) -> None:
    weights = {
        "kind": "weights",
        "message": "other weights: a version 3 00, b version 3 01 (900 tokens)",
        "blocks": True,
    }
    tokens = {
        "kind": "tokens",
        "message": "1f0c29ab.0-0.0: token 5 against 6 at position 31",
        "blocks": True,
        "sequence": "1f0c29ab.0-0.0",
        "position": 31,
    }
    scene = build(tmp_path, cases=make_cases(long=200), identity=[weights, tokens], gaps=2)
    api = Api(scene.a, scene.b, scene.report)
    answer = api.get(api.at("causes"))
    assert row(answer, "weights")["state"] == "supported"
    assert row(answer, "weights")["why"] == weights["message"]
    found = row(answer, "tokenizer")
    assert found["state"] == "supported"
    assert found["evidence"][0]["links"] == [
        {"text": "1f0c29ab.0-0.0", "seq": "1f0c29ab.0-0.0", "tok": 31}
    ]
    recording = row(answer, "recording")
    assert recording["state"] == "supported"
    assert "1 recorded gaps; the first: table = routes" in recording["why"]
    # one sequence shows its own problems, not those of the others
    own = api.get(api.at("seqs", "1f0c29ab.0-0.0", "causes"))
    assert row(own, "tokenizer")["here"][0]["text"] == tokens["message"]
    other = api.get(api.at("seqs", "1f0c29ab.0-0.1", "causes"))
    assert row(other, "tokenizer")["here"] == []


def test_findings_of_a_recording_are_evidence(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=make_cases(long=200), sealed=False)
    found = {"RT405": "an update changed no weights", "RT407": "rank 1 chose other experts"}
    with TapeWriter(scene.a) as writer:
        for code, message in found.items():
            event = {"engine": None, "writer": writer.id, "t_ns": 1, "kind": "finding"}
            detail = json.dumps({"code": code, "message": message, "remedy": "x"})
            writer.append("events", {**event, "detail": detail})
    api = Api(scene.a, scene.b, scene.report)
    answer = api.get(api.at("causes"))
    weights, parallel = row(answer, "weights"), row(answer, "parallel")
    assert weights["state"] == "supported"
    assert weights["why"] == "finding RT405: an update changed no weights"
    # both sides of this scene say that they ran on one rank: that speaks against the finding
    assert parallel["state"] == "inconclusive"
    assert parallel["why"].startswith("the evidence disagrees. For: finding RT407")


def test_flips_and_differences_are_compared_by_the_input_that_drew_the_token(
    board: Any,
) -> None:
    _, cases, _, api = board
    case = cases[4]
    found = diff_case(case)
    delta, flips = found["delta"], found["flips"]
    after: list[float] = []
    others: list[float] = []
    for p in range(1, case.length):
        if delta.valid[p] and flips.valid[p - 1]:
            (after if flips.values[p - 1] else others).append(abs(float(delta.values[p])))
    answer = api.get(api.at("seqs", case.key_a.id, "causes"), rep=_rep(api, "base-report"))
    (text,) = (e["text"] for e in row(answer, "routing")["here"])
    assert f"mean |d| {np.mean(after):.3g} nat at {len(after):,} tokens" in text
    assert f"{np.mean(others):.3g} at the {len(others):,} others" in text
    assert "a correlation, not a cause" in text


def test_a_sequence_has_its_own_numbers(board: Any) -> None:
    _, cases, ids, api = board
    answer = api.get(api.at("seqs", cases[2].key_a.id, "causes"))
    here = effect(answer, "routing", "base-report", "ids-report")["here"]
    (size, _, tokens), (after, _, _) = expected([cases[2]]), expected([ids[2]])
    assert here["mean_before"] == pytest.approx(size / tokens, rel=1e-6)
    assert here["share"] == pytest.approx(1 - after / size, rel=1e-6)
    problem = api.fails(404, api.at("seqs", "nobody.0-0.0", "causes"))
    assert problem["what"] == "sequence"


def test_switches_of_a_replay_that_is_not_open_are_those_of_its_report(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    reports = []
    for name, routing, factor in (("base", "live", 1.0), ("ids", "ids", 0.2)):
        report = add_replay(scene, name, scaled(cases, factor), switches={"routing": routing})
        header = json.loads((report / "report.json").read_text())
        header.pop("xxh3", None)
        header["summary"]["settings"] = {"switch.routing": [None, routing]}
        (report / "report.json").write_text(json.dumps(header))
        reports.append(report)
    api = Api(scene.a, *reports)
    # what else it ran with is not known: no experiment
    assert row(api.get(api.at("causes")), "routing")["state"] == "not_tested"
    assert [r["changed"] for r in api.get(api.at("causes"))["replays"]] == [{}, {"routing": "ids"}]


# ---- the interval -------------------------------------------------------------------------


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    rng = np.random.default_rng(1)
    bottom = rng.gamma(2.0, 1.0, 40)
    top = bottom * rng.uniform(0.1, 0.5, 40)
    low, high = interval(top, bottom)
    other = np.random.default_rng(99)
    ratios = []
    for _ in range(20_000):
        drawn = other.integers(0, 40, 40)
        ratios.append(top[drawn].sum() / bottom[drawn].sum())
    want = np.percentile(ratios, [2.5, 97.5])
    # the end of a percentile interval of 1,000 resamples is off by about a tenth of its width
    assert [low, high] == pytest.approx(want, abs=0.1 * (want[1] - want[0]))
    assert interval(top, bottom) == (low, high)  # the same every time
    assert RESAMPLES == 1000


@pytest.mark.parametrize(
    ("low", "high", "n", "state"),
    [
        (0.11, 0.3, 20, "supported"),
        (0.09, 0.3, 20, "inconclusive"),
        (-0.05, 0.05, 20, "refuted"),
        (-0.2, 0.049, 20, "inconclusive"),
        (-0.2, 0.06, 20, "inconclusive"),
        (0.4, 0.6, FEWEST - 1, "inconclusive"),
    ],
)
def test_the_rule(low: float, high: float, n: int, state: str) -> None:
    assert judge(low, high, n) == state
