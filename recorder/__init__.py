"""Observe: the `record` wrapper, injection, hooks and engine adapters."""

from rolltape.recorder.api import record

__all__ = ["record"]
