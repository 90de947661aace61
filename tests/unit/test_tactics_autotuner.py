"""Choices of the AutoTuner family: seen once, with where they came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rolltape import store
from rolltape.recorder import session as sessions
from rolltape.recorder.tactics import autotuner, bind, rows
from rolltape.recorder.tactics.autotuner import parse
from tests import autotuner_scenario as scenario
from tests.autotuner_scenario import Job
from tests.doubles import autotuner as double

pytestmark = pytest.mark.engine


@pytest.fixture(params=double.LAYOUTS)
def job(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    yield Job(double.load(request.param), tmp_path / "tape", monkeypatch)
    sessions.stop()
    for observer in list(autotuner._observers.values()):
        observer.undo()


def test_a_key_is_written_once_and_again_when_the_answer_changes(job: Job) -> None:
    scenario.check_life(job, timed=not job.name.startswith("flashinfer."))


def test_a_cache_that_was_there_before_is_written_at_the_end(job: Job) -> None:
    scenario.check_late(job)


def test_without_a_session_nothing_is_kept(job: Job) -> None:
    scenario.check_inert(job)


def test_another_cache_in_its_place_is_a_loaded_one(job: Job) -> None:
    job.record()
    autotuner.observe(job.name)
    job.tune(5)
    tuner = job.module.AutoTuner.get()
    loaded = dict(autotuner._cache_of(tuner).items())
    if hasattr(tuner.profiling_cache, "cache"):
        tuner.profiling_cache.cache = loaded
    else:
        tuner.profiling_cache = loaded
    loaded[("other", "Runner", "()", ((2, 2),))] = (0, "t", 1.5)
    job.call(6)
    found = scenario.entries(job.rows())
    assert ([2, 2], "cached", "Runner", "'t'") in found
    assert len(found) == 3


def test_the_end_of_the_warm_up_can_be_said(job: Job) -> None:
    job.tune(5)
    job.record()
    autotuner.observe(job.name)
    job.call(5)
    autotuner.dump()
    autotuner.dump()
    active = sessions.active()
    assert active is not None
    assert active.drain()
    open_rows = [json.loads(r["key"]) for r in store.open(job.tape).rows("tactics")]
    assert sum("shapes" not in key for key in open_rows) == 2
    assert len(scenario.entries(job.rows())) == 2


def test_keys_have_an_end_and_it_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "MOST_KEYS", 3)
    job.record()
    autotuner.observe(job.name)
    for tokens in range(1, 9):
        job.call(tokens)
    assert [c[0][0] for c in scenario.calls(job.rows())] == [1, 2, 3]
    gaps = [e for e in store.open(job.tape).rows("events") if e["kind"] == "gap"]
    assert [json.loads(g["detail"])["table"] for g in gaps] == ["tactics"]


def test_an_entry_of_an_unknown_form_is_a_gap(job: Job) -> None:
    job.record()
    autotuner.observe(job.name)
    job.call(5)
    autotuner._cache_of(job.module.AutoTuner.get())["what"] = "ever"
    job.call(6)
    job.call(7)
    assert len(scenario.calls(job.rows())) == 3
    gaps = [e for e in store.open(job.tape).rows("events") if e["kind"] == "gap"]
    assert [json.loads(g["detail"])["key"] for g in gaps] == ["'what'"]


def test_a_fault_of_the_observer_is_not_one_of_the_engine(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.tape = store.create_tape(job.folder, role="rollout")
    sessions.start(job.tape, sessions.Options())
    autotuner.observe(job.name)
    monkeypatch.setattr(autotuner, "put", None)
    for tokens in range(1, 6):
        assert job.call(tokens) == ("Slow", -1)
    sessions.stop()
    errors = [e for e in store.open(job.tape).rows("events") if e["kind"] == "hook_error"]
    assert {json.loads(e["detail"])["hook"] for e in errors} == {"tactics.autotuner"}
    assert len(errors) == sessions.MAX_FAULTS


def test_an_error_of_the_tuner_reaches_its_caller(job: Job) -> None:
    job.record()
    autotuner.observe(job.name)
    with pytest.raises(AttributeError):
        job.module.AutoTuner.get().choose_one(scenario.OP, job.runners, None, [job.weight])


def test_two_engines_in_a_process_share_no_rows(job: Job) -> None:
    job.record()
    active = sessions.active()
    bind.observe_all("a" * 32)
    assert rows.engine_of(active) == "a" * 32
    bind.observe_all("b" * 32)
    bind.observe_all("a" * 32)
    assert rows.engine_of(active) == ""
    bind.unbind()


@pytest.mark.parametrize(
    ("key", "value", "selection", "expected"),
    [
        (("op", "R", "('a',)", ((4, 8),)), (1, -1, 0.5), None, ("('a',)", (), -1, 0.5)),
        (("op", "R", 77, ((4, 8),)), (1, (2, 3), 0.5), None, (None, (), (2, 3), 0.5)),
        (("op", "R", 77, ((4, 8),)), (1, 7, "profile"), None, (None, (), 7, None)),
        (("op", "R", 77, ((4, 8),), ("bf16",)), (1, 7, None), None, (None, ("bf16",), 7, None)),
        (
            double.Key("op", "R", 77, ((4, 8),), ("bf16",)),
            (7, None),
            {"time_ms": 0.125},
            (None, ("bf16",), 7, 0.125),
        ),
    ],
)
def test_entries_are_read_by_their_form(
    key: Any, value: Any, selection: Any, expected: Any
) -> None:
    entry = parse(key, value, selection)
    assert (entry.op, entry.runner, entry.profile) == ("op", "R", ((4, 8),))
    assert (entry.unique, entry.extras, entry.tactic, entry.time_ms) == expected


@pytest.mark.parametrize(
    ("key", "value"), [("key", (1, 2, 3)), (("op", "R"), (1, 2, 3)), (("op", "R", 7, ()), 3)]
)
def test_other_forms_are_none(key: Any, value: Any) -> None:
    assert parse(key, value) is None
