"""A rollout job on vLLM that knows nothing of rolltape: vllm_job.py MODEL OUTPUTS [--mp]

In process: chunked prefill (300 tokens, 256 a step), a prefix of 256 tokens from the cache, n = 4,
greedy, penalties, a scored prompt, an abort, and so few KV blocks that requests are preempted.
With --bf16 in BF16. With --mp: the engine core in a process of its own, greedy, no prefix cache.
OUTPUTS gets what the engine itself said: ids, logprobs, cached tokens, who was preempted.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

MP = "--mp" in sys.argv
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING=str(int(MP)),
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)


def main(model: str, outputs: str, phase: Callable[[str], object] = lambda name: None) -> None:
    """Run the job.

    Args:
        model: folder.
        outputs: file that is written.
        phase: called before each part of the job with its name.
    """
    import torch

    torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16" if "--bf16" in sys.argv else "float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=9,  # blocks of 128 tokens
        enable_prefix_caching=not MP,
        async_scheduling=True,  # which this platform does not do
        seed=7,
    )
    rng = random.Random(0)

    def prompt(n: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(2, 4000) for _ in range(n)]}

    def params(**how: object) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "detokenize": False, **how})

    if MP:  # the schedule depends on timing, so only greedy is comparable
        given = [prompt(20 + 9 * i) for i in range(4)] + [prompt(300)]
        done = llm.generate(given, params(temperature=0.0, logprobs=0), use_tqdm=False)
        save(outputs, done)
        return

    core = llm.llm_engine.engine_core.engine_core
    preempted: list[str] = []
    preempt = core.scheduler._preempt_request

    def watched(request: Any, *args: Any, **how: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **how)

    core.scheduler._preempt_request = watched

    phase("mixed")
    asked = [
        (prompt(20), params(temperature=1.0, top_k=50, top_p=0.95, logprobs=0)),
        (prompt(27), params(temperature=0.7)),
        (prompt(34), params(temperature=0.0, logprobs=0)),
        (prompt(41), params(temperature=1.0, n=4, top_p=0.9)),
        (prompt(48), params(temperature=0.8, repetition_penalty=1.2, top_k=20)),
        (prompt(300), params(temperature=1.0, prompt_logprobs=0)),
    ]
    done = llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    phase("cached")
    done += llm.generate([asked[-1][0]] * 2, params(temperature=1.0), use_tqdm=False)
    phase("preempted")
    many = [prompt(100 + i) for i in range(6)]  # more than the blocks hold when they grow
    done += llm.generate(many, params(temperature=1.0, max_tokens=120), use_tqdm=False)
    phase("aborted")
    engine, gone, partial = llm.llm_engine, prompt(15), None
    engine.add_request("to-abort", gone, params(temperature=1.0, max_tokens=200))
    for _ in range(5):
        partial = (engine.step() or [partial])[-1]
    engine.abort_request(["to-abort"])
    while engine.has_unfinished_requests():
        engine.step()
    phase("over")
    save(outputs, done, preempted=preempted, aborted=[] if partial is None else told(partial))


def told(request: Any) -> list[dict[str, Any]]:
    """What a request output says of each of its samples."""
    prompt = list(request.prompt_token_ids)
    scored = request.prompt_logprobs or []
    return [
        {
            "external": request.request_id,
            "prompt": prompt,
            "ids": list(out.token_ids),
            "sample": out.index,
            "cached": request.num_cached_tokens,
            "logprobs": out.logprobs
            and [d[t].logprob for t, d in zip(out.token_ids, out.logprobs, strict=True)],
            "prompt_logprobs": scored
            and [d and d[t].logprob for t, d in zip(prompt, scored, strict=True)],
        }
        for out in request.outputs
    ]


def save(outputs: str, done: list[Any], **more: Any) -> None:
    with open(outputs, "w") as file:
        json.dump({"done": [one for request in done for one in told(request)], **more}, file)


if __name__ == "__main__":
    main(*[a for a in sys.argv[1:] if not a.startswith("--")])
