"""What looking at layers costs: `python benchmarks/layer_diff.py [--device cuda] [--json]`.

Ratios of throughput, of the same tokens on a random Qwen3-MoE:

* `score`: mode score without taps over a bare forward of the same batches; goal 0.97. In it is all
  that scoring does for a token: log-softmax, routes, encoding, writing. What is done once, whatever
  the length of the tape, is not: digesting the weights, and what a tape of two tokens costs
  (`once_seconds`: header, library versions, sealing). `score_tape` is the same with the latter.
* `live_diff`: a live diff of every `layers.*.out` of two models over the sum of two bare forwards;
  goal 0.9. `live_diff_all` is that of every site there is.
* `sketches`: `generate()` recorded with sketches of every sequence over recorded without; goal
  0.98. `sketch_bytes`: bytes they add to a token.

A round runs a, b, b, a, so that a drift of the machine falls out; its ratio is a / b. Given is the
median of all rounds and an interval that holds the true median in 95 of 100 cases; `noise` is by
how much two runs of a in one round differ, in the median. `cpu_ratio` is of processor time, all
threads together, also what one of them spends spinning while it waits for another; on a machine
that others use too it moves less than the wall. With as many threads as cores, and other work
beside them, neither means much: set OMP_NUM_THREADS lower. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import rolltape
from rolltape.recorder.facts import model_facts
from rolltape.recorder.rows import engine_job
from rolltape.replay import score as scoring
from rolltape.replay.live_diff import compare_live
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


def now() -> np.ndarray:
    """Seconds of the wall and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


def seconds(args: argparse.Namespace, job: Callable[[], Any]) -> np.ndarray:
    """Seconds of a job, without those that it says to leave out."""
    gc.collect()
    start = now()
    left_out = job()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return now() - start - (0 if left_out is None else left_out)


def rounds(
    args: argparse.Namespace, a: Callable[[], Any], b: Callable[[], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a and of b, [rounds, 2 runs, wall and processor] each."""
    a(), b()
    found = []
    for _ in range(args.rounds):
        first, other, again, last = (seconds(args, job) for job in (a, b, b, a))
        found.append([[first, last], [other, again]])
    times = np.array(found)
    return times[:, 0], times[:, 1]


def described(a: np.ndarray, b: np.ndarray, goal: float | None) -> dict[str, Any]:
    """The ratio a / b of `rounds`."""
    wall, cpu = (a.sum(1) / b.sum(1)).T
    n, ordered = len(wall), np.sort(wall)
    tails = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])
    outside = int((tails <= 0.025).sum())  # so many of each end can be left out
    return {
        "ratio": round(float(np.median(wall)), 4),
        "interval": [round(float(ordered[i]), 4) for i in (outside, n - 1 - outside)],
        "cpu_ratio": round(float(np.median(cpu)), 4),
        "noise": round(float(np.median(np.abs(a[:, 0, 0] / a[:, 1, 0] - 1))), 4),
        "seconds": [round(float(np.median(x[..., 0])), 3) for x in (a, b)],
        "goal": goal,
    }


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
    parser.add_argument("--live-sequences", type=int, default=4, help="of a live diff")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="score,live_diff,live_diff_all,sketches")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    model = make_model(args)
    rng = np.random.default_rng(0)
    tokens = {
        f"s{i}": rng.integers(2, args.vocab, args.length).astype(np.uint32)
        for i in range(args.sequences)
    }
    rows: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}

    def bare(which: Any, tokens: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for laid in lay_out(tokens, tokens=args.tokens_per_batch):
                which(**laid.inputs(args.device))

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if "score" in args.only.split(","):
            rows |= score(args, model, tokens, Path(folder), bare)
        other = copy.deepcopy(model)
        some = dict(list(tokens.items())[: args.live_sequences])
        for name, sites in (("live_diff", "layers.*.out"), ("live_diff_all", "*")):
            if name not in args.only.split(","):
                continue

            def live(sites: str = sites) -> None:
                size = args.tokens_per_batch
                compare_live(model, other, some, sites=sites, tokens_per_batch=size)

            def both() -> None:
                bare(model, some)
                bare(other, some)

            rows[name] = described(*rounds(args, both, live), GOALS.get(name))
        if "sketches" in args.only.split(","):
            times, extra["sketch_bytes"] = sketches(args, model, Path(folder))
            rows["sketches"] = described(*times, GOALS["sketches"])
    if not args.json:
        for name, row in rows.items():
            low, high = row["interval"]
            goal = f"; goal {row['goal']}" if row["goal"] else ""
            print(
                f"{name:14} {row['ratio']:.3f} ({low:.3f} to {high:.3f}; "
                f"cpu {row['cpu_ratio']:.3f}; noise {row['noise']:.3f}{goal})"
            )
    print(
        json.dumps(
            {
                "benchmark": "layer_diff",
                **rows,
                **extra,
                "took_seconds": round(time.perf_counter() - start, 1),
                "rounds": args.rounds,
                "device": args.device,
                "dtype": args.dtype,
                "hidden": args.hidden,
                "layers": args.layers,
                "vocab": args.vocab,
                "tokens": args.sequences * args.length,
                "tokens_per_batch": args.tokens_per_batch,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


def score(
    args: argparse.Namespace,
    model: Any,
    tokens: dict[str, np.ndarray],
    folder: Path,
    bare: Callable[[Any, dict[str, np.ndarray]], None],
) -> dict[str, dict[str, Any]]:
    """A bare forward over mode score, without and with what is done once for a tape."""
    tape = write_tape(folder / "a", model, tokens)
    two = {"s0": next(iter(tokens.values()))[:2]}
    smallest = write_tape(folder / "smallest", model, two)
    number = iter(range(10**6))

    def run(tape: Any) -> np.ndarray:
        """What it takes to prepare, which is mostly to digest the weights."""
        start = now()
        prepare, ended = scoring.prepare, start

        def prepared(*given: Any, **named: Any) -> Any:
            nonlocal ended
            found = prepare(*given, **named)
            ended = now()
            return found

        with mock.patch.object(scoring, "prepare", prepared):
            out, size = folder / f"b{next(number)}", args.tokens_per_batch
            scoring.score_tape(tape, out, model, tokens_per_batch=size)
        return ended - start

    a, b = rounds(args, lambda: bare(model, tokens), lambda: run(tape))
    forward, smallest_score = rounds(args, lambda: bare(model, two), lambda: run(smallest))
    once = np.median((smallest_score - forward).reshape(-1, 2), axis=0)
    return {
        "score": {
            **described(a, b - once, GOALS["score"]),
            "once_seconds": round(float(once[0]), 4),
        },
        "score_tape": described(a, b, None),
    }


def sketches(
    args: argparse.Namespace, model: Any, folder: Path
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, float]]:
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

    times = rounds(args, lambda: rollout(0), lambda: rollout(args.batch))
    tokens = args.batch * (64 + args.new_tokens)
    return times, {"with": size[args.batch] / tokens, "without": size[0] / tokens}


if __name__ == "__main__":
    main()
