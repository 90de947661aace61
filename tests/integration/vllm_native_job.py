"""vLLM 0.32's second model runner on a CPU, asked for its own routes, kept sets and logprobs.

Stock Triton runs in its interpreter: vLLM asks whether a back end is active, so one is named, and
the one kernel that the interpreter cannot run is replaced by vLLM's own PyTorch version.
Usage: vllm_native_job.py MODEL OUTPUTS
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import types
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import triton.backends

triton.backends.backends.setdefault(
    "cpu",
    types.SimpleNamespace(compiler=None, driver=types.SimpleNamespace(is_active=lambda: True)),
)

import torch

torch.cpu._init_amx()

import vllm.v1.sample.ops.topk_topp_sampler as cut
import vllm.v1.worker.gpu.sample.sampler as sampler
from vllm import LLM, SamplingParams


def _cut(logits: Any, k: Any, p: Any) -> Any:
    return cut.apply_top_k_top_p_pytorch(logits, k, p)


def main(model: str, outputs: str) -> None:
    cut.apply_top_k_top_p = sampler.apply_top_k_top_p = _cut
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        seed=7,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 4000) for _ in range(30 + 5 * i)] for i in range(4)]
    params = SamplingParams(
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        logprobs=0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    kept = []
    for request in llm.generate(given, params, use_tqdm=False):
        out = request.outputs[0]
        kept.append(
            {
                "prompt": list(request.prompt_token_ids),
                "ids": list(out.token_ids),
                "routes": out.routed_experts,
                "sets": out.sampling_mask.token_ids,
                "logprobs": [
                    d[t].logprob for t, d in zip(out.token_ids, out.logprobs, strict=True)
                ],
            }
        )
    with open(outputs, "wb") as file:
        pickle.dump(kept, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
