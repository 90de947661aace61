"""A rollout as an RL job would do it: sample completions of prompts with transformers.

It knows nothing of rolltape. Record it with

    rolltape record -o runs/a -- python examples/rollout_transformers.py --model DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OPENINGS = (
    "import os\nimport sys\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "for line in open(path):\n    fields = line.split(",
    "try:\n    import numpy as np\nexcept ImportError:\n",
    "def read_config(path):\n    with open(path) as f:\n        return ",
    "    def __repr__(self):\n        return ",
    "assert isinstance(value, int), ",
    "if __name__ == '__main__':\n    parser = argparse.ArgumentParser(",
    "def test_empty():\n    queue = Queue()\n    assert queue.",
    "x = torch.randn(4, 8)\ny = ",
    "raise ValueError(",
    "while True:\n    data = sock.recv(1024)\n    if not data:\n",
    '"""Utilities for working with dates."""\n\nfrom datetime import ',
    "@property\ndef shape(self):\n    ",
    "return [x for x in values if ",
)


def prompts(count: int) -> list[str]:
    """`count` different prompts of different lengths."""
    rounds = itertools.count()
    texts = (o if r == 0 else f"# part {r}\n{o}" for r in rounds for o in OPENINGS)
    return list(itertools.islice(texts, count))


def main() -> None:
    """Load, generate, say how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--batch", type=int, default=0, help="prompts a batch; 0: all at once")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=None)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float32, ...")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="write the sampled token ids to this JSON file")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    model = model.to(args.device).eval()

    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "min_p": args.min_p,
        }
    torch.manual_seed(args.seed)
    texts = prompts(args.prompts)
    size = args.batch or len(texts)
    tokens, outputs = 0, []
    started = time.perf_counter()
    for first in range(0, len(texts), size):
        batch = tokenizer(texts[first : first + size], return_tensors="pt", padding=True)
        batch = batch.to(args.device)
        ids = model.generate(
            **batch,
            **sampling,
            max_new_tokens=args.max_new_tokens,
            num_return_sequences=args.samples,
            repetition_penalty=args.repetition_penalty,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokens += ids.numel() - ids.shape[0] * batch["input_ids"].shape[1]
        outputs += ids.tolist()
    seconds = time.perf_counter() - started
    print(f"{len(outputs)} completions, {tokens} tokens, {tokens / seconds:.0f} tokens/s")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(outputs, file)


if __name__ == "__main__":
    main()
