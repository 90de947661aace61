"""The sampling settings of one `generate()` call, and what they mean for each logprob column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Processors that cut the vocabulary: what remains after them is the support.
_TRUNCATING = {
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "mass",
    "EpsilonLogitsWarper": "epsilon",
    "EtaLogitsWarper": "epsilon",
}
_TEMPERATURE = "TemperatureLogitsWarper"
_EDIT_ARGUMENT = {"RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty")}
_KEEPS_ALL = "repetition_penalty="


@dataclass(frozen=True)
class Sampling:
    """How tokens were drawn.

    Args:
        greedy: argmax instead of sampling.
        temperature: what the logits were divided by; None if that happened after truncation.
        edits: processors before truncation other than temperature, in order.
        truncation: processors from the first truncating one on, in order; `greedy` for argmax.
        first_truncation: index of that one in the processor list.
        settings: JSON-able generation settings that were set.
        eos: token ids that end a sequence.
        max_length: total length at which generation stops, if known.
    """

    greedy: bool
    temperature: float | None
    edits: tuple[str, ...]
    truncation: tuple[str, ...]
    first_truncation: int
    settings: dict[str, Any]
    eos: tuple[int, ...]
    max_length: int | None

    @property
    def cuts(self) -> bool:
        """Whether some token ids may be left out: by truncation, or by an edit that bans them."""
        return bool(self.truncation) or any(not e.startswith(_KEEPS_ALL) for e in self.edits)


def read_sampling(config: Any, processors: Any) -> Sampling:
    """Read it off the prepared generation config and the processors that will really run."""
    items = list(processors or ())
    names = [type(p).__name__ for p in items]
    first = next((i for i, n in enumerate(names) if n in _TRUNCATING), len(items))
    temperature: float | None = 1.0
    edits = []
    for item, name in zip(items[:first], names[:first], strict=True):
        if name == _TEMPERATURE:
            temperature = float(item.temperature) * (temperature or 1.0)
        else:
            edits.append(_describe(item, name))
    if _TEMPERATURE in names[first:]:
        temperature = None
    truncation = [_describe(p, n) for p, n in zip(items[first:], names[first:], strict=True)]
    greedy = not config.do_sample
    if greedy:
        truncation.append("greedy")
    return Sampling(
        greedy=greedy,
        temperature=temperature,
        edits=tuple(edits),
        truncation=tuple(truncation),
        first_truncation=first,
        settings=_settings(config),
        eos=_token_ids(config.eos_token_id),
        max_length=config.max_length,
    )


def _describe(item: Any, name: str) -> str:
    if name in _TRUNCATING:
        label = argument = _TRUNCATING[name]
    elif name in _EDIT_ARGUMENT:
        label, argument = _EDIT_ARGUMENT[name]
    else:
        plain = {
            k: v for k, v in sorted(vars(item).items()) if isinstance(v, bool | int | float | str)
        }
        inside = ", ".join(f"{key}={value}" for key, value in plain.items())
        return f"{name}({inside})" if inside else name
    value = getattr(item, argument, None)
    return name if value is None else f"{label}={float(value):g}"


def _settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in config.to_diff_dict().items():
        if value is None or name.startswith("_"):
            continue
        if isinstance(value, bool | int | float | str | list):
            settings[name] = value
        else:
            settings[name] = type(value).__name__
    settings["do_sample"] = bool(config.do_sample)
    return settings


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
