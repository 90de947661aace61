"""The double of TensorRT-LLM behaves as the engine's source and documentation say."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.manifests.check import double_problems, load
from tests.tensorrt_llm_plain import (
    MODEL,
    PROMPTS,
    TOKENS,
    VARIANTS,
    Plain,
    args,
    assert_complete,
    params,
    truth,
    worker_environment,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    """`tensorrt_llm` is the double while a test of this module runs."""
    path = str(ROOT / "tests" / "doubles")
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    yield
    sys.path.remove(path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes an `LLM`, which is shut down afterwards; the log is empty then."""
    from tensorrt_llm import LLM
    from tensorrt_llm._double_truth import TRUTH

    made: list[Any] = []

    def build(model: str = MODEL, **kwargs: Any) -> Any:
        made.append(LLM(model, **kwargs))
        TRUTH.clear()
        return made[-1]

    yield build
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def plain(double: None) -> Plain:
    return Plain()


def test_the_double_is_like_the_engine() -> None:
    assert double_problems(load("tensorrt_llm"), "tensorrt_llm") == []


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_a_plain_forward(make: Any, plain: Plain, name: str) -> None:
    llm = make(**args(**VARIANTS[name]))
    outputs = llm.generate(PROMPTS, params()) + llm.generate(PROMPTS, params())
    for prompt, output in zip(PROMPTS * 2, outputs, strict=True):
        assert output.outputs[0].token_ids == plain.greedy(prompt)
        assert output.outputs[0].finish_reason == "length"
        assert_complete(output, prompt, plain)
    kinds = {step.graph is not None for step in truth().served()}
    assert (True in kinds) == ("graph" in name)
    assert ("pause" in dict(truth().events)) == ("few" in name)


def test_a_captured_graph_runs_no_python_but_repeats_writes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm._torch.autotuner import AutoTuner

    llm = make(**args(graph={"batch_sizes": [4], "enable_padding": True}))
    engine = llm._executor.engine.model_engine
    moe = engine.model.model.layers[1].mlp.experts
    tuner = AutoTuner.get()
    calls, tuned, choose = list[int](), list[str](), tuner.choose_one
    buffer = torch.full((64, 2), -1, dtype=torch.int32)

    def choosing(custom_op: str, *rest: Any) -> Any:
        tuned.append(custom_op)
        return choose(custom_op, *rest)

    monkeypatch.setattr(tuner, "choose_one", choosing)
    apply = moe.routing_method.apply

    def seen(logits: torch.Tensor) -> Any:
        ids, scales = apply(logits)
        calls.append(len(ids))
        with torch.inference_mode():
            buffer[: len(ids)].copy_(ids)
        return ids, scales

    object.__setattr__(moe.routing_method, "apply", seen)
    engine.cuda_graph_runner.clear()  # captured again, with the write inside
    llm.generate(PROMPTS[1], params(max_tokens=2))
    before = len(calls)
    assert before == 1 + 3  # a prompt, two warm-ups and the capture
    assert len(tuned) == 3 * before  # for each of the MoE layers
    llm.generate(PROMPTS[1], params(max_tokens=8))
    assert len(calls) == before + 1 and len(tuned) == 3 * len(calls)  # the prompt
    last = truth().served()[-1]
    assert last.graph == (4, 0, False) and last.tokens == 4
    assert [row.dummy for row in last.rows] == [False, True, True, True]
    assert torch.equal(buffer[:4].long(), last.routes[:, 0])


def test_waiting_for_the_device_is_refused_while_capturing() -> None:
    from tensorrt_llm._double_graph import CapturedGraph

    with CapturedGraph(), pytest.raises(RuntimeError, match="not permitted"):
        torch.ones(3).sum().item()


def test_overlap_runs_one_step_more_after_a_stop_token_and_none_after_the_length(
    make: Any, plain: Plain
) -> None:
    prompt = PROMPTS[0]
    third = plain.greedy(prompt)[2]
    for overlap in (True, False):
        llm = make(disable_overlap_scheduler=not overlap)
        stopped = llm.generate(prompt, params(ignore_eos=False, stop_token_ids=[third]))
        assert stopped.outputs[0].stop_reason == third
        assert stopped.outputs[0].finish_reason == "stop"
        assert len(stopped.outputs[0].token_ids) == 2  # the stop word is cut off
        last = len(prompt) + 3 - 1
        assert (last in truth().routes(stopped.request_id)) == overlap
        assert [d.applied for d in truth().draws] == [True] * 3 + [False] * overlap
        llm.generate(prompt, params(max_tokens=3))
        assert sum(not d.applied for d in truth().draws) == overlap


