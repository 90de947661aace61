"""Every endpoint, found from the application itself, against requests and tapes that mean harm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from rolltape.store import TapeWriter, create_report, create_tape, seal
from tests.e2e.viewer_data import ENGINE_A, Scene, build, make_cases

pytest.importorskip("fastapi", reason="the viewer extra is not installed")
pytest.importorskip("httpx2", reason="fastapi's test client needs httpx2")

from fastapi.testclient import TestClient

from rolltape.viewer import make_app

TOKEN = "correct-horse-battery"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
DEEP = "[" * 5000 + "]" * 5000
HUGE = "9" * 100_000
SECRET = "hunter2-in-a-file-next-to-the-tape"

#: Served beside what is described.
APART = {"/", "/static/{name:path}", "/api/openapi.json"}

PATHS = ("../../../etc/passwd", "..%2f..%2fsecret.txt", "/etc/passwd", "../secret.txt")

HOSTILE = (
    *(*PATHS, "..", "file:///etc/passwd", MARKUP, "{{7*7}}", "%00", "a\0b", "\r\nset-cookie: x=1"),
    *("nan", "-inf", "1e999", "-1", "0", str(2**31), str(2**63), "1" + "0" * 400),
    *("", "\u202e\U0001f600\ufffd", "x" * 300, "x" * 20_000, "(" * 2000, "max_abs >", "*", "[!"),
    *("delta > 1 " + "and delta > 1 " * 500, "not not not", DEEP[:9000]),
)


def walk(app: Any) -> dict[str, Any]:
    """Every address, with its description; None for those that are not described."""
    described = TestClient(app, base_url="http://127.0.0.1").get(
        "/api/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}
    )
    operations = {path: methods["get"] for path, methods in described.json()["paths"].items()}
    found: dict[str, Any] = {}
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            found[route.path] = operations.get(route.path)
            continue
        for one in inner.routes:
            found[f"/api{one.path}"] = operations.get(f"/api{one.path}")
    return found


class Site:
    """A viewer, and requests to each of its addresses that would be answered."""

    def __init__(self, *paths: Path, sequence: str | None = None) -> None:
        self.app = make_app(paths)
        self.client = TestClient(
            self.app, base_url="http://127.0.0.1", raise_server_exceptions=False
        )
        self.described = {path: found for path, found in walk(self.app).items() if found}
        runs = self.client.get("/api/runs").json()["runs"]
        reports = [r["id"] for run in runs for r in run["reports"]] or ["none"]
        self.values = {
            "run": runs[0]["id"],
            "engine": ENGINE_A,
            "step": "0",
            "position": "1",
            "seq": sequence or "none",
            "start": "0",
            "end": "2",
            "from": "0",
            "t0": "0",
            "threshold": "0.1",
            "a": reports[0],
            "b": reports[-1],
            "rep": reports[0],
            "q": "max_abs>0.1",
            "where": "delta > 0.1",
        }

    def get(self, path: str, **changed: str) -> Any:
        operation = self.described[path]
        address, params = path, {}
        for parameter in operation.get("parameters", []):
            name = parameter["name"]
            if name not in changed and not parameter["required"]:
                continue
            value = changed.get(name, self.values.get(name, "1"))
            if parameter["in"] == "path":
                address = address.replace(f"{{{name}}}", quote(value, safe=""))
            else:
                params[name] = value
        return self.client.get(address, params=params)

    def parameters(self) -> Iterator[tuple[str, str]]:
        for path, operation in self.described.items():
            for parameter in operation.get("parameters", []):
                yield path, parameter["name"]


def fault(answer: Any, what: object) -> str:
    """What is wrong with an answer, whatever was asked; nothing if all is well."""
    headers, text = answer.headers, answer.text
    kind = headers.get("content-type", "")
    policy = headers.get("content-security-policy", "")
    wrong = [
        *(["fails"] if answer.status_code >= 500 else []),
        *(["a page"] if "html" in kind else []),
        *(["sniffed"] if headers.get("x-content-type-options") != "nosniff" else []),
        *(["policy"] if "default-src 'self'" not in policy or "unsafe" in policy else []),
        *(["cookie"] if "set-cookie" in headers else []),
        *(["a file"] if SECRET in text or "root:" in text else []),
        *(["no JSON"] if "json" in kind and not _is_json(text) else []),
    ]
    return f"{what}: {', '.join(wrong)}: {answer.status_code} {text[:200]}" if wrong else ""


def _is_json(text: str) -> bool:
    try:
        for line in text.splitlines() if "\n" in text else [text]:
            json.loads(line, parse_constant=int)  # NaN and its like are none
    except ValueError:
        return False
    return True


def faults(asked: Iterable[tuple[object, Any]]) -> list[str]:
    """Of (what was asked, the answer)."""
    return [text for what, answer in asked if (text := fault(answer, what))]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("scene")
    made = build(root, cases=make_cases(long=700))
    (root / "secret.txt").write_text(SECRET)
    return made


@pytest.fixture(scope="module")
def site(scene: Scene) -> Site:
    return Site(scene.a, scene.b, scene.report, sequence=scene.id("0-0.1"))


def test_every_address_is_described_or_known(site: Site) -> None:
    found = walk(site.app)
    assert {path for path, operation in found.items() if operation is None} == APART
    assert len(site.described) > 6


def test_an_honest_request_to_every_endpoint_is_answered(site: Site) -> None:
    answers = {path: site.get(path) for path in site.described}
    assert not faults(answers.items())
    wrong = {p: a.text[:300] for p, a in answers.items() if a.status_code not in (200, 404)}
    assert not wrong
    assert sum(a.status_code == 200 for a in answers.values()) > 6


def test_hostile_values_of_every_parameter(site: Site) -> None:
    found = [
        ((path, name, value[:60]), site.get(path, **{name: value}))
        for path, name in site.parameters()
        for value in HOSTILE
    ]
    assert not faults(found)
    reached = [
        what
        for what, answer in found
        if what[1] in ("run", "seq") and what[2] in PATHS and answer.status_code == 200
    ]
    assert not reached


def test_repeated_unknown_and_broken_queries(site: Site) -> None:
    queries = (
        "&" * 500,
        "%",
        "%zz",
        "=",
        "rep=%ff",
        "rep=a&rep=b",
        "x" * 5000,
        "q=%ed%a0",
        "a[]=1",
    )
    assert not faults(
        ((address, query[:20]), site.client.get(f"{address}?{query}"))
        for address in addresses(site)
        if address.startswith("/api")
        for query in queries
    )


@pytest.mark.parametrize("name", ["end", "limit", "max_spans", "bins"])
def test_windows_that_are_too_large_are_refused(site: Site, name: str) -> None:
    asked = [path for path, parameter in site.parameters() if parameter == name]
    assert asked
    for path in asked:
        answer = site.get(path, **{name: str(10**9)})
        assert answer.status_code in (400, 413), path
        if answer.status_code == 413:
            assert answer.json()["limit"] < 10**9


# ---- who is answered ----------------------------------------------------------------------


def addresses(site: Site) -> list[str]:
    described = [path.format_map(_Ones(site.values)) for path in site.described]
    return [*described, "/", "/static/js/main.js", "/api/openapi.json", "/api/nothing", "/nothing"]


class _Ones(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attacker.example"}, 421),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
    ],
)
def test_strangers_are_refused_everywhere(site: Site, headers: dict[str, str], status: int) -> None:
    for address in addresses(site):
        answer = site.client.get(address, headers=headers)
        assert answer.status_code == status, address
        assert "content-security-policy" in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_without_the_token_no_address_says_anything(scene: Scene, site: Site) -> None:
    app = make_app([scene.a, scene.b, scene.report], token=TOKEN)
    client = TestClient(app, base_url="http://gpu-17.example:8000", follow_redirects=False)
    right = {"authorization": f"Bearer {TOKEN}"}
    for address in addresses(site):
        for headers in ({}, {"authorization": "Bearer x"}, {"cookie": "rolltape_0=x"}):
            answer = client.get(address, headers=headers)
            assert answer.status_code == 401, address
            assert site.values["run"] not in answer.text.replace(address, "")
        assert client.get(address, headers=right).status_code in (200, 400, 404), address


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_no_address_takes_anything_but_reading(site: Site, method: str) -> None:
    for address in addresses(site):
        assert site.client.request(method, address).status_code == 405, address


def test_no_endpoint_writes(scene: Scene, site: Site) -> None:
    def look() -> dict[str, tuple[int, int]]:
        files = (f for f in scene.a.parent.rglob("*") if f.is_file())
        return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}

    before = look()
    for path in site.described:
        site.get(path)
    for address in addresses(site):
        site.client.get(address)
    assert look() == before


# ---- tapes that mean harm -----------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A tape and a report whose every text is markup, huge, deep or no number."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "secret.txt").write_text(SECRET)
    a = create_tape(
        root / MARKUP.replace("/", "_"),
        role=MARKUP,
        parent="../secret.txt",
        provenance={"argv": [MARKUP, HUGE], "git": DEEP[:100], MARKUP: {MARKUP: [None, 1e308]}},
    )
    requests = [MARKUP, "../secret.txt", "a/b/c", "", "\u202e\0", HUGE[:2000], "0-0"]
    with TapeWriter(a) as writer:
        for text in (MARKUP, DEEP, HUGE, '{"a": NaN, "b": Infinity}', '"', "null", '{"tp": "x"}'):
            writer.append(
                "engines",
                {
                    "engine": ENGINE_A,
                    "writer": writer.id,
                    "role": MARKUP,
                    "adapter": MARKUP,
                    "ranks": text,
                    "effective": text,
                    "requested": text,
                    "versions": text,
                    "model": "../secret.txt",
                    "model_type": MARKUP,
                    "host": MARKUP,
                    "num_layers": -5,
                    "moe_layers": [[-1, 2**31 - 1]],
                    "num_experts": 0,
                },
            )
            writer.append(
                "tactics",
                {
                    "engine": MARKUP,
                    "writer": writer.id,
                    "t_ns": -(2**62),
                    "tuner": MARKUP,
                    "op": MARKUP,
                    "key": text,
                    "source": MARKUP,
                    "implementation": MARKUP,
                    "time_ms": [float("nan")],
                    "fingerprint": text,
                    "reason": text,
                },
            )
            writer.append(
                "events",
                {
                    "engine": ENGINE_A,
                    "writer": writer.id,
                    "t_ns": 2**62,
                    "detail": text,
                    "kind": ["finding"],
                    "request": MARKUP,
                    "sample": -1,
                },
            )
            writer.append(
                "weights",
                {
                    "engine": ENGINE_A,
                    "version": [-(2**62)],
                    "state": MARKUP,
                    "group": text,
                    "label": text,
                    "reason": text,
                    "digest": 2**64 - 1,
                },
            )
        for kind in ("gap", "update", "preempt", "abort", MARKUP):
            row = {"writer": writer.id, "t_ns": [0], "kind": kind, "detail": "[[[["}
            writer.append("events", row)
        for request in requests:
            key = {"engine": ENGINE_A, "request": request, "sample": 0, "pass": 0}
            writer.append(
                "sequences",
                {
                    **key,
                    "group": MARKUP,
                    "prompt_len": [2],
                    "length": 6,
                    "finish": MARKUP,
                    "sampling": DEEP,
                    "origin": "../secret.txt",
                    "digest": "x",
                },
            )
            writer.append(
                "tokens",
                {
                    **key,
                    "start": 0,
                    "n": [6],
                    "ids": [np.full(6, 2**32 - 1, np.uint32)],
                    "processed": [np.array([0, np.nan, np.inf, -np.inf, 1e38, -1e-45], np.float32)],
                },
            )
            writer.append(
                "forwards",
                {
                    **key,
                    "step": [2**62],
                    "row": -1,
                    "start": 0,
                    "n": 6,
                    "kind": MARKUP,
                    "weight_version": -(2**62),
                    "kv_source": MARKUP,
                },
            )
        writer.append(
            "steps",
            {
                "engine": ENGINE_A,
                "step": [2**62, -1],
                "kind": MARKUP,
                "graph": MARKUP,
                "t_ns": [2**62, -(2**62)],
                "rows": -1,
                "tokens": 2**31 - 1,
                "call": -1,
            },
        )
    seal(a, status={"exit": MARKUP, "dropped": MARKUP, "signal": [1]})
    uuid = json.loads((a / "tape.json").read_text())["uuid"]
    ids = [f"{ENGINE_A[:8]}.{request}.0" for request in requests]
    for number, odd in enumerate(_odd_summaries(ids)):
        side = {"path": MARKUP, "uuid": uuid, "role": MARKUP}
        report = create_report(root / f"report-{number}", summary={"a": side, "b": side, **odd})
        with TapeWriter(report) as writer:
            for name in ids:
                writer.append(
                    "sequences",
                    {
                        "a": [name],
                        "b": MARKUP,
                        "group": MARKUP,
                        "finish": MARKUP,
                        "prompt_len": -1,
                        "length": -7,
                        "max_at": -3,
                        "first_over": 2**31 - 1,
                        "mean_abs": float("nan"),
                        "max_abs": float("inf"),
                        "decisions": 0,
                        "k1": float("-inf"),
                        "k3": 1e308,
                        "compared": -1,
                        "disagree": -1,
                    },
                )
                writer.append(
                    "tokens",
                    {
                        "a": [name],
                        "n": 9,
                        "state": [np.full(3, 255, np.uint8)],
                        "delta": [np.full(4, np.nan, np.float32)],
                    },
                )
                writer.append(
                    "activations",
                    {
                        "a": [name],
                        "site": MARKUP,
                        "start": -4,
                        "n": 2,
                        "rel_l2": [np.array([np.nan, np.inf, 1], np.float32)],
                    },
                )
            writer.append(
                "routing",
                {
                    "layer": [-1],
                    "slice": MARKUP,
                    "decisions": 0,
                    "disagree": 5,
                    "flip_margin_mean": float("nan"),
                },
            )
    return Site(a, *sorted(root.glob("report-*")), sequence=ids[-1])


def _odd_summaries(ids: list[str]) -> list[dict[str, Any]]:
    odd: list[Any] = [MARKUP, None, "NaN", -1, [[]], {"x": MARKUP}, [MARKUP], HUGE[:1000], True]
    names = (
        *("verdict", "reason", "column", "tokens_compared", "mean_abs", "max_abs", "max_at", "k3"),
        *("routing", "compared", "histogram", "identity", "warnings", "activations", "tokens"),
        *("by_position", "by_version", "by_sequence", "semantics", "settings", "not_compared"),
        *("drift", "over", "equal", "first_divergent", "differences", "noise", "supports"),
        *("non_finite", "frac_ratio_gt_2", "k1", "alignment", "scoring", "by_group"),
    )
    plain = [dict.fromkeys(names, value) for value in odd]
    nested = {
        "histogram": {"edges": ["NaN"], "counts": [-1, None], "bitwise": "x"},
        "max_at": {"sequence": MARKUP, "position": "NaN"},
        "routing": {"decisions": 0, "disagree": "x", "per_layer": [None, {}], "tokens": -1},
        "activations": {"front": MARKUP, "sites": [MARKUP, {}], "verdict": 7, "floor": [1]},
        "drift": {"by_version": [MARKUP, {}], "by_time": {"t0_ns": MARKUP}},
        "identity": [{"kind": MARKUP, "message": MARKUP, "blocks": MARKUP}, MARKUP],
        "settings": [{"name": MARKUP, "a": DEEP[:100]}, None],
        "over": {MARKUP: MARKUP, "0.1": "NaN"},
        "first_divergent": {"layer": MARKUP, "site": 5, "by": []},
    }
    return [*plain, nested]


def test_hostile_tapes_break_no_endpoint(hostile: Site) -> None:
    runs = hostile.client.get("/api/runs").json()
    reports = [r["id"] for run in runs["runs"] for r in run["reports"]]
    assert len(reports) == 10, runs["failures"]
    found = []
    for path, operation in hostile.described.items():
        names = {p["name"] for p in operation.get("parameters", [])}
        for number, report in enumerate(reports if "rep" in names else [""]):
            found.append(((path, number), hostile.get(path, **({"rep": report} if report else {}))))
    assert not faults(found)


def test_hostile_names_of_sequences_break_no_endpoint(hostile: Site) -> None:
    rows = hostile.client.get(f"/api/runs/{hostile.values['run']}/seqs").json()["rows"]
    assert len(rows) == 7
    assert not faults(
        ((path, row["id"][:40]), hostile.get(path, seq=row["id"]))
        for path, name in hostile.parameters()
        if name == "seq"
        for row in rows
    )
