"""A rollout job on vLLM that knows nothing of rolltape: vllm_job.py MODEL OUTPUTS [--mp]

Chunked prefill (300 tokens, 256 a step), a prefix of 256 tokens from the cache, n = 4, greedy,
penalties, a scored prompt, an abort, and so few KV blocks that requests are preempted.
"""

from __future__ import annotations

import json
import os
import random
import sys

MP = "--mp" in sys.argv
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING=str(int(MP)),
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)


def main(model: str, outputs: str) -> None:
    import torch

    torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=9,  # blocks of 128 tokens
        seed=7,
    )
    rng = random.Random(0)

    def prompt(n: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(2, 4000) for _ in range(n)]}

    def params(**how: object) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "detokenize": False, **how})

    if MP:  # the schedule depends on timing, so only greedy is comparable
        asked = [(prompt(20 + 9 * i), params(temperature=0.0, logprobs=0)) for i in range(4)]
    else:
        asked = [
            (prompt(20), params(temperature=1.0, top_k=50, top_p=0.95, logprobs=0)),
            (prompt(27), params(temperature=0.7)),
            (prompt(34), params(temperature=0.0)),
            (prompt(41), params(temperature=1.0, n=4, top_p=0.9)),
            (prompt(48), params(temperature=0.8, repetition_penalty=1.2, top_k=20)),
            (prompt(300), params(temperature=1.0, prompt_logprobs=0)),
        ]
    done = llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    aborted: list[int] = []
    if not MP:
        done += llm.generate([asked[-1][0]] * 2, params(temperature=1.0), use_tqdm=False)
        many = [prompt(100 + i) for i in range(6)]  # more than the blocks hold when they grow
        done += llm.generate(many, params(temperature=1.0, max_tokens=120), use_tqdm=False)
        engine = llm.llm_engine
        gone = prompt(15)
        engine.add_request("to-abort", gone, params(max_tokens=200))
        for _ in range(5):
            engine.step()
        engine.abort_request(["to-abort"])
        while engine.has_unfinished_requests():
            engine.step()
        aborted = gone["prompt_token_ids"]
    kept = [
        {
            "external": request.request_id,
            "prompt": list(request.prompt_token_ids),
            "ids": list(out.token_ids),
            "sample": out.index,
        }
        for request in done
        for out in request.outputs
    ]
    with open(outputs, "w") as file:
        json.dump({"done": kept, "aborted": aborted}, file)


if __name__ == "__main__":
    main(*[a for a in sys.argv[1:] if not a.startswith("--")])
