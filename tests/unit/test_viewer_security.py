"""Who the viewer answers to, and what no answer lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltape.store import UsageError
from tests.e2e.viewer_data import Scene, build, make_cases

pytest.importorskip("fastapi", reason="the viewer extra is not installed")
pytest.importorskip("httpx2", reason="fastapi's test client needs httpx2")

from fastapi.testclient import TestClient

from rolltape.viewer import make_app
from rolltape.viewer.security import is_loopback

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"), cases=make_cases()[:1])


@pytest.fixture(scope="module")
def client(scene: Scene) -> TestClient:
    return TestClient(make_app([scene.a]), base_url="http://127.0.0.1")


@pytest.fixture
def guarded(scene: Scene) -> TestClient:
    app = make_app([scene.a], token=TOKEN)
    return TestClient(app, base_url="http://gpu-17.example:8000", follow_redirects=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8123", "localhost:1", "[::1]:8123"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["attacker.example", "127.0.0.1.attacker.example", "attacker.example:80", "", "[::1"]
)
def test_a_rebound_name_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/api/runs", headers={"host": host})
    assert answer.status_code == 421
    assert "runs" not in answer.text


def test_other_names_are_answered_when_they_are_allowed(scene: Scene) -> None:
    app = make_app([scene.a], allowed_hosts=["box.lan"])
    client = TestClient(app, base_url="http://box.lan:9000")
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs", headers={"host": "127.0.0.1"}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(client: TestClient, method: str) -> None:
    answer = client.request(method, "/api/runs")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        (
            {
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "document",
            },
            200,
        ),
        (
            {
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "iframe",
            },
            403,
        ),
    ],
)
def test_another_site_may_link_here_and_never_load_from_here(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    assert client.get("/", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path", ["/", "/static/js/main.js", "/api/runs", "/api/runs/x", "/api/nothing", "/static/x"]
)
def test_every_answer_has_the_protecting_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_a_refusal_has_the_headers_too(client: TestClient) -> None:
    answer = client.get("/", headers={"host": "attacker.example"})
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2Fapp.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/js",
        "/static/",
        "/static/style.css/",
    ],
)
def test_no_address_reaches_another_file(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


@pytest.mark.parametrize("name", ["%2e%2e", "..%2F..%2Fetc", "a%00b", "%2Fetc%2Fpasswd", "x" * 300])
def test_ids_are_looked_up_and_never_used_as_paths(client: TestClient, name: str) -> None:
    run = client.get("/api/runs").json()["runs"][0]["id"]
    assert client.get(f"/api/runs/{name}").status_code in (400, 404, 307)
    assert client.get(f"/api/runs/{run}/seqs/{name}").status_code in (400, 404, 307)


def test_the_interface_description_is_not_served(client: TestClient) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


# ---- token --------------------------------------------------------------------------------


def test_without_the_token_nothing_is_served(guarded: TestClient) -> None:
    for path in ("/", "/static/style.css", "/api/runs"):
        answer = guarded.get(path)
        assert answer.status_code == 401
        assert "rolltape view" in answer.text


def test_the_token_in_the_address_becomes_a_cookie_and_leaves_the_address(
    guarded: TestClient,
) -> None:
    answer = guarded.get("/", params={"token": TOKEN, "x": "1"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "./?x=1"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert guarded.get("/api/runs").status_code == 200


def test_a_bearer_token_is_accepted(guarded: TestClient) -> None:
    right = {"authorization": f"Bearer {TOKEN}"}
    assert guarded.get("/api/runs", headers=right).status_code == 200
    wrong = {"authorization": f"Bearer {TOKEN}x"}
    assert guarded.get("/api/runs", headers=wrong).status_code == 401


@pytest.mark.parametrize("token", ["", "wrong-token-here", TOKEN.upper(), TOKEN[:-1]])
def test_a_wrong_token_is_refused(guarded: TestClient, token: str) -> None:
    assert guarded.get("/", params={"token": token}).status_code == 401
    name = "rolltape_" + "0" * 12
    assert guarded.get("/", headers={"cookie": f"{name}={TOKEN}"}).status_code == 401


def test_an_odd_cookie_of_another_program_does_not_hide_ours(guarded: TestClient) -> None:
    guarded.get("/", params={"token": TOKEN})
    (name,) = guarded.cookies.keys()
    odd = f'x={{"a": [1, 2]}}; {name}={TOKEN}; =; y'
    guarded.cookies.clear()
    assert guarded.get("/api/runs", headers={"cookie": odd}).status_code == 200


def test_another_origin_is_refused_even_with_the_token(guarded: TestClient) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "origin": "http://attacker.example"}
    assert guarded.get("/api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize("token", ["", "short", "has space in it", "semi;colon;token", "x" * 257])
def test_a_token_that_cannot_work_is_refused_at_the_start(scene: Scene, token: str) -> None:
    with pytest.raises(UsageError, match="bad token"):
        make_app([scene.a], token=token)


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("gpu-17", False),
    ],
)
def test_which_addresses_stay_on_this_machine(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_a_tape_that_names_a_model_elsewhere_reads_no_other_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "password.txt").write_text("hunter2")
    scene = build(tmp_path / "t", cases=make_cases()[:1], model=secret / "password.txt")
    client = TestClient(make_app([scene.a, scene.report]), base_url="http://127.0.0.1")
    run = client.get("/api/runs").json()["runs"][0]["id"]
    answer = client.get(f"/api/runs/{run}/seqs/{scene.id('0-0.0')}")
    assert answer.json()["tokenizer"]["path"] is None
    assert "hunter2" not in answer.text
