"""The web viewer: a read-only server over tapes and diff reports. Needs the extra `viewer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.viewer.app import make_app as make_app

__all__ = ["make_app"]


def __getattr__(name: str) -> Any:
    # fastapi is an extra: `rolltape view --help` must work without it
    if name == "make_app":
        from rolltape.viewer.app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
