"""The parts of the TensorRT-LLM adapter that need no engine, and its targets against the source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolltape.recorder.serving.batch import Roster
from rolltape.recorder.tensorrt_llm.identity import adopt, copies
from rolltape.recorder.tensorrt_llm.output import (
    finish_of,
    prompt_logprobs,
    route_rows,
    token_logprobs,
)
from rolltape.recorder.tensorrt_llm.sampling import resolve
from rolltape.recorder.tensorrt_llm.schedule import Schedule, UnsupportedBatch
from rolltape.recorder.tensorrt_llm.settings import findings
from rolltape.recorder.tensorrt_llm.targets import TARGETS
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


def _batch(context: list[Any], generation: list[Any]) -> Any:
    return SimpleNamespace(context_requests=context, generation_requests=generation)


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
    assert findings({"FORCE_DETERMINISTIC": "true"})[0]["code"] == "setting-ignored"
    front = {"TLLM_ROLLTAPE_ENVIRONMENT": '{"FORCE_DETERMINISTIC": "1"}'}
    assert findings(front)[0]["code"] == "setting-not-arrived"


def test_options_travel_under_the_prefix_that_pools_pass_on() -> None:
    late = copies({"ROLLTAPE_TAPE": "/t", "PATH": "/bin"})
    assert late == {"TLLM_ROLLTAPE_TAPE": "/t"}
    assert adopt(late) == ["ROLLTAPE_TAPE"] and late["ROLLTAPE_TAPE"] == "/t"


def test_cancelled_is_an_abort() -> None:
    assert finish_of("cancelled", done=True, failed=False) == "abort"
    assert finish_of(None, done=False, failed=True) == "error"