def test_end_id_stays_in_the_output(make: Any, plain: Plain) -> None:
    second = plain.greedy(PROMPTS[1])[1]
    output = make().generate(PROMPTS[1], params(ignore_eos=False, end_id=second)).outputs[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == second
    assert output.stop_reason is None


def test_a_stop_string_that_only_the_text_shows_aborts_the_request(make: Any, plain: Plain) -> None:
    from tensorrt_llm._double_model import read_config
    from tensorrt_llm._double_tokenizer import DoubleTokenizer

    class Other(DoubleTokenizer):
        """Would write the stop string with other tokens than the model does."""

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [1, 1]

    llm = make(tokenizer=Other(read_config(MODEL)))
    text = llm.tokenizer.decode(plain.greedy(PROMPTS[1]))
    asked = params(stop=text[3:5], max_tokens=60)
    for result in llm.generate_async(PROMPTS[1], asked, streaming=True):
        output = result.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", text[3:5])
    assert output.text == text[: text.find(text[3:5])] and result.aborted()


def test_stop_words_are_cut_off_unless_they_are_wanted(make: Any, plain: Plain) -> None:
    llm = make()
    text = llm.tokenizer.decode(plain.greedy(PROMPTS[1]))
    word = text[3:5]
    end = text.find(word)
    for wanted in (False, True):
        asked = params(ignore_eos=False, stop=word, include_stop_str_in_output=wanted, logprobs=0)
        output = llm.generate(PROMPTS[1], asked).outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", word)
        assert output.text == text[: end + 2 * wanted]
        assert len(output.logprobs) == end + 2  # one for each token that was drawn


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_of_sampled_tokens(make: Any, mode: str) -> None:
    llm = make()
    how = {"temperature": 0.7, "top_k": 5, "seed": 7, "logprobs_mode": mode}
    output = llm.generate(PROMPTS[1], params(logprobs=2, **how))
    draws = truth().drawn(output.request_id)
    entries = output.outputs[0].logprobs
    assert len(entries) == len(draws) == TOKENS
    for entry, draw in zip(entries, draws, strict=True):
        assert next(iter(entry)) == draw.token  # the drawn one stands first, whatever its rank
        value = draw.processed if mode == "processed" else draw.raw
        assert entry[draw.token].logprob == pytest.approx(value)
        assert len(draw.kept) == 5 and draw.token in draw.kept
        assert draw.processed >= draw.raw
    assert any(entry[d.token].rank > 1 for entry, d in zip(entries, draws, strict=True))
    simple = params(logprobs=0, logprobs_simple_format=True, **how)
    again = llm.generate(PROMPTS[1], simple).outputs[0]
    assert again.token_ids == output.outputs[0].token_ids
    assert again.logprobs == [next(iter(e.values())).logprob for e in entries]
    assert again.cumulative_logprob == pytest.approx(sum(again.logprobs))


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, 1), ({"top_k": 1, "temperature": 2.0}, 1), ({"temperature": 0.0}, 1), ({"top_k": 0}, 97)],
)
def test_unset_is_greedy_and_zero_is_all(make: Any, given: dict[str, Any], kept: int) -> None:
    output = make().generate(PROMPTS[1], params(**given))
    assert {len(draw.kept) for draw in truth().drawn(output.request_id)} == {kept}


def test_generation_config_fills_what_is_unset(make: Any, tmp_path: Path) -> None:
    config = {"temperature": 0.8, "top_k": 3, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    asked = params()
    output = make(str(tmp_path)).generate(PROMPTS[1], asked)
    assert {len(draw.kept) for draw in truth().drawn(output.request_id)} == {3}
    assert asked.temperature is None and output.sampling_params.temperature == 0.8


def test_of_several_samples_only_the_last_one_to_end_has_a_reason(make: Any) -> None:
    llm = make()
    with pytest.raises(ValueError, match="Greedy decoding"):
        params(n=3)
    output = llm.generate(PROMPTS[1], params(n=3, temperature=1.5, seed=1, logprobs=0))
    names = {d.request for d in truth().draws}
    assert len(names) == 3 and {d.client for d in truth().draws} == {output.request_id}
    for index, sample in enumerate(output.outputs):
        draws = truth().drawn(output.request_id, index)
        assert [d.token for d in draws] == sample.token_ids
        assert [next(iter(e.values())).logprob for e in sample.logprobs] == pytest.approx(
            [d.raw for d in draws]
        )
    reasons = [sample.finish_reason for sample in output.outputs]
    assert reasons == [None, None, "length"]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3


def test_streaming_gives_pieces(make: Any, plain: Plain) -> None:
    pieces, logprobs = [], []
    result = make().generate_async(PROMPTS[0], params(logprobs=1), streaming=True)
    for output in result:
        pieces += output.outputs[0].token_ids_diff
        logprobs.append(len(output.outputs[0].logprobs))
    assert pieces == plain.greedy(PROMPTS[0])
    assert logprobs == sorted(logprobs) and logprobs[-1] == TOKENS and len(logprobs) > 1
    assert result.outputs[0].finish_reason == "length"


def test_awaiting(make: Any, plain: Plain) -> None:
    llm = make()

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*[_one(llm, prompt) for prompt in PROMPTS]))

    async def _one(llm: Any, prompt: list[int]) -> Any:
        return await llm.generate_async(prompt, params())

    outputs = asyncio.run(ask())
    assert [o.outputs[0].token_ids for o in outputs] == [plain.greedy(p) for p in PROMPTS]


