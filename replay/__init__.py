"""Acting on tapes: replay them, diff any two. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.replay.diff import diff_tapes as diff_tapes

_LAZY = {"diff_tapes": "rolltape.replay.diff"}

__all__ = ["diff_tapes"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
