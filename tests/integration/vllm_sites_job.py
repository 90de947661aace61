"""Runs prompts through an eager vLLM in this process and keeps every site of every forward.

Usage: vllm_sites_job.py MODEL DTYPE OUT [ARGUMENTS], prompts as JSON on stdin, further arguments of
the engine as JSON. OUT is a torch file: the tokens of each request and the forwards.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import torch

torch.cpu._init_amx()

from vllm import LLM, SamplingParams

from rolltape.replay.sites.vllm import EngineTaps


def main(model: str, dtype: str, out: str, arguments: str = "{}") -> None:
    prompts = json.load(sys.stdin)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        seed=7,
        **json.loads(arguments),
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    tree = worker.model_runner.get_model()
    before = {name: len(m._forward_hooks) for name, m in tree.named_modules()}
    taps = EngineTaps(tree)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    forwards = taps.forwards()
    taps.remove()
    assert before == {name: len(m._forward_hooks) for name, m in tree.named_modules()}
    tokens = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in found]
    rows = [{"tokens": f.tokens, "positions": f.positions, "sites": f.sites} for f in forwards]
    torch.save({"tokens": tokens, "forwards": rows}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
