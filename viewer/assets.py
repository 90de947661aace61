"""The viewer's own files, read once: nothing of a request ever becomes a path."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from rolltape.viewer.answers import tagged

_ROOT = Path(__file__).with_name("static")

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file as it is sent.

    Args:
        content: its bytes.
        packed: the same, gzip.
        media_type: its type.
    """

    content: bytes
    packed: bytes
    media_type: str

    def answer(self, request: Request) -> Response:
        """Compressed if the client reads that: through a tunnel it is what the eye waits for."""
        packed = _reads_gzip(request.headers.get("accept-encoding", ""))
        found = tagged(request, self.packed if packed else self.content, self.media_type)
        found.headers["vary"] = "accept-encoding"
        if packed and found.status_code == 200:
            found.headers["content-encoding"] = "gzip"
        return found


def _reads_gzip(accepted: str) -> bool:
    for item in accepted.lower().split(","):
        name, _, quality = item.partition(";")
        if name.strip() in ("gzip", "*"):
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


@cache
def assets() -> dict[str, Asset]:
    """By relative name, with `/`."""
    found = {}
    for path in sorted(_ROOT.rglob("*")):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            found[path.relative_to(_ROOT).as_posix()] = Asset(
                content=content,
                packed=gzip.compress(content, mtime=0),
                media_type=_TYPES[path.suffix],
            )
    return found
