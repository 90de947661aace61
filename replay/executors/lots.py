"""Which calls of a transformers tape run with which weights; one model is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from rolltape.replay.executors.protocol import Changes, NotRunError
from rolltape.replay.models import check_model, load_model, versions_of_model
from rolltape.replay.schedule import Call, Refused, regrouped
from rolltape.replay.versions import as_version, check_known, checkpoint_of
from rolltape.store import Tape, UsageError


@dataclass(frozen=True, kw_only=True)
class Lot:
    """Calls that follow each other and are run with the same weights.

    Args:
        calls: in this order.
        load: gives the model, on its device, and its name; its weights are checked each time.
    """

    calls: tuple[Call, ...]
    load: Callable[[], tuple[Any, str]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run.

    Args:
        lots: in this order.
        refused: calls that no given weights made.
        warnings: what could not be verified.
    """

    lots: tuple[Lot, ...]
    refused: tuple[Refused, ...]
    warnings: tuple[str, ...]


def plan_weights(
    source: Tape,
    calls: Sequence[Call],
    *,
    changes: Changes,
    checkpoints: Mapping[int, str],
    model: Any = None,
    device: str | None = None,
) -> Plan:
    """Choose the weights of every call, and prove all of them before anything runs.

    Args:
        source: the recording.
        calls: of it.
        changes: made on purpose.
        checkpoints: of versions.
        model: for versions without checkpoint: a loaded one, or a path; by default what the tape
            names.
        device: torch device; by default of the kind that was recorded.

    Raises:
        NotRunError: no call was made by the weights that there are.
        ModelMismatchError: weights are not those that they should be.
        UsageError: no such model, device or version.
    """
    models = _Models(source, calls, changes=changes, checkpoints=checkpoints, device=device)
    models.default = checkpoint_of(changes.weights, checkpoints, model)
    chosen, refused, warnings = list(calls), list[Refused](), list[str]()
    wanted = as_version(changes.weights)
    if wanted is not None:
        check_known(source, [wanted])
    if changes.weights is None:
        check_known(source, checkpoints)
        own = [call for call in calls if call.weight_version not in checkpoints]
        others: list[Refused] = []
        if own:
            own, others, warnings = _of_these_weights(source, own, *models.load(None))
        kept = {id(call) for call in own}
        chosen = [c for c in calls if c.weight_version in checkpoints or id(c) in kept]
        refused += others
        if not chosen:
            raise NotRunError(f"no call can be laid out again: {others[0].reason}")
    if changes.rows is not None:
        chosen = regrouped(chosen, changes.rows)

    def version_of(call: Call) -> int | None:
        known = changes.weights is None and call.weight_version in checkpoints
        return call.weight_version if known else None

    lots = tuple(
        Lot(calls=tuple(mine), load=models.loader(version))
        for version, mine in groupby(chosen, key=version_of)
    )
    for version in reversed(list(dict.fromkeys(map(version_of, chosen)))):
        models.load(version)  # the one that runs first is loaded last, and stays
    warnings += models.warnings
    return Plan(lots=lots, refused=tuple(refused), warnings=tuple(dict.fromkeys(warnings)))


class _Models:
    """Loads models and proves what they are; remembers the last one.

    Attributes:
        default: a loaded model, a path, or None: what runs the calls without a checkpoint.
        warnings: what could not be verified.
    """

    def __init__(
        self,
        source: Tape,
        calls: Sequence[Call],
        *,
        changes: Changes,
        checkpoints: Mapping[int, str],
        device: str | None,
    ) -> None:
        self.default: Any = None
        self.warnings: list[str] = []
        self._source, self._weights, self._checkpoints = source, changes.weights, checkpoints
        self._engines: dict[int | None, list[str]] = {}
        for call in calls:
            for version in (None, call.weight_version):
                engines = self._engines.setdefault(version, [])
                if call.engine not in engines:
                    engines.append(call.engine)
        self._device = device or _device(source, calls[0].engine)
        self._last: tuple[int | None, Any, str] | None = None

    def loader(self, version: int | None) -> Callable[[], tuple[Any, str]]:
        """`load` of a version, for later."""
        return lambda: self.load(version)

    def load(self, version: int | None) -> tuple[Any, str]:
        """The model of a version that has a checkpoint, or the default one, and its name."""
        if self._last is None or self._last[0] != version:
            self._last = None  # before the next one takes its memory
            self._last = (version, *self._loaded(version))
        return self._last[1:]

    def _loaded(self, version: int | None) -> tuple[Any, str]:
        place = self.default if version is None else self._checkpoints[version]
        if place is None or isinstance(place, str):
            model, name = load_model(self._source, model=place, device=self._device)
        else:
            model = place
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        wanted = as_version(self._weights) if version is None else version
        if wanted is not None:
            engines = self._engines[version]
            found = check_model(self._source, model, engines, name, weights=str(wanted))
            self.warnings += [text for match in found.values() for text in match.warnings]
        return model, name


def _device(source: Tape, engine: str) -> str:
    recorded = str(source.engine(engine).get("device") or "cpu").partition(":")[0]
    if recorded == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"{source.place} was recorded on {recorded}, which is not here",
            hint="--device cpu runs it there; other bits are to be expected",
        )
    return recorded


def _of_these_weights(
    source: Tape, calls: Iterable[Call], model: Any, name: str
) -> tuple[list[Call], list[Refused], list[str]]:
    """The calls that the weights of a model made, those that others made, and warnings."""
    calls = list(calls)
    kept: list[Call] = []
    others: list[Refused] = []
    warnings: list[str] = []
    for engine in dict.fromkeys(call.engine for call in calls):
        versions, warned = versions_of_model(source, model, engine, name)
        warnings += [text for text in warned if text not in warnings]
        for call in (c for c in calls if c.engine == engine):
            if versions is None or call.weight_version in versions:
                kept.append(call)
                continue
            reason = (
                f"weight version {call.weight_version} made it, {name} is another: "
                f"--checkpoint {call.weight_version}=PATH runs it"
            )
            keys = tuple(row.key for row in call.rows)
            others.append(Refused(engine=engine, number=call.number, keys=keys, reason=reason))
    return kept, others, warnings
