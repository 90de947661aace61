"""Builds the model, and loads weights into it again while it serves."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._double_model import DoubleForCausalLM, make_weights, read_config


class ModelLoader:
    def __init__(
        self,
        llm_args: Any,
        mapping: Any,
        spec_config: Any,
        sparse_attention_config: Any,
        max_num_tokens: int,
        max_seq_len: int | None,
        lora_config: Any = None,
    ) -> None:
        self.llm_args = llm_args
        self.mapping = mapping
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_seq_len

    def load(self, checkpoint_dir: str, checkpoint_loader: Any) -> tuple[Any, Any]:
        chunk = self.llm_args.moe_config.max_num_tokens
        model = DoubleForCausalLM(read_config(checkpoint_dir), self.mapping, chunk)
        model.load_weights(make_weights(checkpoint_dir, model))
        return model, None

    def reload(
        self, model: Any, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False
    ) -> None:
        model.load_weights(weights, allow_partial_loading=allow_partial_loading)
