"""States need evidence: what looks like a proof and is none leaves a hypothesis open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter, create_report, create_tape, seal
from rolltape.viewer.paired import interval
from tests.e2e.schedule_data import ONE, START, TRAINER, TWO
from tests.e2e.schedule_data import build as build_schedule
from tests.e2e.viewer_client import Api, Json, decode
from tests.e2e.viewer_data import Case, Scene, add_replay, build, diff_case, write_report
from tests.unit.test_viewer_causes import ROUTED, many_cases, row, scaled
from tests.unit.test_viewer_causes import effect as effect_of


def edited(file: Path, **more: Any) -> None:
    """Change what a header says; its hash goes, as a folder without one is read, too."""
    header = json.loads(file.read_text())
    header.pop("xxh3", None)
    file.write_text(json.dumps({**header, **more}))


def said(report: Path, **more: Any) -> None:
    """Change members of the summary of a report."""
    summary = json.loads((report / "report.json").read_text())["summary"]
    edited(report / "report.json", summary={**summary, **more})


def causes(folder: Path) -> Json:
    api = Api(folder)
    return api.get(api.at("causes"))


# ---- paired replays -----------------------------------------------------------------------


@pytest.mark.parametrize("larger", ["eager", "sdpa"])
def test_of_two_unusual_values_the_larger_gap_is_before(tmp_path: Path, larger: str) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    for value in ("eager", "sdpa"):
        factor = 2.0 if value == larger else 1.0
        add_replay(scene, value, scaled(cases, factor), switches={"attention": value})
    other = "sdpa" if larger == "eager" else "eager"
    effect = effect_of(causes(tmp_path), "attention", f"{larger}-report", f"{other}-report")
    assert effect["numbers"]["share"] == pytest.approx(0.5, abs=1e-3)
    assert effect["state"] == "supported"


def test_a_gap_that_grows_refutes_nothing(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "base", cases, switches=ROUTED)
    add_replay(scene, "ids", scaled(cases, 2.0), switches={**ROUTED, "routing": "ids"})
    found = row(causes(tmp_path), "routing")
    assert found["state"] == "inconclusive"
    assert (
        "the gap grows by 100 % (95 %: 100 % to 100 %) in sum |\N{GREEK CAPITAL LETTER DELTA}|"
        in found["why"]
    )
    assert "none of it goes" in found["why"]


def test_growth_and_its_interval_are_the_same_quantity(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "base", cases, switches=ROUTED)
    factors = np.linspace(1.1, 1.6, len(cases))
    grown = [scaled([case], float(f))[0] for case, f in zip(cases, factors, strict=True)]
    add_replay(scene, "ids", grown, switches={**ROUTED, "routing": "ids"})
    effect = effect_of(causes(tmp_path), "routing", "base-report", "ids-report")
    n = effect["numbers"]
    growth, low, high = (-n[name] for name in ("share", "high", "low"))
    assert 0 < low < growth < high
    said = f"grows by {100 * growth:.3g} % (95 %: {100 * low:.3g} % to {100 * high:.3g} %)"
    assert said in effect["why"]
    k3 = n["k3_after"] / n["k3_before"] - 1
    assert f"k3 grows by {100 * k3:.3g} %" in effect["why"]


@pytest.mark.parametrize("closed", [("base",), ("base", "ids")])
def test_a_closed_tape_b_makes_no_controlled_pair(tmp_path: Path, closed: tuple[str, ...]) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    paths = [scene.a]
    for name, routing, factor in (("base", "live", 1.0), ("ids", "ids", 0.2)):
        report = add_replay(scene, name, scaled(cases, factor), switches={"routing": routing})
        said(report, settings={"switch.routing": [None, routing]})
        paths += [report] if name in closed else [report, tmp_path / name]
    api = Api(*paths)
    answer = api.get(api.at("causes"))
    assert row(answer, "routing")["state"] == "not_tested"
    (unused,) = answer["unused"]
    for name in closed:
        assert f"{name}-report: conditions not known: open tape B" in unused


def test_sequences_without_a_gap_do_not_count(tmp_path: Path) -> None:
    cases = many_cases()
    for case in cases[3:]:
        case.b.values[:] = case.a.values
    scene = build(tmp_path, cases=cases)
    add_replay(scene, "base", cases, switches=ROUTED)
    add_replay(scene, "ids", scaled(cases, 0.2), switches={**ROUTED, "routing": "ids"})
    found = row(causes(tmp_path), "routing")
    assert found["effects"][0]["numbers"]["sequences"] == 12
    assert found["effects"][0]["numbers"]["with_gap"] == 3
    assert found["state"] == "inconclusive"
    assert "3 sequences with a gap are too few to decide" in found["why"]


def test_a_resample_without_a_gap_has_no_share() -> None:
    bottom = np.zeros(12)
    bottom[0] = 1.0
    assert interval(np.zeros(12), bottom) == (0.0, 0.0)
    assert interval(0.3 * bottom, bottom) == pytest.approx((0.3, 0.3))


def test_of_several_rows_of_a_sequence_the_last_one_is_summed(tmp_path: Path) -> None:
    cases = many_cases()
    scene = build(tmp_path, cases=cases)
    base = add_replay(scene, "base", cases, switches=ROUTED)
    ids = add_replay(scene, "ids", cases, switches={**ROUTED, "routing": "ids"})
    shutil.rmtree(ids)
    both = [*cases, *scaled(cases, 0.2)]
    write_report(ids, scene.a, tmp_path / "ids", both, identity=[])
    effect = effect_of(causes(tmp_path), "routing", base.name, ids.name)
    assert effect["numbers"]["sequences"] == 12
    assert effect["numbers"]["share"] == pytest.approx(0.8, abs=1e-3)


# ---- re-executions ------------------------------------------------------------------------


def executed(root: Path, count: int, *, steady: bool, base: bool = False) -> Scene:
    """A re-execution with one switch that differs, and one without that is identical."""
    cases = many_cases(count)
    scene = build(root, cases=cases)
    if not base:  # the scene's own replay as a trainer
        edited(scene.b / "tape.json", provenance={})
    add_replay(scene, "one", scaled(cases, 0.3), switches={"batch": "one"}, mode="re-execute")
    if steady:
        again = add_replay(scene, "again", scaled(cases, 0), switches={}, mode="re-execute")
        said(again, verdict="identical")
    return scene


@pytest.mark.parametrize(
    ("count", "steady", "state", "why"),
    [
        (12, True, "supported", "there is no replay as a trainer"),
        (1, True, "inconclusive", "1 sequence that differs is too few"),
        (12, False, "inconclusive", "was not looked at"),
    ],
)
def test_without_a_trainer_a_switch_needs_a_control_and_sequences(
    tmp_path: Path, count: int, steady: bool, state: str, why: str
) -> None:
    executed(tmp_path, count, steady=steady)
    found = row(causes(tmp_path), "batch")
    assert found["state"] == state
    assert why in found["why"]


def test_a_size_is_not_set_against_a_gap_of_other_logprobs(tmp_path: Path) -> None:
    executed(tmp_path, 12, steady=True, base=True)
    assert row(causes(tmp_path), "batch")["state"] == "supported"
    said(tmp_path / "one-report", column="scaled")
    answer = causes(tmp_path)
    found = row(answer, "batch")
    assert found["state"] == "inconclusive"
    assert "not the same quantity" in found["why"]
    assert found["effects"][0]["numbers"] is None
    api = Api(tmp_path)
    own = api.get(api.at("seqs", many_cases(1)[0].key_a.id, "causes"))
    assert row(own, "batch")["effects"][0]["here"] is None


def test_an_identical_re_execution_of_one_sequence_refutes_nothing(tmp_path: Path) -> None:
    for count, state in ((1, "inconclusive"), (12, "refuted")):
        executed(tmp_path / str(count), count, steady=False)
        said(tmp_path / str(count) / "one-report", verdict="identical")
        assert row(causes(tmp_path / str(count)), "batch")["state"] == state


# ---- facts --------------------------------------------------------------------------------


def test_a_recording_is_whole_only_where_both_sides_are(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=many_cases(2))
    api = Api(scene.a, scene.b, scene.report)
    found = row(api.get(api.at("causes")), "recording")
    assert found["state"] == "refuted"
    assert found["why"].startswith("both tapes: sealed, every shard is there")
    alone = Api(scene.a, scene.report)
    assert row(alone.get(alone.at("causes")), "recording")["state"] == "not_testable"


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("live", ["tokens/x.live"], "1 shard still being written"),
        ("recovered", [{"shard": "tokens/x", "rows": 3, "torn": 9, "reason": ""}], "1 shard rec"),
    ],
)
def test_a_seal_with_live_or_recovered_shards_is_a_note(
    tmp_path: Path, side: str, name: str, value: Any, word: str
) -> None:
    scene = build(tmp_path, cases=many_cases(2))
    edited((scene.a if side == "a" else scene.b) / "seal.json", **{name: value})
    api = Api(scene.a, scene.b, scene.report)
    found = row(api.get(api.at("causes")), "recording")
    assert found["state"] == "not_testable"
    assert any(e["text"].startswith(word) for e in found["evidence"])
    assert not any(e["decisive"] for e in found["evidence"])


def test_a_sequence_that_never_finished_is_a_note(tmp_path: Path) -> None:
    cases = many_cases(3)
    cases[1].finish = "open"
    scene = build(tmp_path, cases=cases)
    api = Api(scene.a, scene.b, scene.report)
    found = row(api.get(api.at("causes")), "recording")
    assert found["state"] == "not_testable"
    assert any(e["text"] == "1 sequence never finished" for e in found["evidence"])


def test_a_gap_on_one_side_is_enough(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=many_cases(2))
    with TapeWriter(scene.b) as writer:
        event = {"engine": None, "writer": writer.id, "t_ns": 1, "kind": "gap"}
        writer.append("events", {**event, "detail": json.dumps({"table": "routes"})})
    seal(scene.b, status={"exit": 0})
    api = Api(scene.a, scene.b, scene.report)
    found = row(api.get(api.at("causes")), "recording")
    assert found["state"] == "supported"
    assert found["why"] == "1 recorded gaps; the first: table = routes"


def test_a_shard_that_went_is_found_without_reading_it(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=many_cases(2))
    api = Api(scene.a, scene.b, scene.report)
    shard = next((scene.a / "tokens").iterdir())
    shard.unlink()
    found = row(api.get(api.at("causes")), "recording")
    assert found["state"] == "supported"
    assert shard.name in found["why"]


def test_every_engine_has_to_name_its_ranks(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=many_cases(2), sealed=False)
    api = Api(scene.a, scene.b, scene.report)
    assert row(api.get(api.at("causes")), "parallel")["state"] == "refuted"
    with TapeWriter(scene.a) as writer:
        facts = {"engine": TWO, "writer": writer.id, "role": "rollout", "adapter": "vllm"}
        writer.append("engines", facts)
    api = Api(scene.a, scene.b, scene.report)
    found = row(api.get(api.at("causes")), "parallel")
    assert found["state"] == "not_testable"
    assert "1 of 2 engines do not say" in found["evidence"][0]["text"]


@pytest.mark.parametrize("tokens", [0, 4])
def test_equal_digests_count_where_a_token_was_compared(tmp_path: Path, tokens: int) -> None:
    made = build_schedule(tmp_path, dirty=False, mismatch=False)
    report = reported(tmp_path / "other", made.a, made.b, compared=tokens)
    api = Api(made.a, made.b, report)
    evidence = row(api.get(api.at("causes")), "weights")["evidence"]
    same = [e for e in evidence if e["text"].startswith("the weights of both sides have the same")]
    assert len(same) == (1 if tokens else 0)


# ---- digests ------------------------------------------------------------------------------


def reported(path: Path, a: Path, b: Path, *, compared: int) -> Path:
    uuids = [json.loads((p / "tape.json").read_text())["uuid"] for p in (a, b)]
    sides = [{"path": str(p), "uuid": u} for p, u in zip((a, b), uuids, strict=True)]
    summary = {"a": sides[0], "b": sides[1], "tokens_compared": compared}
    report = create_report(path, summary=summary)
    with TapeWriter(report) as writer:
        ids = {"a": f"{ONE[:8]}.0.0", "b": f"{TRAINER[:8]}.0.0", "prompt_len": 8, "length": 12}
        writer.append("sequences", {**ids, "compared": compared, "max_abs": 0.0})
    return report


def weighed(root: Path, a: list[Json], b: list[Json], made: list[tuple[int, ...]]) -> Json:
    """`weights` of two tapes with these digests, A's sequences made by these versions in turn."""
    paths = []
    for name, engine, role, rows in (("a", ONE, "rollout", a), ("b", TRAINER, "trainer", b)):
        path = create_tape(root / name, role=role)
        with TapeWriter(path) as writer:
            facts = {"engine": engine, "writer": writer.id, "role": role, "adapter": "vllm"}
            writer.append("engines", {**facts, "dtype": "bfloat16"})
            for number, digest in enumerate(rows):
                base = {"engine": engine, "state": "complete", "t_ns": START + number, "group": ""}
                writer.append("weights", {**base, "tensors": 1, "elements": 4, **digest})
            for request, versions in enumerate(made if name == "a" else []):
                key = {"engine": engine, "request": str(request), "sample": 0, "pass": 0}
                n = len(versions) + 1
                done = {"prompt_len": 1, "finish": "stop", "length": n}
                writer.append("sequences", {**key, **done})
                columns = {"ids": [list(range(n))], "raw": [[-1.0] * n]}
                writer.append("tokens", {**key, "start": 0, "n": n, **columns})
                for at, version in enumerate(versions):
                    place = {"step": at, "row": 0, "start": at, "n": 1, "kind": "decode"}
                    writer.append("forwards", {**key, **place, "weight_version": version})
        seal(path, status={"exit": 0})
        paths.append(path)
    api = Api(*paths, reported(root / "report", *paths, compared=4))
    return api.get(api.at("weights"))


