"""What an importer hands over: one `Row` a sequence, and `Carried`, the account of what was not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.keys import token_digest

#: Reasons that several readers give; the first word is the unit of the count.
NO_PLACE = "sequences: a tape has no place for it"
PLACEHOLDER = "positions: 0.0 where no token was generated; carried as missing"
WRONG_LENGTH = "sequences: its length is not that of the response"


@dataclass(frozen=True)
class Carried:
    """What of a dump stands in the tape and what does not, by the names of the dump.

    Args:
        kept: field -> `into` (column of the tape), `sequences`, `values`.
        dropped: field -> reason -> count; each reason begins with what is counted.
        notes: what a reader of the tape must know.
    """

    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keep(self, name: str, into: str, values: int = 1) -> None:
        """Count one sequence of a field that was carried."""
        entry = self.kept.setdefault(name, {"into": into, "sequences": 0, "values": 0})
        entry["sequences"] += 1
        entry["values"] += values

    def drop(self, name: str, why: str, count: int = 1) -> None:
        """Count what was not carried."""
        reasons = self.dropped.setdefault(name, {})
        reasons[why] = reasons.get(why, 0) + count

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Row:
    """One sequence of a dump, without padding.

    Args:
        where: file and row, for messages.
        request: unique with `sample` among all rows of one import.
        sample: index among the samples of the request.
        prompt_len: prompt tokens.
        ids: uint32 [T], prompt and response.
        finish: stop, length, abort, error, open, or unknown where the dump does not say.
        group: what belongs to one prompt.
        group_derived: whether the group was made from equal prompts.
        loss_mask: bool [T]; None where the dump has none.
        logprobs: float32 [T]; None where the dump has none.
        routes: expert ids as the dump holds them, row p for position p; see `.routes`.
        kept: (counts int32 [T], ids uint32) of the kept sets; count 0 where there is none.
        version: the one weight version of all logprobs; None if unknown or several.
        annotations: late facts.
    """

    where: str
    request: str
    sample: int
    prompt_len: int
    ids: np.ndarray
    finish: str
    group: str | None = None
    group_derived: bool | None = None
    loss_mask: Masked | None = None
    logprobs: Masked | None = None
    routes: Any = None
    kept: tuple[np.ndarray, np.ndarray] | None = None
    version: int | None = None
    annotations: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of prompt and response, T."""
        return len(self.ids)


def response_column(values: np.ndarray, *, total: int) -> Masked:
    """A column over T positions from the values of the last len(values) of them."""
    out = Masked.empty(total, values.dtype)
    start = total - len(values)
    out.values[start:] = values
    out.valid[start:] = True
    return out


def without_placeholders(
    logprobs: Masked, generated: np.ndarray, carried: Carried, *, name: str
) -> Masked:
    """Frameworks write 0.0 where no token was generated; that is missing, not certainty.

    Args:
        logprobs: float32 [T].
        generated: bool [T].
        carried: counts them under `name`.
        name: field of the dump.
    """
    fake = logprobs.valid & ~generated & (logprobs.values == 0.0)
    if fake.any():
        carried.drop(name, PLACEHOLDER, int(fake.sum()))
    return Masked(logprobs.values, logprobs.valid & ~fake)


def annotate(out: dict[str, float | str], name: str, value: Any, carried: Carried) -> None:
    """Add numbers and texts, those inside dicts under `name.key`; everything else is dropped."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | float):
        out[name] = float(value)
    elif isinstance(value, str):
        out[name] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            annotate(out, f"{name}.{key}", item, carried)
        return
    elif value is None:
        return
    else:
        carried.drop(name, NO_PLACE)
        return
    carried.keep(name, f"annotations.{name}")


def prompt_group(ids: np.ndarray, prompt_len: int) -> str:
    """Name of the group of sequences with the same prompt."""
    return f"prompt-{token_digest(prompt_len, ids[:prompt_len])[:12]}"


def is_empty(value: Any) -> bool:
    """Whether a field says nothing: None, empty, zero, false."""
    if isinstance(value, np.ndarray):
        return value.size == 0
    return value is None or value is False or (not isinstance(value, bool) and not value)


def as_number(value: Any) -> float | None:
    """A finite or non-finite float, None where it is none."""
    value = (
        value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value
    )
    if isinstance(value, bool | int | float):
        return float(value)
    return None


def same_everywhere(values: np.ndarray) -> float | None:
    """The one value of an array, None if there are several or none."""
    if not values.size or not (values == values[0]).all() or math.isnan(values[0]):
        return None
    return float(values[0])
