"""The files that are served, answers that are not sent twice, and `rolltape view` itself."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rolltape.store import UsageError
from rolltape.viewer import make_app
from rolltape.viewer.assets import assets
from rolltape.viewer.cli import _listen, view
from tests.e2e.viewer_client import Api
from tests.e2e.viewer_data import Scene, build


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def api(scene: Scene) -> Api:
    return Api(scene.a, scene.b, scene.report)


# ---- answers and files --------------------------------------------------------------------


def test_an_unchanged_answer_is_not_sent_twice(api: Api, scene: Scene) -> None:
    for path in ("/", "/static/style.css", "/api/runs", api.at(), api.at("seqs")):
        first = api.raw(path)
        assert first.headers["cache-control"] == "no-cache"
        again = api.client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_app_can_be_mounted_under_a_prefix(scene: Scene) -> None:
    outer = FastAPI()
    outer.mount("/tapes", make_app([scene.a, scene.report]))
    client = TestClient(outer, base_url="http://127.0.0.1")
    assert client.get("/tapes/api/runs").json()["runs"][0]["name"] == "a"
    page = client.get("/tapes/").text
    assert re.findall(r'(?:src|href)="(/|https?:)', page) == []
    assert client.get("/tapes/static/js/main.js").status_code == 200


def imports(name: str, files: Mapping[str, bytes], found: set[str]) -> set[str]:
    """A module and all that are fetched with it."""
    if name not in found:
        found.add(name)
        for other in re.findall(r"from '\./([^']+)'", files[name].decode()):
            assert f"js/{other}" in files, f"{name} imports {other}"
            imports(f"js/{other}", files, found)
    return found


def test_every_module_that_is_imported_is_there_and_every_screen_is_small() -> None:
    files = {name: asset.content for name, asset in assets().items()}
    screens = re.findall(r"import\('\./([^']+)'\)", files["js/main.js"].decode())
    assert len(screens) >= 11
    with_all = {name for name in files if not name.endswith(".js")}
    for screen in screens:
        fetched = with_all | imports("js/main.js", files, set())
        fetched |= imports(f"js/{screen}", files, set())
        assert sum(len(gzip.compress(files[name])) for name in fetched) < 60_000, screen


def test_files_are_sent_compressed_to_who_can_read_that(api: Api) -> None:
    client = api.client
    plain = client.get("/static/style.css", headers={"accept-encoding": "identity"})
    packed = client.get("/static/style.css", headers={"accept-encoding": "br, gzip;q=0.8"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.content == plain.content  # the client has unpacked it
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    again = {"if-none-match": packed.headers["etag"], "accept-encoding": "gzip"}
    assert client.get("/static/style.css", headers=again).status_code == 304
    refused = client.get("/static/style.css", headers={"accept-encoding": "gzip;q=0"})
    assert "content-encoding" not in refused.headers


def test_text_never_becomes_markup() -> None:
    for name, asset in assets().items():
        if name.endswith(".js"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|new Function",
                asset.content.decode(),
            )
            assert not found, f"{name}: {found}"


def test_the_viewer_runs_without_torch() -> None:
    code = "import sys, rolltape.viewer.app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- command line -------------------------------------------------------------------------


@pytest.fixture
def process(scene: Scene) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rolltape", "view", str(scene.a), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        yield it
        it.kill()


def test_view_prints_its_address_serves_and_stops_on_interrupt(
    process: subprocess.Popen[str],
) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"rolltape view: (http://127\.0\.0\.1:\d+/)  \(Ctrl-C stops it\)\n", line)
    assert match is not None
    with urllib.request.urlopen(f"{match[1]}api/runs", timeout=30) as answer:
        assert json.load(answer)["runs"][0]["name"] == "a"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "give --token"),
        (["--host", "192.0.2.1"], "can be reached from other machines"),
        (["--token", "short"], "bad token"),
        (["--host", "256.0.0.1", "--token", "long-enough"], "choose another --port or --host"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
    ],
)
def test_view_refuses_what_is_unsafe_or_wrong(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr(uvicorn.Server, "run", started)
    with pytest.raises(UsageError, match=words):
        view.main([str(scene.a), "--no-open", *arguments], standalone_mode=False)


def test_a_port_that_is_taken_is_named(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}"):
            view.main([str(scene.a), "--no-open", "--port", port], standalone_mode=False)
