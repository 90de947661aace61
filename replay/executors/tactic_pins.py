"""Makes the AutoTuner of TensorRT-LLM answer what a recording says, and nothing else.

A tuner that times its candidates again may choose others, and those round differently. So the
choices of a tape are pinned before the engine warms up or captures a graph, tuning is off, and a
shape that the tape does not know is an error. The engine's own cache files say on which device they
were made but do not check it; these pins do.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.tactics import bind
from rolltape.recorder.tactics.autotuner import profile_of
from rolltape.recorder.tactics.rows import fingerprint, graph_key, is_capturing
from rolltape.store import Tape, UsageError

TUNER = "tensorrt_llm"
#: Libraries that have no say in what a tactic is.
_NO_MATTER = ("rolltape", "transformers", "numpy", "pyarrow")
_FALLBACK = "-1"
_SHOWN = 200


class PinError(UsageError):
    """A choice of the tuner cannot be made again."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One choice: the class of the runner and the tactic as text.

    Args:
        runner: class.
        tactic: as `repr` writes it.
        graph: key of the graph that it was first built into; None if eager.
        fingerprint: what it is valid for.
    """

    runner: str
    tactic: str
    graph: str | None
    fingerprint: str


class Pins:
    """The choices of one engine of a tape.

    Args:
        tape: the recording.
        engine: uuid. A process has one tuner, so what it chose for others counts as well.
        foreign: take pins of another device or library, too.
    """

    def __init__(self, tape: Tape, engine: str, *, foreign: bool = False) -> None:
        self.foreign = foreign
        #: a shape without pin is an error only once results count, or are built into a graph
        self.strict = False
        #: first error, also of a thread that hides it
        self.problem: PinError | None = None
        self.used = 0
        self.others: list[str] = []
        #: of foreign pins: what is not as it was
        self.differences: list[str] = []
        self._calls: dict[tuple[Any, ...], list[Pin]] = {}
        self._profiles: dict[tuple[Any, ...], list[Pin]] = {}
        self._checked: set[tuple[str, str]] = set()
        self._patches = Patches()
        writers = {row["writer"] for row in tape.rows("engines") if row["engine"] == engine}
        for row in tape.rows("tactics"):
            if row["engine"] != engine and row["writer"] not in writers:
                continue
            if row["tuner"] != TUNER or row["source"] not in ("chosen", "cached", "fallback"):
                self.others.append(f"{row['op']} ({row['implementation'] or row['tuner']})")
                continue
            pin = Pin(
                runner=row["implementation"],
                tactic=row["tactic"],
                graph=row["graph"],
                fingerprint=row["fingerprint"],
            )
            key = json.loads(row["key"])
            if "shapes" in key:
                at = (
                    row["op"],
                    _frozen(key["shapes"]),
                    _frozen(key["dtypes"]),
                    pin.graph is not None,
                )
                self._calls.setdefault(at, []).append(pin)
            else:
                bucket = (row["op"], _frozen(key["profile"]))
                self._profiles.setdefault(bucket, []).append(pin)

    def install(self) -> None:
        """Pin; must be called before the engine is made.

        Raises:
            PinError: the libraries are not those of the recording.
        """
        here = _facts(fingerprint())
        for pin in self._all():
            there = _facts(pin.fingerprint)
            known = there.keys() & here.keys()  # the device is known when the model is loaded
            self._check(pin, {k: there[k] for k in known}, {k: here[k] for k in known})
        from tensorrt_llm._torch import autotuner

        bind.unbind()  # observers stand outside of us, so that they see the answer
        if not self._patches.around(autotuner.AutoTuner, "choose_one", self._choose):
            raise PinError("the tuner of this TensorRT-LLM cannot be pinned")
        bind.observe_all()

    def remove(self) -> None:
        """Let the tuner choose again."""
        bind.unbind()
        self._patches.undo()

    def _all(self) -> Iterator[Pin]:
        for table in (self._calls, self._profiles):
            for pins in table.values():
                yield from pins

    def _choose(self, wrapped: Any, tuner: Any, args: Any, kwargs: Any) -> Any:
        names = ("custom_op", "runners", "tuning_config", "inputs")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            return self._answer(tuner, *(given[name] for name in names))
        except PinError as error:
            self.problem = self.problem or error
            raise

    def _answer(self, tuner: Any, op: str, runners: Any, config: Any, inputs: Any) -> Any:
        capturing = is_capturing()
        shapes = tuple(_shape(tensor) for tensor in inputs)
        pin = self._find(tuner, op, config, inputs, shapes, graph_key(capturing))
        if pin is None:
            if self.strict or capturing:
                where = " in a graph" if capturing else ""
                raise PinError(
                    f"{op}{where}: no pin for shapes {_shown(shapes)}",
                    hint="record with tactics, or run the recorded batches",
                )
            return runners[0], -1
        here = fingerprint()
        if (pin.fingerprint, here) not in self._checked:
            self._check(pin, _facts(pin.fingerprint), _facts(here))
            self._checked.add((pin.fingerprint, here))
        found = [runner for runner in runners if type(runner).__name__ == pin.runner]
        if len(found) != 1:
            many = f"{len(found)} runners of class {pin.runner}"
            raise PinError(f"{op}: {many} for shapes {_shown(shapes)}, its pin needs one")
        self.used += 1
        try:
            return found[0], ast.literal_eval(pin.tactic)
        except (ValueError, SyntaxError) as error:
            text = f"{op}: tactic {pin.tactic[:_SHOWN]} for shapes {_shown(shapes)} is no literal"
            raise PinError(text) from error

    def _find(
        self, tuner: Any, op: str, config: Any, inputs: Any, shapes: Any, graph: str | None
    ) -> Pin | None:
        """That of the same call; else that of its bucket, which the tuner itself would take.

        A choice is recorded in the first graph that has it, and stands for the later ones.
        """
        dtypes = tuple(_dtype(tensor) for tensor in inputs)
        pins = self._calls.get((op, shapes, dtypes, graph is not None))
        if pins is not None:
            pins = [pin for pin in pins if pin.graph == graph] or pins
        else:
            profile = profile_of(tuner, config, shapes)
            pins = None if profile is None else self._profiles.get((op, _frozen(profile)))
        return None if pins is None else self._only(op, shapes, pins)

    def _only(self, op: str, shapes: Any, pins: list[Pin]) -> Pin:
        """A fallback from before the warm-up had tuned the shape gives way to what came then."""
        tuned = [pin for pin in pins if pin.tactic != _FALLBACK]
        if len({(pin.runner, pin.tactic) for pin in tuned}) > 1:
            answers = ", ".join(sorted({f"{pin.runner} {pin.tactic[:40]}" for pin in tuned}))
            text = f"{op}: the recording has several choices for shapes {_shown(shapes)}: {answers}"
            raise PinError(text)
        return (tuned or pins)[-1]

    def _check(self, pin: Pin, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                text = f"pins of {name} {there.get(name)}, here it is {here.get(name)}"
                if not self.foreign:
                    hint = "run it where it was recorded; --foreign-pins takes them nevertheless"
                    raise PinError(text, hint=hint)
                if text not in self.differences:
                    self.differences.append(text)


def _facts(text: str) -> dict[str, Any]:
    """What a tactic is only valid for, flat."""
    facts: dict[str, Any] = json.loads(text or "{}")
    versions = facts.pop("versions", {})
    if "device" in facts:
        facts.pop("cpu", None)  # no kernel of a GPU depends on it
    return facts | {name: v for name, v in versions.items() if name not in _NO_MATTER}


def _shape(tensor: Any) -> tuple[int, ...] | None:
    shape = getattr(tensor, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def _dtype(tensor: Any) -> str | None:
    dtype = getattr(tensor, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _shown(shapes: Any) -> str:
    return str([None if shape is None else list(shape) for shape in shapes])[:_SHOWN]


def _frozen(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value
