"""Train a tiny Qwen3 mixture-of-experts model from text files, on whatever accelerator is here.

    python examples/train_tiny_moe.py OUT FILE_OR_FOLDER... --seconds 110 --license "..."

OUT becomes a Hugging Face folder: BF16 weights, a byte-level BPE tokenizer trained on the same
text, and a README.md that states where it came from. The defaults give the shape of
examples/models/tiny-moe. It needs torch, transformers and tokenizers, and nothing of rolltape.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BOS, EOS = 0, 1
HEAD_DIM = 32
CONTEXT = 4096

CARD = """\
# {name}

A {parameters:.1f}M-parameter Qwen3-MoE language model: {layers} layers, {experts} experts
(top-{topk}), hidden size {hidden}, vocabulary {vocab}, BF16. It is made for testing software, not
for use as a language model.

- Text: the files named in the command below; {files} files, {tokens:,} tokens.
- Training: {steps} steps of {step_tokens:,} tokens in {seconds:.0f} s on {device}.
- Loss (training text, nats per token): {first:.2f} in the first step, {last:.2f} as the mean of the
  last {window}.
- Licence: {license}
- Made with torch {torch}, by:

```
{command}
```
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("sources", type=Path, nargs="+", help="text files, or folders of them")
    parser.add_argument(
        "--suffix", nargs="+", default=[".py"], help="files to take from folders (default: .py)"
    )
    parser.add_argument("--license", required=True, help="licence of the result, for its README.md")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=110, help="train so long (default: 110)")
    length.add_argument("--steps", type=int, help="or train so many steps")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4, help="experts per token")
    parser.add_argument("--hidden", type=int, default=128, help=f"a multiple of {2 * HEAD_DIM}")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64, help="rows in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first one present)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: name a new folder")
    if args.hidden % (2 * HEAD_DIM):
        parser.error(f"--hidden {args.hidden}: must be a multiple of {2 * HEAD_DIM}")
    if args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k}: there are only {args.experts} experts")
    return args


def read_texts(sources: list[Path], suffixes: list[str]) -> list[str]:
    """All texts in a stable order; a file that is not UTF-8 is left out and named."""
    texts = []
    for source in sources:
        if not source.exists():
            sys.exit(f"{source}: no such file or folder")
        found = [source] if source.is_file() else sorted(source.rglob("*"))
        for path in found:
            if path == source or (path.suffix in suffixes and path.is_file()):
                try:
                    texts.append(path.read_text(encoding="utf-8"))
                except UnicodeDecodeError as error:
                    print(f"left out {path}: {error}", file=sys.stderr)
    if not texts:
        sys.exit(f"no text found: folders are searched for {' '.join(suffixes)} (--suffix)")
    return texts


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<bos>", "<eos>"],  # in this order: they get the ids BOS and EOS
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", model_max_length=CONTEXT
    )


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> torch.Tensor:
    """Rows of `length` tokens, cut from all texts laid end to end as `<bos> text <eos>`."""
    pieces = [
        np.array([BOS, *encoding.ids, EOS], dtype=np.int32)
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)
    ]
    stream = np.concatenate(pieces)
    rows = len(stream) // length
    if not rows:
        sys.exit(f"only {len(stream)} tokens of text: fewer than one row of --length {length}")
    return torch.from_numpy(stream[: rows * length].reshape(rows, length))


def make_model(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,  # of dense layers, of which there are none
        moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        num_key_value_heads=args.hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,  # balances the load of the experts
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen3MoeForCausalLM(config)


def batches(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Batches of shuffled rows, for ever; the rest of an epoch too small for a batch is dropped."""
    size = min(size, len(rows))
    while True:
        order = torch.randperm(len(rows))
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]].long()


def train(model: Qwen3MoeForCausalLM, rows: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """The cross-entropy of each step, without the balancing loss."""
    device = model.device
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses: list[float] = []
    start = time.monotonic()
    for step, batch in enumerate(batches(rows, args.batch)):
        seconds = time.monotonic() - start
        done = step / args.steps if args.steps else seconds / args.seconds
        if done >= 1 and losses:
            break
        # Linear warm-up over the first 2 %, then a cosine down to a tenth of the peak.
        rate = args.lr * min(1.0, done / 0.02 + 0.01) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batch.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = model(input_ids=batch, labels=batch, output_router_logits=True)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        balance = model.config.router_aux_loss_coef * output.aux_loss
        losses.append((output.loss - balance).item())
        if not math.isfinite(losses[-1]):
            sys.exit(f"step {step}: loss is {losses[-1]}; lower --lr {args.lr}")
        if step % 20 == 0:
            print(f"step {step:5}  {seconds:5.0f} s  rate {rate:.1e}  loss {losses[-1]:.3f}")
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device(args.device or (accelerator.type if accelerator else "cpu"))

    texts = read_texts(args.sources, args.suffix)
    tokenizer = train_tokenizer(texts, args.vocab)
    if len(tokenizer) != args.vocab:
        sys.exit(f"the text gives {len(tokenizer)} tokens, not --vocab {args.vocab}: add text")
    rows = pack(texts, tokenizer, args.length)
    model = make_model(args).to(device)
    print(f"{len(texts)} files, {rows.numel():,} tokens, {model.num_parameters():,} parameters")

    start = time.monotonic()
    losses = train(model, rows, args)
    seconds = time.monotonic() - start
    window = min(20, len(losses))
    last = sum(losses[-window:]) / window

    model.to(torch.bfloat16).save_pretrained(args.out)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    is_cuda = device.type == "cuda"
    card = CARD.format(
        name=args.out.name,
        parameters=model.num_parameters() / 1e6,
        layers=args.layers,
        experts=args.experts,
        topk=args.top_k,
        hidden=args.hidden,
        vocab=args.vocab,
        files=len(texts),
        tokens=rows.numel(),
        steps=len(losses),
        step_tokens=min(args.batch, len(rows)) * args.length,
        seconds=seconds,
        device=torch.cuda.get_device_name(device) if is_cuda else device.type,
        first=losses[0],
        last=last,
        window=window,
        license=args.license,
        torch=torch.__version__,
        command=shlex.join(["python", *sys.argv]),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"{args.out}: loss {losses[0]:.3f} -> {last:.3f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
