"""One GRPO-like step from a tape, with the routes and kept sets that the rollout really used.

    python examples/grpo_step.py --model DIR [--tape TAPE]

Without `--tape` it first records a rollout of the model: several completions of each prompt,
sampled with top-k and top-p. Rewards of a toy task go onto the tape as annotations. The loader then
gives whole groups with routes, kept sets and the log-probabilities that the rollout drew with. The
step: forced routes, log-probabilities over the kept sets, importance ratio, clipped loss.

It prints how far the trainer's log-probabilities are from the rollout's, with the routes forced and
without, and which routers got a gradient. Nothing has been trained yet: all of that distance is
error.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rollout_transformers import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolltape
from rolltape import store
from rolltape.replay.forcing import ForcedRoutes, RouteForcing
from rolltape.store.loader import Batch, TapeDataset, renormalised_logprobs


def record_rollout(model, tokenizer, path: Path, args: argparse.Namespace) -> None:
    """Sample `--samples` completions of each prompt and record it."""
    batch = tokenizer(prompts(args.prompts), return_tensors="pt", padding=True).to(args.device)
    torch.manual_seed(args.seed)
    with rolltape.record(path):
        model.generate(
            **batch,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            top_p=0.95,
            num_return_sequences=args.samples,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )


def write_rewards(path: Path, tokenizer) -> None:
    """The toy task: a completion is better the more spaces it has. Rewards are late facts."""
    with store.TapeWriter(path) as writer:
        for sequence in store.open(path):
            key = sequence.key
            text = tokenizer.decode(sequence.tokens.values[sequence.prompt_len :].tolist())
            writer.append(
                "annotations",
                {
                    "engine": key.engine,
                    "request": key.request,
                    "sample": key.sample,
                    "pass": key.scoring,
                    "name": "reward",
                    "number": text.count(" ") / max(len(text), 1),
                    "t_ns": time.time_ns(),
                },
            )
    store.seal(path)


def group_advantages(batch: Batch) -> torch.Tensor:
    """Rewards of each group, centred and scaled: float32 [n]. Groups are never split."""
    reward = batch.annotation("reward")
    out = torch.zeros_like(reward)
    for group in batch.group_index.unique():
        mine = batch.group_index == group
        out[mine] = (reward[mine] - reward[mine].mean()) / (reward[mine].std() + 1e-6)
    return out.float()


def logprobs(model, batch: Batch, forcing: RouteForcing | None):
    """Log-probabilities of the tokens, over the sets that they were drawn from."""
    forced = nullcontext()
    if forcing is not None:
        routes = ForcedRoutes(
            batch.route_layers, batch.routes, batch.routes_valid, num_experts=batch.num_experts
        )
        forced = forcing.routes(routes)
    with forced:
        logits = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
            use_cache=False,
        ).logits
    return renormalised_logprobs(
        logits,
        batch.supports,
        batch.input_ids,
        mask=batch.loss_mask & batch.logprobs_valid,
        temperature=batch.temperatures,
    )


def clipped_loss(found, batch: Batch, advantages: torch.Tensor, clip: float = 0.2):
    """The clipped policy loss, and log ratios to the rollout, of the tokens that count."""
    chosen = found.valid
    log_ratio = found.logprobs[chosen] - batch.logprobs[chosen]
    advantage = batch.per_token(advantages)[chosen]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean(), log_ratio.detach()


def main() -> None:
    """Record if needed, take one step, print what it was like."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face MoE model")
    parser.add_argument("--tape", type=Path, help="a tape of it with rewards; default: record one")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a micro-batch")
    parser.add_argument(
        "--dtype", default="float32", help="of the trainer; the rollout has its own"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    with tempfile.TemporaryDirectory() as folder:
        path = args.tape or Path(folder) / "rollout"
        if args.tape is None:
            engine = AutoModelForCausalLM.from_pretrained(args.model).to(args.device).eval()
            record_rollout(engine, tokenizer, path, args)
            write_rewards(path, tokenizer)
        result = train_step(path, args)

    if not args.json:
        print(
            f"{result['sequences']} sequences in {result['groups']} groups, {result['tokens']} "
            f"tokens\nmean |log ratio|  live routes {result['live']['mean_abs_log_ratio']:.2e}  "
            f"recorded routes {result['replay']['mean_abs_log_ratio']:.2e}\n"
            f"gradients reached {result['routers_with_gradient']} of {result['routers']} routers"
        )
    print(json.dumps(result))


def train_step(path: Path, args: argparse.Namespace) -> dict[str, object]:
    """One optimiser step over all micro-batches; log ratios with live and with recorded routes."""
    dataset = TapeDataset(
        path,
        batch_size=args.batch_size,
        columns=("logprobs", "routes", "supports", "annotations"),
        shuffle=True,
        seed=args.seed,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ratios: dict[str, list[torch.Tensor]] = {"live": [], "replay": []}
    losses, groups, sequences = [], set(), 0
    with RouteForcing(model) as forcing:
        for batch in dataset:
            advantages = group_advantages(batch)
            batch, advantages = batch.to(args.device), advantages.to(args.device)
            with torch.no_grad():
                live = logprobs(model, batch, None)
            ratios["live"].append(clipped_loss(live, batch, advantages)[1])
            found = logprobs(model, batch, forcing)
            loss, log_ratio = clipped_loss(found, batch, advantages)
            (loss / len(dataset)).backward()
            ratios["replay"].append(log_ratio)
            losses.append(float(loss.detach()))
            groups |= set(batch.group_index.tolist())
            sequences += len(batch)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    routers = [
        n for n, _ in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))
    ]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    moved = sum(not torch.equal(before[n], p) for n, p in model.named_parameters())

    def facts(name: str) -> dict[str, float]:
        values = torch.cat(ratios[name]).abs()
        return {"mean_abs_log_ratio": float(values.mean()), "max": float(values.max())}

    return {
        "sequences": sequences,
        "groups": len(groups),
        "micro_batches": len(losses),
        "tokens": sum(len(r) for r in ratios["replay"]),
        "loss": sum(losses) / len(losses),
        "live": facts("live"),
        "replay": facts("replay"),
        "grad_norm": float(norm),
        "grads_finite": all(bool(g.isfinite().all()) for g in gradients.values()),
        "routers": len(routers),
        "routers_with_gradient": sum(bool(gradients[n].any()) for n in routers if n in gradients),
        "parameters_moved": moved,
    }


if __name__ == "__main__":
    main()
