"""Watches Inductor (`torch.compile`) choose between implementations of an operator.

All of it happens while something is compiled; compiled code never comes here.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import wrapt

from rolltape.recorder.tactics.rows import Tactic, current_session, put, set_engine

MODULE = "torch._inductor.select_algorithm"
_undo: Callable[[], None] | None = None


class _Selecting(threading.local):
    """Timings of the selection that runs in this thread."""

    depth = 0
    timings: Mapping[Any, float] | None = None


_selecting = _Selecting()
_benchmarks = 0  # Inductor's own count when we last looked


def observe(module_name: str = MODULE, engine: str = "") -> Callable[[], None]:
    """Record which implementation Inductor takes for each operator that it compiles.

    Args:
        module_name: module of Inductor's `AlgorithmSelectorCache`.
        engine: id of the engine of this process, if it is known.

    Returns:
        What undoes it; the same when it is observed already.
    """
    global _undo
    set_engine(current_session(), engine)
    if _undo is None:
        module = importlib.import_module(module_name)
        cls = module.AlgorithmSelectorCache
        original = vars(cls)["__call__"]

        def undo() -> None:
            global _undo
            if _undo is undo:
                _undo, cls.__call__ = None, original
                made = getattr(module, "_ALGORITHM_SELECTOR_CACHE", None)
                savers = getattr(made, "feedback_saver_fns", [])
                if _on_timings in savers:
                    savers.remove(_on_timings)

        cls.__call__ = wrapt.FunctionWrapper(original, _around_call)
        _undo = undo
    return _undo


def _around_call(wrapped: Any, selector: Any, args: Any, kwargs: Any) -> Any:
    session = current_session()
    if session is None:
        return wrapped(*args, **kwargs)
    savers = getattr(selector, "feedback_saver_fns", None)
    if savers is not None and _on_timings not in savers:
        savers.append(_on_timings)
    outer = _selecting.depth, _selecting.timings
    _selecting.depth, _selecting.timings = outer[0] + 1, None
    try:
        result = wrapped(*args, **kwargs)
        session.safely(
            "tactics.inductor", _chosen, session, args, kwargs, result, _selecting.timings
        )
        return result
    finally:
        _selecting.depth, _selecting.timings = outer


def _on_timings(timings: Any, name: Any, inputs: Any, choices: Any, *rest: Any) -> None:
    """Feedback of Inductor: milliseconds of each choice, measured or from its cache."""
    if _selecting.depth:
        _selecting.timings = timings
        return
    session = current_session()
    if session is not None:
        session.safely("tactics.inductor", _deferred, session, timings, name, inputs, choices)


def _chosen(
    session: Any, args: Any, kwargs: Any, result: Any, timings: Mapping[Any, float] | None
) -> None:
    given = dict(zip(("name", "choices", "input_nodes"), args, strict=False)) | kwargs
    choice = result[1] if isinstance(result, tuple) and len(result) == 2 else None
    if choice is None and timings:  # older ones return only the node
        choice = min(timings, key=lambda c: timings[c])
    if choice is None and len(given["choices"]) == 1:
        choice = given["choices"][0]
    if choice is None:  # decided when it fuses: the timings come then, see `_deferred`
        return
    if timings:
        source = "chosen" if _has_measured() else "cached"
    else:
        source = "chosen" if len(given["choices"]) == 1 or _by_rule() else "fallback"
    key = _key(given["input_nodes"], given["choices"])
    put(session, [_row(given["name"], key, choice, source, (timings or {}).get(choice))])


def _deferred(session: Any, timings: Any, name: Any, inputs: Any, choices: Any) -> None:
    if not timings:
        return
    best = min(timings, key=lambda c: timings[c])
    # Inductor may still take another one, for what it fuses with
    key = {**_key(inputs, choices), "selection": "before fusion"}
    source = "chosen" if _has_measured() else "cached"
    put(session, [_row(name, key, best, source, timings[best])])


def _row(
    name: Any, key: Mapping[str, Any], choice: Any, source: str, time_ms: float | None
) -> Tactic:
    kernel = str(getattr(choice, "name", choice))
    return Tactic(
        tuner="inductor",
        op=str(name),
        key=key,
        source=source,
        # generated kernels are numbered in the order of compilation
        implementation=re.sub(r"_\d+$", "", kernel),
        tactic=str(getattr(choice, "description", "") or kernel),
        time_ms=time_ms,
    )


def _key(inputs: Any, choices: Any) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "shape": _sizes(node, "get_size"),
                "stride": _sizes(node, "get_stride"),
                "dtype": str(node.get_dtype()).removeprefix("torch."),
                "device": str(node.get_device()),
            }
            for node in inputs
        ],
        "candidates": len(choices),
    }


def _sizes(node: Any, method: str) -> list[int | str] | None:
    """Numbers, and names where a dimension is symbolic; None where the node has none."""
    try:
        sizes = getattr(node, method)()
    except (AttributeError, NotImplementedError):
        return None
    return [int(size) if str(size).isdecimal() else str(size) for size in sizes]


def _has_measured() -> bool:
    """Whether Inductor ran a benchmark since the last selection."""
    from torch._dynamo.utils import counters

    global _benchmarks
    count = counters["inductor"]["select_algorithm_autotune"]
    grown, _benchmarks = count != _benchmarks and count > 0, count
    return grown


def _by_rule() -> bool:
    """Whether Inductor is told to choose without measuring."""
    from torch._inductor import config

    return bool(getattr(config, "deterministic", False))
