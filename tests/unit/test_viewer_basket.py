"""The notes file: the one thing that is ever written, and by whom."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the viewer extra is not installed")
pytest.importorskip("httpx2", reason="fastapi's test client needs httpx2")

from fastapi.testclient import TestClient

from rolltape.store import UsageError
from rolltape.viewer import make_app
from rolltape.viewer.basket import MAX_BYTES, Notes
from tests.e2e.viewer_data import Scene

ITEM = {"run": "ab", "seq": "1f0c29ab.0-0.0", "tok": 71, "hash": "#/run/ab/seq/s?tok=71"}
HEADERS = {"x-rolltape-write": "1", "content-type": "application/json"}


def client(scene: Scene, **options: Any) -> TestClient:
    return TestClient(make_app([scene.a], **options), base_url="http://127.0.0.1")


def put(to: TestClient, items: list[Any], tag: str, **more: str) -> Any:
    headers = {**HEADERS, "if-match": tag, **more}
    return to.put("/api/notes", content=json.dumps({"items": items}), headers=headers)


def test_without_a_file_nothing_can_be_written(scene: Scene) -> None:
    to = client(scene)
    assert to.get("/api/notes").json() == {"file": None, "items": []}
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        answer = to.request(method, "/api/notes", headers=HEADERS, content="{}")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


def test_what_is_written_is_read_again(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    to = client(scene, notes=file)
    first = to.get("/api/notes")
    assert first.json() == {"file": "notes.json", "items": []}
    assert not file.exists()
    item = {**ITEM, "note": "na\u00efve \U0001f600\nline", "name": "run", "at": "now", "other": 1}
    done = put(to, [item], first.headers["etag"])
    assert done.status_code == 200, done.text
    want = {k: v for k, v in item.items() if k != "other"}
    assert to.get("/api/notes").json()["items"] == [want]
    assert json.loads(file.read_text())["items"] == [want]
    assert to.get("/api/notes").headers["etag"] == done.headers["etag"]
    assert os.listdir(tmp_path) == ["notes.json"]  # nothing is left beside it
    again = client(scene, notes=file)
    assert again.get("/api/notes").json()["items"] == [want]


def test_nothing_else_of_the_address_space_can_be_written(scene: Scene, tmp_path: Path) -> None:
    to = client(scene, notes=tmp_path / "notes.json")
    for path in ("/", "/api/runs", "/api/notes/x", "/api/notes/", "/api//notes", "/static/a.js"):
        assert to.put(path, headers=HEADERS, content="{}").status_code == 405, path
    for method in ("POST", "PATCH", "DELETE"):
        assert to.request(method, "/api/notes", headers=HEADERS).status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"x-rolltape-write": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"host": "evil.example"},
    ],
)
def test_other_sites_cannot_write(scene: Scene, tmp_path: Path, headers: dict[str, str]) -> None:
    file = tmp_path / "notes.json"
    to = client(scene, notes=file)
    tag = to.get("/api/notes").headers["etag"]
    assert put(to, [ITEM], tag, **headers).status_code in (403, 421)
    assert not file.exists()


def test_the_page_itself_can(scene: Scene, tmp_path: Path) -> None:
    to = client(scene, notes=tmp_path / "notes.json")
    tag = to.get("/api/notes").headers["etag"]
    own = {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
    assert put(to, [ITEM], tag, **own).status_code == 200


def test_a_token_is_needed_where_there_is_one(scene: Scene, tmp_path: Path) -> None:
    to = client(scene, notes=tmp_path / "notes.json", token="secret-token")
    assert put(to, [ITEM], '""').status_code == 401
    bearer = {"authorization": "Bearer secret-token"}
    tag = to.get("/api/notes", headers=bearer).headers["etag"]
    assert put(to, [ITEM], tag, **bearer).status_code == 200


def test_a_file_that_has_changed_is_not_overwritten(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    to, other = client(scene, notes=file), client(scene, notes=file)
    tag = to.get("/api/notes").headers["etag"]
    assert put(other, [ITEM], tag).status_code == 200
    lost = put(to, [], tag)
    assert lost.status_code == 409
    assert "read it again" in lost.json()["detail"]
    assert len(json.loads(file.read_text())["items"]) == 1
    missing = to.put("/api/notes", content='{"items": []}', headers=HEADERS)
    assert missing.status_code == 428


def test_of_many_at_once_one_writes(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes.json")
    _, tag = notes.read()
    start = threading.Barrier(8)
    done: list[str] = []

    def write(k: int) -> None:
        start.wait()
        try:
            notes.write({"items": [{**ITEM, "tok": k}]}, tag)
            done.append("written")
        except Exception as error:
            done.append(str(getattr(error, "status", error)))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["409"] * 7 + ["written"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"[", "body"),
        (b"\xff", "body"),
        (b"[" * 100_000, "body"),
        (b"[]", "items"),
        (b'{"items": {}}', "items"),
        (b'{"items": [1]}', "items[0]"),
        (b'{"items": [{"run": "a"}]}', "items[0].hash"),
        (b'{"items": [{"run": "a", "hash": "https://evil.example"}]}', "items[0].hash"),
        (b'{"items": [{"run": "a", "hash": "javascript:x"}]}', "items[0].hash"),
        (b'{"items": [{"run": "a", "hash": "#/run/a", "tok": -1}]}', "items[0].tok"),
        (b'{"items": [{"run": "a", "hash": "#/run/a", "tok": true}]}', "items[0].tok"),
        (b'{"items": [{"run": "a", "hash": "#/run/a", "note": 5}]}', "items[0].note"),
        (b'{"items": [{"run": "a", "hash": "#/run/a", "note": "\\ud800"}]}', "items[0].note"),
        (b'{"items": [{"run": "a\\u0000", "hash": "#/run/a"}]}', "items[0].run"),
    ],
)
def test_only_items_are_written(scene: Scene, tmp_path: Path, body: bytes, field: str) -> None:
    file = tmp_path / "notes.json"
    to = client(scene, notes=file)
    tag = to.get("/api/notes").headers["etag"]
    answer = to.put("/api/notes", content=body, headers={**HEADERS, "if-match": tag})
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"] == field
    assert not file.exists()


def test_there_is_a_limit(scene: Scene, tmp_path: Path) -> None:
    to = client(scene, notes=tmp_path / "notes.json")
    tag = to.get("/api/notes").headers["etag"]
    answer = to.put(
        "/api/notes", content=b" " * (MAX_BYTES + 1), headers={**HEADERS, "if-match": tag}
    )
    assert answer.status_code == 413
    assert put(to, [ITEM] * 2001, tag).json()["field"] == "items"


def test_a_file_of_something_else_is_refused_at_the_start(scene: Scene, tmp_path: Path) -> None:
    other = tmp_path / "tape.json"
    other.write_text('{"uuid": "x"}')
    with pytest.raises(UsageError, match="not a file of notes"):
        make_app([scene.a], notes=other)
    with pytest.raises(UsageError, match="no such folder"):
        make_app([scene.a], notes=tmp_path / "nowhere" / "notes.json")
    with pytest.raises(UsageError, match="is a folder"):
        make_app([scene.a], notes=tmp_path)


def test_a_link_stays_a_link_and_rights_stay(scene: Scene, tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text('{"items": []}')
    real.chmod(0o600)
    (tmp_path / "notes.json").symlink_to(real)
    to = client(scene, notes=tmp_path / "notes.json")
    tag = to.get("/api/notes").headers["etag"]
    assert put(to, [ITEM], tag).status_code == 200
    assert (tmp_path / "notes.json").is_symlink()
    assert len(json.loads(real.read_text())["items"]) == 1
    assert real.stat().st_mode & 0o777 == 0o600


def test_it_can_be_mounted_under_a_prefix(scene: Scene, tmp_path: Path) -> None:
    from fastapi import FastAPI

    outer = FastAPI()
    outer.mount("/tapes", make_app([scene.a], notes=tmp_path / "notes.json"))
    to = TestClient(outer, base_url="http://127.0.0.1")
    tag = to.get("/tapes/api/notes").headers["etag"]
    headers = {**HEADERS, "if-match": tag}
    done = to.put("/tapes/api/notes", content='{"items": []}', headers=headers)
    assert done.status_code == 200
    assert to.put("/tapes/api/runs", content="{}", headers=headers).status_code == 405
