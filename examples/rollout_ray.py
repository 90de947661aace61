"""A rollout on Ray: actors sample completions with transformers, stragglers are killed.

It knows nothing of rolltape. Record it, whether it starts Ray itself or joins a cluster, with

    rolltape record -o runs/a -- python examples/rollout_ray.py --model DIR [--address HOST:PORT]
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray

OPENINGS = (
    "import os\nimport sys\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "for line in open(path):\n    fields = line.split(",
)


@ray.remote(num_cpus=1)
class Sampler:
    """One replica of the model."""

    def __init__(self, model: str, seed: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def ready(self) -> str:
        """Name of the machine, once the model is loaded."""
        return os.uname().nodename

    def sample(self, text: str, tokens: int) -> list[int]:
        """Prompt and response."""
        batch = self.tokenizer(text, return_tensors="pt")
        eos = self.tokenizer.eos_token_id
        sampling = {"do_sample": True, "top_k": 0, "pad_token_id": eos}
        # a response of the full length, as a rollout with ignore_eos has them
        ids = self.model.generate(**batch, **sampling, max_new_tokens=tokens, min_new_tokens=tokens)
        return ids[0].tolist()


def main() -> None:
    """Sample, kill who is late, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--address", help="of a running cluster; default: start one here")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=0, help="tokens of the last prompt instead")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds a prompt may take")
    parser.add_argument("--out", help="write the sampled token ids to this JSON file")
    args = parser.parse_args()

    local = {"num_cpus": args.actors, "include_dashboard": False}
    ray.init(address=args.address or "local", **({} if args.address else local))
    actors = [Sampler.remote(args.model, seed) for seed in range(args.actors)]
    hosts = ray.get([actor.ready.remote() for actor in actors])

    texts = [OPENINGS[i % len(OPENINGS)] for i in range(args.prompts)]
    tokens = [args.max_new_tokens] * args.prompts
    tokens[-1] = args.longest or tokens[-1]
    running = {
        actors[i % len(actors)].sample.remote(text, n): i
        for i, (text, n) in enumerate(zip(texts, tokens, strict=True))
    }
    done, late = ray.wait(list(running), num_returns=len(running), timeout=args.deadline)
    for actor in {running[ref] % len(actors) for ref in late}:
        ray.kill(actors[actor])
    outputs = {running[ref]: ray.get(ref) for ref in done}
    print(f"{len(outputs)} completions from {len(actors)} actors on {len(set(hosts))} machines")
    if args.out:
        with open(args.out, "w") as file:
            json.dump([outputs.get(i) for i in range(args.prompts)], file)
    ray.shutdown()


if __name__ == "__main__":
    main()
