"""A GRPO job as a user would write it; knows nothing of rolltape.

python trl_job.py OUT [--lora]                               # one process
torchrun --nproc-per-node 2 trl_job.py OUT --samples 8       # data parallel
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")  # of TRL and what it uses

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

TINY_MOE = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-moe"


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--bf16", action="store_true", help="autocast, TRL's default")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TINY_MOE, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
    lora = None
    if args.lora:
        from peft import LoraConfig

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    prompts = [{"prompt": text} for text in ("import os\n", "x = ")]
    GRPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=GRPOConfig(
            output_dir=args.out,
            per_device_train_batch_size=2,
            num_generations=args.samples,
            steps_per_generation=2,
            gradient_accumulation_steps=1,  # not a multiple of the above: TRL needs old logprobs
            max_completion_length=8,
            max_steps=4,
            learning_rate=1e-3,
            warmup_steps=0,
            beta=0.1,
            temperature=0.7,
            report_to=[],
            use_cpu=True,
            bf16=args.bf16,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=lora,
    ).train()


if __name__ == "__main__":
    main()
