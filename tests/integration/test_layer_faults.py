"""Seeded faults are found at the site where they are: transformers against transformers."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from rolltape.replay.front import SiteFloor
from rolltape.replay.live_diff import live_diff
from rolltape.replay.noise import measure_floor
from tests.integration.conftest import make_model

LAYER = 1
SEQUENCES = {
    f"s{i}": np.random.default_rng(i).integers(2, 320, 12 + 3 * i).tolist() for i in range(3)
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Any:
    model = make_model("qwen3_moe", getattr(torch, request.param), num_hidden_layers=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def floor(model: Any) -> Any:
    return measure_floor(model, SEQUENCES, rows=3)


def layer(model: Any) -> Any:
    return model.model.layers[LAYER]


def nudge(path: str, times: float = 1) -> Callable[[Any], None]:
    """One weight of a layer, moved by so many times the largest one."""

    def fault(model: Any) -> None:
        weight = layer(model).get_parameter(path)
        with torch.no_grad():
            weight.view(-1)[3] += times * weight.abs().max()

    return fault


def wrong_eps(path: str) -> Callable[[Any], None]:
    def fault(model: Any) -> None:
        model.get_submodule(path).variance_epsilon = 1e-3

    return fault


def attention_scale(model: Any) -> None:
    layer(model).self_attn.scaling *= 1.02


def swapped_experts(model: Any) -> None:
    experts = layer(model).mlp.experts
    with torch.no_grad():
        for weight in experts.parameters():
            weight[[2, 5]] = weight[[5, 2]]


def low_router(model: Any) -> None:
    router = layer(model).mlp.gate

    def forward(hidden: torch.Tensor) -> Any:
        hidden = hidden.reshape(-1, router.hidden_dim)
        logits = functional.linear(hidden.bfloat16(), router.weight.bfloat16()).float()
        scores, ids = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), ids

    router.forward = forward


def low_head(model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: functional.linear(x.bfloat16(), head.weight.bfloat16()).float()


def stale_layer(model: Any) -> None:
    with torch.no_grad():
        for parameter in layer(model).parameters():
            parameter.mul_(1.01)


def padding_column(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[319].add_(0.05)


def interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """RoPE on pairs (0, 1), (2, 3), ... instead of the two halves."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turned(x: Any) -> Any:
        pairs = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + pairs * sin

    return turned(q), turned(k)


@contextmanager
def rope_interleaved(model: Any) -> Iterator[None]:
    """For one layer of one model: the function is that of all of them, also in other threads."""
    import transformers.models.qwen3_moe.modeling_qwen3_moe as module

    attention, original = layer(model).self_attn, module.apply_rotary_pos_emb
    forward, inside = attention.forward, threading.local()

    def rope(*args: Any, **kwargs: Any) -> Any:
        return (interleaved if getattr(inside, "here", False) else original)(*args, **kwargs)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        inside.here = True
        try:
            return forward(*args, **kwargs)
        finally:
            inside.here = False

    attention.forward, module.apply_rotary_pos_emb = faulty, rope
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = original


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "input_layernorm": (nudge("input_layernorm.weight"), "layers.1.attn_norm"),
    "q_proj": (nudge("self_attn.q_proj.weight"), "layers.1.q"),
    "k_proj": (nudge("self_attn.k_proj.weight"), "layers.1.k"),
    "v_proj": (nudge("self_attn.v_proj.weight"), "layers.1.v"),
    "q_norm": (nudge("self_attn.q_norm.weight"), "layers.1.q"),
    "k_norm": (nudge("self_attn.k_norm.weight"), "layers.1.k"),
    "o_proj": (nudge("self_attn.o_proj.weight"), "layers.1.attn"),
    "post_attention_layernorm": (nudge("post_attention_layernorm.weight"), "layers.1.mlp_norm"),
    "gate": (nudge("mlp.gate.weight"), "layers.1.router"),
    "experts gate_up": (nudge("mlp.experts.gate_up_proj"), "layers.1.experts"),
    "experts down": (nudge("mlp.experts.down_proj", 30), "layers.1.experts"),
    "eps of attention norm": (
        wrong_eps("model.layers.1.input_layernorm"),
        "layers.1.attn_norm",
    ),
    "eps of mlp norm": (
        wrong_eps("model.layers.1.post_attention_layernorm"),
        "layers.1.mlp_norm",
    ),
    "eps of q norm": (wrong_eps("model.layers.1.self_attn.q_norm"), "layers.1.q"),
    "eps of last norm": (wrong_eps("model.norm"), "norm"),
    "attention scale": (attention_scale, "layers.1.heads"),
    "two experts swapped": (swapped_experts, "layers.1.experts"),
    "router in bfloat16": (low_router, "layers.1.router"),
    "LM head in bfloat16": (low_head, "logits"),
    "stale layer": (stale_layer, "layers.1.attn_norm"),
    "padding column": (padding_column, "logits"),
}


