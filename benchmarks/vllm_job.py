"""A rollout job on vLLM that knows nothing of rolltape; timed by `record_overhead.py`.

Prints a line of JSON for each timed run: workload, tokens, seconds, tokens per second. With
`--outputs FILE` token ids, logprobs and the engine's own routes of the last run are kept there.
With `--turns` a line on stdin is waited for before each workload, so that engines can share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

ROOT = Path(__file__).resolve().parents[1]


def random_model(layers: int, folder: Path) -> str:
    """A config of a Qwen3-MoE with 128 experts; the weights are made up when it is loaded."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
        max_position_embeddings=4096,
    )
    config.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples/models/tiny-moe"))
    parser.add_argument("--random-moe", type=int, default=0, metavar="LAYERS")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="of timed decoding a workload")
    parser.add_argument("--workloads", default="logprobs,none")
    parser.add_argument("--routes", action="store_true", help="have the engine return its routes")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--turns", action="store_true", help="wait for a line before a workload")
    parser.add_argument("--graphs", default="", help="capture sizes of CUDA graphs; the engine's")
    parser.add_argument("--kv-mb", type=int, default=0, help="KV cache; 0: the engine decides")
    parser.add_argument("--outputs", type=Path, default=None)
    args = parser.parse_args()

    import torch

    if not torch.cuda.is_available() and hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(args.random_moe, Path(folder)) if args.random_moe else args.model
        extra: dict[str, Any] = {"load_format": "dummy"} if args.random_moe else {}
        if args.kv_mb:
            extra["kv_cache_memory_bytes"] = args.kv_mb << 20
        if args.graphs:
            sizes = [int(size) for size in args.graphs.split(",")]
            extra["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if args.routes:
            extra["enable_return_routed_experts"] = True
        llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=args.prompt_tokens + args.tokens + 16,
            max_num_seqs=args.prompts,
            max_num_batched_tokens=8192,
            enforce_eager=args.eager,
            gpu_memory_utilization=0.1 if args.kv_mb else 0.8,
            seed=1,
            **extra,
        )
        vocab = llm.llm_engine.model_config.get_vocab_size()
    print(json.dumps({"started_s": round(time.perf_counter() - begun, 1)}), flush=True)
    rng = random.Random(0)

    def batch() -> list[dict[str, Any]]:
        return [
            {"prompt_token_ids": [rng.randrange(2, vocab) for _ in range(args.prompt_tokens)]}
            for _ in range(args.prompts)
        ]

    outputs: Any = None
    for workload in args.workloads.split(","):
        params = SamplingParams(
            temperature=1.0,
            top_k=50,
            top_p=0.95,
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if workload == "logprobs" else None,
        )
        if args.turns:
            sys.stdin.readline()
        llm.generate(batch(), params, use_tqdm=False)  # not timed
        spent, run = 0.0, 0
        while spent < args.seconds or run == 0:
            prompts = batch()
            begin, cpu = time.perf_counter(), time.thread_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took, cpu = time.perf_counter() - begin, time.thread_time() - cpu
            spent, run = spent + took, run + 1
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            line = {
                "workload": workload,
                "tokens": tokens,
                "seconds": took,
                "rate": tokens / took,
                "thread": cpu / took,  # how busy the calling thread was
            }
            print(json.dumps(line), flush=True)
        print(json.dumps({"done": workload}), flush=True)
    memory = {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if torch.cuda.is_available():
        memory["device_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(memory), flush=True)
    if args.outputs is not None:
        kept = [
            {
                "request": o.request_id,
                "prompt": list(o.prompt_token_ids),
                "ids": list(o.outputs[0].token_ids),
                "logprobs": [d[t].logprob for t, d in _drawn(o.outputs[0])],
                "routes": getattr(o.outputs[0], "routed_experts", None),
            }
            for o in outputs
        ]
        torch.save(kept, args.outputs)


def _drawn(output: Any) -> list[tuple[int, Any]]:
    return list(zip(output.token_ids, output.logprobs or (), strict=False))


if __name__ == "__main__":
    main()
