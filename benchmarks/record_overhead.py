"""Rollout throughput with recording over without: `python benchmarks/record_overhead.py [--json]`.

Alternating pairs in one process, so that both sides see the same machine. A recorded run is timed
until everything that it recorded is on disk. The last line is one JSON object:

    ratio        mean over pairs of (seconds without / seconds with recording)
    lo, hi       95 % interval of that mean (Student's t over the pairs)
    verdict      conclusive | inconclusive (half-width over 0.02)

    python benchmarks/record_overhead.py                                  # bundled model, CPU
    python benchmarks/record_overhead.py --random-moe 12 --device cuda    # about 7.6B parameters

With `--engine vllm` the pairs are engine starts, and the JSON has a ratio of rates by workload: a
job that asks for logprobs, and one that does not. Arguments behind `--` go to vllm_job.py.

    python benchmarks/record_overhead.py --engine vllm                    # bundled model, CPU
    python benchmarks/record_overhead.py --engine vllm --random-moe 24 -- --prompts 256 \\
        --prompt-tokens 256 --tokens 256
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
from rollout_transformers import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from rolltape import store
from rolltape.recorder import session
from rolltape.recorder import transformers as adapter
from rolltape.recorder.options import Options

#: A wider 95 % interval than this says nothing.
MAX_HALF_WIDTH = 0.02


def student_95(freedom: int) -> float:
    """97.5 % quantile of Student's t (Cornish-Fisher expansion; error below 1e-3 from 10 on)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and a padded batch for it."""
    if args.random_moe:
        config = Qwen3MoeConfig(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=args.random_moe,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(1, 151_936, (args.batch, 128), device=args.device)
        return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device).eval()
    batch = tokenizer(prompts(args.batch), return_tensors="pt", padding=True)
    return model, dict(batch.to(args.device))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples/models/tiny-moe"))
    parser.add_argument("--random-moe", type=int, default=0, metavar="LAYERS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--level", default="routing", choices=("tokens", "routing"))
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--starts", type=int, default=3, help="vllm: engine starts a side")
    parser.add_argument("--together", type=int, default=1, help="vllm: engines up at a time")
    parser.add_argument("--workloads", default="logprobs,none", help="vllm: see vllm_job.py")
    parser.add_argument("job", nargs="*", help="vllm: arguments of vllm_job.py, behind --")
    args = parser.parse_args()
    if args.engine == "vllm":
        from vllm_sides import compare

        job = ["--random-moe", str(args.random_moe)] if args.random_moe else ["--model", args.model]
        job += ["--workloads", args.workloads, *args.job]
        print(json.dumps({"engine": "vllm", **compare(args, job)}))
        return
    model, batch = load(args)

    def rollout(recording: session.Session | None) -> float:
        torch.manual_seed(0)
        if args.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            **batch,
            do_sample=True,
            top_k=50,
            top_p=0.95,
            max_new_tokens=args.tokens,
            min_new_tokens=args.tokens if args.random_moe else None,
            pad_token_id=0,
        )
        if args.device == "cuda":
            torch.cuda.synchronize()
        if recording is not None and not recording.drain():
            raise SystemExit("the recording was not written")
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        tape = store.create_tape(Path(folder) / "tape", role="rollout")
        recording = session.start(tape, Options(level=args.level))
        adapter.bind()
        started = rollout(recording)
        adapter.unbind()
        rollout(None)

        ratios, without, with_ = [], [], []
        for pair in range(args.pairs):
            seconds = {}
            for recorded in (True, False) if pair % 2 else (False, True):
                if recorded:
                    adapter.bind()
                seconds[recorded] = rollout(recording if recorded else None)
                adapter.unbind()
            ratios.append(seconds[False] / seconds[True])
            without.append(seconds[False])
            with_.append(seconds[True])
            if not args.json:
                print(
                    f"pair {pair + 1:3}: {seconds[False]:.3f} s without, {seconds[True]:.3f} s "
                    f"with recording, ratio {ratios[-1]:.4f}",
                    flush=True,
                )
        session.stop()
        events = store.open(tape).rows("events")
        size = sum(f.stat().st_size for f in tape.rglob("*.arrow"))
        sequences = list(store.open(tape))
        recorded_tokens = sum(s.length - s.prompt_len for s in sequences)
    if events or recorded_tokens == 0:
        raise SystemExit(f"not a recording of everything: {events[:3]}")

    mean = statistics.fmean(ratios)
    half = student_95(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    produced = args.batch * args.tokens
    result = {
        "benchmark": "record_overhead",
        "ratio": round(mean, 4),
        "lo": round(mean - half, 4),
        "hi": round(mean + half, 4),
        "pairs": len(ratios),
        "median": round(statistics.median(ratios), 4),
        "verdict": "conclusive" if half <= MAX_HALF_WIDTH else "inconclusive",
        "tokens_per_s_without": round(produced / statistics.median(without), 1),
        "tokens_per_s_with": round(produced / statistics.median(with_), 1),
        "first_recorded_run_s": round(started, 3),
        "bytes_per_token": round(size / recorded_tokens, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": args.batch,
        "tokens": args.tokens,
        "level": args.level,
        "device": torch.cuda.get_device_name()
        if args.device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
