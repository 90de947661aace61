"""Modes of vLLM that are too slow for every run of CI: vllm_modes_job.py MODEL OUTPUTS MODE

speculation: drafts by n-grams. parallel: tensor parallel, two processes. compiled: torch.compile.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

MODE = sys.argv[3]
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING=str(int(MODE == "parallel")),
    VLLM_CPU_OMP_THREADS_BIND="0|1" if MODE == "parallel" else "auto",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def main(model: str, outputs: str, mode: str) -> None:
    import torch

    torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    from vllm import LLM, SamplingParams

    modes: dict[str, dict[str, Any]] = {
        "speculation": {"speculative_config": NGRAMS, "disable_log_stats": False},
        "parallel": {"tensor_parallel_size": 2},
        "compiled": {"enforce_eager": False},
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        seed=7,
        **{"enforce_eager": True, **modes[mode]},
    )
    rng = random.Random(0)
    base = [rng.randrange(2, 4000) for _ in range(12)]
    prompts = [{"prompt_token_ids": base * 3 + base[: i + 1]} for i in range(4)]

    def params(i: int, temperature: float, n: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_tokens=n,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if i % 2 else None,
        )

    # greedy text repeats itself, so that drafts are accepted; apart from what is sampled, because
    # verification on the CPU samples all of a batch that has both
    done = llm.generate(prompts, [params(i, 0.0, 120) for i in range(4)], use_tqdm=False)
    done += llm.generate(prompts, [params(i, 0.7, 40) for i in range(4)], use_tqdm=False)
    counts = {}
    if mode == "speculation":
        names = ("num_draft_tokens", "num_accepted_tokens")
        found = {metric.name: metric for metric in llm.get_metrics()}
        counts = {name: found[f"vllm:spec_decode_{name}"].value for name in names}
    kept = [
        {
            "prompt": list(request.prompt_token_ids),
            "ids": list(out.token_ids),
            "logprobs": out.logprobs
            and [d[t].logprob for t, d in zip(out.token_ids, out.logprobs, strict=True)],
        }
        for request in done
        for out in request.outputs
    ]
    with open(outputs, "w") as file:
        json.dump({"done": kept, "counts": counts}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
