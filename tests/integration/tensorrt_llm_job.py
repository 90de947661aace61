"""Rollouts on TensorRT-LLM that know nothing of rolltape: tensorrt_llm_job.py OUTPUTS SCENARIO...

Each scenario makes an engine of its own. What callers got and what the engine's double noted of
itself goes to OUTPUTS.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm._double_truth import TRUTH
from tensorrt_llm._torch.autotuner import AutoTuner
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, MoeConfig
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension, _double_device

FRESH = KvCacheConfig(enable_block_reuse=False)
Asked = tuple[list[int], SamplingParams]
#: Filled in by a scenario: what else a test has to know.
NOTES: dict[str, Any] = {}


def prompt(n: int, seed: int = 0) -> list[int]:
    """Token ids without the one that ends a sequence."""
    chosen = random.Random(1000 * n + seed)
    return [chosen.randrange(3, 97) for _ in range(n)]


def params(**how: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "end_id": 2, "pad_id": 2, **how})


def engine(**how: Any) -> LLM:
    return LLM(model="double", skip_tokenizer_init=True, **{"kv_cache_config": FRESH, **how})


def mix() -> list[Asked]:
    """Each way of sampling, and both formats and kinds of logprobs."""
    return [
        (prompt(9), params(logprobs=0)),  # nothing is set: greedy
        (
            prompt(14),
            params(
                temperature=0.9,
                top_k=5,
                logprobs=0,
                logprobs_simple_format=True,
                logprobs_mode="processed",
            ),
        ),
        (prompt(21), params(temperature=1.0, logprobs=3)),
        (prompt(5), params(temperature=1.0, top_p=0.9, n=3, logprobs=0)),
        (prompt(30), params(temperature=0.7, min_p=0.1)),
        (prompt(11), params(temperature=1.0, logprobs=0, logprobs_mode="processed")),
    ]


@contextlib.contextmanager
def standing(llm: LLM) -> Iterator[None]:
    """The loop stands still: what is handed in meanwhile arrives together."""
    with llm._executor.engine.control_action():
        yield


def answer(future: Any) -> dict[str, Any]:
    return {
        "client": future.request_id,
        "prompt": list(future.prompt_token_ids),
        "cached": future.cached_tokens,
        "prompt_logprobs": future._outputs[0].prompt_logprobs,
        "outputs": [
            {
                "ids": list(out.token_ids),
                "logprobs": [
                    entry[token].logprob if isinstance(entry, dict) else entry
                    for entry, token in zip(out.logprobs or (), out.token_ids, strict=False)
                ],
                "finish": out.finish_reason,
            }
            for out in future.outputs
        ],
    }


def generate(llm: LLM, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    with standing(llm):
        futures = [llm.generate_async(ids, how) for ids, how in asked]
    for future in futures:
        future.result()
    return [answer(future) for future in futures]


def extension(llm: LLM) -> Any:
    made = WorkerExtension()
    made.engine = llm._executor.engine
    return made


def refit(llm: LLM, scale: float, parts: int = 2) -> None:
    """An update in several calls, drained first."""
    worker = extension(llm)
    tensors = changed(llm, scale)
    for part in range(parts):
        handles = [(name, (lambda t: t, (t,))) for name, t in tensors[part::parts]]
        worker.update_weights({_double_device: handles})
    worker.update_weights(None)


def changed(llm: LLM, scale: float) -> list[tuple[str, Any]]:
    model = llm._executor.engine.model_engine.model
    return [(name, tensor.detach() * scale) for name, tensor in model.named_parameters()]


# -- scenarios ----------------------------------------------------------------------------


def plain() -> Any:
    with engine(disable_overlap_scheduler=True) as llm:
        return generate(llm, mix())


def overlap() -> Any:
    """With chunks of prompts, chunks inside of MoE layers, and an end that comes unforeseen."""
    chunked = {"enable_chunked_prefill": True, "max_num_tokens": 16}
    with engine(**chunked, moe_config=MoeConfig(max_num_tokens=6)) as llm:
        first = generate(llm, mix())
        fourth = first[0]["outputs"][0]["ids"][3]
        stop = (prompt(9), params(end_id=fourth, logprobs=0))
        return first + generate(llm, [stop, *mix()[1:3]])


def graphs() -> Any:
    with engine(cuda_graph_config=CudaGraphConfig(enable_padding=True)) as llm:
        answers = generate(llm, mix()[:3]) + generate(llm, mix()[:1])
        cache = AutoTuner.get().profiling_cache.cache
        NOTES["tactics"] = {key[3][0][0]: value[1] for key, value in cache.items()}
        return answers


def reuse() -> Any:
    """The second request finds the prefix of the first one in the cache."""
    asked = (prompt(26), params(prompt_logprobs=0, logprobs=0))
    other = (prompt(26)[:17] + prompt(9), params(prompt_logprobs=0, logprobs=0))
    with engine(kv_cache_config=KvCacheConfig()) as llm:
        return generate(llm, [asked]) + generate(llm, [asked]) + generate(llm, [other])


def inflight() -> Any:
    """Weights change while a sequence grows, then once more when nothing runs."""
    with engine() as llm:
        running = llm.generate_async(prompt(9), params(max_tokens=60, logprobs=0), streaming=True)
        for _ in range(5):
            next(running)
        loop = llm._executor.engine
        with loop.control_action(drain=False):
            loader = loop.model_engine.model_loader
            loader.reload(loop.model_engine.model, dict(changed(llm, 1.25)))
            loop.reset_prefix_cache()
        running.result()
        refit(llm, 0.5)
        return [answer(running), *generate(llm, mix()[:2])]


def failed() -> Any:
    """An update fails half-way; it serves on, is updated in full, and serves again."""
    with engine() as llm:
        before = generate(llm, mix()[:1])
        tensors = changed(llm, 1.5)
        bad = [*tensors[:9], ("model.no_such_tensor", tensors[0][1])]
        try:
            handles = [(name, (lambda t: t, (t,))) for name, t in bad]
            extension(llm).update_weights({_double_device: handles})
        except ValueError as error:
            NOTES["failed"] = str(error)
        mixed = generate(llm, mix()[:1])
        refit(llm, 0.75)
        return [*before, *mixed, *generate(llm, mix()[:1])]


def cancel() -> Any:
    """A request is cancelled and continued by another one with all that there was."""
    how = params(max_tokens=60, logprobs=0, temperature=1.0)
    with engine() as llm:
        other = llm.generate_async(prompt(12), params(max_tokens=40))
        gone = llm.generate_async(prompt(9), how, streaming=True)
        for _ in range(4):
            next(gone)
        gone.abort()
        gone.result()
        so_far = prompt(9) + answer(gone)["outputs"][0]["ids"]
        goes_on = llm.generate_async(so_far, params(max_tokens=10, logprobs=0))
        return [answer(future.result()) for future in (other, gone, goes_on)]


def preempt() -> Any:
    """Fewer blocks than the sequences need when they have grown."""
    cache = KvCacheConfig(enable_block_reuse=False, max_tokens=96)
    asked = [(prompt(10, i), params(max_tokens=30, temperature=1.0, logprobs=0)) for i in range(4)]
    with engine(kv_cache_config=cache) as llm:
        return generate(llm, asked)


def routed() -> Any:
    """The engine captures routes itself."""
    asked = [(ids, copy.copy(how)) for ids, how in mix()[:2]]
    for _, how in asked:
        how.return_routed_experts = True
    with engine(enable_return_routed_experts=True) as llm:
        return generate(llm, [*asked, mix()[2]])


def peers() -> Any:
    """Attention data parallelism: a dummy runs while only another rank has requests."""
    with engine(enable_attention_dp=True) as llm:
        first = generate(llm, mix()[:2])
        llm._executor.engine._double_peer_steps(3)
        return first + generate(llm, mix()[:1])


def broken() -> Any:
    """A forward fails: its requests do, and later ones do not."""
    with engine() as llm:
        llm._executor.engine.model_engine._double_fault = RuntimeError("out of memory")
        with standing(llm):
            future = llm.generate_async(prompt(9), params(logprobs=0))
        try:
            future.result()
        except Exception as error:
            NOTES["broken"] = str(error)
        return [answer(future), *generate(llm, mix()[:1])]


def small() -> Any:
    """A bit of everything that has a hook."""
    scored = (prompt(13), params(prompt_logprobs=0, logprobs=0))
    graphs = CudaGraphConfig(batch_sizes=[4], enable_padding=True)
    with engine(cuda_graph_config=graphs, moe_config=MoeConfig(max_num_tokens=6)) as llm:
        stream = llm.generate_async(prompt(7), params(logprobs=0), streaming=True)
        for _ in stream:
            continue
        first = [answer(stream), *generate(llm, [mix()[0], mix()[1], scored])]
        refit(llm, 1.25)
        return first + generate(llm, [mix()[3]])


def spawned() -> Any:
    """The worker is a process of a pool."""
    os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "0"
    os.environ["FORCE_DETERMINISTIC"] = "1"  # does not reach it
    with engine() as llm:
        futures = [llm.generate_async(ids, how) for ids, how in mix()]
        return [answer(future.result()) for future in futures]


SCENARIOS: dict[str, Callable[[], Any]] = {
    call.__name__: call
    for call in (
        plain,
        overlap,
        graphs,
        reuse,
        inflight,
        failed,
        cancel,
        preempt,
        routed,
        peers,
        broken,
        small,
        spawned,
    )
}


def main(outputs: str, *names: str) -> None:
    found = {}
    for name in names:
        TRUTH.clear()
        answers = SCENARIOS[name]()
        found[name] = {"answers": answers, "truth": copy.deepcopy(TRUTH)}
    with open(outputs, "wb") as file:
        pickle.dump({"scenarios": found, "notes": NOTES}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
