"""The sampling parameters of a request as TensorRT-LLM applies them.

Unset is not neutral there: with temperature, top_p and top_k unset a request is greedy. Values
may also come from the model's generation_config.json, so the worker's are taken where they are
known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NAMES = ("temperature", "top_k", "top_p", "min_p", "top_p_decay", "top_p_min", "seed")
_PENALTIES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}
_OTHER = (
    "n",
    "best_of",
    "use_beam_search",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "return_context_logits",
    "end_id",
    "ignore_eos",
    "stop",
    "stop_token_ids",
)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What is applied to the logits of a request, in the order in which it is.

    Args:
        greedy: argmax instead of sampling.
        temperature: what logits are divided by.
        edits: what changes them before truncation.
        truncation: what cuts the vocabulary; `greedy` for argmax.
        processed: whether the engine's logprobs are those of the processed distribution.
        settings: everything that was set, for the tape.
    """

    greedy: bool
    temperature: float
    edits: tuple[str, ...]
    truncation: tuple[str, ...]
    processed: bool
    settings: dict[str, Any]


def resolve(params: Any) -> Resolved:
    """Resolve a `SamplingParams`, or anything that has its fields.

    Fields that this version does not have count as unset.
    """
    values = {name: _scalar(getattr(params, name, None)) for name in (*_NAMES, *_PENALTIES)}
    greedy = getattr(params, "_greedy_decoding", None)  # rules changed: the engine's own counts
    if greedy is None:
        greedy = not getattr(params, "use_beam_search", False) and _greedy(values)
    temperature = values["temperature"]
    truncation = ["greedy"] if greedy else []
    if not greedy:
        top_k, top_p, min_p = values["top_k"], values["top_p"], values["min_p"]
        truncation += [f"top_k={top_k}"] if top_k else []
        truncation += [f"top_p={top_p:g}"] if top_p is not None and top_p < 1 else []
        truncation += [f"min_p={min_p:g}"] if min_p else []
        if _decays(values):
            truncation.append(f"top_p_decay={values['top_p_decay']:g}")
    other = {name: getattr(params, name, None) for name in _OTHER}
    settings = {name: v for name, v in {**values, **other}.items() if v is not None}
    mode = str(getattr(params, "logprobs_mode", None) or "raw")
    return Resolved(
        greedy=greedy,
        temperature=1.0 if greedy or temperature is None else float(temperature),
        edits=_edits(params, values),
        truncation=tuple(truncation),
        processed=mode.rpartition(".")[2].lower() == "processed",
        settings={**settings, "greedy": greedy, "logprobs_mode": mode},
    )


def _greedy(values: dict[str, Any]) -> bool:
    temperature, top_k, top_p, min_p = (
        values[n] for n in ("temperature", "top_k", "top_p", "min_p")
    )
    if top_k == 1 or top_p == 0 or min_p == 1 or temperature == 0:
        return True
    unset = temperature is None and top_p is None and top_k is None
    return unset and not min_p and not _decays(values)


def _decays(values: dict[str, Any]) -> bool:
    decay = values["top_p_decay"]
    return decay is not None and decay < 1


def _edits(params: Any, values: dict[str, Any]) -> tuple[str, ...]:
    edits = [
        f"{name}={values[name]:g}"
        for name, neutral in _PENALTIES.items()
        if values[name] is not None and values[name] != neutral
    ]
    if (getattr(params, "min_tokens", None) or 0) > 1:
        edits.append(f"min_tokens={_scalar(params.min_tokens)}")
    named = {
        "embedding_bias": "embedding_bias",
        "bad": "bad_words",
        "bad_token_ids": "bad_words",
        "guided_decoding": "guided_decoding",
        "logits_processor": "logits_processor",
    }
    edits += [text for name, text in named.items() if getattr(params, name, None) is not None]
    if getattr(params, "apply_batched_logits_processor", False):
        edits.append("batched_logits_processor")
    return tuple(dict.fromkeys(edits))


def _scalar(value: Any) -> Any:
    """The runtime's own configuration holds lists of one value a beam."""
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value
