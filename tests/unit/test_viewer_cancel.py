"""A client that goes away in the middle of a scan: the server stops working for it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter, seal
from rolltape.store.columns import make_batch
from rolltape.store.schema import REPORT_TABLES
from tests.e2e.viewer_data import Scene, build, make_cases

pytest.importorskip("fastapi", reason="the viewer extra is not installed")
pytest.importorskip("uvicorn", reason="the viewer extra is not installed")

import uvicorn

from rolltape.viewer import make_app, predicate
from rolltape.viewer import scan as scan_module
from rolltape.viewer.cli import _listen

BATCHES = 400
WAIT = 60.0  # seconds until something that must happen is given up on


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Its report has many small batches of tokens."""
    made = build(tmp_path, cases=make_cases(long=300)[:1])
    row = {"a": [made.id("0-0.0")], "n": 50, "state": [np.zeros(50, np.uint8)]}
    row |= {"delta": [np.full(50, 0.5, np.float32)]}
    batch = make_batch("tokens", REPORT_TABLES["tokens"], row)
    with TapeWriter(made.report) as writer:
        for _ in range(BATCHES):
            writer.write_batch("tokens", batch)
    seal(made.report)
    return made


@pytest.fixture
def ended() -> threading.Event:
    """Set when the server is done with a scan, in whatever way."""
    return threading.Event()


@pytest.fixture
def address(scene: Scene, ended: threading.Event) -> Iterator[tuple[str, int]]:
    app = make_app([scene.a, scene.report])

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["path"].endswith("/scan"):
                ended.set()

    config = uvicorn.Config(watched, log_level="critical", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    with _listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def ask(address: tuple[str, int], path: str) -> socket.socket:
    client = socket.create_connection(address, timeout=WAIT)
    client.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return client


def receive(client: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = client.recv(65536)
        assert part, data
        data += part
    return data


def test_a_scan_ends_when_its_client_has_gone(
    address: tuple[str, int], ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, looked, mask = threading.Semaphore(1), 0, predicate.mask

    def slow(*args: Any) -> Any:
        nonlocal looked
        assert may_go_on.acquire(timeout=WAIT)
        looked += 1
        return mask(*args)

    monkeypatch.setattr(predicate, "mask", slow)
    monkeypatch.setattr(scan_module, "TELL_EVERY", 0.0)
    with ask(address, "/api/runs") as client:
        run = receive(client, b'"id":"').partition(b'"id":"')[2][:32].decode()
    client = ask(address, f"/api/runs/{run}/scan?where=delta>0.1")
    receive(client, b'"progress"')
    assert looked >= 1
    # gone without a word: a reset
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    for _ in range(BATCHES):
        may_go_on.release()
    assert ended.wait(WAIT)
    assert looked < BATCHES / 2
    with ask(address, "/api/runs") as client:
        assert receive(client, b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_scan_that_nobody_leaves_looks_at_everything(address: tuple[str, int]) -> None:
    with ask(address, "/api/runs") as client:
        run = receive(client, b'"id":"').partition(b'"id":"')[2][:32].decode()
    with ask(address, f"/api/runs/{run}/scan?where=delta=0.5") as client:
        text = receive(client, b'"damaged"').decode()
    assert f'"matched":{50 * BATCHES}' in text
