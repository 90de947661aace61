"""Runs prompts through an eager tensor-parallel vLLM and keeps every site, merged over the ranks.

Usage: vllm_ranks_job.py MODEL DTYPE OUT ARGUMENTS [PARAMETER], prompts as JSON on stdin. OUT is as
of vllm_sites_job.py, with `disagreements` of each forward. With PARAMETER the first value of that
parameter of rank 1 alone is nudged and the prompts are run again: `faulty` are those forwards.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

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

from rolltape.replay.sites.vllm_ranks import MergedForward, RankTaps


def main(model: str, dtype: str, out: str, arguments: str, parameter: str = "") -> None:
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
    before = llm.collective_rpc(hooks)
    taps = RankTaps(llm.collective_rpc)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def run() -> tuple[list[list[int]], list[dict[str, Any]]]:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        tokens = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in found]
        return tokens, [plain(forward) for forward in taps.forwards()]

    tokens, forwards = run()
    faulty: list[dict[str, Any]] = []
    if parameter:
        llm.collective_rpc(nudge, args=(1, parameter))
        _, faulty = run()
    layouts = {site: (at.split, at.copies) for site, at in taps.layouts.items()}
    taps.remove()
    assert before == llm.collective_rpc(hooks)
    torch.save({"tokens": tokens, "forwards": forwards, "faulty": faulty, "layouts": layouts}, out)


def plain(forward: MergedForward) -> dict[str, Any]:
    names = ("site", "rank", "against", "token", "position", "row", "rows", "max_abs")
    return {
        "tokens": forward.tokens,
        "positions": forward.positions,
        "sites": forward.sites,
        "disagreements": [{n: getattr(d, n) for n in names} for d in forward.disagreements],
    }


def hooks(worker: Any) -> int:
    tree = worker.model_runner.get_model()
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tree.modules())


def nudge(worker: Any, rank: int, parameter: str) -> None:
    """By one unit in the last place of the first value."""
    if worker.rank == rank:
        with torch.no_grad():
            values = worker.model_runner.get_model().get_parameter(parameter).view(-1)
            values[0] = torch.nextafter(values[0], values[0] + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
