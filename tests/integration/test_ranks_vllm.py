"""Sites of two tensor-parallel ranks of vLLM, put together, are those of one; replicas agree."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_sites_vllm import (
    ARGUMENTS,
    PROMPTS,
    PYTHON,
    ROUNDING,
    compare,
    of_engine,
    owners,
    random_model,
    run_engine,
)

CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no vLLM here: `make venv-vllm`"),
    pytest.mark.skipif(len(CORES) < 2, reason="two ranks of vLLM need two cores"),
]


def run_ranks(model: Path, out: Path, family: str, parameter: str = "") -> dict[str, Any]:
    job = str(Path(__file__).with_name("vllm_ranks_job.py"))
    arguments = {"tensor_parallel_size": 2, **ARGUMENTS.get(family, {})}
    done = subprocess.run(
        [PYTHON, job, str(model), "float32", str(out), json.dumps(arguments), parameter],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # by itself vLLM gives each rank a NUMA node of its own
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(out)
    return found


def rows_of(engine: dict[str, Any]) -> dict[tuple[str, int, int], torch.Tensor]:
    """(site, request, position) -> row, without logits."""
    found = {}
    for forward in engine["forwards"]:
        requests = owners(forward, engine["tokens"])
        for site, values in forward["sites"].items():
            for request, position, value in zip(
                requests, forward["positions"].tolist(), values, strict=False
            ):
                if site != "logits":
                    found[site, request, position] = value
    return found


def test_two_ranks_are_one_and_a_fault_of_one_rank_is_found(tmp_path: Path) -> None:
    """Merged they are those of one rank; one value of one rank's norm, off by its last bit, is
    found at that norm although all sums over the ranks agree again."""
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    faulty = "model.layers.1.post_attention_layernorm.weight"
    two = run_ranks(tmp_path / "model", tmp_path / "two.pt", "qwen3_moe", faulty)
    one = run_engine(tmp_path / "model", tmp_path / "one.pt")
    assert two["tokens"] == one["tokens"]
    merged, alone = rows_of(two), rows_of(one)
    assert merged.keys() == alone.keys()
    for at, want in alone.items():
        scale = want.abs().max().clamp_min(1e-3)
        assert float((merged[at] - want).abs().max() / scale) < ROUNDING, at
    assert any(not torch.equal(merged[at], want) for at, want in alone.items())
    split = {site for site, (whole, _) in two["layouts"].items() if whole}
    assert {s.rpartition(".")[2] for s in split} == {"q", "k", "v", "q_rot", "k_rot", "heads"}

    assert not [d for forward in two["forwards"] for d in forward["disagreements"]]
    found = [d for forward in two["faulty"] for d in forward["disagreements"]]
    first = found[0]
    assert (first["site"], first["rank"], first["against"]) == ("layers.1.mlp_norm", 1, 0)
    forward = two["faulty"][0]
    assert first["position"] == int(forward["positions"][first["row"]])
    assert first["token"] == int(forward["tokens"][first["row"]])
    assert 0 < first["max_abs"] < 1e-5
    # nothing before the norm is accused
    before = {"embed", *(s for s in two["layouts"] if s.startswith("layers.0."))}
    assert before.isdisjoint(d["site"] for d in found)


@pytest.mark.parametrize("family", ["olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen2"])
def test_two_ranks_of_the_family_are_as_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    two = run_ranks(tmp_path / "model", tmp_path / "two.pt", family)
    assert not [d for forward in two["forwards"] for d in forward["disagreements"]]
    compare(model, two, of_engine(family, model))
