"""The parts of the TensorRT-LLM adapter that need no engine, and its targets against the source."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolltape import store
from rolltape.recorder import reached
from rolltape.recorder.options import Options
from rolltape.recorder.reached import find_unreached
from rolltape.recorder.rows import engine_job
from rolltape.recorder.serving.batch import Roster
from rolltape.recorder.session import Session
from rolltape.recorder.summary import summarize
from rolltape.recorder.tensorrt_llm import frontend, identity
from rolltape.recorder.tensorrt_llm.identity import ENVIRONMENT_VARIABLE, copies
from rolltape.recorder.tensorrt_llm.output import (
    finish_of,
    prompt_logprobs,
    route_rows,
    token_logprobs,
)
from rolltape.recorder.tensorrt_llm.ray import Recorded
from rolltape.recorder.tensorrt_llm.sampling import resolve
from rolltape.recorder.tensorrt_llm.schedule import Schedule, UnsupportedBatch, prompt_ids
from rolltape.recorder.tensorrt_llm.settings import findings
from rolltape.recorder.tensorrt_llm.targets import TARGETS
from rolltape.recorder.tensorrt_llm.weights import Weights
from rolltape.store import TapeWriter
from rolltape.store.places import LocalPlace
from tests.manifests.check import load, target_problems


def test_targets_are_in_the_source() -> None:
    assert target_problems(load("tensorrt_llm"), TARGETS) == []


def test_logprob_is_looked_up_by_token_not_taken_from_the_first_entry() -> None:
    best = {9: SimpleNamespace(logprob=-0.1, rank=1), 4: SimpleNamespace(logprob=-2.0, rank=3)}
    values, there = token_logprobs([best, {9: SimpleNamespace(logprob=-0.5)}], [4, 7])
    assert values[0] == -2.0
    assert there.tolist() == [True, False]


def test_simple_format_may_be_longer_and_shorter() -> None:
    values, there = token_logprobs([-1.0, -2.0, -3.0], [5, 6])
    assert values.tolist() == [-1.0, -2.0] and there.all()
    assert token_logprobs([-1.0], [5, 6])[1].tolist() == [True, False]


def test_prompt_logprobs_score_the_next_token() -> None:
    placed = prompt_logprobs([-1.0, -2.0, -9.0], [1, 2, 3])
    assert placed is not None and placed[0].tolist() == [-1.0, -2.0]
    assert prompt_logprobs([-2.0], [1, 2, 3, 4]) is None  # a reused prefix: only the end is there


def test_engine_routes_are_cut_and_checked() -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[1, 3]]], np.int16)
    assert len(route_rows(ids, 3)[0]) == 2  # one surplus forward
    assert route_rows(ids, 5)[1] is not None
    assert route_rows(np.zeros_like(ids), 4)[1] is not None
    assert route_rows(ids * 0 + 2, 4)[1] is not None


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_k": 1, "temperature": 0.7}, True),
        ({"top_k": 0, "temperature": 0.7}, False),
        ({"min_p": 0.1}, False),
        ({"top_p_decay": 0.5}, False),
    ],
)
def test_unset_is_greedy(values: dict[str, Any], greedy: bool) -> None:
    assert resolve(SimpleNamespace(**values)).greedy is greedy


def _request(name: int, **values: Any) -> Any:
    plain = {"py_request_id": name, "py_client_id": name + 100, "py_orig_prompt_len": 5}
    return SimpleNamespace(**plain, py_prompt_len=5, py_draft_tokens=[], **values)


def _chunk(request: Any, start: int, n: int) -> Any:
    request.context_current_position, request.context_chunk_size = start, n
    return request


def _batch(context: Sequence[Any] = (), generation: Sequence[Any] = ()) -> Any:
    return SimpleNamespace(context_requests=[*context], generation_requests=[*generation])


def test_positions_of_chunks_decode_and_recompute() -> None:
    schedule, request = Schedule(Roster()), _request(1)
    seen = []
    # two positions came from the cache; later it is paused, and everything is run again
    for chunk in ((2, 2), (4, 1), None, None, (0, 7), None):
        context = [] if chunk is None else [_chunk(request, *chunk)]
        rows = schedule.plan(_batch(context, [] if chunk else [request])).rows
        seen.append((int(rows.start[0]), int(rows.n[0]), int(rows.cached[0])))
    assert seen == [(2, 2, 2), (4, 1, 0), (5, 1, 0), (6, 1, 0), (0, 7, 0), (7, 1, 0)]


def test_dummies_are_left_out_of_rows_but_not_of_the_flat_batch() -> None:
    dummy = _request(9, is_attention_dp_dummy=True)
    batch = _batch([_chunk(dummy, 0, 3), _chunk(_request(1), 0, 5)], [])
    plan = Schedule(Roster()).plan(batch)
    assert plan.tokens == 8 and len(plan.lives) == 1 and plan.lives[0].request == "101"
    assert plan.kept is not None and plan.kept.tolist() == [3, 4, 5, 6, 7]


def test_drafts_are_refused() -> None:
    request = _request(1)
    request.py_draft_tokens = [3]
    with pytest.raises(UnsupportedBatch):
        Schedule(Roster()).plan(_batch([], [request]))


def test_only_the_string_1_turns_determinism_on() -> None:
    assert findings({"FORCE_DETERMINISTIC": "1"}) == []
    assert [f["code"] for f in findings({"FORCE_DETERMINISTIC": "true"})] == ["RT401"]
    front = {ENVIRONMENT_VARIABLE: '{"FORCE_DETERMINISTIC": "1"}'}
    assert [f["code"] for f in findings(front)] == ["RT402"]
    assert [f["code"] for f in findings({**front, "FORCE_DETERMINISTIC": "0"})] == ["RT403"]


def test_options_travel_under_the_prefix_that_pools_pass_on() -> None:
    found = copies({"ROLLTAPE_TAPE": "/t", "PATH": "/bin", "TLLM_ROLLTAPE_LEVEL": "x"})
    assert found == {"TLLM_ROLLTAPE_TAPE": "/t"}


def test_cancelled_is_an_abort() -> None:
    assert finish_of("cancelled", done=True, failed=False) == "abort"
    assert finish_of(None, done=False, failed=True) == "error"


# -- positions that are no longer known ---------------------------------------------------


def test_a_missed_forward_costs_positions_and_never_shifts_them() -> None:
    schedule = Schedule(Roster())
    a, b = _request(1), _request(2)
    schedule.plan(_batch([_chunk(a, 0, 5), _chunk(b, 0, 5)]))
    schedule.lose()  # a step that no hook saw
    plan = schedule.plan(_batch(generation=[a, b]))
    assert (plan.lives, plan.tokens, len(plan.rows)) == ([], 2, 0)
    assert [life.request for life, _ in plan.unknown] == ["101", "102"]
    assert schedule.plan(_batch(generation=[a, b])).unknown == []  # said once
    # a request that is forwarded anew tells where it is
    plan = schedule.plan(_batch([_chunk(a, 0, 7)], [b]))
    assert (plan.rows.start.tolist(), plan.rows.n.tolist()) == ([0], [7])
    plan = schedule.plan(_batch(generation=[b, a]))
    assert plan.rows.start.tolist() == [7] and plan.kept is not None
    assert plan.kept.tolist() == [1], "the row of the unknown one stays in the flat batch"


def test_a_request_that_is_first_seen_decoding() -> None:
    fresh = _request(1, get_num_tokens=lambda beam: 6)  # its prompt ran on another server
    late = _request(2, get_num_tokens=lambda beam: 9)
    plan = Schedule(Roster()).plan(_batch(generation=[fresh, late]))
    assert plan.rows.start.tolist() == [5]
    assert [life.request for life, _ in plan.unknown] == ["102"]


def test_the_same_batch_one_step_further() -> None:
    schedule, requests = Schedule(Roster()), [_request(1), _request(2), _request(3)]
    schedule.plan(_batch([_chunk(request, 0, 5) for request in requests]))
    dummy = _request(9, is_cuda_graph_dummy=True)
    starts = []
    for generation in (
        [dummy, *requests],
        [dummy, *requests],
        [dummy, *requests],
        requests[1:],
        requests[1:],
        requests[::-1][:2],
    ):
        plan = schedule.plan(_batch(generation=generation))
        starts.append(plan.rows.start.tolist())
        assert (plan.kept is None) == (dummy not in generation)
        assert [life.request for life in plan.lives] == [
            str(r.py_client_id) for r in generation if r is not dummy
        ]
    assert starts == [[5, 5, 5], [6, 6, 6], [7, 7, 7], [8, 8], [9, 9], [10, 10]]
    requests[2].py_draft_tokens = [4]
    with pytest.raises(UnsupportedBatch):
        schedule.plan(_batch(generation=requests[::-1][:2]))
    requests[2].py_draft_tokens = []
    schedule.lose()
    assert len(schedule.plan(_batch(generation=requests[::-1][:2])).rows) == 0


def test_an_unsupported_batch_changes_nothing() -> None:
    schedule = Schedule(Roster())
    draft = _request(2)
    draft.py_draft_tokens = [1]
    with pytest.raises(UnsupportedBatch):
        schedule.plan(_batch([_chunk(_request(1), 0, 5)], [draft]))
    assert schedule.requests == {}


def test_what_is_not_wanted_keeps_its_rows_and_is_not_recorded() -> None:
    schedule = Schedule(Roster(), wants=lambda request: request.py_request_id == 2)
    plan = schedule.plan(_batch([_chunk(_request(1), 0, 5), _chunk(_request(2), 0, 5)]))
    assert [life.wanted for life in plan.lives] == [False, True]


def test_a_child_without_a_number_is_not_taken_for_the_first_sample() -> None:
    child = _chunk(_request(2, is_child=True), 0, 5)
    plan = Schedule(Roster()).plan(_batch([_chunk(_request(1), 0, 5), child]))
    assert [life.wanted for life in plan.lives] == [True, False]
    ((life, reason),) = plan.unknown
    assert life is plan.lives[1] and "not known which" in reason


def test_prompt_ids_leave_out_what_was_generated() -> None:
    request = _request(1, get_tokens=lambda beam: [1, 2, 3, 4, 5, 60, 61])
    assert prompt_ids(request) == [1, 2, 3, 4, 5]
    assert prompt_ids(_request(1)) is None


# -- which engine -------------------------------------------------------------------------


class BaseWorker:
    """As the engine calls the executors that run a model."""


class Worker(BaseWorker):
    """One of them."""


class Proxy:
    """An executor that speaks to a worker elsewhere."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process without an engine; called again it is another one that inherits `env`."""

    def start(**env: str) -> None:
        for name in ("TRTLLM_ROLLTAPE_ENGINE", "PMIX_NAMESPACE", "SLURM_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(identity, "_own", set())
        monkeypatch.setattr(identity, "_started", 0)
        for name, none in (("engine", ""), ("front", False), ("worker", False)):
            monkeypatch.setattr(identity._Announced, name, none)

    start()
    return start


def test_a_spawned_worker_has_the_engine_of_its_front_end(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAPE_TAPE", "/now")
    monkeypatch.setenv("TLLM_ROLLTAPE_TAPE", "/earlier")
    engine = identity.announce()  # the pool may take its variables now
    assert os.environ["TLLM_ROLLTAPE_TAPE"] == "/now"
    assert os.environ[ENVIRONMENT_VARIABLE.replace("ENVIRONMENT", "ENGINE")] == engine
    assert identity.start_engine(Proxy()) == engine
    process(TRTLLM_ROLLTAPE_ENGINE=engine)
    assert identity.start_engine(Worker()) == identity.current_engine() == engine


def test_front_end_and_worker_in_one_process(process: Any) -> None:
    engine = identity.announce()
    front, worker = Proxy(), Worker()
    assert identity.start_engine(front) == identity.start_engine(worker) == engine
    assert identity.engine_of(front) == engine
    second = identity.announce()
    assert identity.start_engine(Worker()) == second != engine
    assert identity.start_engine(worker) == engine


def test_an_engine_in_a_process_started_by_one_with_an_engine_is_another(process: Any) -> None:
    parent = identity.announce()
    process(TRTLLM_ROLLTAPE_ENGINE=parent)
    assert identity.announce() != parent


def test_ranks_of_one_launch_agree_without_talking(process: Any) -> None:
    launch = {"PMIX_NAMESPACE": "job7", "OMPI_COMM_WORLD_SIZE": "2"}
    process(**launch)
    front = [identity.announce()]
    assert identity.start_engine(Proxy()) == identity.start_engine(Worker()) == front[0]
    front.append(identity.announce())
    process(**launch)
    assert [identity.start_engine(Worker()), identity.start_engine(Worker())] == front


# -- the front end ------------------------------------------------------------------------


def _result(name: int, ids: list[int], n: int = 1) -> Any:
    params = SimpleNamespace(n=n, best_of=n, temperature=1.0)
    outputs = [SimpleNamespace(finish_reason=None, logprobs=[]) for _ in range(n)]
    return SimpleNamespace(
        id=name, prompt_token_ids=ids, sampling_params=params, _outputs=outputs, _done=False
    )


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(store.create_tape(tmp_path / "tape", role="rollout"), Options())


def _sequences(session: Session) -> Any:
    session.close()
    return list(store.open(session.tape))


def test_a_front_end_has_queues_and_a_worker_with_queues_has_a_front_end(
    session: Session, process: Any
) -> None:
    queues = {"result_queue": object()}
    front, alone, behind = Proxy(), Worker(), Worker()
    vars(front).update(queues)
    vars(behind).update(queues)
    for name, executor in ((1, front), (2, alone), (3, behind)):
        frontend.opened(session, _result(name, [5, 6]), executor)
    assert [s.key.request for s in _sequences(session)] == ["1", "2"]


def test_tokens_that_a_postprocess_worker_took_are_a_gap(session: Session, process: Any) -> None:
    result = _result(1, [5, 6])
    frontend.opened(session, result, Proxy())
    result._done = True
    frontend.handled(frontend.request_of(result), result, failed=False)
    (sequence,) = _sequences(session)
    assert sequence.info["length"] is None and sequence.finish == "open"
    (gap,) = [e for e in store.open(session.tape).rows("events") if e["kind"] == "gap"]
    assert (gap["request"], gap["start"]) == ("1", 2)


def test_settings_go_on_the_tape_without_secrets(session: Session, process: Any) -> None:
    args = SimpleNamespace(
        model="m", env_overrides={"HF_TOKEN": "Sesame0pen", "OTHER": "Sesame0pen"}, max_seq_len=7
    )
    frontend.engine_started(session, SimpleNamespace(args=args))
    session.close()
    (row,) = store.open(session.tape).rows("engines")
    asked = json.loads(row["requested"])
    assert asked["env_overrides"] == {"HF_TOKEN": "***", "OTHER": "***"}
    assert (asked["model"], asked["max_seq_len"]) == ("m", 7)


def test_a_front_end_without_workers_is_said_once(session: Session, process: Any) -> None:
    for name in (1, 2):  # of an engine that was made before the recording
        result = _result(name, [5, 6])
        frontend.opened(session, result, Proxy())
    idle = frontend.current_engine().replace("0", "f")
    session.put(lambda w: _closed(w, frontend.current_engine()), nbytes=1, gap={})
    session.put(_front(idle), nbytes=1, gap={})  # it has generated nothing
    session.close()
    place = LocalPlace(Path(session.tape))
    for _ in range(2):
        find_unreached(place)
    events = [e for e in store.open(session.tape).rows("events") if e["kind"] == "finding"]
    assert [e["engine"] for e in events] == [frontend.current_engine()]
    (text,) = summarize(place, Path("nowhere")).unreached
    assert "only its front end was recorded" in text and "--inject pth" in text
    (notice,) = [e for e in store.open(session.tape).rows("events") if e["kind"] == "notice"]
    assert "made before the recording" in notice["detail"]
    with TapeWriter(session.tape) as writer:  # now one is there
        _front(idle, process="worker")(writer)
        engine_job(notice["engine"], "rollout", "tensorrt_llm", {"process": "worker"})(writer)
    assert reached._unreached(place) == set()


def _front(engine: str, process: str = "frontend") -> Any:
    return engine_job(engine, "rollout", "tensorrt_llm", {"process": process})


def _closed(writer: TapeWriter, engine: str) -> None:
    row = {"engine": engine, "request": "1", "sample": 0, "pass": 0, "finish": "stop"}
    writer.append("sequences", {**row, "prompt_len": 2, "length": 3})


def test_of_several_samples_each_has_its_own_end(session: Session, process: Any) -> None:
    result = _result(1, [5, 6], n=2)
    frontend.opened(session, result, Proxy())
    request = frontend.request_of(result)
    for sample, reason in enumerate(("END_ID", "LENGTH")):
        response = SimpleNamespace(output_token_ids=[[7 + sample]])
        assert frontend.received(request, [SimpleNamespace(name=reason)], response, sample)
    result._done = True
    frontend.handled(request, result, failed=False)
    assert [s.finish for s in _sequences(session)] == ["stop", "length"]


# -- weights ------------------------------------------------------------------------------


class Refit:
    """A model whose weights are loaded in parts, and a recording of it."""

    def __init__(self, folder: Path) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        self.root = store.create_tape(folder / "tape", role="rollout")
        self.session = Session(self.root, Options())
        self.model = torch.nn.Linear(2, 2)
        self.weights = Weights(self.session, "e" * 32, "", lambda: self.model)

    def load(self, *names: str, fails: bool = False) -> None:
        self.weights.loading(names)
        for parameter in self.model.parameters():
            parameter.data += 1
        if fails:
            self.weights.failed(ValueError("no such tensor"))
        else:
            self.weights.loaded()

    def tape(self) -> Any:
        self.session.close()
        return store.open(self.root)


def test_an_update_of_several_parts_is_one_version(tmp_path: Path) -> None:
    refit = Refit(tmp_path)
    refit.load("a")
    assert (refit.weights.version, refit.weights.dirty) == (0, True)
    refit.load("b")
    refit.weights.complete(reset=True, in_flight=3)
    refit.weights.complete(reset=False)  # the control action ends as well
    assert (refit.weights.version, refit.weights.dirty) == (1, False)
    tape = refit.tape()
    rows = [(r["version"], r["state"]) for r in tape.rows("weights")]
    assert sorted(rows) == [(0, "complete"), (0, "dirty"), (1, "complete")]
    (event,) = [json.loads(e["detail"]) for e in tape.rows("events") if e["kind"] == "update"]
    assert (event["loads"], event["prefix_cache_reset"], event["in_flight"]) == (2, True, 3)
    digests = {r["version"]: r["digest"] for r in tape.rows("weights") if r["state"] == "complete"}
    assert digests[0] != digests[1] and None not in digests.values()


def test_after_a_failed_update_all_that_it_touched_must_be_loaded_again(tmp_path: Path) -> None:
    refit = Refit(tmp_path)
    refit.load("a", "b")
    refit.weights.complete(reset=True)
    refit.load("a")
    refit.load("b", "no such", fails=True)
    refit.weights.complete(reset=True)  # the framework carries on regardless
    assert (refit.weights.version, refit.weights.dirty) == (1, True)
    refit.load("a")
    refit.weights.complete(reset=True)
    assert refit.weights.dirty, "half of `b` is still that of the failed update"
    refit.load("b", "c")
    refit.weights.complete(reset=True)
    assert (refit.weights.version, refit.weights.dirty) == (2, False)
    codes = [json.loads(e["detail"]).get("code") for e in refit.tape().rows("events")]
    assert codes.count("weights-mixed") == 1


# -- the extension for Ray ----------------------------------------------------------------


def test_the_extension_has_no_name_that_a_worker_could_have() -> None:
    names = [name for name in dir(Recorded) if not name.startswith("__")]
    assert names and all(name.startswith("rolltape_") for name in names)


def test_the_extension_is_composed_with_the_one_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = type("WorkerExtension", (), {"update_weights": lambda self: "theirs"})
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.rlhf_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["tensorrt_llm.llmapi.rlhf_utils"])["WorkerExtension"] = theirs
    module, _, name = "rolltape.recorder.tensorrt_llm.ray.Extension".rpartition(".")
    monkeypatch.delitem(vars(importlib.import_module(module)), name, raising=False)
    extension = getattr(importlib.import_module(module), name)  # as the engine resolves it
    worker = type("RayGPUWorker", (Worker, extension), {})()
    assert worker.update_weights() == "theirs"
    assert worker.rolltape_tape() is None and worker.rolltape_commit() is False
    monkeypatch.delitem(vars(importlib.import_module(module)), name)
