"""The same tensors at the same sites in transformers and vLLM: equal at rounding level in FP32."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.front import front_of
from rolltape.replay.noise import measure_floor
from rolltape.replay.site_errors import row_errors
from rolltape.replay.sites import known_families, sites_of
from rolltape.replay.taps import Span, Taps
from tests.integration.conftest import BASE, FAMILIES, TINY_MOE, make_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no vLLM here: `make venv-vllm`"),
]

PROMPTS = [
    [5, 17, 300, 22, 90, 41, 7, 30],
    [9, 8, 120, 77, 65, 204, 33, 12, 99, 100, 101],
    [70, 71, 40],
]
#: Relative to the largest value of the site: some hundred roundings of FP32.
ROUNDING = 2e-5

#: The CPU attention of vLLM has no heads of 16.
WIDE = {"hidden_size": 128, "head_dim": 32}
DENSE = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}


def run_engine(model: Path, out: Path, dtype: str = "float32") -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("vllm_sites_job.py")), str(model), dtype, out],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(out)
    return found


def truth(model: Any, tokens: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Every site of every sequence, each run alone."""
    found = []
    with Taps(model, "*") as taps, torch.no_grad():
        for ids in tokens:
            taps.watch([Span(key=0, row=0, column=0, n=len(ids))], columns=len(ids))
            model(input_ids=torch.tensor([ids]), use_cache=False)
            found.append({taken.site: taken.values for taken in taps.taken()})
    return found


def pairs(model: Any, engine: dict[str, Any]) -> Iterator[tuple[str, int, int, Any, Any]]:
    """(site, request, position, row of transformers, row of the engine) of all its forwards."""
    expected = truth(model, engine["tokens"])
    # prompts have no two equal (position, token), responses follow the row order of the forward
    for forward in engine["forwards"]:
        requests = owners(forward, engine["tokens"])
        for site, values in forward["sites"].items():
            rows = last_rows(requests) if site == "logits" else range(len(requests))
            assert len(values) == len(rows), site
            for value, row in zip(values, rows, strict=True):
                position = int(forward["positions"][row])
                want = expected[requests[row]][site][position]
                assert value.shape == want.shape, site
                yield site, requests[row], position, want, value


def compare(model: Any, engine: dict[str, Any], sites: set[str]) -> None:
    """Every row of every site of every forward of the engine is that of transformers."""
    compared = dict.fromkeys(sites, 0)
    for site, request, position, want, value in pairs(model, engine):
        scale = want.abs().max().clamp_min(1e-3)
        assert float((value - want).abs().max() / scale) < ROUNDING, (site, request, position)
        compared[site] += 1
    total = sum(len(ids) - 1 for ids in engine["tokens"])  # the last token has no forward
    for site in sites - {"logits"}:
        assert compared[site] == total, site
    assert compared["logits"] == sum(
        len(ids) - len(p) for ids, p in zip(engine["tokens"], PROMPTS, strict=True)
    )


def owners(forward: dict[str, Any], tokens: list[list[int]]) -> list[int]:
    pairs = zip(forward["positions"].tolist(), forward["tokens"].tolist(), strict=True)
    found: list[int] = []
    for position, token in pairs:
        fitting = [i for i, ids in enumerate(tokens) if ids[position : position + 1] == [token]]
        follows = [i for i in fitting if found and i == found[-1] and position]
        new = [i for i in fitting if i not in found]
        found.append((follows or new)[0])
    return found


def last_rows(requests: list[int]) -> list[int]:
    return [i for i, r in enumerate(requests) if i + 1 == len(requests) or requests[i + 1] != r]


def test_the_bundled_model_is_the_same_at_every_site(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    engine = run_engine(TINY_MOE, tmp_path / "engine.pt")
    compare(model, engine, set(sites_of(model)))


def test_in_bf16_the_diff_shows_the_front(tmp_path: Path) -> None:
    """Both round to BF16, at places of their own: the embeddings are the same bits, what comes
    behind is above the noise of transformers with itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    engine = run_engine(TINY_MOE, tmp_path / "engine.pt", "bfloat16")
    tally = SiteTally()
    for site, request, position, want, value in pairs(model, engine):
        rows = (x.float().numpy()[None] for x in (want, value))
        error = row_errors(str(request), site, position, *rows, grid="bfloat16")
        tally.spans.setdefault(site, []).append(error)
    floor = measure_floor(model, {str(i): ids for i, ids in enumerate(engine["tokens"])}, rows=3)
    found = front_of(tally, floor)
    sites = {row["site"]: row for row in tally.summary()}
    assert sites["embed"]["equal"] == sites["embed"]["positions"]
    assert found["verdict"] == "divergent" and found["front"]["site"].startswith("layers.0.")
    assert found["front"]["rel_l2"] < 0.05  # rounding, no bug
    worst = max(row["rel_l2_max"] for row in sites.values())
    assert 1e-3 < worst < 1


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "glm4_moe", "qwen3", "llama"])
def test_a_random_model_of_the_family_is_the_same(family: str, tmp_path: Path) -> None:
    if family in FAMILIES:
        model = make_model(family, **WIDE)
    else:
        torch.manual_seed(0)
        config = DENSE[family](**{**BASE, **WIDE})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would not tell one norm from another
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "model")
    engine = run_engine(tmp_path / "model", tmp_path / "engine.pt")
    missing = {"glm4_moe": "experts"}.get(family, "-")
    compare(model, engine, {s for s in sites_of(model) if not s.endswith(f".{missing}")})


def test_families_without_a_vllm_map_are_those_that_could_not_be_checked() -> None:
    both = known_families("transformers").keys() - known_families("vllm").keys()
    assert both == {"gpt_oss", "deepseek_v3", "qwen3_next", "mistral", "qwen2"}
    assert all(family.checked for family in known_families("vllm").values())
