"""Runs, overview and sequence list: verdicts in words, and every state that needs words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import NotATapeError, TapeWriter, create_report, seal
from rolltape.store.schema import TOKEN_STATES
from rolltape.viewer import make_app
from rolltape.viewer.library import LOOK_EVERY, Library
from rolltape.viewer.overview import percent
from tests.e2e import viewer_data
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import Scene, build, diff_case, make_cases

# ---- runs ---------------------------------------------------------------------------------


def test_a_report_belongs_to_the_tape_that_is_its_side_a(api: Api, scene: Scene) -> None:
    runs = api.get("/api/runs")["runs"]
    assert [r["name"] for r in runs] == ["a", "b"]
    assert [r["verdict"] for r in runs[0]["reports"]] == ["divergent"]
    assert runs[1]["reports"] == []
    assert runs[0]["id"] == json.loads((scene.a / "tape.json").read_text())["uuid"]


def test_a_folder_stands_for_the_tapes_and_reports_in_it(scene: Scene) -> None:
    runs = Api(scene.a.parent).get("/api/runs")["runs"]
    assert [(r["name"], len(r["reports"])) for r in runs] == [("a", 1), ("b", 0)]


def test_an_empty_folder_is_no_runs_and_a_wrong_path_is_an_error(tmp_path: Path) -> None:
    assert Api(tmp_path).get("/api/runs")["runs"] == []
    with pytest.raises(NotATapeError, match="no such file or folder"):
        make_app([tmp_path / "nowhere"])


def test_a_tape_of_a_newer_format_is_named_and_the_others_are_served(small: Scene) -> None:
    header = json.loads((small.b / "tape.json").read_text())
    (small.b / "tape.json").write_text(json.dumps({**header, "format": "2.0"}))
    answer = Api(small.a, small.b).get("/api/runs")
    assert [r["name"] for r in answer["runs"]] == ["a"]
    (failure,) = answer["failures"]
    assert "format 2.0" in failure["message"]
    assert "upgrade rolltape" in failure["message"]


def test_a_copy_of_an_open_tape_is_told_apart_from_it(small: Scene, tmp_path: Path) -> None:
    shutil.copytree(small.a, tmp_path / "copy")
    answer = Api(small.a, tmp_path / "copy").get("/api/runs")
    assert len(answer["runs"]) == 1
    assert "a copy of" in answer["failures"][0]["message"]


def test_the_newest_report_is_shown_unless_another_is_asked_for(small: Scene) -> None:
    other = small.a.parent / "later"
    shutil.copytree(small.report, other)
    header = json.loads((other / "report.json").read_text())
    header |= {"uuid": "0" * 32, "created": "2100-01-01T00:00:00Z"}
    header["summary"]["verdict"] = "inconclusive"
    header.pop("xxh3", None)
    (other / "report.json").write_text(json.dumps(header))
    api = Api(small.a, other, small.report)
    assert api.overview()["verdict"] == "inconclusive"
    first = api.get("/api/runs")["runs"][0]["reports"][0]["id"]
    assert api.get(api.at(), rep=first)["verdict"] == "divergent"
    assert api.fails(404, api.at(), rep="f" * 32)["what"] == "report"


# ---- overview -----------------------------------------------------------------------------


def test_the_headline_says_verdict_share_worst_token_and_routing_in_words(
    api: Api, scene: Scene
) -> None:
    data = api.overview()
    text = "".join(piece["text"] for piece in data["headline"])
    deltas = np.concatenate(
        [
            np.abs(d["delta"].values[d["delta"].valid])
            for d in (diff_case(c) for c in scene.cases.values() if c.reported)
        ]
    )
    share = f"{100 * (deltas > 0.1).mean():.3g} %"
    assert text.startswith(
        f"divergent: {share} of {len(deltas):,} compared tokens differ by more than 0.1 nat; "
        f"worst is 1.29 nat in sequence {scene.id('0-0.1')} at position 71; "
        "first divergent layer 3, layers.3.router; 2 not finite; routing: "
    )
    assert text.endswith(" of tokens")
    (worst,) = [piece for piece in data["headline"] if "seq" in piece]
    assert (worst["seq"], worst["tok"]) == (scene.id("0-0.1"), 71)


def test_coverage_counts_every_state(api: Api, scene: Scene) -> None:
    states = np.concatenate(
        [diff_case(c)["state"] for c in scene.cases.values() if c.reported and c.name != "0-3.0"]
    )
    counts = dict(zip(TOKEN_STATES, np.bincount(states, minlength=6).tolist(), strict=True))
    tokens = api.overview()["coverage"]["tokens"]
    assert tokens == {
        "compared": counts["compared"],
        "masked": counts["masked"],
        "missing": counts["missing_a"] + counts["missing_b"],
        "non_finite": counts["non_finite"],
    }


def test_the_histogram_keeps_the_bitwise_equal_tokens_apart(api: Api) -> None:
    data = api.overview()
    histogram = data["histogram"]
    assert histogram["equal"] > 0
    total = sum(histogram["counts"]) + histogram["equal"]
    assert total == data["coverage"]["tokens"]["compared"]


def test_a_histogram_is_made_where_the_summary_has_none(small: Scene) -> None:
    without = Api(small.a, _edited(small.report, histogram=None)).overview()["histogram"]
    given = Api(small.a, small.report).overview()["histogram"]
    assert without["equal"] == given["equal"]
    assert sum(without["counts"]) == sum(given["counts"])


def test_a_summary_with_nothing_but_a_verdict_is_shown(small: Scene) -> None:
    header = json.loads((small.report / "report.json").read_text())
    side = header["summary"]["a"]
    header["summary"] = {"verdict": "divergent", "a": {"uuid": side["uuid"]}}
    header.pop("xxh3", None)
    (small.report / "report.json").write_text(json.dumps(header))
    data = Api(small.a, small.report).overview()
    text = "".join(piece["text"] for piece in data["headline"])
    assert text.startswith("divergent: ")
    assert "at position 71" in text
    assert len(data["routing"]["layers"]) == viewer_data.LAYERS


def test_nothing_compared_is_said_as_such(small: Scene) -> None:
    report = viewer_data.write_report(
        small.a.parent / "empty", small.a, small.b, [], identity=["no sequence in common"]
    )
    data = Api(small.a, report).overview()
    assert data["headline"] == [{"text": "not-run: no token was compared"}]
    assert data["identity"] == ["no sequence in common"]


def test_identical_sides_are_said_to_be_equal(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=[c for c in make_cases() if c.name == "0-0.2"])
    text = "".join(p["text"] for p in Api(scene.a, scene.report).overview()["headline"])
    assert text.startswith("identical: all 62 compared tokens have equal logprobs")
    assert "worst" not in text


def test_provenance_puts_both_sides_next_to_each_other(api: Api) -> None:
    rows = {row["name"]: row for row in api.overview()["provenance"]}
    assert rows["dtype"] == {
        "name": "dtype",
        "a": "bfloat16",
        "b": "bfloat16",
        "differs": False,
        "main": True,
    }
    assert rows["effective.attention"]["differs"]
    assert (rows["effective.attention"]["a"], rows["effective.attention"]["b"]) == ("flash", "sdpa")
    assert rows["switches.routing"]["b"] == "live"
    assert not rows["path"]["differs"]


def test_every_layer_has_its_routing_numbers(api: Api, scene: Scene) -> None:
    layers = api.overview()["routing"]["layers"]
    assert [row["layer"] for row in layers] == list(range(viewer_data.LAYERS))
    case = scene.cases["0-0.2"]
    assert np.array_equal(case.routes, case.live)
    assert sum(row["disagree"] for row in layers) > 0


def test_percent_never_rounds_away_what_is_there() -> None:
    assert percent(0, 10) == "0 %"
    assert percent(10, 10) == "100 %"
    assert percent(1, 10_000_000) == "under 0.001 %"
    assert percent(9_999_999, 10_000_000) == "over 99.9 %"
    assert percent(1, 8) == "12.5 %"
    assert percent(1, 0) == "an unknown share"


# ---- states that need words ---------------------------------------------------------------


def _titles(data: Json) -> list[str]:
    return [notice["title"] for notice in data["notices"]]


def _edited(report: Path, **changes: Any) -> Path:
    header = json.loads((report / "report.json").read_text())
    header["summary"] |= changes
    header.pop("xxh3", None)
    (report / "report.json").write_text(json.dumps(header))
    return report


def test_a_tape_without_a_report_says_which_commands_make_one(small: Scene) -> None:
    data = Api(small.a).overview()
    (notice,) = data["notices"]
    assert notice["title"] == "No report of this tape is open"
    replay, diff, view = notice["commands"]
    assert replay.startswith(f"rolltape replay {small.a} ")
    assert diff.startswith(f"rolltape diff {small.a} ")
    assert view.startswith(f"rolltape view {small.a} ")


def test_a_replay_says_what_it_replays_and_where_it_was_compared(small: Scene) -> None:
    api = Api(small.b, small.report, small.a)
    runs = api.get("/api/runs")["runs"]
    assert [r["name"] for r in runs] == ["a", "b"], "a replay stands after what it replays"
    assert (runs[1]["parent"], runs[1]["as_b"]) == ("a", 1)
    (notice,) = api.get(f"/api/runs/{runs[1]['id']}")["notices"]
    assert notice["title"] == "Side B of a report"
    assert [entry["text"] for entry in notice["links"]] == ["report"]
    api = Api(small.b, small.a)
    (alone,) = api.get(f"/api/runs/{runs[1]['id']}")["notices"]
    assert alone["title"] == "A replay without a report"
    assert alone["commands"][0].startswith(f"rolltape diff {small.a} {small.b} -o ")


def test_damage_is_told_on_the_first_page_that_is_opened(small: Scene) -> None:
    (shard,) = (small.a / "tokens").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    problems = Api(small.a, small.b, small.report).overview()["problems"]
    assert any(shard.name in problem for problem in problems)


def test_a_report_without_its_tape_still_shows_its_numbers(small: Scene) -> None:
    api = Api(small.report)
    data = api.overview()
    assert "The tape of this report is not open" in _titles(data)
    assert str(small.a) in data["notices"][0]["commands"][0]
    assert "1.29 nat" in "".join(p["text"] for p in data["headline"])
    seq = small.id("0-0.1")
    arrays, metadata = api.arrays(seq, 0, 157)
    flags = metadata["flags"].split(",")
    assert not (arrays["flags"] & (1 << flags.index("id"))).any()
    assert arrays["delta"][71] == np.float32(1.2899998)
    detail = api.get(api.at("seqs", seq, "tokens", "71"))
    assert detail["a"]["text"] == "-2.75"
    assert detail["sides"] == {"a": None, "b": None}
    assert "not open" in detail["routes"]["missing"]


def test_the_same_link_opens_a_report_with_and_without_its_tape(small: Scene) -> None:
    assert Api(small.report).run == Api(small.a, small.report).run


def test_gaps_and_hook_errors_are_told_in_words(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=make_cases()[:1], gaps=3)
    data = Api(scene.a, scene.b, scene.report).overview()
    assert data["recording"]["events"] == {"gap": 2, "hook_error": 1}
    assert _titles(data) == ["The recorder dropped data", "A recording hook failed"]
    assert "reason = queue full" in data["notices"][0]["text"]


def test_all_masked_says_so(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=[c for c in make_cases() if c.name == "0-1.2"])
    assert "All tokens are masked" in _titles(Api(scene.a, scene.b, scene.report).overview())


def test_a_run_opens_with_the_newest_report_against_a_trainer(tmp_path: Path) -> None:
    sides = {"a": {"uuid": "f" * 32, "role": "rollout"}}
    for name, role in (("first", "trainer"), ("score", "trainer"), ("self", "rollout")):
        summary = {**sides, "b": {"uuid": name, "role": role}, "verdict": "divergent"}
        create_report(tmp_path / name, summary=summary)
    answer = Api(tmp_path).get("/api/runs")
    (run,) = answer["runs"]
    names = {report["id"]: report["name"] for report in run["reports"]}
    assert [names[r["id"]] for r in run["reports"]] == ["first", "score", "self"]
    assert names[run["report"]] == "score"


def test_a_sequence_whose_row_is_damaged_is_named_with_the_damage(small: Scene) -> None:
    (shard,) = (small.a / "sequences").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(bytes(content))
    api = Api(small.a, small.b, small.report)
    name = small.id("0-0.1")
    for path in ((name,), (name, "tokens", "5"), (name, "routing")):
        answer = api.raw(api.at("seqs", *path))
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert shard.name in answer.json()["detail"] and "sequences" in answer.json()["detail"]


def test_a_damaged_shard_is_named_and_the_rest_is_served(small: Scene) -> None:
    (shard,) = (small.a / "routes").iterdir()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    api = Api(small.a, small.b, small.report)
    seq = small.id("0-0.1")
    detail = api.get(api.at("seqs", seq, "tokens", "71"))
    assert detail["a"]["text"] == "-2.75"
    assert all(row["a"]["ids"] is None for row in detail["routes"]["layers"])
    (notice,) = api.overview()["notices"]
    assert notice["title"] == "Damaged shard"
    assert shard.name in notice["text"]


def test_a_shard_that_is_gone_is_named_before_its_table_is_read(small: Scene) -> None:
    (shard,) = (small.a / "supports").iterdir()
    shard.unlink()
    (problem,) = Api(small.a, small.b, small.report).overview()["problems"]
    assert shard.name in problem
    assert "missing" in problem


def test_a_recording_that_goes_on_is_followed(small: Scene, tmp_path: Path) -> None:
    scene = build(tmp_path / "live", cases=make_cases()[:1], sealed=False)
    now = [0.0]
    library = Library([scene.a], clock=lambda: now[0])
    (run,) = library.runs()
    assert len(library.pair(run.id, None).facts) == 1
    case = make_cases()[1]
    with TapeWriter(scene.a) as writer:
        viewer_data._write_sequence(writer, case, case.key_a, "open")
    library.refresh()
    assert len(library.pair(run.id, None).facts) == 1, "looked again too early"
    now[0] += LOOK_EVERY
    library.refresh()
    assert len(library.pair(run.id, None).facts) == 2
    seal(scene.a)
    now[0] += LOOK_EVERY
    library.refresh()
    tape = library.pair(run.id, None).tape
    assert tape is not None
    assert tape.seal is not None


def test_a_tape_that_is_not_sealed_says_that_it_is_being_written(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=make_cases()[:1], sealed=False)
    data = Api(scene.a).overview()
    assert "Still recording" in _titles(data)
    assert data["run"]["sealed"] is False


# ---- sequence list ------------------------------------------------------------------------


def test_the_list_begins_with_the_worst_sequence_and_ends_with_what_was_not_compared(
    api: Api, scene: Scene
) -> None:
    rows = api.rows()
    assert rows[0]["id"] == scene.id("0-0.1")
    sizes = [row["max_abs"] for row in rows]
    there = [s for s in sizes if s is not None]
    assert there == sorted(there, reverse=True)
    assert sizes[len(there) :] == [None] * (len(sizes) - len(there))


@pytest.mark.parametrize("column", ["max_abs", "k3", "first_over", "weight_version", "compared"])
def test_missing_numbers_come_last_in_both_directions(api: Api, column: str) -> None:
    for sort in (column, f"-{column}"):
        values = [row[column] for row in api.rows(sort=sort)]
        there = [v for v in values if v is not None]
        assert values[: len(there)] == there
        assert there == sorted(there, reverse=sort.startswith("-"))


def test_nan_sorts_last_too(small: Scene) -> None:
    rows = small.report / "sequences"
    shutil.rmtree(rows)
    base = {"prompt_len": 33, "length": 95, "finish": "stop"}
    with TapeWriter(small.report) as writer:
        for name, value in (("0-0.0", float("nan")), ("0-0.1", 0.5)):
            writer.append(
                "sequences",
                {"a": small.id(name), "b": "x", "mean_abs": value, **base},
            )
    api = Api(small.a, small.report)
    for sort in ("mean_abs", "-mean_abs"):
        assert [row["mean_abs"] for row in api.rows(sort=sort)] == [0.5, "NaN"]


def test_pages_show_every_row_once(api: Api) -> None:
    whole = [row["id"] for row in api.rows()]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = api.get(api.at("seqs"), limit=3, **after)
        assert page["start"] == len(seen)
        seen += [row["id"] for row in page["rows"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == whole
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("max_abs>0.5", {"0-0.1", "0-2.1"}),
        ("max_abs>0.5 finish=length group:0-2", {"0-2.1"}),
        ("abort", {"0-3.0"}),
        ("non_finite>=1", {"0-1.0"}),
        ("finish!=stop", {"0-0.1", "0-2.1", "0-2.2", "0-3.0"}),
        ("weight_version=4", {"0-2.0"}),
        ("nothing-like-this", set()),
    ],
)
def test_the_filter_joins_words_and_conditions(
    api: Api, scene: Scene, query: str, names: set[str]
) -> None:
    page = api.get(api.at("seqs"), q=query)
    assert {row["id"] for row in page["rows"]} == {scene.id(n) for n in names}
    assert page["matched"] == len(names)
    assert page["total"] == 10


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"q": "max_abs>big"}, "q"),
        ({"q": "colour>1"}, "q"),
        ({"q": "group>1"}, "q"),
        ({"sort": "-colour"}, "sort"),
        ({"after": "%%%"}, "after"),
        ({"after": "WyJ4Il0"}, "after"),
        ({"limit": 0}, "limit"),
        ({"limit": 501}, "limit"),
        ({"limit": "many"}, "limit"),
    ],
)
def test_a_bad_parameter_is_named(api: Api, params: Json, field: str) -> None:
    problem = api.fails(400, api.at("seqs"), **params)
    assert problem["field"] == field
    assert problem["detail"].startswith(f"{field}: ")


def test_weight_versions_come_from_the_steps(api: Api, scene: Scene) -> None:
    rows = {row["id"]: row for row in api.rows()}
    straddles = rows[scene.id("0-2.0")]
    assert (straddles["weight_version_min"], straddles["weight_version"]) == (3, 4)
    assert rows[scene.id("0-3.0")]["weight_version"] is None
