"""How a router's logits become experts and their weights."""

from __future__ import annotations

import torch


class BaseMoeRoutingMethod(torch.nn.Module):
    def apply(  # type: ignore[override]
        self, _router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a routing method has to say how it chooses")

    def get_experts_per_token(self) -> int:
        return int(self.top_k)

    @property
    def experts_per_token(self) -> int:
        return self.get_experts_per_token()


class DefaultMoeRoutingMethod(BaseMoeRoutingMethod):
    """Softmax over all experts, then the largest ones."""

    def __init__(self, top_k: int, output_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.top_k, self.output_dtype = top_k, output_dtype

    def apply(  # type: ignore[override]
        self, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales, ids = torch.topk(router_logits.float().softmax(-1), self.top_k, dim=-1)
        return ids.to(torch.int32), scales.to(self.output_dtype)
