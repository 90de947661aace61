"""Observe: the `record` wrapper, injection, hooks and engine adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.recorder.api import record as record

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    # loaded when used: a hook in a process without an engine must not load the store
    if name == "record":
        from rolltape.recorder.api import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
