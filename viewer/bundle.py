"""Answers of the interface in files: asked in this process, written once, found by address."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from rolltape.store.errors import UsageError

_SUFFIX = {
    "application/json": "json",
    "application/x-safetensors": "safetensors",
    "application/problem+json": "problem.json",
}


@dataclass(frozen=True)
class Answer:
    """An answer of the interface."""

    status: int
    media: str
    body: bytes


class Asked:
    """An ASGI application that is asked in this process, without a socket.

    Its event loop has a thread of its own: the caller may be in one already.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._thread = ThreadPoolExecutor(1, "export")
        self._runner = asyncio.Runner()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def get(self, path: str, query: str) -> Answer:
        """One GET."""
        return self._thread.submit(lambda: self._runner.run(_get(self._app, path, query))).result()


@dataclass
class Bundle:
    """What has been written.

    Args:
        root: the folder.
        app: what is asked.
        screen: that the next files are for.
        files: key of a request -> file relative to the folder.
        written: file -> bytes.
        sizes: screen -> bytes.
    """

    root: Path
    app: Asked
    screen: str = "runs"
    files: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def ask(self, path: str, **params: Any) -> Any:
        """The JSON answer.

        Raises:
            UsageError: there is none.
        """
        return json.loads(self._answer(path, params).body)

    def find(self, path: str, **params: Any) -> Any | None:
        """The JSON answer; None where there is nothing of that name.

        Raises:
            UsageError: there is none for another reason.
        """
        answer = self._answer(path, params, 404)
        return json.loads(answer.body) if answer.status == 200 else None

    def refusal(self, path: str) -> str | None:
        """What the interface says instead of an answer; None if it has one."""
        answer = self.app.get("/" + path, "")
        return None if answer.status == 200 else str(json.loads(answer.body).get("detail"))

    def keep(self, path: str, **params: Any) -> bytes:
        """Write an answer as it is, also that there is nothing of that name.

        Raises:
            UsageError: there is none.
        """
        answer = self._answer(path, params, 404)
        self._write(key_of(path, params), answer.media, answer.body)
        return answer.body

    def put(self, path: str, value: Any, **params: Any) -> None:
        """Write a JSON answer that was changed."""
        body = json.dumps(value, separators=(",", ":")).encode()
        self._write(key_of(path, params), "application/json", body)

    def stand_in(self, rep: str) -> None:
        """An address without `rep` means this one: the newest report."""
        for key, name in list(self.files.items()):
            path, _, query = key.partition("?")
            rest = [part for part in query.split("&") if part != f"rep={rep}"]
            if query and len(rest) < len(query.split("&")):
                self.files[path + (f"?{'&'.join(rest)}" if rest else "")] = name

    def _answer(self, path: str, params: Mapping[str, Any], also: int = 200) -> Answer:
        given = {k: v for k, v in params.items() if v is not None}
        answer = self.app.get("/" + path, urlencode(given))
        if answer.status not in (200, also):
            raise UsageError(f"{path}: {json.loads(answer.body).get('detail')}")
        return answer

    def _write(self, key: str, media: str, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()[:16]
        stem = re.sub(r"[^A-Za-z0-9._/-]", "_", key.partition("?")[0])
        name = f"{stem}-{digest}.{_SUFFIX[media]}"
        self.files[key] = name
        if name not in self.written:
            write_file(self.root / name, body)
            self.written[name] = len(body)
            self.sizes[self.screen] = self.sizes.get(self.screen, 0) + len(body)


def write_file(path: Path, body: bytes) -> None:
    """Write a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def quoted(name: str) -> str:
    """A part of an address as the page writes it."""
    return quote(name, safe="!*'()")


def key_of(path: str, params: Mapping[str, Any]) -> str:
    """What the page looks an answer up by; `keyOf` in js/static_api.js makes the same."""
    given = sorted((k, str(v)) for k, v in params.items() if v is not None)
    return path + (f"?{'&'.join(f'{k}={v}' for k, v in given)}" if given else "")


async def _get(app: Any, path: str, query: str) -> Answer:
    status, media, body = 500, "", b""

    parts = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, media, body
        if message["type"] == "http.response.start":
            status = int(message["status"])
            headers = {bytes(k).lower(): bytes(v).decode() for k, v in message["headers"]}
            media = headers.get(b"content-type", "").partition(";")[0]
        else:
            body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path.replace("%3A", ":"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1")],
        "client": None,
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return Answer(status, media, body)
