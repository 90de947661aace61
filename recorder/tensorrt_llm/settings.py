"""What a front end asked for and what is in force in each worker, where it decides numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rolltape.recorder import settings as shared
from rolltape.recorder.tensorrt_llm.identity import ENVIRONMENT_VARIABLE

#: Variables that change numbers, kernels or what can be recorded here, beside `shared.FLAGS`.
_OTHERS = (
    "FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL",
    "TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE",
    "TLLM_TRTLLMGEN_FORCE_SEPARATED_ROUTING",
    "TLLM_WORKER_USE_SINGLE_PROCESS",
)
_DEPTH = 4


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that decide numbers as this process has them."""
    env = os.environ if env is None else env
    return {name: env[name] for name in (*shared.FLAGS, *_OTHERS) if name in env}


def named(env: Mapping[str, str]) -> dict[str, str]:
    """The same, as they stand among the settings of a process."""
    return {f"env.{name}": value for name, value in env.items()}


def leave_environment() -> None:
    """Tell the workers that will be started what the front end has."""
    os.environ[ENVIRONMENT_VARIABLE] = json.dumps(environment())


def asked_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that this process should have: as its front end, else its launcher has them.

    A script may set them itself, and pool workers get TLLM_* and TRTLLM_* only.
    """
    env = os.environ if env is None else env
    try:
        front = json.loads(env.get(ENVIRONMENT_VARIABLE, "{}"))
    except ValueError:
        front = {}
    return {**(shared.launch_environment(env) or {}), **front}


def findings(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What is not as it was asked for in this process, as details of `finding` events."""
    here, asked = environment(env), asked_environment(env)
    return [f.as_detail() for f in shared.findings({}, {}, here, launched=asked)]


def requested(args: Any) -> dict[str, Any]:
    """`LlmArgs` as plain values: of a pydantic model what was set, of others all."""
    if args is None:
        return {}
    dump = getattr(args, "model_dump", None)
    values = dump(exclude_unset=True) if dump else getattr(args, "__dict__", {})
    plain = {name: _plain(value) for name, value in values.items() if not name.startswith("_")}
    return {**plain, **named(environment())}


def worker_facts(executor: Any, layers: list[Any]) -> dict[str, Any]:
    """Columns of the `engines` row of a worker.

    Args:
        executor: `PyExecutor`; what it does not have is left out.
        layers: its MoE layers, see `rolltape.recorder.tensorrt_llm.routes`.
    """
    engine = executor.model_engine
    model = engine.model
    args = getattr(executor, "llm_args", None) or getattr(engine, "llm_args", None)
    config = getattr(getattr(model, "model_config", None), "pretrained_config", None)
    config = config or getattr(model, "config", None)
    parameter = next(model.parameters())
    return {
        "process": "worker",
        "model": _text(getattr(args, "model", None)),
        "model_type": getattr(config, "model_type", None),
        "vocab_size": _int(getattr(config, "vocab_size", None)),
        "num_layers": _int(getattr(config, "num_hidden_layers", None)),
        "moe_layers": [layer.layer for layer in layers],
        "num_experts": max((layer.num_experts for layer in layers), default=None),
        "experts_per_token": max((layer.k for layer in layers), default=None),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "ranks": json.dumps(ranks_of(mapping_of(executor))),
        "effective": {
            **{name: _plain(getattr(args, name)) for name in _ARGUMENTS if hasattr(args, name)},
            **_classes(executor),
            **shared.process_settings()["torch"],
            **named(environment()),
        },
    }


_ARGUMENTS = (
    "attn_backend",
    "sampler_type",
    "disable_overlap_scheduler",
    "enable_chunked_prefill",
    "enable_autotuner",
    "allreduce_strategy",
    "cuda_graph_config",
    "moe_config",
    "kv_cache_config",
    "scheduler_config",
    "torch_compile_config",
    "speculative_config",
    "attention_dp_config",
    "enable_attention_dp",
    "enable_return_routed_experts",
    "force_deterministic",
    "enable_deterministic_inference",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
)


def _classes(executor: Any) -> dict[str, Any]:
    """What AUTO came to: the classes that run."""
    engine = executor.model_engine
    experts = {type(m).__name__ for m in engine.model.modules() if hasattr(m, "routing_method")}
    found: dict[str, Any] = {"experts": ",".join(sorted(experts)) or None}
    for name, owner in (
        ("sampler", getattr(executor, "sampler", None)),
        ("scheduler", getattr(executor, "scheduler", None)),
        ("attention", getattr(engine, "attn_backend", None)),
        ("kv_cache_manager", getattr(executor, "kv_cache_manager", None)),
    ):
        if owner is not None:
            found[name] = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    runner = getattr(engine, "cuda_graph_runner", None)
    if runner is not None:
        found["graphs"] = bool(getattr(runner, "enabled", True))
        found["graph_padding"] = getattr(runner, "padding_enabled", None)
        found["graph_batch_sizes"] = _plain(getattr(runner, "supported_batch_sizes", None))
    return found


def ranks_of(mapping: Any) -> dict[str, list[int]]:
    """[rank, size] for each kind of parallelism that the engine's `Mapping` names."""
    found = {}
    for kind in ("tp", "pp", "cp"):
        size = int(getattr(mapping, f"{kind}_size", 1) or 1)
        found[kind] = [int(getattr(mapping, f"{kind}_rank", 0) or 0), size]
    if getattr(mapping, "enable_attention_dp", False):
        found["dp"] = list(found["tp"])
    return found


def mapping_of(executor: Any) -> Any:
    """The engine's `Mapping`, wherever this version keeps it; None if nowhere."""
    for owner in (executor.model_engine, getattr(executor, "dist", None)):
        mapping = getattr(owner, "mapping", None)
        if mapping is not None:
            return mapping
    return getattr(executor, "dist", None)


def _plain(value: Any, depth: int = 0) -> Any:
    """Something that JSON holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < _DEPTH:
        if isinstance(value, Mapping):
            return {str(k): _plain(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple | set):
            return [_plain(v, depth + 1) for v in value]
        dump = getattr(value, "model_dump", None)
        if dump is not None:
            return _plain(dump(), depth + 1)
        if hasattr(value, "name") and hasattr(value, "value"):
            return value.name
        fields = getattr(value, "__dict__", None)
        if fields and not callable(value):
            shown = {k: v for k, v in fields.items() if not k.startswith("_")}
            return {k: _plain(v, depth + 1) for k, v in shown.items()}
    return type(value).__name__


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
