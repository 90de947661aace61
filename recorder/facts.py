"""Facts about a model and the settings in force: the columns of an `engines` row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import xxhash

from rolltape.recorder.moe import find_moe_blocks

if TYPE_CHECKING:
    from torch import nn

#: Configuration keys that do not change what the model computes.
_NOT_ARCHITECTURE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
}


def model_facts(model: nn.Module, name: str | None = None) -> dict[str, Any]:
    """What identifies a transformers causal language model.

    Args:
        model: a `PreTrainedModel`.
        name: path or name as the job gave it; by default what the config remembers.

    Returns:
        Columns of the `engines` table: model, model_type, model_fingerprint, vocab_size,
        num_layers, moe_layers, num_experts, experts_per_token, dtype, device, ranks (JSON, null
        for a process that is alone), effective (a dict).
    """
    parameter = next(model.parameters())
    return {
        "model": name or getattr(model.config, "_name_or_path", None) or None,
        **architecture(model),
        "dtype": dtype_name(parameter.dtype),
        "device": str(parameter.device),
        "ranks": _ranks(),
        "effective": effective_settings(model),
    }


def _ranks() -> str | None:
    """This process among those that train or generate together by torch.distributed."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return json.dumps({"world": [rank, size]}) if size > 1 else None


def architecture(model: nn.Module) -> dict[str, Any]:
    """The part of `model_facts` that needs no weights: a model on the meta device will do."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    blocks = find_moe_blocks(model)
    return {
        "model_type": getattr(config, "model_type", None),
        "model_fingerprint": fingerprint(config.to_dict()),
        "vocab_size": int(text.vocab_size),
        "num_layers": int(text.num_hidden_layers),
        "moe_layers": [b.layer for b in blocks],
        "num_experts": blocks[0].num_experts if blocks else None,
        "experts_per_token": blocks[0].k if blocks else None,
    }


def fingerprint(config: dict[str, Any]) -> str:
    """xxh3-128 of the part of a config that decides what is computed."""
    kept = {
        k: v
        for k, v in config.items()
        if k not in _NOT_ARCHITECTURE and not k.startswith("_") and v is not None
    }
    text = json.dumps(kept, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def effective_settings(model: nn.Module) -> dict[str, Any]:
    """Settings in force that change bits: implementations, precision, determinism, threads."""
    import torch

    config: Any = model.config
    cuda = torch.backends.cuda
    return {
        "attention": getattr(config, "_attn_implementation", None),
        "experts": experts_implementation(model),
        "training": model.training,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32": cuda.matmul.allow_tf32,
        "allow_bf16_reduced_precision_reduction": (
            cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "sdpa": sdpa_backends(),
        "autocast": torch.is_autocast_enabled(next(model.parameters()).device.type),
    }


def experts_implementation(model: nn.Module) -> str | None:
    """Name of the experts implementation, None for a dense model or an older transformers."""
    return getattr(model.config, "_experts_implementation", None)


def sdpa_backends() -> str:
    """SDPA backends that are allowed, joined by commas; which one runs is the library's choice."""
    import torch

    cuda = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return ",".join(name for name, on in enabled.items() if on)
