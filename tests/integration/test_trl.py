"""TRL's real GRPO trainer, two steps on the bundled model: what it computes is on the tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape import store
from tests.integration.conftest import TINY_MOE

trl = pytest.importorskip("trl", reason="trl is not installed (it is not in the dev extra)")
datasets = pytest.importorskip("datasets", reason="trl needs datasets")


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


@pytest.mark.filterwarnings("ignore")  # of TRL and what it uses
def test_a_grpo_job_is_recorded(tmp_path: Path, tokenizer: Any) -> None:
    import torch
    import transformers

    from rolltape.recorder import trl as adapter

    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
    prompts = datasets.Dataset.from_list([{"prompt": "import os\n"}, {"prompt": "x = "}] * 4)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_generations=2,
        steps_per_generation=2,
        max_completion_length=8,
        max_steps=2,
        beta=0.1,
        temperature=0.7,
        report_to=[],
        use_cpu=True,
        bf16=False,  # on by default, and then both sides run under autocast
        save_strategy="no",
        disable_tqdm=True,
    )
    with rolltape.record(tmp_path / "tape"):
        adapter.bind()
        try:
            trl.GRPOTrainer(
                model=model,
                reward_funcs=length_reward,
                args=config,
                train_dataset=prompts,
                processing_class=tokenizer,
            ).train()
        finally:
            adapter.unbind()
    tape = store.open(tmp_path / "tape")
    faults = [row["detail"] for row in tape.rows("events") if row["kind"] in ("gap", "hook_error")]
    assert not faults
    roles = {row["engine"]: row["role"] for row in tape.engines.values()}
    assert sorted(roles.values()) == ["reference", "rollout", "trainer"]
    rollouts = {s.info["digest"]: s for s in tape if roles[s.key.engine] == "rollout"}
    scored = [s for s in tape if roles[s.key.engine] != "rollout"]
    assert rollouts and scored
    assert {str(s.annotations["scoring"]) for s in scored} >= {"current", "reference"}
    for sequence in rollouts.values():
        assert {"reward", "advantage", "reward.length_reward"} <= sequence.annotations.keys()
    for sequence in scored:
        assert sequence.info["digest"] in rollouts
        mine = sequence.logprob("scaled")
        assert mine.valid[sequence.prompt_len :].all()
        routes = sequence.routes()
        assert routes is not None and routes.valid.all()
        if sequence.annotations["optimizer_step"] == 0:
            # before the first update both sides have the same weights
            theirs = rollouts[sequence.info["digest"]].logprob("scaled")
            both = mine.valid & theirs.valid
            assert both.any()
            np.testing.assert_allclose(mine.values[both], theirs.values[both], atol=1e-3)
