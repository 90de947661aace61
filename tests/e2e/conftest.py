"""A real server on a loopback socket and a real browser in front of it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.viewer_data import Scene, build

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"


class Served:
    """A viewer that answers; stop it and start it again on the same port."""

    def __init__(self, *paths: Path, **options: Any) -> None:
        self.paths, self.options = paths, options
        self.port = 0
        self.start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        import uvicorn

        from rolltape.viewer import make_app

        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]
        app = make_app(self.paths, **self.options)
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()


@contextmanager
def serving(*paths: Path, **options: Any) -> Iterator[Served]:
    served = Served(*paths, **options)
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:
        yield lambda *paths, **options: stack.enter_context(serving(*paths, **options))


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="session")
def served(scene: Scene) -> Iterator[Served]:
    pytest.importorskip("uvicorn", reason="the viewer extra is not installed")
    with serving(scene.a, scene.b, scene.report) as it:
        yield it


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no chromium at {CHROMIUM}")
    with sync.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield launched
        launched.close()


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Any]:
    """One page on the common scene; nothing may go wrong in it."""
    from tests.e2e.viewer_tab import Tab

    it = Tab(browser, served)
    yield it
    it.context.close()
    assert it.trouble == []


@pytest.fixture
def tab_of(browser: Any) -> Iterator[Callable[..., Any]]:
    """Pages on servers of the test's own."""
    from tests.e2e.viewer_tab import Tab

    tabs: list[Tab] = []

    def make(served: Served, **options: Any) -> Tab:
        tabs.append(Tab(browser, served, **options))
        return tabs[-1]

    yield make
    for it in tabs:
        it.context.close()
        assert it.trouble == []


@pytest.fixture(scope="session", autouse=True)
def _fresh_pictures() -> None:
    shutil.rmtree(Path(__file__).resolve().parents[1] / "artifacts" / "viewer", ignore_errors=True)
