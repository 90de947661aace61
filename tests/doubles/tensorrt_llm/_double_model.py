"""A small decoder with a mixture of experts; computes in float32 on the CPU.

Attention reads keys and values from the blocks of the cache, for every query all rows that its
sequence may ever have, masked by position: shapes depend on the number of tokens only, so that
what a graph has captured can be run again with other contents.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorrt_llm._torch import route_capture
from tensorrt_llm._torch.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
)
from tensorrt_llm._torch.modules.fused_moe.interface import MoE
from tensorrt_llm._torch.modules.fused_moe.routing import DefaultMoeRoutingMethod
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model's config.json."""

    model_type: str = "double_moe"
    vocab_size: int = 97
    hidden_size: int = 32
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 16
    dense_layers: tuple[int, ...] = (0,)
    max_position_embeddings: int = 256
    torch_dtype: torch.dtype = torch.float32
    eos_token_id: int = 0


@dataclass
class AttentionMetadata:
    """Where the tokens of one forward stand.

    Args:
        slots: int64 [tokens], row of the cache that each token's key and value go to.
        keys: int64 [tokens, longest], rows of the cache of each token's sequence.
        positions: int64 [tokens].
        last: int64 [requests], row of each request's last token.
        cache: keys and values [rows, heads, size] of each layer.
    """

    slots: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    cache: list[tuple[torch.Tensor, torch.Tensor]]
    is_cuda_graph: bool = False

    def fill(self, other: AttentionMetadata) -> None:
        """Take over the contents of another one of the same sizes, in place."""
        for name in ("slots", "keys", "positions", "last"):
            getattr(self, name).copy_(getattr(other, name))


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.size = config.hidden_size // self.heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, attn_metadata: AttentionMetadata) -> torch.Tensor:
        tokens = hidden.shape[0]
        q, k, v = self.qkv_proj(hidden).view(tokens, 3, self.heads, self.size).unbind(1)
        keys, values = attn_metadata.cache[self.layer]
        keys.index_put_((attn_metadata.slots,), k)
        values.index_put_((attn_metadata.slots,), v)
        scores = torch.einsum("thd,tlhd->thl", q, keys[attn_metadata.keys]) / self.size**0.5
        span = torch.arange(attn_metadata.keys.shape[1])
        later = span[None, :] > attn_metadata.positions[:, None]
        weights = scores.masked_fill(later[:, None, :], float("-inf")).softmax(-1)
        mixed = torch.einsum("thl,tlhd->thd", weights, values[attn_metadata.keys])
        return self.o_proj(mixed.reshape(tokens, -1))


class Experts(TunableRunner):
    """The matrix products of chosen experts. Tactic 1 adds up the experts in another order."""

    def get_valid_tactics(self, inputs: Any, profile: Any) -> list[Any]:
        return [0, 1]

    def forward(self, /, inputs: Any, *, tactic: Any = -1, do_preparation: bool = False) -> Any:
        x, ids, scales, w_in, w_out = inputs
        chosen = ids.long()
        inner = nn.functional.silu(torch.einsum("tkfh,th->tkf", w_in[chosen], x))
        parts = torch.einsum("tkhf,tkf->tkh", w_out[chosen], inner) * scales[..., None]
        return parts.flip(1).cumsum(1)[:, -1] if tactic == 1 else parts.sum(1)


def _bucket(tokens: int) -> int:
    return 1 << max(tokens - 1, 0).bit_length()


TUNING = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec(0, 0, (1, 2, 4, 8, 16, 32, 64), _bucket),),
    # a row of experts and of their weights for each token
    constraint_specs=tuple(ConstraintSpec(i, 0, lambda shapes: shapes[0][0]) for i in (1, 2)),
)


