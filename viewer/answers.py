"""What goes over the wire: JSON with an ETag, array bytes, and problem details (RFC 9457)."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from fastapi import Request
from fastapi.responses import Response


class Problem(Exception):
    """An error that the client gets as `application/problem+json`.

    Args:
        status: HTTP status.
        title: what kind of problem; the same for every occurrence.
        detail: what is wrong this time and what to do.
        extra: more members, for example `field` or `limit`.
    """

    def __init__(self, status: int, title: str, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"title": title, "status": status, "detail": detail, **extra}

    def answer(self) -> Response:
        """The response."""
        return Response(
            json.dumps(plain(self.body)),
            status_code=self.status,
            media_type="application/problem+json",
        )


def bad_parameter(field: str, detail: str) -> Problem:
    """400: names the parameter."""
    return Problem(400, "bad parameter", f"{field}: {detail}", field=field)


def unknown(what: str, name: str, hint: str) -> Problem:
    """404: names what is not there."""
    return Problem(404, f"unknown {what}", f"no {what} {name!r}; {hint}", what=what)


def plain(value: Any) -> Any:
    """A JSON-able copy: numpy scalars become Python's, non-finite floats become strings."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number(value: Any) -> float | None:
    """A float from JSON as rolltape writes it (non-finite as strings); None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


def json_answer(request: Request, value: Any) -> Response:
    """JSON, or 304 when the client has these very bytes."""
    return tagged(request, json_bytes(value), "application/json")


def tagged(
    request: Request, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A body with its content hash as ETag; 304 when the client already has it."""
    return with_tag(request, f'"{xxhash.xxh3_128_hexdigest(body)}"', body, media_type, headers)


# Of this process: another one may be of another version, and answer in another way.
_PROCESS = uuid.uuid4().hex


def sealed_tag(request: Request, *parts: str) -> str:
    """ETag of an answer that depends on its address and on these alone, as long as we run."""
    whole = "\0".join((_PROCESS, request.url.path, request.url.query, *parts))
    return f'"{xxhash.xxh3_128_hexdigest(whole.encode())}"'


def known(request: Request, tag: str) -> bool:
    """Whether the client has what a tag stands for."""
    given = request.headers.get("if-none-match", "").split(",")
    return tag in [t.strip().removeprefix("W/") for t in given]


def with_tag(
    request: Request,
    tag: str,
    body: bytes,
    media_type: str,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A body under a tag; 304 when the client already has it."""
    sent = {"etag": tag, "cache-control": "no-cache", **(headers or {})}
    if known(request, tag):
        return Response(status_code=304, headers=sent)
    return Response(body, media_type=media_type, headers=sent)


def json_bytes(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode()
