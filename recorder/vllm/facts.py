"""What a vLLM worker knows about its model and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolltape.recorder.facts import dtype_name, fingerprint
from rolltape.recorder.vllm.arguments import requested_of


@dataclass(frozen=True)
class Moe:
    """The MoE layers of a model.

    Args:
        layers: number of the decoder layer of each, dense layers counted.
        routers: their routers, in the same order.
        k: experts a token.
        num_experts: experts that a router chooses from, before they are spread over devices.
        reason: why no routes can be captured; None if they can.
    """

    layers: tuple[int, ...] = ()
    routers: tuple[Any, ...] = ()
    k: int = 0
    num_experts: int = 0
    reason: str | None = None


def find_moe(model: Any, config: Any) -> Moe:
    """The MoE layers of a loaded model, and whether a hook sees the choices of each token.

    Args:
        model: the module that the runner calls.
        config: `VllmConfig`.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    found = [m for m in model.modules() if isinstance(m, MoERunner)]
    if not found:
        return Moe()
    found.sort(key=lambda m: int(m.layer_id))
    first = found[0].router
    reason = None
    if any(m.is_monolithic for m in found):
        reason = "fused: the router runs inside of the experts kernel"
    elif not all(hasattr(m.router, "set_capture_fn") for m in found):
        reason = f"unknown router: {type(first).__name__}"
    elif any(getattr(m.moe_config, "is_sequence_parallel", False) for m in found):
        reason = "sequence-parallel: each rank routes a part of the tokens"
    elif getattr(config.parallel_config, "use_ubatching", False):
        reason = "microbatches: a step is run in two halves"
    return Moe(
        layers=tuple(int(m.layer_id) for m in found),
        routers=tuple(m.router for m in found),
        k=int(first.top_k),
        num_experts=int(found[0].moe_config.num_logical_experts)
        if hasattr(found[0].moe_config, "num_logical_experts")
        else int(first.global_num_experts),
        reason=reason,
    )


def worker_facts(runner: Any, model: Any, moe: Moe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of the `engines` row of a worker, and the settings that were asked for.

    Returns:
        (facts, requested); facts has `columns` with what stands in every row of `steps`.
    """
    import torch

    config = runner.vllm_config
    chosen, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    text = getattr(chosen, "hf_text_config", chosen.hf_config)
    scheduler, compilation = config.scheduler_config, config.compilation_config
    attention = sorted({type(m.impl).__name__ for m in model.modules() if _is_attention(m)})
    experts = sorted({type(m._quant_method).__name__ for m in model.modules() if _is_moe(m)})
    effective = {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "attention": ",".join(attention) or None,
        "experts": ",".join(experts) or None,
        "logprobs_mode": str(chosen.logprobs_mode),
        "quantization": chosen.quantization,
        "enforce_eager": bool(chosen.enforce_eager),
        "compilation_mode": _name(getattr(compilation, "mode", None)),
        "cudagraph_mode": _name(getattr(compilation, "cudagraph_mode", None)),
        "cudagraph_capture_sizes": list(getattr(compilation, "cudagraph_capture_sizes", None) or ())
        or None,
        "dtype": dtype_name(chosen.dtype),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "enable_expert_parallel": bool(parallel.enable_expert_parallel),
        "seed": chosen.seed,
        "max_model_len": chosen.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": cache.block_size,
        "kv_cache_dtype": str(cache.cache_dtype),
        "speculation": _name(getattr(config.speculative_config, "method", None)),
        "enable_return_routed_experts": bool(
            getattr(chosen, "enable_return_routed_experts", False)
        ),
        "threads": torch.get_num_threads(),
    }
    facts = {
        "process": "worker",
        "model": str(chosen.model),
        "model_type": getattr(chosen.hf_config, "model_type", None),
        "model_fingerprint": fingerprint(chosen.hf_config.to_dict()),
        "vocab_size": int(text.vocab_size),
        "num_layers": int(text.num_hidden_layers),
        "moe_layers": list(moe.layers),
        "num_experts": moe.num_experts or None,
        "experts_per_token": moe.k or None,
        "dtype": dtype_name(chosen.dtype),
        "device": str(runner.device),
        "replica": int(parallel.data_parallel_rank),
        "ranks": _ranks(parallel),
        "effective": effective,
        "columns": {
            "attention": effective["attention"],
            "experts": effective["experts"],
            "cache": "paged",
            "threads": effective["threads"],
        },
    }
    return facts, requested_of(config)


def _ranks(parallel: Any) -> str:
    import json

    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    return json.dumps(
        {
            "tp": [int(tp.rank_in_group), int(tp.world_size)],
            "pp": [int(pp.rank_in_group), int(pp.world_size)],
            "dp": [int(parallel.data_parallel_rank), int(parallel.data_parallel_size)],
        }
    )


def _is_attention(module: Any) -> bool:
    return hasattr(module, "impl") and hasattr(module, "kv_cache_dtype")


def _is_moe(module: Any) -> bool:
    return hasattr(module, "is_monolithic") and hasattr(module, "_quant_method")


def _name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))