def test_prompt_logprobs_score_the_next_token_and_are_short_after_reuse(
    make: Any, plain: Plain
) -> None:
    llm, prompt = make(), PROMPTS[0]
    values = plain.run(prompt)[0].log_softmax(-1)
    first = plain.greedy(prompt, 1)
    wanted = [float(values[i, token]) for i, token in enumerate(prompt[1:] + first)]
    how = params(max_tokens=1, prompt_logprobs=0, prompt_logprobs_simple_format=True)
    fresh = llm.generate(prompt, how).outputs[0]
    assert fresh.prompt_logprobs == pytest.approx(wanted, abs=1e-5)
    reused = llm.generate(prompt, how)
    assert reused.cached_tokens == 8
    assert len(reused.outputs[0].prompt_logprobs) == len(prompt) - 8
    top = llm.generate(PROMPTS[3], params(max_tokens=1, prompt_logprobs=2)).outputs[0]
    assert all(2 <= len(entry) <= 3 for entry in top.prompt_logprobs)
    assert len(top.prompt_logprobs) == len(PROMPTS[3])


def test_a_reused_prefix_is_not_forwarded(make: Any) -> None:
    llm = make()
    llm.generate(PROMPTS[0], params())
    truth().clear()
    output = llm.generate(PROMPTS[2], params())  # shares its first two blocks
    first = truth().served()[0].rows[0]
    assert (output.cached_tokens, first.start, first.n) == (8, 8, 2)


def test_the_engines_own_routes(make: Any) -> None:
    llm = make(enable_return_routed_experts=True, **args(moe={"max_num_tokens": 3}))
    asked = params()
    asked.return_routed_experts = True
    for _ in range(2):  # the second time a prefix is taken over, with the routes of the first
        output = llm.generate(PROMPTS[0], asked)
        found = output.outputs[0].additional_generation_outputs["routed_experts"]
        assert found.dtype == torch.int16
        length = len(PROMPTS[0]) + TOKENS
        assert found.shape == (length - 1, 3, 2)
        for position, entries in truth().routes(output.request_id).items():
            assert torch.equal(found[position].long(), entries[0][1])
    assert llm.generate(PROMPTS[0], params()).outputs[0].additional_generation_outputs is None


def test_additional_outputs(make: Any, plain: Plain) -> None:
    asked = params(additional_model_outputs=["logits"], logprobs=0)
    output = make().generate(PROMPTS[1], asked).outputs[0]
    logits = output.additional_generation_outputs["logits"]
    assert logits.shape == (TOKENS, 97)
    assert logits.argmax(-1).tolist() == output.token_ids


def test_a_logits_processor_changes_what_is_drawn_and_its_raw_logprob(make: Any) -> None:
    def force(name: int, logits: torch.Tensor, tokens: Any, stream: Any, client: Any) -> None:
        logits.fill_(float("-inf"))[..., 42] = 0.0

    output = make().generate(PROMPTS[1], params(logits_processor=force, logprobs=0)).outputs[0]
    assert output.token_ids == [42] * TOKENS
    assert [entry[42].logprob for entry in output.logprobs] == [0.0] * TOKENS


def test_min_tokens_keeps_the_end_away(make: Any, plain: Plain) -> None:
    second = plain.greedy(PROMPTS[1])[1]
    asked = params(ignore_eos=False, end_id=second, min_tokens=5)
    assert second not in make().generate(PROMPTS[1], asked).outputs[0].token_ids[:5]