def digests(*pairs: tuple[int, int], **more: Any) -> list[Json]:
    return [{"version": version, "digest": digest, **more} for version, digest in pairs]


def test_digests_match_only_where_all_were_compared(tmp_path: Path) -> None:
    layer = {"version": 0, "group": "layers.0.attn", "digest": 7}
    whole = {"version": 0, "digest": 1}
    other = {**whole, "digest": 2, "reason": "repacked for the MoE kernel"}
    same = weighed(tmp_path / "same", [whole, layer], [whole, layer], [(0,)])["against_b"]
    assert same["state"] == "match"
    some = weighed(tmp_path / "some", [other, layer], [whole, layer], [(0,)])["against_b"]
    assert some["state"] == "inconclusive"
    assert some["counts"] == {"match": 1, "mismatch": 0, "not comparable": 1, "unpaired": 0}
    assert some["reason"] == "1 of 2 pairs of digests are equal, the others not comparable"


def test_versions_without_a_name_are_unpaired_where_names_pair(tmp_path: Path) -> None:
    a = [*digests((0, 1), label="step-0"), *digests((1, 2), label=None)]
    b = digests((0, 1), label="step-0")
    found = weighed(tmp_path, a, b, [(0,)])["against_b"]
    assert found["paired_by"] == "name"
    assert found["counts"]["unpaired"] == 1
    assert found["state"] == "inconclusive"
    assert "1 version has no name" in found["reason"]


