"""Watches Triton's `@autotune`: which configuration it keeps for which key.

`Autotuner.run` is on the hot path of every kernel that has one, so all that a call adds is a look
at the size of the autotuner's own cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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

MODULE = "triton.runtime.autotuner"
#: What an autotuner is given to remember: (session, size of its cache when we last looked).
_SEEN = "_rolltape_seen"
_undo: Callable[[], None] | None = None


def observe(module_name: str = MODULE, engine: str = "") -> Callable[[], None]:
    """Record the configuration of every new key of every `@triton.autotune` kernel.

    Args:
        module_name: module of Triton's `Autotuner`.
        engine: id of the engine of this process, if it is known.

    Returns:
        What undoes it; the same when it is observed already.
    """
    global _undo
    set_engine(current_session(), engine)
    if _undo is None:
        cls = importlib.import_module(module_name).Autotuner
        original = vars(cls)["run"]

        def undo() -> None:
            global _undo
            if _undo is undo:
                _undo, cls.run = None, original

        cls.run = wrapt.FunctionWrapper(original, _around_run)
        _undo = undo
    return _undo


def _around_run(wrapped: Any, tuner: Any, args: Any, kwargs: Any) -> Any:
    session = current_session()
    if session is None:
        return wrapped(*args, **kwargs)
    state = vars(tuner)
    before = state.get("bench_time"), state.get("configs_timings")
    result = wrapped(*args, **kwargs)
    cache = state.get("cache")
    if cache and state.get(_SEEN) != (session, len(cache)):
        session.safely("tactics.triton", _look, session, tuner, cache, before)
    return result


def _look(session: Any, tuner: Any, cache: dict[Any, Any], before: tuple[Any, Any]) -> None:
    state = vars(tuner)
    seen, size = state.get(_SEEN) or (None, 0)
    # dicts keep their order: what is new stands behind what we have seen
    new = list(cache.items())[size if seen is session else 0 :]
    state[_SEEN] = (session, len(cache))
    graph = graph_key(is_capturing())
    # a measurement leaves both anew, Triton's disk cache only the timings, and a kernel with one
    # configuration left neither
    measured = state.get("bench_time") is not before[0]
    timings = state.get("configs_timings")
    told = timings is not None and timings is not before[1]
    rows = []
    for index, (key, config) in enumerate(new):
        last = index == len(new) - 1  # of the call that just ran; others ran unwatched
        time_ms = _milliseconds(timings.get(config)) if last and told else None
        loaded = not last or (told and not measured)
        rows.append(_row(tuner, key, config, time_ms, "cached" if loaded else "chosen", graph))
    put(session, rows)


def _row(
    tuner: Any, key: Any, config: Any, time_ms: float | None, source: str, graph: str | None
) -> Tactic:
    function = tuner.base_fn
    values = list(key) if isinstance(key, tuple | list) else [key]
    names = [str(name) for name in tuner.keys]
    return Tactic(
        tuner="triton",
        op=function.__name__,
        # the arguments named in `key=`, then the dtypes of all arguments that have one
        key={
            "arguments": dict(zip(names, values, strict=False)),
            "dtypes": [str(value) for value in values[len(names) :]],
        },
        source=source,
        implementation=f"{function.__module__}.{function.__qualname__}",
        tactic=str(config),
        graph=graph,
        time_ms=time_ms,
    )


def _milliseconds(timing: Any) -> float | None:
    """Triton times a configuration by quantiles, the median first, or by one number."""
    first = timing[0] if isinstance(timing, list | tuple) and timing else timing
    return float(first) if isinstance(first, int | float) else None