def test_forced_determinism_turns_block_reuse_off(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_DETERMINISTIC", "1")
    llm = make()
    assert [llm.generate(PROMPTS[0], params()).cached_tokens for _ in range(2)] == [0, 0]


def test_cancelled_in_flight_runs_on_for_a_step(make: Any) -> None:
    llm = make()
    executor, entered = llm._executor.engine, threading.Event()
    go_on, forward = threading.Event(), executor._forward_step

    def held(batch: Any, *rest: Any) -> Any:
        if batch.generation_requests and not entered.is_set():
            entered.set()
            go_on.wait()
        return forward(batch, *rest)

    executor._forward_step = held
    result = llm.generate_async(PROMPTS[1], params(max_tokens=60))
    entered.wait()
    result.abort()
    go_on.set()
    output = result.result().outputs[0]
    assert output.finish_reason == "cancelled" and result.aborted()
    kept = len(output.token_ids)
    assert 0 < kept < 60
    assert dict(truth().events)["cancel"] == truth().draws[0].request
    llm.generate(PROMPTS[3], params(max_tokens=1))  # the loop has handled what was in flight
    forwarded = truth().routes(result.request_id)
    assert max(forwarded) >= len(PROMPTS[1]) + kept - 1
    assert sum(not draw.applied for draw in truth().draws) == 1


def test_requests_may_be_dropped_between_schedule_and_forward(make: Any, plain: Plain) -> None:
    llm, seen = make(), list[int]()

    def drop_once(batch: Any) -> None:
        if batch.context_requests and not seen:
            seen.append(len(batch.context_requests))
            batch.reset_context_requests([])

    llm._executor.engine.kv_connector_manager = SimpleNamespace(
        take_scheduled_requests_pending_load=drop_once
    )
    output = llm.generate(PROMPTS[1], params())
    assert seen and output.outputs[0].token_ids == plain.greedy(PROMPTS[1])
    assert_complete(output, PROMPTS[1], plain)


def test_attention_dp_dummies_run_while_another_rank_works(make: Any) -> None:
    llm = make(enable_attention_dp=True)
    executor, ran = llm._executor.engine, threading.Semaphore(0)
    forward = executor._forward_step

    def counted(*batch: Any) -> Any:
        outputs = forward(*batch)
        ran.release()
        return outputs

    executor._forward_step = counted
    executor._double_peer_steps(3)
    for _ in range(3):
        assert ran.acquire(timeout=60)
    output = llm.generate(PROMPTS[1], params())
    dummies = [all(row.dummy for row in step.rows) for step in truth().served()]
    assert dummies == [True] * 3 + [False] * TOKENS
    assert len(output.outputs[0].token_ids) == TOKENS


def test_a_failed_forward_is_an_error_of_its_requests(make: Any, plain: Plain) -> None:
    from tensorrt_llm._double_queues import RequestError

    llm = make()
    llm._executor.engine.model_engine._double_fault = RuntimeError("an expert is missing")
    with pytest.raises(RequestError, match="an expert is missing"):
        llm.generate(PROMPTS[1], params())
    assert llm.generate(PROMPTS[1], params()).outputs[0].token_ids == plain.greedy(PROMPTS[1])


def test_what_cannot_be_scheduled_is_an_error(make: Any) -> None:
    from tensorrt_llm._double_queues import RequestError

    with pytest.raises(ValueError, match="max_num_tokens"):
        make(max_num_tokens=8).generate(PROMPTS[0], params())
    llm = make(**args(kv={"max_tokens": 8}))
    with pytest.raises(RequestError, match="fail to schedule"):
        llm.generate(PROMPTS[0], params())


def test_a_loop_that_dies_wakes_those_who_wait(make: Any) -> None:
    from tensorrt_llm._double_queues import RequestError

    llm = make()

    def broken(*_: Any) -> None:
        raise LookupError("no such slot")

    llm._executor.engine.sampler.update_requests = broken
    with pytest.raises(RequestError, match="Event loop terminated with error: no such slot"):
        llm.generate(PROMPTS[1], params())


def test_warm_up_tunes_and_captures_before_anything_is_served(make: Any) -> None:
    from tensorrt_llm import LLM
    from tensorrt_llm._torch.autotuner import AutoTuner

    AutoTuner.get().clear_cache()
    truth().clear()
    with LLM(MODEL, **args(graph={"batch_sizes": [1, 4]})) as llm:
        steps = list(truth().steps)
        runner = llm._executor.engine.model_engine.cuda_graph_runner
        assert set(runner.graphs) == {(1, 0, False), (4, 0, False)}
    assert steps and all(step.warmup for step in steps)
    assert [step.graph for step in steps if step.graph] == [(4, 0, False), (1, 0, False)]
    cache = AutoTuner.get().profiling_cache.cache
    assert {key[0] for key in cache} == {"trtllm::double_fused_moe"}
    assert {tactic for _, tactic, _ in cache.values()} == {0, 1}


def _extension(llm: Any) -> Any:
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    worker = WorkerExtension()
    worker.engine = llm._executor.engine
    return worker


def _handles(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"GPU-double-0": [(name, (torch.Tensor.clone, (t,))) for name, t in weights.items()]}


def test_an_update_in_parts_empties_the_prefix_cache(make: Any) -> None:
    llm = make()
    worker, old = _extension(llm), llm.generate(PROMPTS[0], params())
    model = worker.engine.model_engine.model
    new = {name: p + 0.3 * torch.randn_like(p) for name, p in model.named_parameters()}
    names = list(new)
    worker.update_weights(_handles({n: new[n] for n in names[:5]}))
    assert model.first_pre_reload_weights
    worker.update_weights(_handles({n: new[n] for n in names[5:]}))
    worker.update_weights(None)
    assert not hasattr(model, "first_pre_reload_weights")
    output = llm.generate(PROMPTS[0], params())
    assert output.cached_tokens == 0
    assert output.outputs[0].token_ids != old.outputs[0].token_ids
    first, second = (truth().drawn(o.request_id) for o in (old, output))
    assert {d.weights for d in first} != {d.weights for d in second}


def test_an_update_that_fails_half_way_leaves_a_mixture(make: Any) -> None:
    llm = make()
    engine = llm._executor.engine.model_engine
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    bad = {name: p + 1 for name, p in before.items()}
    bad["lm_head.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="lm_head"):
        _extension(llm).update_weights(_handles(bad))
    changed = [not torch.equal(p, before[n]) for n, p in engine.model.named_parameters()]
    assert any(changed) and not all(changed)


def test_an_update_in_flight_is_between_two_steps(make: Any) -> None:
    llm = make()
    executor = llm._executor.engine
    model = executor.model_engine.model
    reached, asked = threading.Event(), threading.Event()
    forward, put = executor._forward_step, executor.request_queue.put

    def waits(*batch: Any) -> Any:
        if len(truth().served()) > 5:
            reached.set()
            asked.wait()
        return forward(*batch)

    def told(item: Any) -> None:
        put(item)
        if isinstance(item, bool):  # a control action
            asked.set()

    executor._forward_step, executor.request_queue.put = waits, told
    result = llm.generate_async(PROMPTS[0], params(max_tokens=60))
    reached.wait()
    with executor.control_action(drain=False):
        steps = len(truth().steps)
        new = {name: p * 1.01 for name, p in model.named_parameters()}
        executor.model_engine.model_loader.reload(model, new)
        assert len(truth().steps) == steps  # the loop stands still
    output = result.result()
    kinds = [draw.weights for draw in truth().drawn(output.request_id)]
    assert len(kinds) == 60 and len(set(kinds)) == 2 and kinds == sorted(kinds)


def test_a_draining_control_action_waits_for_requests(make: Any) -> None:
    llm = make()
    result = llm.generate_async(PROMPTS[0], params(max_tokens=40))
    with llm._executor.engine.control_action():
        assert len(truth().drawn(result.request_id)) == 40
    assert len(result.result().outputs[0].token_ids) == 40


def test_the_worker_process_has_only_prefixed_variables_and_has_them_late(
    make: Any, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm._double_truth import Truth

    found = tmp_path / "truth"
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")
    monkeypatch.setenv("TLLM_DOUBLE_TRUTH", str(found))
    monkeypatch.setenv("TRTLLM_SOMETHING", "1")
    monkeypatch.setenv("FORCE_DETERMINISTIC", "1")
    llm = make()
    outputs = llm.generate(PROMPTS, params(logprobs=0))
    assert [o.outputs[0].token_ids for o in outputs] == [plain.greedy(p) for p in PROMPTS]
    late = llm._executor._double_call(worker_environment)
    aborted = llm.generate_async(PROMPTS[0], params(max_tokens=100))
    aborted.abort()
    assert aborted.result().outputs[0].finish_reason in ("cancelled", "length")
    llm.shutdown()
    assert late["TRTLLM_SOMETHING"] == "1" and "FORCE_DETERMINISTIC" not in late
    assert not [name for name in late if name.startswith("PYTHON")]
    assert json.loads(late["at start"]) == []
    assert truth().served() == []  # nothing ran in this process
    import pickle

    log = pickle.loads(found.read_bytes())
    assert isinstance(log, Truth) and len(log.drawn(outputs[0].request_id)) == TOKENS