def test_a_version_between_two_that_made_tokens_made_none(tmp_path: Path) -> None:
    a, b = digests((2, 2), (3, 3), (5, 5)), digests((2, 2), (3, 33), (5, 5))
    apart = weighed(tmp_path / "apart", a, b, [(2,), (5,)])
    assert apart["against_b"]["state"] == "mismatch"
    assert apart["alarms"] == []
    # one sequence from 2 to 5: the roll-ups keep its least and greatest version alone
    through = weighed(tmp_path / "through", a, b, [(2, 5)])
    (alarm,) = through["alarms"]
    assert alarm["level"] == "warn"
    assert alarm["text"].startswith("Version 3 may have made tokens, and A and B have other")
    sure = weighed(tmp_path / "sure", a, b, [(3,)])
    (alarm,) = sure["alarms"]
    assert alarm["level"] == "error"
    assert alarm["text"].startswith("Version 3 made tokens")


# ---- rows of a report that were written twice ---------------------------------------------


def twice(root: Path) -> tuple[Case, Api, dict[str, str]]:
    """The second report has the first sequence once more, with half of its difference."""
    cases = many_cases(2)
    scene = build(root, cases=cases)
    (again,) = scaled(cases[:1], 0.5)
    write_report(root / "second-report", scene.a, scene.b, [*cases, again], identity=[])
    api = Api(root)
    (run,) = (r for r in api.get("/api/runs")["runs"] if r["id"] == api.run)
    ids = {r["name"]: str(r["id"]) for r in run["reports"]}
    return again, api, {"a": ids["report"], "b": ids["second-report"]}


def test_side_by_side_shows_the_last_row_of_a_sequence(tmp_path: Path) -> None:
    case, api, both = twice(tmp_path)
    path = api.at("seqs", case.key_a.id, "sides")
    raw = api.raw(path, **both, start=0, end=case.length)
    arrays, _ = decode(raw.content)
    want = diff_case(case)["delta"]
    assert arrays["delta_b"][want.valid].tolist() == want.values[want.valid].tolist()


def test_the_contrast_of_flips_is_that_of_the_last_row(tmp_path: Path) -> None:
    case, api, both = twice(tmp_path)
    found = diff_case(case)
    delta, flips = found["delta"], found["flips"]
    sizes = [
        abs(float(delta.values[p]))
        for p in range(1, case.length)
        if delta.valid[p] and flips.valid[p - 1] and flips.values[p - 1]
    ]
    answer = api.get(api.at("seqs", case.key_a.id, "causes"), rep=both["b"])
    (text,) = (e["text"] for e in row(answer, "routing")["here"])
    assert f"mean |d| {np.mean(sizes):.3g} nat at {len(sizes):,} tokens" in text
