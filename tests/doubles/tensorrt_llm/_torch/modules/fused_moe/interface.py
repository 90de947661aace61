"""What every MoE module of the engine has."""

from __future__ import annotations

from typing import Any

import torch


class MoE(torch.nn.Module):
    def __init__(
        self,
        *,
        routing_method: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        model_config: Any = None,
    ) -> None:
        super().__init__()
        self.routing_method = routing_method
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.mapping = getattr(model_config, "mapping", None)

    def create_weights(self) -> None:
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        raise NotImplementedError
