"""Overview: sizes from the summary or counted, drift, the first layer that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.replay.drift import counts_over, drift
from rolltape.replay.measures import Deltas
from rolltape.store import Key, TapeWriter, create_tape, open_report
from rolltape.store import open as open_tape
from rolltape.store.columns import Masked
from rolltape.viewer import overview as module
from rolltape.viewer.library import Library
from rolltape.viewer.overview import count_sizes
from tests.e2e.viewer_client import Api
from tests.e2e.viewer_data import Scene, diff_case


def _summary(report: Path, **changes: Any) -> None:
    header = json.loads((report / "report.json").read_text())
    header["summary"] |= changes
    header.pop("xxh3", None)
    (report / "report.json").write_text(json.dumps(header))


def _deltas(scene: Scene) -> np.ndarray:
    found = [diff_case(c)["delta"] for c in scene.cases.values() if c.reported]
    return np.concatenate([np.abs(d.values[d.valid]) for d in found])


def test_a_report_without_sizes_is_counted_once(
    small: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = _deltas(small)
    found = count_sizes(open_report(small.report))
    assert (found.tokens, found.equal) == (len(size), int((size == 0).sum()))
    assert found.over == {f"{x:g}": int((size > x).sum()) for x in (1e-3, 1e-2, 1e-1, 1.0)}
    api = Api(small.a, small.b, small.report)
    api.overview()
    monkeypatch.setattr(module, "count_sizes", lambda _: pytest.fail("counted again"))
    data = api.overview()
    assert data["over"] == found.over
    assert data["numbers"]["over_share"] == found.over["0.1"] / len(size)


def test_a_summary_with_sizes_is_enough(small: Scene) -> None:
    size = _deltas(small)
    _summary(small.report, over=counts_over(size))
    for shard in (small.report / "tokens").iterdir():
        shard.unlink()
    data = Api(small.a, small.b, small.report).overview()
    share = f"{100 * (size > 0.1).mean():.3g} %"
    assert data["headline"][0]["text"].startswith(f"divergent: {share} of {len(size):,} ")


def test_drift_of_an_older_report_is_by_version_and_says_that_it_is_not_exact(
    api: Api, scene: Scene
) -> None:
    found = api.overview()["drift"]
    assert found["exact"] is False and found["by_time"] == found["by_step"] == []
    rows = {row["version"]: row for row in found["by_version"]}
    assert set(rows) == {3, 4}
    case = scene.cases["0-2.0"]
    delta = diff_case(case)["delta"]
    there = delta.values[delta.valid].astype(np.float64)
    assert rows[4]["tokens"] == len(there)
    assert rows[4]["mean"] == pytest.approx(there.mean())
    assert rows[4]["p99_abs"] is None


def test_drift_that_the_diff_wrote_is_shown(small: Scene) -> None:
    row = {"version": 7, "label": "step 70", "tokens": 5, "outside": 0.25}
    _summary(small.report, drift={"by_version": [row], "by_step": [], "by_time": "nonsense"})
    found = Api(small.a, small.report).overview()["drift"]
    assert found == {"exact": True, "by_version": [row], "by_step": [], "by_time": []}


def test_the_first_layer_that_differs_is_in_the_headline(small: Scene) -> None:
    for first, words in (
        ({"layer": 17, "site": None, "by": "routing"}, "first divergent layer 17, routing"),
        ({"layer": None, "site": "embed", "by": "activations"}, "first divergent embed"),
    ):
        _summary(small.report, first_divergent=first)
        data = Api(small.a, small.report).overview()
        assert data["first_divergent"] == first
        assert any(piece["text"] == f"; {words}" for piece in data["headline"])


# ---- what the diff counts -----------------------------------------------------------------


class _Sequence:
    def __init__(self, key: Key, opened: int | None) -> None:
        self.key, self.info = key, {"opened_ns": opened}


class _Result:
    def __init__(self, number: int, opened: int | None) -> None:
        self.a = _Sequence(Key("a" * 32, str(number)), opened)
        self.b = _Sequence(Key("b" * 32, str(number)), None)


def test_drift_by_version_step_and_time(tmp_path: Path) -> None:
    a, b = create_tape(tmp_path / "a", role="rollout"), create_tape(tmp_path / "b", role="trainer")
    with TapeWriter(a) as writer:
        for version, label in ((3, "step 30"), (4, None)):
            noted = {"engine": "a" * 32, "version": version, "state": "complete", "label": label}
            writer.append("weights", noted)
    with TapeWriter(b) as writer:
        for number, step in ((0, 10), (1, 11)):
            key = {"engine": "b" * 32, "request": str(number), "sample": 0, "pass": 0}
            writer.append(
                "annotations", {**key, "name": "optimizer_step", "number": step, "t_ns": 1}
            )
            writer.append("annotations", {**key, "name": "reward", "number": 9.0, "t_ns": 1})
    delta = np.array([0.0, 0.5, -0.1, 0.01, -1.0, 0.2])
    pair = np.array([0, 0, 1, 1, 2, 2])
    versions = Masked(np.array([3, 3, 3, 4, 4, 0]), np.array([1, 1, 1, 1, 1, 0], bool))
    deltas = Deltas(delta, delta == 0, pair, pair, pair, versions)
    results: Any = [_Result(0, 1000), _Result(1, 1000 + 63), _Result(2, None)]
    found = drift(deltas, results, open_tape(a), open_tape(b))
    three, four = found["by_version"]
    assert (three["version"], three["label"], three["tokens"]) == (3, "step 30", 3)
    assert four["label"] is None and four["tokens"] == 2
    assert three["mean"] == pytest.approx(0.4 / 3) and three["max_abs"] == 0.5
    assert three["outside"] == pytest.approx(1 / 3)
    assert three["worst_ratio"] == pytest.approx(np.exp(0.5))
    assert four["worst_ratio"] == pytest.approx(np.exp(-1.0))
    assert [(row["step"], row["tokens"]) for row in found["by_step"]] == [(10, 2), (11, 2)]
    times = found["by_time"]
    assert [(r["t0_ns"], r["t1_ns"], r["tokens"]) for r in times] == [
        (1000, 1001, 2),
        (1063, 1064, 2),
    ]
    assert counts_over(delta) == {"0.001": 5, "0.01": 4, "0.1": 3, "1": 0}
    same: Any = [_Result(0, 5), _Result(1, 5), _Result(2, None)]
    assert drift(deltas, same, open_tape(a), open_tape(a))["by_time"] == []
    assert drift(deltas, same, open_tape(a), open_tape(a))["by_step"] == []


def test_events_of_many_commits_are_counted_and_the_first_of_each_is_kept(tmp_path: Path) -> None:
    root = create_tape(tmp_path / "a", role="rollout")
    with TapeWriter(root) as writer:
        for i in range(600):
            kind = "preempt" if i < 300 or i % 2 else "gap"
            row = {"writer": writer.id, "t_ns": i, "kind": kind, "detail": str(i)}
            writer.append("events", row)
            writer.flush()
    (run,) = Library([root]).runs()
    pair = Library([root]).pair(run.id, None)
    assert pair.events == {"preempt": (450, "0"), "gap": (150, "300")}