class CutlassFusedMoE(MoE):
    """Runs its tokens in chunks of at most `moe_max_num_tokens`: a call of the router each.

    `used` lists the ids that the experts of a forward really ran with: (layer, int32 [rows, k]).
    """

    def __init__(self, config: Config, layer: int, chunk: int | None, used: list[Any]) -> None:
        super().__init__(
            routing_method=DefaultMoeRoutingMethod(config.num_experts_per_tok),
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
        )
        shape = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        self.w_in = nn.Parameter(torch.empty(shape))
        self.w_out = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.moe_max_num_tokens = chunk
        self.layer, self.used, self.runner = layer, used, Experts()

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        size = self.moe_max_num_tokens or len(x)
        chunks = zip(x.split(size), router_logits.split(size), strict=True)
        outputs = [self._chunk(*chunk) for chunk in chunks]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _chunk(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        ids, scales = self.routing_method.apply(router_logits)
        ids = ids.to(torch.int32)
        if route_capture.RouteCapture.get() is not None:
            route_capture.RouteCapture.capture(self.layer, ids)
        inputs = [x, ids, scales, self.w_in, self.w_out]
        op = "trtllm::double_fused_moe"
        runner, tactic = AutoTuner.get().choose_one(op, [self.runner], TUNING, inputs)
        self.used.append((self.layer, ids))
        return runner(inputs, tactic=tactic)


class SparseBlock(nn.Module):
    def __init__(self, config: Config, layer: int, chunk: int | None, used: list[Any]) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = CutlassFusedMoE(config, layer, chunk, used)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden, self.gate(hidden))


class DenseBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(hidden)))


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int, chunk: int | None, used: list[Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        sparse = layer not in config.dense_layers
        self.mlp = SparseBlock(config, layer, chunk, used) if sparse else DenseBlock(config)

    def forward(self, hidden: torch.Tensor, attn_metadata: AttentionMetadata) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), attn_metadata)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    def __init__(self, config: Config, chunk: int | None, used: list[Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, i, chunk, used) for i in layers)
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attn_metadata: AttentionMetadata
    ) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attn_metadata)
        return self.norm(hidden)


@dataclass
class ModelConfig:
    pretrained_config: Config
    mapping: Any
    extra_attrs: dict[str, Any] = field(default_factory=dict)


class DoubleForCausalLM(nn.Module):
    """The engine calls `forward` itself, never the module: hooks of the root do not run."""

    def __init__(self, config: Config, mapping: Any, chunk: int | None = None) -> None:
        super().__init__()
        self.used: list[tuple[int, torch.Tensor]] = []
        self.config = config
        self.model_config = ModelConfig(config, mapping)
        self.extra_attrs: dict[str, Any] = {}
        self.model = Decoder(config, chunk, self.used)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the MoE layers, dense ones counted."""
        layers = range(self.config.num_hidden_layers)
        return [layer for layer in layers if layer not in self.config.dense_layers]

    def forward(
        self,
        *,
        attn_metadata: AttentionMetadata,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        return_context_logits: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        self.used.clear()
        route_capture.RouteCapture._double_rewind()
        hidden = self.model(input_ids, position_ids, attn_metadata)
        if not return_context_logits:  # one row a request: the product has another size
            hidden = hidden[attn_metadata.last]
        return self.lm_head(hidden).float()

    def load_weights(
        self, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False
    ) -> None:
        """Copy tensors in, in the order in which they come; a bad one leaves those before it.

        Raises:
            ValueError: a name is missing, unknown, or of another shape.
        """
        own = dict(self.named_parameters())
        for name, tensor in weights.items():
            if name not in own:
                raise ValueError(f"no parameter {name}")
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}")
            own[name].copy_(tensor)
        if not allow_partial_loading and set(own) - set(weights):
            raise ValueError(f"missing {sorted(set(own) - set(weights))[0]}")


def read_config(checkpoint: str) -> Config:
    """config.json of a checkpoint folder; the defaults for a mere name."""
    path = Path(checkpoint) / "config.json"
    given = json.loads(path.read_text()) if path.is_file() else {}
    known = {f.name for f in fields(Config)}
    if "dense_layers" in given:
        given["dense_layers"] = tuple(given["dense_layers"])
    return Config(**{k: v for k, v in given.items() if k in known and k != "torch_dtype"})


def read_generation_config(checkpoint: str) -> dict[str, Any]:
    """generation_config.json of a checkpoint folder; {} if there is none."""
    path = Path(checkpoint) / "generation_config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def make_weights(checkpoint: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """weights.pt of a checkpoint folder; else random ones that the name decides."""
    path = Path(checkpoint) / "weights.pt"
    if path.is_file():
        return dict(torch.load(path, weights_only=True))
    random = torch.Generator().manual_seed(zlib.crc32(checkpoint.encode()))
    found = {}
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            found[name] = torch.ones_like(tensor)
        else:  # wide enough that tokens and experts differ from position to position
            scale = 1.0 if "embed" in name else 2.0 / tensor.shape[-1] ** 0.5
            found[name] = torch.randn(tensor.shape, generator=random) * scale
    return found


def plain_mapping() -> Any:
    return SimpleNamespace(
        tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, cp_size=1, rank=0, enable_attention_dp=False
    )
