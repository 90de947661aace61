"""What forcing the recorded routes does to the gap: `python benchmarks/routing_replay.py [--json]`.

Records a BF16 rollout of the bundled model, then scores the same tokens in another dtype with
live routes, with the recorded ids, with ids and weights, and with two kinds of wrong ids. Those
must be far worse: else a forced run that only echoed its input could not be told from a right one.
The last line is one JSON object with k3, mean and max of |d| a row, and the ratios to `live`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np
import torch
from rollout_transformers import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolltape
from rolltape.replay.diff import diff_tapes
from rolltape.replay.score import score_tape
from rolltape.replay.switches import Switches
from rolltape.store import Routes, Sequence


def shifted(sequence: Sequence, routes: Routes) -> Routes:
    """Every row is the one of the position before it."""
    return replace(routes, ids=np.concatenate([routes.ids[:1], routes.ids[:-1]]))


def random_ids(sequence: Sequence, routes: Routes) -> Routes:
    """Different experts drawn at random, none twice in a decision."""
    rng = np.random.default_rng(0)
    order = rng.random((*routes.ids.shape[:2], routes.num_experts)).argsort(-1)
    ids = order[..., : routes.ids.shape[-1]].astype(routes.ids.dtype)
    return replace(routes, ids=ids)


CASES: dict[str, tuple[str, Any]] = {
    "live": ("live", None),
    "ids": ("ids", None),
    "ids+weights": ("ids+weights", None),
    "ids shifted by one": ("ids", shifted),
    "random ids": ("ids", random_ids),
}


def measure(
    model_path: str, folder: Path, *, count: int, tokens: int, dtype: str, device: str, seed: int
) -> dict[str, dict[str, Any]]:
    """Record once, score in each way, and return the diffs by name."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    model = model.to(device).eval()
    batch = tokenizer(prompts(count), return_tensors="pt", padding=True).to(device)
    with rolltape.record(folder / "rollout"):
        torch.manual_seed(seed)
        model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=1)
    tape = rolltape.open(folder / "rollout")
    results = {}
    for name, (routing, transform) in CASES.items():
        out = folder / name.replace(" ", "-")
        switches = Switches.parse([f"routing={routing}", f"dtype={dtype}"])
        score_tape(tape, out, model, switches=switches, transform_routes=transform)
        results[name] = diff_tapes(tape, rolltape.open(out))
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples/models/tiny-moe"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of the scoring: model, float32, ...")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        diffs = measure(
            args.model,
            Path(folder),
            count=args.prompts,
            tokens=args.tokens,
            dtype=args.dtype,
            device=args.device,
            seed=args.seed,
        )
    rows = {}
    for name, diff in diffs.items():
        routing = diff["routing"]
        rows[name] = {
            "k3": diff["k3"],
            "ratio": diff["k3"] / diffs["live"]["k3"],
            "mean_abs": diff["mean_abs"],
            "max_abs": diff["max_abs"],
            "tokens": diff["tokens_compared"],
            "decisions": routing["disagree"] / routing["decisions"],
            "tokens_any": routing["tokens_any"] / routing["tokens"],
            "verdict": diff["verdict"],
        }
        if not args.json:
            row = rows[name]
            print(
                f"{name:20} k3 {row['k3']:.3g} ({row['ratio']:.2f} x live)  "
                f"mean |d| {row['mean_abs']:.4f}  max {row['max_abs']:.3f}  live choice differs in "
                f"{row['decisions']:.1%} of decisions, {row['tokens_any']:.1%} of tokens"
            )
    print(
        json.dumps(
            {
                "benchmark": "routing_replay",
                "rows": rows,
                "dtype": args.dtype,
                "device": args.device,
                "torch": torch.__version__,
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