@pytest.mark.engine
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_site(fault: str, model: Any, floor: Any) -> None:
    apply, site = FAULTS[fault]
    if model.dtype == torch.bfloat16 and fault.endswith("in bfloat16"):
        pytest.skip("that is what this model does")
    other = copy.deepcopy(model)
    apply(other)
    found = live_diff(model, other, SEQUENCES, floor=floor)
    assert found["verdict"] == "divergent"
    assert found["front"]["site"] == site, found["above"]
    before = [row for row in found["sites"] if row["site"] not in found["above"]]
    assert all(row["rel_l2_max"] <= floor.threshold(row["site"]) for row in before)
    if fault == "padding column":
        assert found["front"]["column"] == 319


@pytest.mark.engine
def test_interleaved_rope_is_found_at_the_rotated_query(model: Any, floor: Any) -> None:
    other = copy.deepcopy(model)
    with rope_interleaved(other):
        found = live_diff(model, other, SEQUENCES, floor=floor)
    assert found["front"]["site"] == "layers.1.q_rot"
    assert found["front"]["position"] == 1  # position 0 is not turned


@pytest.mark.engine
def test_no_fault_is_identical(model: Any, floor: Any) -> None:
    found = live_diff(model, copy.deepcopy(model), SEQUENCES, floor=floor)
    assert found["verdict"] == "identical" and found["front"] is None
    assert {row["positions"] for row in found["sites"]} == {sum(map(len, SEQUENCES.values()))}


@pytest.mark.engine
def test_within_noise_needs_a_floor(model: Any, floor: Any) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        layer(other).self_attn.v_proj.weight[3] *= 1 + 10 * torch.finfo(model.dtype).eps
    found = live_diff(model, other, SEQUENCES)
    assert found["verdict"] == "divergent" and found["front"]["site"] == "layers.1.v"
    assert found["front"]["threshold"] is None and found["floor"] is None
    wide = {site: SiteFloor(max=10, positions=9, unequal=9) for site in floor.sites}
    found = live_diff(model, other, SEQUENCES, floor=dataclasses.replace(floor, sites=wide))
    assert found["verdict"] == "within-noise" and found["front"] is None
    del wide["layers.1.v"]  # of a site that was not measured nothing is noise
    found = live_diff(model, other, SEQUENCES, floor=dataclasses.replace(floor, sites=wide))
    assert found["verdict"] == "divergent" and found["above"].keys() == {"layers.1.v"}


@pytest.mark.engine
def test_a_fault_in_one_row_is_located(model: Any) -> None:
    """A value that is not finite is counted and located, and left out of every mean."""
    other = copy.deepcopy(model)

    def broken(_module: Any, _args: Any, output: Any) -> Any:
        output = output.clone()
        output[1, 4, 7] = torch.nan
        return output

    layer(other).self_attn.o_proj.register_forward_hook(broken)
    found = live_diff(model, other, SEQUENCES, sites="layers.1.attn")
    row = found["sites"][0]
    assert row["non_finite"] == 1
    assert row["non_finite_at"] == {"sequence": "s1", "position": 4, "column": 7}
    assert row["rel_l2_max"] == 0 and row["equal"] == row["positions"] - 1
    assert found["front"]["non_finite"] == 1 and found["front"]["position"] == 4
