"""Mixture-of-experts blocks of a transformers model, found by structure, not by class.

A block is a module with a child `experts` and a sibling router called `gate` or `router`. The
router returns its logits first; `experts` is called as experts(hidden, ids, weights) with rows
flattened as batch * sequence. That holds in transformers 5.10 and later for Qwen3-MoE, Mixtral,
OLMoE, DeepSeek-V3, GPT-OSS and GLM4-MoE, whatever the experts implementation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class MoeBlock:
    """One MoE layer.

    Args:
        layer: number of the decoder layer, dense layers counted.
        name: module path of the block, for messages.
        block: the module that owns both.
        router: module whose first output is the router logits [rows, num_experts].
        experts: module called with (hidden, ids [rows, k], weights [rows, k]).
        num_experts: experts that the router chooses from.
        k: experts a token.
    """

    layer: int
    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    k: int


def find_moe_blocks(model: nn.Module) -> list[MoeBlock]:
    """Every MoE block of a causal language model, by layer. Empty for a dense model."""
    modules = dict(model.named_modules())
    found = []
    for path, experts in modules.items():
        parent, _, last = path.rpartition(".")
        match = _LAYER.search(parent)
        if last != "experts" or match is None:
            continue
        router = modules.get(f"{parent}.gate") or modules.get(f"{parent}.router")
        weight = getattr(router, "weight", None)
        if router is None or weight is None:
            continue
        found.append(
            MoeBlock(
                layer=int(match[1]),
                name=parent,
                block=modules[parent],
                router=router,
                experts=experts,
                num_experts=int(weight.shape[0]),
                k=_experts_per_token(router, modules[parent], getattr(model, "config", None)),
            )
        )
    return sorted(found, key=lambda b: b.layer)


def _experts_per_token(*owners: object) -> int:
    for owner in owners:
        for name in ("top_k", "num_experts_per_tok"):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return 0


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Decoder layers by number: the modules whose path ends in the layer number."""
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        match = _LAYER.search(path)
        if match is not None and match.end() == len(path):
            found.setdefault(int(match[1]), module)
    return found
