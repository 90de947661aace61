"""The viewer's own files, read once: nothing of a request ever becomes a path."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_ROOT = Path(__file__).with_name("static")

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """Relative name, with `/` -> (content, media type)."""
    return {
        path.relative_to(_ROOT).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(_ROOT.rglob("*"))
        if path.suffix in _TYPES
    }
