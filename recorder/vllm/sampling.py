"""What vLLM's sampling parameters mean for each logprob column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Below this vLLM takes the argmax.
_GREEDY = 1e-5

#: Parameters that change logits before truncation, and the value that leaves them alone.
_EDITS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_EDIT_FLAGS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "structured_outputs",
    "logits_processors",
    "thinking_token_budget",
)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn; names as in `serving.batch.Life`."""

    greedy: bool
    temperature: float
    edits: tuple[str, ...]
    truncation: tuple[str, ...]
    top_k: int


def read_sampling(params: Any) -> Sampling:
    """Read it off a `SamplingParams` as the worker got it.

    Args:
        params: fields that an older or newer version lacks count as unset.
    """
    temperature = float(getattr(params, "temperature", 1.0))
    greedy = temperature < _GREEDY
    edits = [
        f"{name}={getattr(params, name):g}"
        for name, neutral in _EDITS.items()
        if getattr(params, name, neutral) not in (neutral, None)
    ]
    edits += [name for name in _EDIT_FLAGS if getattr(params, name, None)]
    if greedy:
        return Sampling(True, 1.0, tuple(edits), ("greedy",), 0)
    cut = []
    if getattr(params, "min_p", 0.0):
        cut.append(f"min_p={params.min_p:g}")
    top_k = int(getattr(params, "top_k", 0) or 0)
    if top_k > 0:
        cut.append(f"top_k={top_k}")
    if getattr(params, "top_p", 1.0) < 1.0:
        cut.append(f"top_p={params.top_p:g}")
    return Sampling(False, temperature, tuple(edits), tuple(cut), max(top_k, 0))


def settings(params: Any) -> dict[str, Any]:
    """JSON-able sampling settings that are not None, as they were sent."""
    names = getattr(params, "__struct_fields__", None) or vars(params)
    values = {name: getattr(params, name, None) for name in names if not name.startswith("_")}
    plain = (bool, int, float, str, list)
    return {n: v for n, v in values.items() if isinstance(v, plain) and v != []}


def recorded(params: Any) -> bool:
    """Whether the request may be recorded: `extra_args={"rolltape": False}` says no."""
    extra = getattr(params, "extra_args", None) or {}
    return bool(extra.get("rolltape", True))
