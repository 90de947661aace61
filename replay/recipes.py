"""How a router turns its logits into expert choices and combine weights, family by family.

A recipe is picked by the attributes of the router, never by its class name, and
`rolltape.replay.forcing` proves it on the first forward of every block: the recipe applied to the
block's own ids must give the block's own weights bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from rolltape.recorder.moe import MoeBlock


@dataclass(frozen=True)
class Recipe:
    """The arithmetic between router logits and the arguments of `experts`.

    Args:
        name: for messages.
        weights: (logits [rows, E], ids int64 [rows, k]) -> combine weights [rows, k], in the dtype
            that the family computes them in. Differentiable with respect to the logits.
        scores: logits [rows, E] -> scores [rows, E] whose top k are the experts chosen.
    """

    name: str
    weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scores: Callable[[torch.Tensor], torch.Tensor]


def recipe_for(block: MoeBlock) -> Recipe:
    """The recipe of a block.

    * a router with `e_score_correction_bias` (DeepSeek-V3, GLM4-MoE): sigmoid scores, the bias only
      steers the choice, groups limit it;
    * with `norm_topk_prob` (Qwen3-MoE, OLMoE): softmax over all experts in float32, cast back;
    * with a `bias` of its own (GPT-OSS): softmax over the selected logits, in their dtype;
    * otherwise (Mixtral): softmax over all experts in float32, renormalised, kept in float32.

    Older versions keep some of the attributes on the block rather than on the router.
    """
    if _attribute(block, "e_score_correction_bias") is not None:
        return _sigmoid_groups(block)
    normalise = _attribute(block, "norm_topk_prob")
    if normalise is not None:
        return _softmax_all(bool(normalise), cast_back=True)
    if getattr(block.router, "bias", None) is not None:
        return Recipe("softmax over the selected logits", _softmax_selected, lambda logits: logits)
    return _softmax_all(True, cast_back=False)


def margin(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """How far the last chosen expert was ahead of the first one left out.

    Args:
        scores: choice scores [rows, E].
        ids: int64 [rows, k], the experts of the k best scores in any order.

    Returns:
        float32 [rows]; +inf where nothing was left out.
    """
    # selecting the k + 1 best again would take twenty times as long on a CPU
    last = scores.gather(-1, ids).amin(dim=-1)
    first = scores.scatter(-1, ids, -torch.inf).amax(dim=-1)
    return last.float() - first.float()


def _attribute(block: MoeBlock, name: str) -> Any:
    value = getattr(block.router, name, None)
    return getattr(block.block, name, None) if value is None else value


def _softmax_all(normalise: bool, *, cast_back: bool) -> Recipe:
    def scores(logits: torch.Tensor) -> torch.Tensor:
        return functional.softmax(logits, dim=-1, dtype=torch.float32)

    def weights(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen = scores(logits).gather(-1, ids)
        if normalise:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen.to(logits.dtype) if cast_back else chosen

    return Recipe("softmax over all experts", weights, scores)


def _softmax_selected(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = logits.gather(-1, ids)
    return functional.softmax(chosen, dim=-1, dtype=chosen.dtype)


def _sigmoid_groups(block: MoeBlock) -> Recipe:
    normalise = bool(_attribute(block, "norm_topk_prob"))
    scale: float | None = _attribute(block, "routed_scaling_factor")
    # 5.10 calls it n_group
    groups = int(_attribute(block, "num_group") or _attribute(block, "n_group") or 1)
    kept = int(_attribute(block, "topk_group") or groups)

    def scores(logits: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = _attribute(block, "e_score_correction_bias")
        biased = logits.sigmoid() + bias
        if kept >= groups:
            return biased
        grouped = biased.view(len(biased), groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(kept, dim=-1, sorted=False).indices, True)
        return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)

    def weights(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen = logits.sigmoid().gather(1, ids)
        if normalise:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen if scale is None else chosen * scale

    return Recipe("sigmoid with groups", weights, scores)
