"""What SGLang's configuration says: the model, its MoE layers, sampling and logprobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rolltape.recorder.facts import fingerprint

#: Settings that decide numbers, kernels or the schedule.
_EFFECTIVE = (
    "attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "enable_fp32_lm_head",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "disable_cuda_graph",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "chunked_prefill_size",
    "max_running_requests",
    "schedule_policy",
    "speculative_algorithm",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "random_seed",
    "enable_return_routed_experts",
    "skip_tokenizer_init",
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
#: SGLang writes this for "the whole vocabulary".
_TOP_K_ALL = 1 << 30
_NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_EDITS = ("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens")


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The router of a model.

    Args:
        layers: numbers of the MoE layers; empty for a dense model.
        all_layers: decoder layers, dense ones counted: the layer axis of what SGLang returns.
        k: experts a token.
        num_experts: experts that the router chooses from.
    """

    layers: tuple[int, ...] = ()
    all_layers: int = 0
    k: int = 0
    num_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of a request are drawn, and what its logprobs are.

    Args:
        greedy: the argmax is taken.
        temperature: of the distribution that is sampled from.
        edits: changes to the logits before truncation.
        truncation: in the order applied.
        column: column of `tokens` that the engine's logprobs belong in.
        column_temperature: what they were divided by; None if that depends on the batch.
    """

    greedy: bool
    temperature: float
    edits: tuple[str, ...]
    truncation: tuple[str, ...]
    column: str
    column_temperature: float | None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that hold the same numbers."""
        plain = self.column_temperature == 1.0 and not self.edits
        same = {self.column} | ({"raw"} if plain else set())
        if self.column_temperature == self.temperature:
            same.add("scaled")
            if not self.truncation:
                same.add("processed")
        return tuple(sorted(same))


def read_sampling(
    params: Any, *, custom: bool = False, env: Mapping[str, str] = os.environ
) -> Sampling:
    """Read it off a normalised `SamplingParams`.

    Args:
        params: of a `TokenizedGenerateReqInput`.
        custom: whether the request has a logit processor of its own.
        env: environment that the scheduler has inherited.
    """
    edits = [
        f"{name}={value:g}"
        for name, neutral in _NEUTRAL.items()
        if (value := getattr(params, name, neutral)) not in (neutral, None)
    ]
    edits += [name for name in _EDITS if getattr(params, name, None)]
    if custom:
        edits.append("custom_logit_processor")
    if getattr(params, "watermark", None) is not None:
        edits.append("watermark")
    top_k = int(getattr(params, "top_k", _TOP_K_ALL))
    temperature = float(getattr(params, "temperature", 1.0))
    greedy = top_k == 1
    cut = ["greedy"] if greedy else []
    if not greedy:
        if 0 < top_k < _TOP_K_ALL:
            cut.append(f"top_k={top_k}")
        if getattr(params, "top_p", 1.0) < 1.0:
            cut.append(f"top_p={params.top_p:g}")
        if getattr(params, "min_p", 0.0) > 0.0:
            cut.append(f"min_p={params.min_p:g}")
    original = original_logprobs(env)
    # a batch of greedy requests only is not divided by the temperature, a mixed one is
    unsure = greedy and temperature != 1.0
    of_column = 1.0 if original else None if unsure else temperature
    return Sampling(
        greedy=greedy,
        temperature=temperature,
        edits=tuple(edits),
        truncation=tuple(cut),
        column="raw" if original and not edits else "scaled",
        column_temperature=of_column,
    )


def original_logprobs(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the engine returns logprobs from before the temperature."""
    return env.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")


def settings(params: Any) -> dict[str, Any]:
    """JSON-able sampling parameters that are set."""
    names = getattr(params, "__struct_fields__", None) or vars(params)
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(params, name, None)
        if isinstance(value, set | frozenset):
            value = sorted(value)
        if isinstance(value, bool | int | float | str | list | dict) and value not in ([], {}):
            found[name] = value
    return found


def find_moe(text: Any) -> Moe:
    """The MoE layers that a text configuration of Hugging Face describes."""
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    experts = next((n for name in _EXPERTS if (n := getattr(text, name, None))), None)
    k = getattr(text, "num_experts_per_tok", None)
    if not isinstance(experts, int) or not isinstance(k, int) or not layers:
        return Moe(all_layers=layers)
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    dense |= set(range(int(getattr(text, "first_k_dense_replace", 0) or 0)))
    named = getattr(text, "moe_layers", None)
    step = int(getattr(text, "decoder_sparse_step", 1) or 1)
    every = getattr(text, "moe_layer_freq", 1)
    chosen = []
    for layer in range(layers):
        sparse = (layer + 1) % step == 0
        if isinstance(every, list | tuple):
            sparse = sparse and layer < len(every) and bool(every[layer])
        elif isinstance(every, int) and every > 1:
            sparse = sparse and layer % every == 0
        if named:
            sparse = sparse and layer in named
        if sparse and layer not in dense:
            chosen.append(layer)
    return Moe(layers=tuple(chosen), all_layers=layers, k=k, num_experts=experts)


def engine_facts(manager: Any, moe: Moe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of the `engines` row, and the settings that were asked for.

    Args:
        manager: a `TokenizerManager`.
        moe: from `find_moe`.
    """
    config = manager.model_config
    hf = getattr(config, "hf_config", None)
    to_dict = getattr(hf, "to_dict", None)
    asked = _plain(getattr(manager, "server_args", None))
    resolved = asked
    resolve = getattr(manager, "resolved_config_dict", None)
    if resolve is not None:
        try:
            read = getattr(manager.server_args, "resolved_dict", None)
            resolved = dict(resolve(asked if read is None else read()))
        except Exception:  # only the settings as asked for are known then
            resolved = asked
    effective = {name: resolved[name] for name in _EFFECTIVE if name in resolved}
    effective["return_original_logprob"] = original_logprobs()
    dtype = getattr(config, "dtype", None)
    facts = {
        "process": "frontend",
        "model": str(getattr(config, "model_path", None) or ""),
        "model_type": getattr(hf, "model_type", None),
        "model_fingerprint": None if to_dict is None else fingerprint(to_dict()),
        "vocab_size": int(config.vocab_size),
        "num_layers": moe.all_layers or None,
        "moe_layers": list(moe.layers) if moe.all_layers else None,
        "num_experts": moe.num_experts or None,
        "experts_per_token": moe.k or None,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "effective": effective,
    }
    return facts, {name: asked[name] for name in _EFFECTIVE if name in asked}


def _plain(args: Any) -> dict[str, Any]:
    if args is None:
        return {}
    if is_dataclass(args) and not isinstance(args, type):
        try:
            return asdict(args)
        except Exception:  # something in it does not copy
            return dict(vars(args))
    return dict(vars(args))
