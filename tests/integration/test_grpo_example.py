"""The GRPO example: record, reward, load, replay routes, renormalise, step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from tests.integration.conftest import ROOT, TINY_MOE

pytestmark = pytest.mark.engine

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
SCRIPT = [sys.executable, str(ROOT / "examples/grpo_step.py"), "--model", str(TINY_MOE)]


def step(*args: str | Path) -> dict[str, Any]:
    command = [*SCRIPT, "--json", *map(str, args)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return step("--prompts", "4", "--samples", "4", "--max-new-tokens", "32")


def test_replaying_routes_brings_the_ratio_nearer_to_one(result: dict[str, Any]) -> None:
    live, replay = (result[name]["mean_abs_log_ratio"] for name in ("live", "replay"))
    assert 0 < replay < 0.9 * live
    # the rollout was BF16 and the step FP32: what is left is small and not nothing
    assert live < 0.2


def test_every_group_and_token_takes_part(result: dict[str, Any]) -> None:
    assert (result["sequences"], result["groups"], result["micro_batches"]) == (16, 4, 2)
    assert 16 < result["tokens"] <= 16 * 32


def test_gradients_are_finite_and_reach_every_router(result: dict[str, Any]) -> None:
    assert result["grads_finite"] and result["grad_norm"] > 0
    assert result["routers"] == result["routers_with_gradient"] == 6
    assert result["parameters_moved"] > 60


def test_in_the_rollouts_own_dtype_the_distance_is_less(result: dict[str, Any]) -> None:
    same = step("--prompts", "4", "--samples", "4", "--max-new-tokens", "32", "--dtype", "bfloat16")
    assert same["tokens"] == result["tokens"]
    assert same["replay"]["mean_abs_log_ratio"] < same["live"]["mean_abs_log_ratio"]


def test_a_tape_without_rewards_is_refused_by_name(tmp_path: Path, tiny_moe: Any) -> None:
    import torch

    import rolltape

    with rolltape.record(tmp_path / "a"):
        ids = torch.full((1, 5), 7, device=tiny_moe.device)
        tiny_moe.generate(
            ids, do_sample=True, max_new_tokens=4, num_return_sequences=2, pad_token_id=1
        )
    command = [*SCRIPT, "--tape", str(tmp_path / "a")]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "annotation 'reward' is not there" in done.stderr.splitlines()[-1]
    assert len(store.open(tmp_path / "a")) == 2
