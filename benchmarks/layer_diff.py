"""What looking at layers costs: `python benchmarks/layer_diff.py [--device cuda] [--json]`.

Ratios of throughput, from alternating runs of the same tokens on a random Qwen3-MoE:

* `score`: mode score without taps over a bare forward of the same batches; goal 0.97. In it is all
  that scoring does for a token: log-softmax, routes, writing, and sealing the tape. What is done
  once, whatever the length of the tape, is not: digesting the weights.
* `live_diff`: a live diff of every `layers.*.out` of two models over the sum of two bare forwards;
  goal 0.9. `live_diff_all` is that of every site there is.
* `sketches`: `generate()` recorded with sketches of every sequence over recorded without; goal
  0.98. `sketch_bytes`: bytes they add to a token.

On a machine that others use too the ratio of processor time (of all threads) moves less than that
of the wall. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import rolltape
from rolltape.recorder.facts import model_facts
from rolltape.recorder.rows import engine_job
from rolltape.replay.live_diff import compare_live
from rolltape.replay.score import score_tape
from rolltape.replay.token_batches import lay_out
from rolltape.store import TapeWriter, create_tape, new_uuid, seal

GOALS = {"score": 0.97, "live_diff": 0.9, "sketches": 0.98}


def make_model(args: argparse.Namespace) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden,
        moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def write_tape(path: Path, model: Any, tokens: dict[str, np.ndarray]) -> Any:
    """A tape whose first quarter of every sequence is the prompt."""
    engine = new_uuid()
    create_tape(path, role="rollout")
    with TapeWriter(path) as writer:
        engine_job(engine, "rollout", "transformers", model_facts(model, "random"), {})(writer)
        for request, ids in tokens.items():
            key = {"engine": engine, "request": request, "sample": 0, "pass": 0}
            prompt = len(ids) // 4
            sampling = json.dumps({"do_sample": True, "temperature": 1.0})
            facts = {"prompt_len": prompt, "length": len(ids), "finish": "length"}
            row = {**key, **facts, "sampling": sampling}
            writer.append("sequences", {name: [value] for name, value in row.items()})
            mask = np.arange(len(ids)) >= prompt
            cells = {**key, "start": 0, "n": len(ids), "ids": ids, "loss_mask": mask}
            writer.append("tokens", {name: [value] for name, value in cells.items()})
    seal(path)
    return rolltape.open(path)


def seconds(args: argparse.Namespace, job: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a job on the wall and of the processor; without what it says to leave out."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    left_out = job() or (0.0, 0.0)
    if args.device != "cpu":
        torch.cuda.synchronize()
    wall = time.perf_counter() - start - left_out[0]
    return wall, time.process_time() - cpu - left_out[1]


def alternate(
    args: argparse.Namespace, a: Callable[[], Any], b: Callable[[], Any]
) -> list[tuple[float, float]]:
    """Seconds of `a` over those of `b`, pair by pair; which one goes first changes."""
    a(), b()
    ratios = []
    for pair in range(args.pairs):
        jobs = (a, b) if pair % 2 else (b, a)
        times = {job: seconds(args, job) for job in jobs}
        ratios.append((times[a][0] / times[b][0], times[a][1] / times[b][1]))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8, help="sequences of generate()")
    parser.add_argument("--tokens-per-batch", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="score,live_diff,live_diff_all,sketches")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    model = make_model(args)
    rng = np.random.default_rng(0)
    tokens = {
        f"s{i}": rng.integers(2, args.vocab, args.length).astype(np.uint32)
        for i in range(args.sequences)
    }
    found: dict[str, list[tuple[float, float]]] = {}
    extra: dict[str, Any] = {}

    def bare(which: Any) -> None:
        with torch.no_grad():
            for laid in lay_out(tokens, tokens=args.tokens_per_batch):
                which(**laid.inputs(args.device))

    with tempfile.TemporaryDirectory() as folder:
        if "score" in args.only.split(","):
            tape, number = write_tape(Path(folder) / "a", model, tokens), iter(range(10**6))

            def score() -> tuple[float, float]:
                out, size = Path(folder) / f"b{next(number)}", args.tokens_per_batch
                start, cpu = time.perf_counter(), time.process_time()
                said = score_tape(tape, out, model, tokens_per_batch=size)
                once = time.perf_counter() - start - said["seconds"]
                # the processor is busy throughout what is done once, before the clock starts
                return once, min(once, time.process_time() - cpu)

            found["score"] = alternate(args, lambda: bare(model), score)
        other = copy.deepcopy(model)
        for name, sites in (("live_diff", "layers.*.out"), ("live_diff_all", "*")):
            if name not in args.only.split(","):
                continue

            def live(sites: str = sites) -> None:
                size = args.tokens_per_batch
                compare_live(model, other, tokens, sites=sites, tokens_per_batch=size)

            def both() -> None:
                bare(model)
                bare(other)

            found[name] = alternate(args, both, live)
        if "sketches" in args.only.split(","):
            found["sketches"], extra["sketch_bytes"] = sketches(args, model, Path(folder))
    rows = {
        name: {
            "ratio": round(statistics.median(wall for wall, _ in ratios), 4),
            "lowest": round(min(ratios)[0], 4),
            "highest": round(max(ratios)[0], 4),
            "cpu_ratio": round(statistics.median(cpu for _, cpu in ratios), 4),
            "goal": GOALS.get(name),
        }
        for name, ratios in found.items()
    }
    if not args.json:
        for name, row in rows.items():
            goal = f", goal {row['goal']}" if row["goal"] else ""
            print(
                f"{name:14} {row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f}{goal})"
            )
    print(
        json.dumps(
            {
                "benchmark": "layer_diff",
                **rows,
                **extra,
                "pairs": args.pairs,
                "device": args.device,
                "dtype": args.dtype,
                "hidden": args.hidden,
                "layers": args.layers,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


def sketches(
    args: argparse.Namespace, model: Any, folder: Path
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Seconds without sketches over with them, all of it on disk; bytes a token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, args.vocab, (args.batch, 64), generator=generator).to(args.device)
    size: dict[int, int] = {}
    number = iter(range(10**6))

    def rollout(count: int) -> None:
        path = folder / f"r{next(number)}"
        with rolltape.record(path, sketches=count):
            torch.manual_seed(0)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                min_new_tokens=args.new_tokens,
                max_new_tokens=args.new_tokens,
                pad_token_id=0,
            )
        size[count] = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    ratios = alternate(args, lambda: rollout(0), lambda: rollout(args.batch))
    tokens = args.batch * (64 + args.new_tokens)
    return ratios, {"with": size[args.batch] / tokens, "without": size[0] / tokens}


if __name__ == "__main__":
    main()
