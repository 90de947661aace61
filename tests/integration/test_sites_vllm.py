"""The same tensors at the same sites in transformers and vLLM: equal at rounding level in FP32."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
DENSE = {
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
}
#: Its CPU kernels for latent attention have the sizes of the real model only.
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "qk_head_dim": 192,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
#: The CPU kernel of vLLM 0.32 rotates a query [tokens, heads, size] as if each head were a token of
#: its own: with it `q_rot` of DeepSeek is another tensor from the second head on.
ARGUMENTS = {"deepseek_v3": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}}
#: Sites that vLLM has not: shared experts are added inside of `experts`, no key is expanded.
MISSING = {
    "glm4_moe": {"experts"},
    "deepseek_v3": {"experts", "k_rot"},
    "qwen3_next": {"experts"},
}


def run_engine(
    model: Path, out: Path, dtype: str = "float32", arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    job = str(Path(__file__).with_name("vllm_sites_job.py"))
    done = subprocess.run(
        [PYTHON, job, str(model), dtype, str(out), json.dumps(arguments or {})],
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
    """The request of each row: that of the row before where it goes on, else one not yet seen."""
    found: list[int] = []
    before = -1
    pairs = zip(forward["positions"].tolist(), forward["tokens"].tolist(), strict=True)
    for position, token in pairs:
        fitting = [i for i, ids in enumerate(tokens) if ids[position : position + 1] == [token]]
        follows = [i for i in fitting if found and i == found[-1] and position == before + 1]
        new = [i for i in fitting if i not in found]
        found.append((follows or new)[0])
        before = position
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


def random_model(family: str) -> Any:
    """A small model whose norms are told from one another."""
    if family == "deepseek_v3":
        model = make_model(family, **LATENT)
    elif family == "gpt_oss":  # its CPU experts take multiples of 32, of each of two ranks too
        model = make_model(family, **WIDE, intermediate_size=128)
    elif family in FAMILIES:
        model = make_model(family, **WIDE)
    else:
        torch.manual_seed(0)
        config = DENSE[family](**{**BASE, **WIDE})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return with_other_norms(model)


def with_other_norms(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would not tell one norm from another
                parameter.uniform_(0.5, 1.5)
    return model


def of_engine(family: str, model: Any) -> set[str]:
    """The sites of transformers that the map of vLLM has too."""
    missing = MISSING.get(family, set())
    return {site for site in sites_of(model) if site.rpartition(".")[2] not in missing}


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "olmoe", "glm4_moe", "qwen3", "llama", "mistral", "qwen2"),
        *("gpt_oss", "deepseek_v3"),
    ],
)
def test_a_random_model_of_the_family_is_the_same(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "engine.pt"
    engine = run_engine(tmp_path / "model", out, arguments=ARGUMENTS.get(family))
    compare(model, engine, of_engine(family, model))


def test_linear_attention_is_the_same_in_bf16(tmp_path: Path) -> None:
    """vLLM's linear attention on a CPU takes BF16 alone: at every site vLLM is as far from FP32 as
    transformers is in BF16."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **{**BASE, **WIDE, "num_hidden_layers": 4},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in with_other_norms(model).named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)  # far from ties: another expert is no rounding
    model.save_pretrained(tmp_path / "model")
    engine = run_engine(tmp_path / "model", tmp_path / "engine.pt", "bfloat16")
    exact = truth(copy.deepcopy(model).float(), engine["tokens"])
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for site, request, position, theirs, value in pairs(model, engine):
        want = exact[request][site][position]
        both = (float((x.float() - want).norm() / want.norm()) for x in (value, theirs))
        errors[site].append((next(both), next(both)))
    assert errors.keys() == of_engine("qwen3_next", model)
    assert {"layers.0.attn", "layers.3.q_rot", "layers.3.v"} <= errors.keys()
    for site, found in errors.items():
        mine, noise = (sum(column) / len(found) for column in zip(*found, strict=True))
        assert mine <= 1.5 * noise < 0.15, (site, mine, noise)


def test_every_family_has_a_map_for_vllm() -> None:
    found = known_families("vllm")
    assert known_families("transformers").keys() == found.keys()
    assert all(family.checked for family in found.values())
