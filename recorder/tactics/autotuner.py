"""Watches the AutoTuner of TensorRT-LLM and the one of FlashInfer, which descends from it.

`choose_one` is called on every eager call of a tunable operator, and inside of a CUDA graph only
while it is captured. What it answers is a function of its cache and the shapes, so a key is
written once, and again only if the answer changes: a shape that fell back before the warm-up tuned
it gets a second row.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import wrapt

from rolltape.recorder.tactics.rows import (
    Tactic,
    current_session,
    graph_key,
    is_capturing,
    put,
    set_engine,
)

#: Keys remembered in a process; shapes of eager steps may have no end.
MOST_KEYS = 20_000
#: Answers remembered of one key: operators whose dtype varies share it.
_MOST_ANSWERS = 8
#: What the tuners return when their cache has nothing: `runners[0]` with this tactic.
_FALLBACK = -1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a profiling cache.

    Args:
        op: custom operator.
        runner: name of the runner's class.
        unique: what else identifies the runner, where that is the same in every process.
        profile: shapes of the bucket, -1 where a dimension follows from the others.
        extras: what the runner adds to its key, for example dtypes.
        tactic: any object.
        time_ms: as measured; None where the tuner does not keep it.
    """

    op: str
    runner: str
    unique: str | None
    profile: tuple[Any, ...]
    extras: tuple[Any, ...]
    tactic: Any
    time_ms: float | None

    def row(self, tuner: str, source: str) -> Tactic:
        """The entry as a row; its key has `profile` where that of a call has `shapes`."""
        key: dict[str, Any] = {"profile": self.profile}
        if self.unique is not None:
            key["runner"] = self.unique
        if self.extras:
            key["extras"] = [str(extra) for extra in self.extras]
        return Tactic(
            tuner=tuner,
            op=self.op,
            key=key,
            source=source,
            implementation=self.runner,
            tactic=repr(self.tactic),
            time_ms=self.time_ms,
        )


def parse(key: Any, value: Any, selection: Mapping[str, Any] | None = None) -> Entry | None:
    """Read an entry by its form.

    Args:
        key: (op, runner class, runner id, profile, *extras), or an object that has these as
            `custom_op`, `runner_class_name`, `runner_hash`, `nearest_profile`, `extras`.
        value: (runner index, tactic, time in ms), (runner index, tactic, profile) or
            (tactic, profile). The index is one into the list of that call, so it is not kept.
        selection: what the tuner knows of how it chose, with `time_ms`.

    Returns:
        None for any other form.
    """
    if isinstance(key, tuple) and len(key) >= 4:
        op, runner, unique, profile, *rest = key
        # FlashInfer adds one tuple of extras
        extras = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple) else tuple(rest)
    elif hasattr(key, "nearest_profile") and hasattr(key, "custom_op"):
        op, runner, unique = key.custom_op, key.runner_class_name, getattr(key, "runner_hash", 0)
        profile, extras = key.nearest_profile, tuple(getattr(key, "extras", ()))
    else:
        return None
    time_ms: Any = (selection or {}).get("time_ms")
    if not isinstance(value, tuple) or not 2 <= len(value) <= 3:
        return None
    tactic = value[-2]
    if len(value) == 3 and isinstance(value[2], float):
        time_ms = value[2]
    return Entry(
        op=str(op),
        runner=str(runner),
        unique=unique if isinstance(unique, str) else None,  # hash() is salted in each process
        profile=tuple(profile),
        extras=extras,
        tactic=tactic,
        time_ms=time_ms if isinstance(time_ms, float) else None,
    )


