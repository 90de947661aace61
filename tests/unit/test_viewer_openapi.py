"""The description of the HTTP interface, and answers to whatever it allows."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings

from rolltape.viewer import make_app
from rolltape.viewer.endpoints.parameters import MAX_INT
from tests.e2e.viewer_client import Api
from tests.e2e.viewer_data import Scene, build

FEW = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def api(scene: Scene) -> Api:
    return Api(scene.a, scene.b, scene.report)


@pytest.fixture(scope="module")
def description(api: Api) -> dict[str, Any]:
    return api.get("/api/openapi.json")


def operations(description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path: methods["get"] for path, methods in description["paths"].items()}


def test_only_what_is_read_is_described(description: dict[str, Any]) -> None:
    assert {"/api/runs", "/api/runs/{run}/seqs/{seq}/tokens"} <= set(description["paths"])
    for path, methods in description["paths"].items():
        assert set(methods) == {"get"}, path
        assert path.startswith("/api/")


def test_every_endpoint_says_what_it_answers(description: dict[str, Any]) -> None:
    for path, operation in operations(description).items():
        answers = operation["responses"]
        assert set(answers) == {"200", "304", "400", "404", "413", "500"}, path
        assert answers["200"]["content"], path
        for status in ("400", "404", "413", "500"):
            assert set(answers[status]["content"]) == {"application/problem+json"}


def test_arrays_are_described_as_arrays(
    description: dict[str, Any], api: Api, scene: Scene
) -> None:
    tokens = operations(description)["/api/runs/{run}/seqs/{seq}/tokens"]
    path = api.at("seqs", scene.id("0-0.0"), "tokens")
    given_type = api.raw(path, start=0, end=5).headers["content-type"]
    assert set(tokens["responses"]["200"]["content"]) == {given_type}


def test_a_number_beyond_its_limit_is_refused(description: dict[str, Any], api: Api) -> None:
    seen = 0
    for path, operation in operations(description).items():
        for parameter in operation.get("parameters", []):
            kinds = [parameter["schema"], *parameter["schema"].get("anyOf", ())]
            limits = [k for k in kinds if k.get("type") == "integer"]
            if not limits:
                continue
            seen += 1
            assert {"minimum", "maximum"} <= set(limits[0]), (path, parameter["name"])
            for value in (str(MAX_INT + 1), str(-MAX_INT - 1), "1" + "0" * 400, "9" * 5000):
                where = filled(path, {"run": api.run, parameter["name"]: value})
                params = {} if parameter["in"] == "path" else {parameter["name"]: value}
                answer = api.raw(where, **params)
                assert answer.status_code == 400, where
                assert answer.json()["field"] in (parameter["name"], *needed(operation))
    assert seen > 5


def filled(path: str, values: dict[str, Any]) -> str:
    """A path of the description with its parameters replaced; `x` where there is no value."""
    parts = path.split("/")
    return "/".join(str(values.get(p[1:-1], 1)) if p.startswith("{") else p for p in parts)


def needed(operation: dict[str, Any]) -> list[str]:
    return [p["name"] for p in operation.get("parameters", []) if p["required"]]


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 20_000])
def test_text_that_is_none_is_refused(api: Api, text: str) -> None:
    answer = api.client.get(f"/api/runs/{api.run}", params={"rep": text.encode("utf-8", "replace")})
    escaped = "%ED%A0%80" if text == "\ud800" else None
    if escaped is not None:  # half a character cannot be sent otherwise
        answer = api.client.get(f"/api/runs/{api.run}?rep={escaped}")
    assert answer.status_code in (400, 404)


def test_answers_to_whatever_the_description_allows(
    api: Api, scene: Scene, description: dict[str, Any]
) -> None:
    """No 5xx; documented status codes, media types and bodies only."""
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis, of the dev extra, is not installed"
    )
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as conformance

    known = [
        checks.not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_dict(description)
    names = [scene.id(name) for name in scene.cases]
    reports = [r["id"] for r in api.get("/api/runs")["runs"][0]["reports"]]
    engine = scene.cases["0-0.0"].key_a.engine
    tried = 0
    statuses: dict[str, set[int]] = {}

    def ask(case: Any) -> None:
        nonlocal tried
        tried += 1
        if tried % 5:  # most of the time there is something at that address
            there = {"run": api.run, "seq": names[tried % len(names)], "engine": engine}
            there |= dict.fromkeys(("rep", "a", "b"), reports[0])
            for part in (case.path_parameters, case.query):
                part.update({k: there[k] for k in part or () if k in there})
        request = case.as_transport_kwargs(base_url="http://127.0.0.1")
        answer = api.client.request(request["method"], request["url"], params=request["params"])
        statuses.setdefault(case.operation.path, set()).add(answer.status_code)
        case.validate_response(answer, checks=known)

    for result in schema.get_all_operations():
        FEW(given(result.ok().as_strategy())(ask))()
    assert tried > 5 * len(description["paths"])
    reached = [path for path, seen in statuses.items() if 200 in seen]
    assert len(reached) > len(statuses) / 2, statuses


def test_the_description_of_a_mounted_app_is_served(scene: Scene) -> None:
    from fastapi.testclient import TestClient

    outer = FastAPI()
    outer.mount("/tapes", make_app([scene.a]))
    client = TestClient(outer, base_url="http://127.0.0.1")
    assert "/api/runs" in client.get("/tapes/api/openapi.json").json()["paths"]
    assert client.get("/tapes/api/runs?n=1").status_code == 200
