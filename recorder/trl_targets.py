"""The places in TRL that `rolltape.recorder.trl` relies on."""

from __future__ import annotations

from rolltape.recorder.targets import Target

_GRPO = "trl.trainer.grpo_trainer"

TARGETS: tuple[Target, ...] = (
    Target(
        module=_GRPO,
        symbol="GRPOTrainer._get_per_token_logps_and_entropies",
        parameters=("model", "input_ids", "attention_mask", "logits_to_keep"),
        gives="logprobs, routes, weights",
        instead="what the trainer computes is not recorded; call rolltape.trainer in the loss",
    ),
    Target(
        module=_GRPO,
        symbol="GRPOTrainer._generate_and_score_completions",
        parameters=("inputs",),
        gives="lifecycle",
        instead="advantages are not annotated, and old logprobs are called current",
    ),
    Target(
        module=_GRPO,
        symbol="GRPOTrainer._calculate_rewards",
        gives="lifecycle",
        instead="rewards are not annotated",
    ),
)
