"""rolltape: record, replay and diff what an RL rollout engine and its trainer compute.

The names below are loaded when they are first used, so that `import rolltape` costs nothing in
the processes of a job.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.recorder import record as record
    from rolltape.store import open as open

__version__ = "0.1.0"

_LAZY = {"open": "rolltape.store", "record": "rolltape.recorder"}

__all__ = ["__version__", "open", "record"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
