"""Sampling parameters as the real engine resolves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOP_K_ALL = 1 << 30


@dataclass
class SamplingParams:
    """The fields that the adapter reads; greedy is top_k 1 at temperature 1."""

    max_new_tokens: int | None = 128
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    custom_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL
