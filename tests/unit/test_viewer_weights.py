"""Versions of the weights: what was in place, who held the same, and what was made with which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltape.store import TapeWriter, create_tape, seal
from rolltape.viewer.digests import compared
from rolltape.viewer.library import Library
from rolltape.viewer.weights import alarms
from tests.e2e.schedule_data import GROUPS, MS, ONE, START, TRAINER, TWO, Schedule, build
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import Scene


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return build(tmp_path_factory.mktemp("schedule"))


@pytest.fixture(scope="module")
def api(schedule: Schedule) -> Api:
    return Api(schedule.a, schedule.b, schedule.report)


@pytest.fixture(scope="module")
def data(api: Api) -> Json:
    return api.get(api.at("weights"))


# ---- what was in place --------------------------------------------------------------------


def test_states_follow_each_other_and_count_the_steps_of_a_dirty_one(data: Json) -> None:
    found = [
        (s["engine"], s["version"], s["state"], s["label"], s["steps"]) for s in data["states"]
    ]
    assert found == [
        (ONE, 0, "complete", "step-0", None),
        (ONE, 0, "dirty", None, 0),
        (ONE, 1, "complete", "step-1", None),
        (TWO, 0, "complete", "step-0", None),
        (TWO, 0, "dirty", None, 1),  # its last step begins 235 ms after the start
        (TWO, 1, "complete", "step-1", None),
    ]
    dirty = data["states"][1]
    assert (dirty["t_ns"], dirty["until"]) == (str(START + 210 * MS), str(START + 240 * MS))
    assert dirty["reason"] == "update_weights"


def test_engines_say_which_versions_made_their_tokens(data: Json) -> None:
    found = {e["id"]: (e["used"], e["quantization"]) for e in data["engines"]}
    assert found == {
        ONE: ([0, 1], ["quantization = fp8"]),
        TWO: ([0, 0], ["quantization = fp8"]),
    }


def test_what_was_asked_for_is_told_from_what_was_applied(data: Json) -> None:
    found = [(u["state"], u["label"], u["version"], u["applied"]) for u in data["updates"]]
    assert found == [
        ("requested", "step-1", None, True),
        ("requested", "step-9", None, False),
        ("applied", "step-1", 1, None),
    ]


# ---- digests ------------------------------------------------------------------------------


def test_each_group_has_a_digest_of_each_version(data: Json) -> None:
    shown = data["digests"]
    assert (shown["versions"], shown["all"], shown["first"], shown["last"]) == ([0, 1], 2, 0, 1)
    names = [g["group"] for g in shown["groups"]]
    assert names == [
        "",
        "derived",
        "embed",
        "layers.0.experts",
        "layers.0.router",
        "layers.2.attn",
        "layers.10.attn",
    ]
    for group in shown["groups"]:
        digest, reason = GROUPS[group["group"]]
        frozen = group["group"] == "embed"
        for version, cell in enumerate(group["cells"]):
            (answer,) = cell["answers"]
            assert answer["digest"] == f"{digest + (0 if frozen else version):016x}"
            assert answer["engines"] == [ONE, TWO]
            assert answer["reason"] == reason
            assert answer["moved"] == (None if version == 0 else not frozen)
            assert cell["engines"] == "equal"


def test_a_and_b_are_compared_by_the_name_of_the_version(data: Json) -> None:
    against = data["against_b"]
    assert (against["state"], against["paired_by"]) == ("mismatch", "name")
    # 6 groups of 2 versions of 2 engines; experts are repacked; 2 groups of version 1 differ
    counts = {"match": 16, "mismatch": 4, "not comparable": 4, "unpaired": 0}
    assert against["counts"] == counts
    wrong = [(r["group"], r["version"], r["a"], r["b"], r["pairs"]) for r in against["mismatches"]]
    assert sorted(wrong) == [
        ("", 1, f"{1001:016x}", f"{1101:016x}", 2),
        ("layers.0.router", 1, f"{21:016x}", f"{121:016x}", 2),
    ]
    words = {r["result"] for r in against["rows"] if r["group"] == "layers.0.experts"}
    assert words == {"not comparable: repacked for the MoE kernel"}


def test_the_same_weights_on_both_sides_are_no_alarm(tmp_path: Path) -> None:
    made = build(tmp_path, dirty=False, mismatch=False)
    api = Api(made.a, made.b, made.report)
    data = api.get(api.at("weights"))
    # the experts are repacked: nothing says that they are the same
    assert data["against_b"]["state"] == "inconclusive"
    assert data["against_b"]["counts"]["mismatch"] == 0
    assert data["against_b"]["reason"].startswith("20 of 24 pairs of digests are equal")
    assert [a["title"] for a in data["alarms"]] == ["An update brought no new weights"]


def row(**more: Any) -> Json:
    base = {"digest": 1, "group": "g", "tensors": 1, "elements": 4, "dtype": "x", "reason": None}
    return {**base, **more}


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({}, "equal"),
        ({"reason": "repacked"}, "equal"),  # equal bits are equal whatever is said of them
        ({"digest": 2}, "differs"),
        ({"digest": 2, "reason": "repacked"}, "not comparable: repacked"),
        ({"digest": None}, "not comparable: no digest was recorded"),
        ({"digest": None, "reason": "emptied"}, "not comparable: emptied"),
        ({"digest": 2, "dtype": "y"}, "not comparable: x against y"),
        ({"digest": 2, "group": "g", "elements": 5}, "not comparable: 1 tensors of 4 elements"),
    ],
)
def test_two_digests_are_equal_or_differ_or_cannot_be_compared(other: Json, word: str) -> None:
    assert compared(row(), row(**other)).startswith(word)


def test_the_page_of_digests_ends_at_the_version_asked_for(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        for version in range(20):
            put(writer, ONE, version, digest=100 + version // 2)
    api = Api(path)
    assert api.get(api.at("weights"))["digests"]["versions"] == list(range(12, 20))
    shown = api.get(api.at("weights"), version=9)["digests"]
    assert shown["versions"] == list(range(2, 10))
    moved = [cell["answers"][0]["moved"] for cell in shown["groups"][0]["cells"]]
    assert moved == [True, False] * 4
    assert api.get(api.at("weights"), version=99)["digests"]["versions"][-1] == 19
    assert api.fails(400, api.at("weights"), version=-1)["field"] == "version"


def put(writer: TapeWriter, engine: str, version: int, *, digest: int, **more: Any) -> None:
    row = {"state": "complete", "t_ns": START + version * MS, "group": "", "tensors": 1}
    facts = {"engine": engine, "version": version, "digest": digest, "elements": 4}
    writer.append("weights", {**facts, **row, **more})


# ---- sequences ----------------------------------------------------------------------------


def test_sequences_of_several_versions_straddle_an_update(data: Json) -> None:
    found = data["straddling"]
    assert (found["count"], found["known"], found["of"]) == (2, 5, 5)
    assert [(r["seq"], r["from"], r["to"], r["length"]) for r in found["rows"]] == [
        (f"{ONE[:8]}.0.0", 0, 1, 12),
        (f"{ONE[:8]}.3.0", 0, 1, 12),
    ]


def test_staleness_counts_from_the_version_that_the_trainer_scored_with(data: Json) -> None:
    found = data["staleness"]
    # 0, 3 and 4 began with version 0, 1 and 2 with version 1; all are scored with version 1
    assert found["basis"] == "trainer"
    assert found["lags"] == [{"lag": 0, "sequences": 2}, {"lag": 1, "sequences": 3}]


def test_without_a_trainer_staleness_counts_from_the_end_of_the_sequence(
    schedule: Schedule,
) -> None:
    api = Api(schedule.a)
    found = api.get(api.at("weights"))["staleness"]
    assert found["basis"] == "close"
    # request 3 closes 50 ms after the start, before version 1 came
    assert found["lags"] == [{"lag": 0, "sequences": 3}, {"lag": 1, "sequences": 2}]
    assert found["unknown"] == 0


# ---- alarms -------------------------------------------------------------------------------


def titles(*paths: Path) -> list[tuple[str, str]]:
    library = Library(paths)
    pair = library.pair(library.runs()[0].id, None)
    return [(a["level"], a["title"]) for a in alarms(pair)]


def test_wrong_weights_that_made_tokens_are_alarms(schedule: Schedule) -> None:
    assert titles(schedule.a, schedule.b, schedule.report) == [
        ("error", "Weights of A and B differ"),
        ("error", "Tokens were made with half-written weights"),
        ("warn", "An update brought no new weights"),
    ]


def test_alarms_name_versions_and_groups(data: Json) -> None:
    first, second, _ = data["alarms"]
    assert first["text"].startswith(
        "Version 1 made tokens, and A and B have other digests of the whole model, layers.0.router"
    )
    assert second["text"].startswith(
        "1 step began while the weights were being written (update_weights)"
    )


def engines(writer: TapeWriter, *names: str) -> None:
    for name in names:
        facts = {"engine": name, "writer": writer.id, "role": "rollout", "adapter": "vllm"}
        writer.append("engines", {**facts, "dtype": "bfloat16", "model_fingerprint": "1" * 32})


def used(writer: TapeWriter, engine: str, version: int) -> None:
    key = {"engine": engine, "request": "0", "sample": 0, "pass": 0}
    writer.append("sequences", {**key, "prompt_len": 1, "finish": "stop", "length": 2})
    writer.append("tokens", {**key, "start": 0, "n": 2, "ids": [[1, 2]], "raw": [[0.0, -1.0]]})
    row = {"step": 0, "row": 0, "start": 0, "n": 1, "kind": "prefill", "weight_version": version}
    writer.append("forwards", {**key, **row})


def test_replicas_with_the_same_updates_must_hold_the_same(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        engines(writer, ONE, TWO)
        used(writer, ONE, 1)
        for version in (0, 1):
            put(writer, ONE, version, digest=version)
            put(writer, TWO, version, digest=0)  # the second update did not reach it
    seal(path, status={"exit": 0})
    assert titles(path) == [("error", "Engines hold other weights as the same version")]
    api = Api(path)
    (group,) = api.get(api.at("weights"))["digests"]["groups"]
    assert [cell["engines"] for cell in group["cells"]] == ["equal", "differs"]


def test_an_engine_that_was_started_later_counts_for_itself(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        engines(writer, ONE, TWO)
        used(writer, ONE, 0)
        for version in (0, 1):
            put(writer, ONE, version, digest=version)
        put(writer, TWO, 0, digest=1)  # it loaded what is version 1 of the other one
    seal(path, status={"exit": 0})
    assert titles(path) == []


def test_versions_that_made_no_token_alarm_nobody(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        engines(writer, ONE, TWO)
        used(writer, ONE, 0)
        for version in (0, 1):
            put(writer, ONE, version, digest=version)
            put(writer, TWO, version, digest=0)
    seal(path, status={"exit": 0})
    assert titles(path) == []


def test_a_dirty_version_without_times_is_a_question(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        engines(writer, ONE)
        put(writer, ONE, 0, digest=1)
        put(writer, ONE, 0, digest=2, state="dirty", t_ns=None, reason="update")
    seal(path, status={"exit": 0})
    assert titles(path) == [("warn", "Weights were being written")]


# ---- states -------------------------------------------------------------------------------


def test_a_tape_without_weights_says_so_and_still_knows_the_versions(scene: Scene) -> None:
    api = Api(scene.a, scene.b, scene.report)
    data = api.get(api.at("weights"))
    assert data["recorded"] is False
    assert data["digests"]["versions"] == []
    assert data["straddling"]["count"] == 1  # `0-2.0` goes from version 3 to 4
    assert data["against_b"] | {"rows": []} == {
        "state": "not-run",
        "reason": "tape A has no version",
        "paired_by": None,
        "counts": {},
        "rows": [],
        "mismatches": [],
    }
    assert data["alarms"] == []
    assert data["staleness"]["lags"] == []
    assert data["staleness"]["unknown"] == data["staleness"]["of"]


def test_one_version_only(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        put(writer, TRAINER, 0, digest=7)
    api = Api(path)
    data = api.get(api.at("weights"))
    (group,) = data["digests"]["groups"]
    assert group["cells"][0]["engines"] == "only one"
    assert data["against_b"]["reason"] == "tape B is not open"


def test_a_report_alone_has_no_weights(schedule: Schedule) -> None:
    api = Api(schedule.report)
    assert api.fails(404, api.at("weights"))["what"] == "tape"
