"""A trainer's step on a recorded rollout: what it computes is recorded too, and compared.

    python examples/trainer_logprobs.py --model DIR --out runs/step

Samples completions and records them as OUT/rollout. Then a trainer scores the same tokens with the
same weights ("old"), takes one optimiser step, and scores them again ("current"): OUT/trainer. Both
come from calls in the loss, with the expert choices and the digest of the weights. At last
`rolltape diff` says where rollout and trainer differ, before the step and after it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rollout_transformers import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolltape

TEMPERATURE = 0.8


def sample(path: Path, args: argparse.Namespace):
    """Ids, attention mask and loss mask [B, S], rewards [B], and the keys on the tape."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts(args.prompts), return_tensors="pt", padding=True).to(args.device)
    engine = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    engine = engine.to(args.device).eval()
    torch.manual_seed(args.seed)
    with rolltape.record(path):
        ids = engine.generate(
            **batch,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        keys = rolltape.last_requests()
        width = batch["input_ids"].shape[1]
        ends = (ids[:, width:] == tokenizer.eos_token_id).long()
        completion = (ends.cumsum(1) - ends == 0).long()  # up to the first end, and that too
        # the toy task: a completion is better the more spaces it has
        rewards = [text.count(" ") for text in tokenizer.batch_decode(ids[:, width:])]
        for key, reward in zip(keys, rewards, strict=True):
            rolltape.annotate(key, reward=reward)
    attention = torch.cat([batch["attention_mask"], completion], 1)
    loss = torch.cat([torch.zeros_like(batch["attention_mask"]), completion], 1)
    return ids, attention, loss, torch.tensor(rewards, device=ids.device).float(), keys


def score(model, ids, attention, loss, keys, **facts):
    """Logprobs [B, S - 1] of the tokens 1..S-1, recorded where a recording runs."""
    with rolltape.trainer.live_routes(model) as routes:
        logits = model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    logits = logits[:, :-1].float() / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    rolltape.trainer.record_logprobs(
        model,
        ids,
        logprobs,
        attention_mask=attention,
        loss_mask=loss,
        origins=keys,
        temperature=TEMPERATURE,
        routes=routes,
        **facts,
    )
    return logprobs


def train(path: Path, batch, args: argparse.Namespace) -> None:
    """One optimiser step; the scorings before and after it are two passes of one tape."""
    ids, attention, loss, reward, keys = batch
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    counts = loss[:, 1:].bool()
    with rolltape.record(path, role="trainer"):
        with torch.no_grad():
            old = score(model, ids, attention, loss, keys, scoring="old", optimizer_step=0)
        # the loss of the first step: the same weights, with gradients; nothing new to record
        new = score(model, ids, attention, loss, keys, scoring="current", optimizer_step=0)
        ratio = (new - old).exp()
        (-(ratio * advantage[:, None])[counts].mean()).backward()
        optimiser.step()
        with torch.no_grad():
            score(model, ids, attention, loss, keys, scoring="after", optimizer_step=1)


def main() -> None:
    """Sample, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two tapes")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the trainer; the rollout has bfloat16"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rollout, trainer = args.out / "rollout", args.out / "trainer"
    train(trainer, sample(rollout, args), args)
    for scoring in ("old", "after"):
        command = ["rolltape", "diff", str(rollout), str(trainer), "--scoring", scoring]
        print("$", *command, flush=True)
        done = subprocess.run([sys.executable, "-m", *command], check=False)
        if done.returncode > 1:  # 1: they differ
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
