"""What an executor is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolltape.replay.schedule import Refused
from rolltape.replay.switches import ALTERNATIVES
from rolltape.store.errors import UsageError

_SWITCHES = "switches of re-execute: " + ", ".join(f"{k}={v}" for k, v in ALTERNATIVES.items())


class NotRunError(Exception):
    """Nothing of a schedule can be run; why.

    Args:
        reason: one line.
    """


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a re-execution changes on purpose.

    Args:
        rows: rows of a batch; None is the recorded composition.
        weights: a weight version of the tape for all calls, or the path of another checkpoint;
            None is each call's own version.
        chunk: tokens of a prompt that one step takes at most; None is as recorded.
        prefix_cache: False switches it off; True is as recorded.
    """

    rows: int | None = None
    weights: str | None = None
    chunk: int | None = None
    prefix_cache: bool = True

    @property
    def any(self) -> bool:
        """Whether anything is changed."""
        return self.composition or self.weights is not None

    @property
    def composition(self) -> bool:
        """Whether steps are composed anew."""
        return self.rows is not None or self.chunk is not None or not self.prefix_cache

    @classmethod
    def parse(cls, items: Sequence[str]) -> Changes:
        """From `["batch=one", ...]`.

        Raises:
            UsageError: not KEY=VALUE, an unknown key or value, or a key given twice.
        """
        given: dict[str, str] = {}
        for item in items:
            key, equals, value = item.partition("=")
            if not equals or not value:
                raise UsageError(f"switch {item!r} is not KEY=VALUE", hint=_SWITCHES)
            if key not in ALTERNATIVES:
                raise UsageError(f"mode re-execute has no switch {key!r}", hint=_SWITCHES)
            if key in given:
                raise UsageError(f"switch {key} is given twice", hint=_SWITCHES)
            given[key] = value
        weights = given.get("weights", "recorded")
        if given.get("prefix_cache", "recorded") not in ("recorded", "off"):
            raise _no_value("prefix_cache", given["prefix_cache"])
        return cls(
            rows=_number("batch", given.get("batch", "recorded")),
            weights=None if weights == "recorded" else weights,
            chunk=_number("chunk", given.get("chunk", "recorded")),
            prefix_cache=given.get("prefix_cache") != "off",
        )

    def as_dict(self) -> dict[str, str]:
        """As they are given on the command line, defaults included."""
        return {
            "batch": {None: "recorded", 1: "one"}.get(self.rows, str(self.rows)),
            "weights": self.weights or "recorded",
            "chunk": str(self.chunk or "recorded"),
            "prefix_cache": "recorded" if self.prefix_cache else "off",
        }


def _number(key: str, value: str) -> int | None:
    if value == "recorded":
        return None
    if key == "batch" and value == "one":
        return 1
    if value.isdecimal() and int(value) > 0:
        return int(value)
    raise _no_value(key, value)


def _no_value(key: str, value: str) -> UsageError:
    return UsageError(f"switch {key}={value}: no such value", hint=_SWITCHES)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What the executor itself saw of a run, told beside the tape that was written.

    Args:
        model: path or name of the model that ran.
        forwards: of the model, counted by a hook of the executor's own.
        started_ns: wall clock.
        ended_ns: wall clock.
        self_test: `neutral`: forcing a run's own tokens changes no bit; `control`: a changed
            prompt does; None where that could not be found out, and `reason` says why.
        refused: calls that could not be laid out again.
        warnings: what could not be verified.
    """

    model: str
    forwards: int
    started_ns: int
    ended_ns: int
    self_test: Mapping[str, object]
    refused: tuple[Refused, ...] = ()
    warnings: tuple[str, ...] = ()
