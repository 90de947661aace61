"""The switches of a replay: one controlled change each, written KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rolltape.store.errors import UsageError

#: Every switch of mode score and its values; the first value is the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "routing": ("live", "ids", "ids+weights"),
    "support": ("full", "recorded"),
    "temperature": ("recorded", "1"),
    "dtype": ("model", "float32", "bfloat16", "float16", "float64"),
    "lm_head": ("model", "float32"),
    "router": ("model", "float32"),
    "attention": ("model", "eager", "sdpa", "flash_attention_2"),
    "weights": ("recorded",),
}
#: What a switch takes beside those.
FREE = {"weights": "VERSION|PATH"}
#: Every switch of mode re-execute and its values; the first value is the default.
ALTERNATIVES = {
    "batch": "recorded|one|N",
    "weights": "recorded|VERSION|PATH",
    "chunk": "recorded|N",
    "prefix_cache": "recorded|off",
}


@dataclass(frozen=True)
class Switches:
    """What a replay changes on purpose.

    Args:
        routing: experts as the model chooses them, or as recorded (`ids`: weights from the live
            router logits; `ids+weights`: recorded weights too).
        support: normalise `processed` over the kept sets of the tape, or not at all.
        temperature: of the tape, or 1.
        dtype: of all weights; `model` is the dtype of the tape.
        lm_head: float32 runs the head in float32 on the final hidden state.
        router: float32 runs the routers in float32.
        attention: attention implementation; `model` is the model's own.
        weights: any version that the tape recorded; that version; or another checkpoint.

    Raises:
        UsageError: a value that the switch does not have.
    """

    routing: str = "live"
    support: str = "full"
    temperature: str = "recorded"
    dtype: str = "model"
    lm_head: str = "model"
    router: str = "model"
    attention: str = "model"
    weights: str = "recorded"

    def __post_init__(self) -> None:
        for key, value in self.as_dict().items():
            if value not in CHOICES[key] and (key not in FREE or not value):
                raise UsageError(f"switch {key}={value}: no such value", hint=_values(key))

    @classmethod
    def parse(cls, items: Sequence[str]) -> Switches:
        """From `["routing=ids", ...]`.

        Raises:
            UsageError: not KEY=VALUE, an unknown key or value, or a key given twice.
        """
        given: dict[str, str] = {}
        for item in items:
            key, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"switch {item!r} is not KEY=VALUE", hint=_everything())
            if key not in CHOICES:
                raise UsageError(f"no switch {key!r}", hint=_everything())
            if key in given:
                raise UsageError(f"switch {key} is given twice", hint=_values(key))
            given[key] = value
        return cls(**given)

    def as_dict(self) -> dict[str, str]:
        """All switches, defaults included."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def listed(key: str) -> str:
    """The values of a switch, for people."""
    return "|".join((*CHOICES[key], *([FREE[key]] if key in FREE else [])))


def _values(key: str) -> str:
    return f"{key}={listed(key)}"


def _everything() -> str:
    return "switches: " + ", ".join(_values(key) for key in CHOICES)
