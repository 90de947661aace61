"""A scan of all tokens says what it found, what it did not send, and what it could not read."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter
from rolltape.store.distributions import distribution_columns, raw_semantics
from rolltape.store.schema import TOKEN_STATES
from rolltape.viewer.library import Library
from rolltape.viewer.scan import read_condition, scan
from rolltape.viewer.stats import BELOW, NO_RANK
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import Scene, diff_case


def lines(api: Api, where: str, **params: Any) -> tuple[list[Json], Json]:
    answer = api.raw(api.at("scan"), where=where, **params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert found[-1]["kind"] == "summary"
    return [row for row in found if row["kind"] == "token"], found[-1]


def truth(scene: Scene) -> list[tuple[str, Json]]:
    cases = [c for c in scene.cases.values() if c.reported and c.length > c.prompt_len]
    return [(case.key_a.id, diff_case(case)) for case in cases]


def test_a_scan_finds_every_token_that_meets_the_condition(api: Api, scene: Scene) -> None:
    rows, summary = lines(api, "abs_delta > 0.05", limit=10_000)
    expected = {
        (seq, int(tok))
        for seq, case in truth(scene)
        for tok in np.flatnonzero(
            case["delta"].valid & (np.abs(case["delta"].values.astype(np.float64)) > 0.05)
        )
    }
    assert {(row["seq"], row["tok"]) for row in rows} == expected
    assert summary["matched"] == summary["sent"] == len(expected) > 50
    assert summary["scanned"] == sum(len(case["state"]) for _, case in truth(scene))
    assert summary["limited"] is False and summary["damaged"] == []
    (worst,) = [row for row in rows if row["tok"] == 71 and row["seq"] == scene.id("0-0.1")]
    assert (worst["a"], worst["state"]) == (-2.75, "compared")
    assert np.float32(worst["delta"]) == np.float32(1.2899998)


def test_conditions_on_state_flips_and_position(api: Api, scene: Scene) -> None:
    rows, _ = lines(api, "state = missing_b or state = missing_a", limit=1000)
    counts = {name: sum(r["state"] == name for r in rows) for name in ("missing_a", "missing_b")}
    assert counts == {"missing_a": 4, "missing_b": 6}
    assert all(row["delta"] is None for row in rows)
    rows, summary = lines(api, "flips > 0 and position < 200 and not equal = 1", limit=10_000)
    expected = 0
    for seq, case in truth(scene):
        a = next(c for c in scene.cases.values() if c.key_a.id == seq)
        same = case["delta"].valid & (a.a.values.view("u4") == a.b.values.view("u4"))
        flips = case["flips"].valid & (case["flips"].values > 0)
        expected += int((flips & ~same & (np.arange(len(flips)) < 200)).sum())
    assert summary["matched"] == len(rows) == expected > 0
    states = {TOKEN_STATES[s] for _, case in truth(scene) for s in case["state"]}
    assert (
        sum(lines(api, f"state = {name}")[1]["matched"] for name in states)
        == (lines(api, "position >= 0")[1]["matched"])
    )


def test_a_limit_is_said(api: Api) -> None:
    rows, summary = lines(api, "abs_delta > 0.01", limit=5)
    assert len(rows) == summary["sent"] == summary["limit"] == 5
    assert summary["matched"] > 5 and summary["limited"] is True


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"where": "colour > 1"}, "where"),
        ({"where": ""}, "where"),
        ({"where": "word"}, "where"),
        ({"where": "delta > 1 and"}, "where"),
        ({"where": "delta > 1", "limit": 0}, "limit"),
        ({"where": "delta > 1", "limit": 10_001}, "limit"),
        ({}, "where"),
    ],
)
def test_a_bad_scan_is_named_before_it_begins(api: Api, params: Json, field: str) -> None:
    assert api.fails(400, api.at("scan"), **params)["field"] == field


def test_without_a_report_there_is_nothing_to_scan(small: Scene) -> None:
    api = Api(small.a)
    assert api.fails(404, api.at("scan"), where="delta > 1")["what"] == "report"


def test_damage_is_told_in_the_summary(small: Scene) -> None:
    with TapeWriter(small.report) as writer:  # lists that do not fit each other
        writer.append("tokens", {"a": "x", "n": 2, "state": [[0, 0]], "delta": [[1.0]]})
    rows, summary = lines(Api(small.a, small.report), "delta > 1 and position > 0")
    assert any("does not have a value for each position" in text for text in summary["damaged"])
    assert summary["matched"] == len(rows) == 1


def test_damage_is_told_by_every_scan(small: Scene) -> None:
    (shard,) = (small.report / "tokens").iterdir()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    api = Api(small.a, small.report)
    for _ in range(3):
        _, summary = lines(api, "position >= 0")
        assert summary["scanned"] == 0
        (told,) = summary["damaged"]
        assert f"tokens/{shard.name}" in told


def test_damage_of_other_tables_is_not_that_of_a_scan(small: Scene) -> None:
    library = Library([small.a, small.report])
    report = library.pair(library.runs()[0].id, None).report
    assert report is not None
    report.note(f"{report.place}/sequences/x.arrow: damaged")
    told = list(scan(report, read_condition("position >= 0"), limit=1, lock=library.lock))
    assert json.loads(told[-1])["damaged"] == []


def test_the_lock_is_free_between_two_batches_and_a_scan_can_be_left(small: Scene) -> None:
    for i in range(3):
        with TapeWriter(small.report) as writer:
            writer.append("tokens", {"a": f"x{i}", "n": 1, "state": [[0]], "delta": [[9.0 + i]]})
    library = Library([small.a, small.report])
    report = library.pair(library.runs()[0].id, None).report
    assert report is not None
    held: list[bool] = []

    class Lock(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            held.append(True)

        def __exit__(self, *_: object) -> None:
            held.pop()

    stream = scan(report, read_condition("delta > 8"), limit=9, lock=Lock())
    first = next(stream)
    assert held == [] and json.loads(first)["kind"] == "token"
    stream.close()
    assert held == []
    told = list(scan(report, read_condition("delta > 8"), limit=9, lock=Lock(), clock=_Clock()))
    kinds = [json.loads(line)["kind"] for part in told for line in part.splitlines()]
    assert kinds.count("token") == 3 and "progress" in kinds and kinds[-1] == "summary"


class _Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


# ---- what distributions say ---------------------------------------------------------------


def _distributions(scene: Scene, name: str) -> None:
    case = scene.cases[name]
    semantics = raw_semantics(vocab_size=4096, dtype="float32", source="engine")
    for path, key, logs in (
        (scene.a, case.key_a, [0.5, 0.25]),
        (scene.b, case.key_b, [0.25, 0.5]),
    ):
        token = int(case.ids[50])
        best = [token, token + 1] if path == scene.a else [token + 1, token]
        ids = np.array([best, [4000, 4001]])
        logprobs = np.log(np.array([sorted(logs, reverse=True)] * 2, np.float32))
        tail = np.log(np.full(2, 0.25, np.float32))
        columns = distribution_columns(ids, logprobs, tail, np.array([2]))
        span = {"engine": key.engine, "request": key.request, "sample": key.sample}
        with TapeWriter(path) as writer:
            row = {**span, "pass": 0, "start": 50, "n": 2, "semantics": [semantics]}
            writer.append("distributions", {**row, **columns})


def test_stats_are_made_when_asked_for_and_absent_is_not_a_number(small: Scene) -> None:
    _distributions(small, "0-0.1")
    api = Api(small.a, small.b, small.report)
    seq = small.id("0-0.1")
    plain, metadata = api.arrays(seq, 45, 60)
    every = ["entropy_a", "entropy_b", "rank_a", "rank_b", "kl", "topk_overlap"]
    assert sorted(metadata["stats"].split(",")) == sorted(every) and "kl" not in plain
    assert sorted(api.get(api.at("seqs", seq))["stats"]) == sorted(every)
    found, _ = api.arrays(seq, 45, 60, cols=",".join(every))
    assert set(found) == set(every)
    there = np.arange(45, 60) == 50
    entropy = -(0.5 * np.log(0.5) + 0.5 * np.log(0.25))
    np.testing.assert_allclose(found["entropy_a"][5:7], entropy, rtol=1e-6)
    assert np.isnan(found["entropy_a"][:5]).all() and np.isnan(found["kl"][7:]).all()
    assert found["rank_a"].tolist() == [NO_RANK] * 5 + [1, BELOW] + [NO_RANK] * 8
    assert found["rank_b"][there].tolist() == [2]
    np.testing.assert_allclose(found["topk_overlap"][5:7], 1.0)
    np.testing.assert_allclose(found["kl"][5], 0.25 * np.log(2), rtol=1e-5)
    assert found["kl"][6] == 0.0
    none, metadata = api.arrays(small.id("0-0.0"), 45, 60, cols="kl,rank_a")
    assert metadata["stats"] == "" and np.isnan(none["kl"]).all()
    assert (none["rank_a"] == NO_RANK).all()