def observe(module_name: str, engine: str = "") -> Callable[[], None]:
    """Record what the `AutoTuner` of a module chooses.

    Args:
        module_name: `flashinfer.autotuner` or `tensorrt_llm._torch.autotuner`.
        engine: id of the engine of this process, if it is known.

    Returns:
        What undoes it. Observing a class that is observed already returns the same.

    Raises:
        ImportError: no such module.
        AttributeError: it has no `AutoTuner.choose_one`.
    """
    set_engine(current_session(), engine)
    cls = importlib.import_module(module_name).AutoTuner
    if cls not in _observers:
        original = vars(cls)["choose_one"]
        _observers[cls] = observer = _Observer(module_name.partition(".")[0])

        def undo() -> None:
            if _observers.pop(cls, None) is observer:
                cls.choose_one = original

        observer.undo = undo
        cls.choose_one = wrapt.FunctionWrapper(original, observer)
    return _observers[cls].undo


def dump() -> None:
    """Write the entries of every observed tuner's cache that no row stands for yet.

    Call it when the warm-up of an engine has ended; the end of a recording calls it too.
    """
    session = current_session()
    if session is None:
        return
    for observer in list(_observers.values()):
        session.safely("tactics.dump", observer.dump, session)


class _Observer:
    """Stands around `choose_one` of one class.

    `choose_one` is a method of a singleton; another instance is followed like a new cache.
    """

    def __init__(self, tuner: str) -> None:
        self.undo: Callable[[], None] = lambda: None
        self._tuner = tuner
        self._session: Any = None
        self._instance: Any = None
        self._cache: Any = None  # the dict, to see when another one takes its place
        self._size = 0
        self._answers: dict[Any, list[tuple[type, Any]]] = {}
        self._before: dict[Any, Any] = {}  # entries that were there when we first looked
        self._written: dict[Any, Any] = {}
        self._full = False
        self._odd = False

    def __call__(self, wrapped: Any, tuner: Any, args: Any, kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return wrapped(*args, **kwargs)
        if session is not self._session or _cache_of(tuner) is not self._cache:
            session.safely("tactics.autotuner", self._begin, session, tuner)
        answer = wrapped(*args, **kwargs)
        session.safely("tactics.autotuner", self._look, session, tuner, args, kwargs, answer)
        return answer

    def _begin(self, session: Any, tuner: Any) -> None:
        if session is not self._session:
            self._session, self._answers, self._written = session, {}, {}
            self._before, self._full, self._odd = {}, False, False
        self._instance, self._cache = tuner, _cache_of(tuner)
        self._size = len(self._cache)
        self._before |= {at: value for at, value, _ in _values(tuner)}

    def _look(self, session: Any, tuner: Any, args: Any, kwargs: Any, answer: Any) -> None:
        op = args[0] if args else kwargs["custom_op"]
        inputs = args[3] if len(args) > 3 else kwargs["inputs"]
        shapes = tuple([getattr(tensor, "shape", None) for tensor in inputs])
        capturing = is_capturing()
        given = (type(answer[0]), answer[1])
        key = (op, shapes, capturing)
        try:
            answers = self._answers.get(key)
        except TypeError:  # symbolic sizes: somebody traces, nothing runs
            return
        settled = answers is not None and (given in answers or len(answers) >= _MOST_ANSWERS)
        if settled and len(self._cache) == self._size:
            return
        if answers is None and len(self._answers) >= MOST_KEYS:
            if not self._full:
                self._full = True
                reason = f"more than {MOST_KEYS} keys of one tuner: later ones are not recorded"
                session.event("gap", detail={"table": "tactics", "reason": reason})
            return
        new = self._new_entries(session, tuner)
        rows = [entry.row(self._tuner, "chosen") for entry in new.values()]
        config = args[2] if len(args) > 2 else kwargs.get("tuning_config")
        row = self._choice(tuner, op, config, inputs, shapes, answer, new)
        if not settled:
            self._answers.setdefault(key, []).append(given)
        if not settled or row.source == "chosen":
            rows.append(row)
        put(session, rows)

    def _choice(
        self,
        tuner: Any,
        op: str,
        config: Any,
        inputs: Any,
        shapes: tuple[Any, ...],
        answer: Any,
        new: dict[Any, Entry],
    ) -> Tactic:
        runner, tactic = type(answer[0]).__name__, answer[1]
        profile = profile_of(tuner, config, shapes)
        found, source = None, "fallback" if _is_fallback(tactic) else "cached"
        for at, value, selection in _values(tuner) if profile is not None else ():
            entry = parse(at[1], value, selection)
            if (
                entry is not None
                and (entry.op, entry.runner, entry.profile) == (op, runner, profile)
                and bool(entry.tactic == tactic)
            ):
                found, source = entry, "chosen" if at in new else "cached"
                break
        key: dict[str, Any] = {
            "shapes": [None if shape is None else list(shape) for shape in shapes],
            "dtypes": [_dtype(tensor) for tensor in inputs],
        }
        if found is not None:
            key["profile"] = found.profile
        return Tactic(
            tuner=self._tuner,
            op=str(op),
            key=key,
            source=source,
            implementation=runner,
            tactic=repr(tactic),
            graph=graph_key(is_capturing()),
            time_ms=found.time_ms if found is not None else None,
        )

    def _new_entries(self, session: Any, tuner: Any) -> dict[Any, Entry]:
        """Entries that came since we last looked, by where they stand."""
        new: dict[Any, Entry] = {}
        for at, value, selection in _values(tuner):
            if self._before.get(at) is value or self._written.get(at) is value:
                continue
            self._written[at] = value
            entry = parse(at[1], value, selection)
            if entry is not None:
                new[at] = entry
            elif not self._odd:
                self._odd = True
                reason = f"entries of the cache of {self._tuner} have a form that is not known"
                detail = {"table": "tactics", "reason": reason, "key": repr(at[1])[:200]}
                session.event("gap", detail=detail)
        self._size = len(self._cache)
        return new

    def dump(self, session: Any) -> None:
        """Write what is in the cache and was not written yet."""
        if self._instance is None or self._session is not session:
            return
        new = self._new_entries(session, self._instance)
        rows = [entry.row(self._tuner, "chosen") for entry in new.values()]
        for at, value, selection in _values(self._instance):
            entry = parse(at[1], value, selection)
            if self._written.get(at) is not value and entry is not None:
                self._written[at] = value
                rows.append(entry.row(self._tuner, "cached"))
        put(session, rows)


_observers: dict[type, _Observer] = {}


def _cache_of(tuner: Any) -> Any:
    cache = tuner.profiling_cache
    return getattr(cache, "cache", cache)


def _values(tuner: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(place, value, selection) of every entry; a place is (partition, key)."""
    selections = getattr(tuner, "_profiling_cache_selections", {})
    partitions = {None: _cache_of(tuner), **getattr(tuner, "_winner_partitions", {})}
    for partition, cache in partitions.items():
        for key, value in list(cache.items()):
            at = (partition, key)
            yield at, value, selections.get(at)


def profile_of(tuner: Any, config: Any, shapes: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The profile that the tuner looks these shapes up by, by its own function; None: unknown."""
    find = getattr(tuner, "_find_nearest_profile", None)
    if find is None or config is None:
        return None
    override = getattr(tuner, "_apply_tuning_overrides", None)
    if override is not None and (tuner._override_tuning_buckets or tuner._override_round_up):
        config = override(config)
    asked = tuple((0,) if shape is None else tuple(shape) for shape in shapes)
    given = {"shapes": asked, "input_shapes": asked, "tuning_config": config}
    known = {
        name: given.get(name, getattr(config, name, None))
        for name in inspect.signature(find).parameters
        if name in given or hasattr(config, name)
    }
    return tuple(tuple(shape) for shape in find(**known))


def _is_fallback(tactic: Any) -> bool:
    return isinstance(tactic, int) and tactic == _FALLBACK


def _dtype(tensor: Any) -> str | None:
    dtype = getattr(tensor, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")
