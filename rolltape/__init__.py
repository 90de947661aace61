"""rolltape: record, replay and diff what an RL rollout engine and its trainer compute.

The names below are loaded when they are first used, so that `import rolltape` costs nothing in
the processes of a job.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.recorder import record as record
    from rolltape.recorder import trainer as trainer
    from rolltape.recorder.annotate import annotate as annotate
    from rolltape.recorder.annotate import last_requests as last_requests
    from rolltape.store import open as open

__version__ = "0.1.0"

_LAZY = {
    "annotate": "rolltape.recorder.annotate",
    "last_requests": "rolltape.recorder.annotate",
    "open": "rolltape.store",
    "record": "rolltape.recorder",
}
_MODULES = {"trainer": "rolltape.recorder.trainer"}

__all__ = ["__version__", "annotate", "last_requests", "open", "record", "trainer"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
