"""Installs the observers of every tuner that is loaded in this process.

Called by the import hook when a library with a tuner has been imported, and by adapters, which
know the engine. Loads no library that is not there already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from rolltape.recorder.tactics.rows import current_session, finish_at_end, put, set_engine

#: module with the tuner -> (what must be in it, module with `observe(module_name, engine)`).
TUNERS = {
    "flashinfer.autotuner": ("AutoTuner", "rolltape.recorder.tactics.autotuner"),
    "tensorrt_llm._torch.autotuner": ("AutoTuner", "rolltape.recorder.tactics.autotuner"),
    "triton.runtime.autotuner": ("Autotuner", "rolltape.recorder.tactics.triton"),
    "torch._inductor.select_algorithm": (
        "AlgorithmSelectorCache",
        "rolltape.recorder.tactics.inductor",
    ),
}

_installed: dict[str, Callable[[], None]] = {}


def bind() -> None:
    """For the import hook: observe what is loaded now."""
    observe_all()


def observe_all(engine: str = "") -> Callable[[], None]:
    """Observe every tuner that is loaded. May be called again when more are.

    Args:
        engine: id of the engine of this process; its rows carry it from now on. "" leaves it.

    Returns:
        What undoes all that was installed, by this call or earlier ones.
    """
    session = current_session() if engine else None
    if session is not None:
        set_engine(session, engine)
        finish_at_end(session)
    for name, (symbol, observer) in TUNERS.items():
        module = sys.modules.get(name)
        if name not in _installed and hasattr(module, symbol):
            _installed[name] = importlib.import_module(observer).observe(name)
    return unbind


def unbind() -> None:
    """Undo `observe_all`."""
    while _installed:
        _installed.popitem()[1]()


def finish() -> None:
    """Write what is only known at the end of a process: whole caches, and what nobody saw."""
    from rolltape.recorder.tactics.unrecorded import unrecorded

    autotuner = sys.modules.get("rolltape.recorder.tactics.autotuner")
    if autotuner is not None:
        autotuner.dump()
    session = current_session()
    if session is not None:
        put(session, unrecorded())
