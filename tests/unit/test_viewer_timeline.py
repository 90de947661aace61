"""The schedule: windows, bins, events, steps, files, choices of kernels."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter, create_tape, seal
from tests.e2e.schedule_data import MS, ONE, START, STARTS, TWO, Schedule, build, build_dense
from tests.e2e.viewer_client import Api, Json

FLAGS = ("prefill", "decode", "verify", "recompute", "cached", "chunk", "score", "dummy")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return build(tmp_path_factory.mktemp("schedule"))


@pytest.fixture(scope="module")
def api(schedule: Schedule) -> Api:
    return Api(schedule.a, schedule.b, schedule.report)


def spans(data: Json) -> list[Json]:
    """The spans as rows with names instead of codes."""
    columns = dict(data["spans"])
    flags = columns.pop("flags")
    rows = []
    for i in range(len(columns["t"])):
        row = {name: values[i] for name, values in columns.items()}
        lane = data["lanes"][row.pop("lane")]
        for name, texts in data["names"].items():
            row[name] = None if row[name] is None else texts[row[name]]
        bits = flags[i] if flags is not None else 0
        row["marks"] = [name for bit, name in enumerate(data["flags"]) if bits >> bit & 1]
        rows.append({**row, "engine": lane["engine"], "kind": lane["kind"]})
    return rows


# ---- windows ------------------------------------------------------------------------------


def test_a_step_lasts_until_the_next_one_of_its_engine(api: Api) -> None:
    data = api.get(api.at("timeline"))
    assert data["axis"] == "time"
    assert data["origin"] == str(START)
    assert tuple(data["flags"]) == FLAGS
    mine = [s for s in spans(data) if s["engine"] == ONE]
    assert [s["t"] for s in mine] == [t * MS for t in STARTS]
    assert [s["duration"] for s in mine] == [*(np.diff(STARTS) * MS).tolist(), None]
    assert [s["kind"] for s in mine] == [
        "prefill",
        "mixed",
        "decode",
        "mixed",
        "decode",
        "verify",  # two rows and three tokens
        "decode",
    ]
    assert [s["rows"] for s in mine] == [2, 2, 2, 3, 2, 2, 1]
    assert [s["graph"] for s in mine] == [None, None, "full:2", None, "full:2", None, "full:1"]
    assert [s["padded_tokens"] for s in mine] == [0, 0, 2, 0, 2, 0, 2]


def test_a_step_says_which_kinds_of_rows_it_has(api: Api) -> None:
    found = {(s["engine"], s["step"]): s["marks"] for s in spans(api.get(api.at("timeline")))}
    assert found[ONE, 0] == ["prefill", "chunk"]
    assert found[ONE, 1] == ["prefill", "decode"]  # that chunk ends the prompt
    assert found[ONE, 3] == ["prefill", "decode", "recompute"]
    assert found[ONE, 5] == ["decode", "verify"]
    assert found[TWO, 0] == ["prefill", "cached"]
    assert found[TWO, 1] == ["decode"]


def test_engines_and_lanes_are_those_of_the_whole_tape_in_every_window(api: Api) -> None:
    whole = api.get(api.at("timeline"))
    part = api.get(api.at("timeline"), t0=START, t1=START + MS)
    assert part["lanes"] == whole["lanes"]
    assert part["extent"] == whole["extent"]
    assert [(e["id"], e["replica"], e["steps"]) for e in whole["engines"]] == [
        (ONE, 0, 7),
        (TWO, 1, 3),
    ]
    kinds = [(lane["engine"], lane["kind"], lane["steps"]) for lane in whole["lanes"]]
    assert kinds == [
        (ONE, "prefill", 1),
        (ONE, "mixed", 2),
        (ONE, "decode", 3),
        (ONE, "verify", 1),
        (TWO, "prefill", 1),
        (TWO, "decode", 2),
    ]


def test_a_window_has_the_steps_that_reach_into_it(api: Api) -> None:
    data = api.get(api.at("timeline"), t0=START + 41 * MS, t1=START + 262 * MS)
    # step 2 began before; step 4 begins where the window ends
    assert [(s["engine"], s["step"]) for s in spans(data)] == [
        (ONE, 2),
        (ONE, 3),
        (TWO, 1),
        (TWO, 2),
    ]
    late = api.get(api.at("timeline"), t0=START + 287 * MS, t1=START + 900 * MS)
    assert spans(late) == []  # how long the last steps took is not known
    assert late["in_window"] == 0


def test_some_lanes_alone(api: Api) -> None:
    data = api.get(api.at("timeline"), lanes=f"{ONE}:verify,{TWO}:prefill")
    assert [(s["engine"], s["step"]) for s in spans(data)] == [(ONE, 5), (TWO, 0)]


def test_events_of_the_window_stand_where_they_happened(api: Api) -> None:
    data = api.get(api.at("timeline"))
    assert [(e["kind"], e["t"] // MS) for e in data["events"]] == [
        ("preempt", 60),
        ("sleep", 100),
        ("wake", 200),
        ("update", 205),
        ("update", 206),
        ("update", 240),
        ("gap", 280),
        ("finding", 281),
    ]
    assert data["events_total"]["update"] == 3
    first, last = data["events"][0], data["events"][-1]
    assert first["seq"] == f"{ONE[:8]}.0.0"
    assert last["detail"] == "RT405 the update changed no weight"
    part = api.get(api.at("timeline"), t0=START + 100 * MS, t1=START + 200 * MS)
    assert [e["kind"] for e in part["events"]] == ["sleep"]


def test_weight_versions_are_bands(api: Api) -> None:
    bands = api.get(api.at("timeline"))["versions"]
    assert [(b["version"], b["state"], b["t"] // MS) for b in bands] == [
        (0, "complete", -50),
        (0, "dirty", 210),
        (1, "complete", 240),
    ]
    assert [b["until"] and b["until"] // MS for b in bands] == [210, 240, None]
    assert {b["engine"] for b in bands} == {ONE}


# ---- many steps ---------------------------------------------------------------------------


def test_many_steps_become_shares_of_time(tmp_path: Path) -> None:
    api = Api(build_dense(tmp_path, steps=5000))
    data = api.get(api.at("timeline"), max_spans=100)
    assert data["spans"] is None
    assert data["in_window"] == 10000
    bins = data["bins"]
    edges = np.array(bins["edges"])
    assert (edges[0], edges[-1]) == (0, data["extent"])
    # counted once more, one step after the other
    number = np.arange(5000)
    length = np.where(number % 50 == 0, 10, 1) * MS
    start = np.cumsum(length) - length
    length[-1] = 0
    for lane, cells in zip(data["lanes"], bins["lanes"], strict=True):
        mine = number[(number % 50 == 0) == (lane["kind"] == "prefill")]
        for i in range(0, len(edges) - 1, 37):
            low, high = edges[i], edges[i + 1]
            inside = np.minimum(start[mine] + length[mine], high) - np.maximum(start[mine], low)
            share = inside[inside > 0].sum() / (high - low)
            assert cells["share"][i] == pytest.approx(1000 * share, abs=1.01)
            reaches = mine[(inside > 0) | ((start[mine] >= low) & (start[mine] < high))]
            assert cells["rows"][i] == (int((reaches % 32 + 1).max()) if len(reaches) else None)
            begin = int(((start[mine] >= low) & (start[mine] < high)).sum())
            assert cells["steps"][i] == begin
        assert sum(cells["steps"]) == lane["steps"]


def test_nothing_that_ran_looks_as_if_it_had_not(tmp_path: Path) -> None:
    api = Api(build_dense(tmp_path, steps=5000, engines=1))
    data = api.get(api.at("timeline"), t0=START, t1=START + 10**15, max_spans=10)
    assert data["bins"]["lanes"][0]["share"][0] >= 1
    assert sum(data["bins"]["lanes"][0]["steps"]) == 100


def test_the_map_has_the_whole_tape_whatever_the_window(tmp_path: Path) -> None:
    api = Api(build_dense(tmp_path, steps=1000, engines=1))
    whole = api.get(api.at("timeline"))["map"]
    assert api.get(api.at("timeline"), t0=START, t1=START + MS)["map"] == whole
    share = np.array(whole["prefill"]) / 1000
    # of each 59 ms, 10 are prefill; the last step has no length
    assert share.mean() == pytest.approx(10 / 59, abs=0.005)
    assert set(whole) == {"prefill", "decode"}


def test_kinds_of_rows_are_left_out_where_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(build_dense(tmp_path, steps=200, engines=1, rows=True))
    assert api.get(api.at("timeline"))["spans"]["flags"] == [2] * 200
    monkeypatch.setattr("rolltape.viewer.rows.MOST", 100)
    data = api.get(api.at("timeline"))
    assert data["spans"]["flags"] is None
    few = api.get(api.at("timeline"), t0=START, t1=START + 12 * MS)
    assert few["spans"]["flags"] == [2, 2, 2]


def test_many_events_are_put_together(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        writer.append("steps", {"engine": [ONE] * 2, "step": [0, 1], "t_ns": [0, 10**9]})
        writer.append(
            "events",
            {
                "engine": [ONE] * 3000,
                "writer": writer.id,
                "t_ns": np.arange(3000) * 1000,
                "kind": ["abort", "preempt", "notice"] * 1000,
            },
        )
    api = Api(path)
    data = api.get(api.at("timeline"))
    assert data["events_total"] == {"abort": 1000, "preempt": 1000}
    assert len(data["events"]) <= 200
    assert sum(e["count"] for e in data["events"]) == 2000


# ---- states -------------------------------------------------------------------------------


def test_steps_without_times_stand_on_an_axis_of_numbers(tmp_path: Path) -> None:
    api = Api(build_dense(tmp_path, steps=60, timed=False))
    data = api.get(api.at("timeline"), t0=10, t1=20)
    assert data["axis"] == "step"
    assert data["untimed"] == 120
    assert data["extent"] == 60
    found = spans(data)
    assert [s["step"] for s in found if s["engine"] == ONE] == list(range(10, 20))
    assert {s["duration"] for s in found} == {1}
    assert data["versions"] == []
    answer = api.get(api.at("steps", ONE, "10"))
    assert (answer["t_ns"], answer["duration_ns"]) == (None, None)


def test_a_tape_without_steps_says_whether_it_has_rows(tmp_path: Path, schedule: Schedule) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    seal(path, status={"exit": 0})
    api = Api(path)
    data = api.get(api.at("timeline"))
    assert (data["steps"], data["forwards"], data["lanes"]) == (0, False, [])
    trainer = Api(schedule.b)
    assert trainer.get(trainer.at("timeline"))["forwards"] is True
    assert trainer.get(trainer.at("tactics"))["total"] == 4


def test_a_tape_that_is_still_written_shows_what_reached_the_disk(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        writer.append("steps", {"engine": ONE, "step": [0, 1], "t_ns": [10, 30], "rows": [1, 2]})
        writer.flush()
        api = Api(path)
        data = api.get(api.at("timeline"))
        assert [(s["step"], s["duration"], s["kind"]) for s in spans(data)] == [
            (0, 20, "unknown"),
            (1, None, "unknown"),
        ]


def test_a_damaged_shard_is_named_and_the_other_engine_is_shown(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    for engine in (ONE, TWO):
        with TapeWriter(path) as writer:
            writer.append("steps", {"engine": engine, "step": [0, 1], "t_ns": [10, 30]})
        shard = next((path / "steps").glob(f"{writer.id}*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    api = Api(path)
    answer = api.get(api.at("timeline"))
    assert [e["id"] for e in answer["engines"]] == [ONE]
    assert shard.name in answer["problems"][0]


def test_a_report_alone_has_no_schedule(schedule: Schedule) -> None:
    api = Api(schedule.report)
    assert api.fails(404, api.at("timeline"))["what"] == "tape"
    assert api.fails(404, api.at("steps", ONE, "0"))["what"] == "tape"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"t0": 5, "t1": 5}, "t1"),
        ({"lanes": "x:decode"}, "lanes"),
        ({"format": "xml"}, "format"),
        ({"max_spans": -1}, "max_spans"),
        ({"t0": -1}, "t0"),
        ({"t0": "soon"}, "t0"),
        ({"t1": 1 << 80}, "t1"),
    ],
)
def test_parameters_that_cannot_be_are_named(api: Api, params: Json, field: str) -> None:
    assert api.fails(400, api.at("timeline"), **params)["field"] == field


def test_too_many_spans_are_refused_with_the_limit(api: Api) -> None:
    assert api.fails(413, api.at("timeline"), max_spans=10**6)["limit"] == 20_000


# ---- one step -----------------------------------------------------------------------------


def test_one_step_whole(api: Api) -> None:
    data = api.get(api.at("steps", ONE, "5"))
    assert data["kind"] == "verify"
    assert data["t_ns"] == str(START + 274 * MS)
    assert data["duration_ns"] == 12 * MS
    assert (data["previous"], data["next"]) == (4, 6)
    assert data["batch"]["of"] == 2
    first, second = data["batch"]["rows"]
    assert (first["seq"], first["start"], first["n"], first["kind"]) == (
        f"{ONE[:8]}.0.0",
        10,
        1,
        "decode",
    )
    assert (second["kind"], second["drafted"], second["accepted"]) == ("verify", 3, 1)
    assert second["weight_version"] == 1
    assert api.get(api.at("steps", ONE, "6"))["duration_ns"] is None
    assert api.get(api.at("steps", "bb", "0"))["engine"] == TWO


def test_an_unfinished_prefill_and_a_shared_prefix_are_named(api: Api) -> None:
    rows = api.get(api.at("steps", ONE, "0"))["batch"]["rows"]
    assert [(r["seq"], r["chunk"]) for r in rows] == [
        (f"{ONE[:8]}.0.0", True),
        (f"{ONE[:8]}.3.0", False),
    ]
    shared = api.get(api.at("steps", TWO, "0"))["batch"]["rows"]
    assert sorted((r["kind"], r["kv_source"], r["n"]) for r in shared) == [
        ("cached", "shared", 4),
        ("prefill", "own", 4),
    ]


def test_a_step_has_the_kernel_choices_that_were_known_by_then(api: Api) -> None:
    def known(step: int) -> list[tuple[str, str]]:
        found = api.get(api.at("steps", ONE, str(step)))["tactics"]["rows"]
        return [(row["op"], row["tactic"]) for row in found]

    assert known(0) == [("fused_moe", "2"), ("fused_moe", "-1")]
    assert known(3) == [("fused_moe", "2"), ("fused_moe", "-1"), ("bmm", "3")]
    assert known(2) == [("fused_moe", "1")]  # frozen in its graph
    assert known(6) == []  # of another graph


def test_a_step_that_is_not_there(api: Api) -> None:
    assert api.fails(404, api.at("steps", ONE, "99"))["what"] == "step"
    assert api.fails(404, api.at("steps", "ffff", "0"))["what"] == "engine"
    assert api.fails(400, api.at("steps", ONE, "-1"))["field"] == "step"


# ---- files --------------------------------------------------------------------------------


def test_perfetto_reads_a_chrome_trace(api: Api) -> None:
    answer = api.raw(api.at("timeline"), format="perfetto")
    assert answer.headers["content-disposition"] == 'attachment; filename="timeline.json"'
    trace = answer.json()
    events: list[dict[str, Any]] = trace["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 10
    step = next(e for e in complete if e["pid"] == 1 and e["args"]["step"] == 2)
    assert (step["ts"], step["dur"]) == (40_000, 210_000)
    assert step["args"]["graph"] == "full:2"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[step["pid"], 0] == f"rollout {ONE}"
    assert names[step["pid"], step["tid"]] == "decode"
    assert {e["name"] for e in events if e["ph"] == "i"} >= {"sleep", "wake", "update"}
    assert trace["otherData"]["origin_ns"] == str(START)


def test_csv_has_every_step_of_the_window(api: Api) -> None:
    answer = api.raw(api.at("timeline"), format="csv", t0=START, t1=START + 50 * MS)
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(r["engine"], r["step"]) for r in rows] == [
        (ONE, "0"),
        (ONE, "1"),
        (ONE, "2"),
        (TWO, "0"),
        (TWO, "1"),
    ]
    assert rows[2]["t_ns"] == str(START + 40 * MS)
    assert rows[2]["graph"] == "full:2"


def test_csv_gives_a_spreadsheet_no_formula(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        writer.append("steps", {"engine": ONE, "step": 0, "t_ns": 1, "graph": "=1+1"})
        writer.append("steps", {"engine": "@SUM(1)", "step": 0, "t_ns": 2, "graph": "x"})
    api = Api(path)
    rows = list(csv.DictReader(io.StringIO(api.raw(api.at("timeline"), format="csv").text)))
    assert {row["graph"] for row in rows} == {"'=1+1", "x"}
    assert {row["engine"] for row in rows} == {ONE, "'@SUM(1)"}


def test_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.viewer.timeline.MAX_EXPORT", 50)
    api = Api(build_dense(tmp_path, steps=60, engines=1))
    assert api.fails(413, api.at("timeline"), format="csv")["limit"] == 50


# ---- choices of kernels -------------------------------------------------------------------


def test_choices_of_a_and_b_are_compared(api: Api) -> None:
    data = api.get(api.at("tactics"))
    assert (data["total"], data["matched"], data["differ"]) == (4, 4, 1)
    rows = {(r["op"], json.loads(r["key"])["shapes"][0], r["graph"]): r for r in data["rows"]}
    other = rows["fused_moe", 2, None]
    assert other["differs"] is True
    assert [a["tactic"] for a in other["a"]] == ["2"]
    assert [a["tactic"] for a in other["b"]] == ["7"]
    assert other["a"][0]["time_ms"] == 0.25
    assert rows["fused_moe", 2, "full:2"]["differs"] is False
    (hidden,) = data["unrecorded"]
    assert (hidden["tuner"], hidden["reason"]) == ("cublas", "its heuristic has no interface")


def test_choices_are_filtered_by_words(api: Api) -> None:
    def ops(query: str) -> list[str]:
        return [r["op"] for r in api.get(api.at("tactics"), q=query)["rows"]]

    assert ops("differs") == ["fused_moe"]
    assert ops("BMM") == ["bmm"]
    assert ops("cutlass full:2") == ["fused_moe"]
    assert ops("cutlass trtllm") == []
    assert len(ops("fused_moe")) == 3


def test_choices_come_in_pages(api: Api) -> None:
    first = api.get(api.at("tactics"), limit=3)
    assert (len(first["rows"]), first["next"]) == (3, "3")
    second = api.get(api.at("tactics"), limit=3, after=first["next"])
    assert (len(second["rows"]), second["next"]) == (1, None)
    assert api.fails(400, api.at("tactics"), limit=0)["field"] == "limit"
    assert api.fails(400, api.at("tactics"), after="x")["field"] == "after"


def test_without_b_no_choice_differs(schedule: Schedule) -> None:
    api = Api(schedule.a)
    data = api.get(api.at("tactics"))
    assert (data["b"], data["differ"]) == (False, 0)
    assert {r["differs"] for r in data["rows"]} == {None}
