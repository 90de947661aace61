"""Which kernel was chosen for which shapes: rows of the `tactics` table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.recorder.tactics.autotuner import dump as dump
    from rolltape.recorder.tactics.bind import observe_all as observe_all
    from rolltape.recorder.tactics.bind import unbind as unbind
    from rolltape.recorder.tactics.rows import capturing as capturing

__all__ = ["capturing", "dump", "observe_all", "unbind"]

_FROM = {"capturing": "rows", "dump": "autotuner", "observe_all": "bind", "unbind": "bind"}


def __getattr__(name: str) -> Any:
    # loaded when used: the import hook loads this package in processes that only import a library
    if name in _FROM:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
