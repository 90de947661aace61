"""The description of the HTTP interface: FastAPI's own, with what it cannot know.

Every answer is made by hand (`answers.py`), so FastAPI sees neither media types nor problems. An
endpoint that answers something else than JSON says so: `responses=ARRAYS` or `media(...)`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rolltape.viewer.endpoints.parameters import MAX_FLOAT, MAX_INT

_PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "Problem details, RFC 9457.",
    "required": ["title", "status", "detail"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string", "description": "The parameter that is wrong."},
        "limit": {"type": "integer", "description": "What is allowed of it."},
    },
}

_PROBLEMS = {
    "400": "A parameter is wrong; `field` names it.",
    "404": "There is nothing with that id.",
    "413": "More was asked for at once than `limit`.",
    "500": "A file of the tape is damaged; `detail` names it.",
}

_LIMITS = {"integer": MAX_INT, "number": MAX_FLOAT}

_JSON: dict[str, Any] = {"application/json": {"schema": {}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of everything under `/api`."""
    found = get_openapi(
        title="rolltape view",
        version=app.version,
        description="Tapes and reports, read-only. All ids are those that the answers hold.",
        routes=app.routes,
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = _PROBLEM
    for operations in found.get("paths", {}).values():
        for operation in operations.values():
            _complete(operation)
    return found


def _complete(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # a wrong parameter is 400 here
    responses["200"]["description"] = "The answer."
    content = responses["200"].setdefault("content", dict(_JSON))
    if len(content) > 1 and content.get("application/json") == {"schema": {}}:
        del content["application/json"]  # what FastAPI says when nobody says anything
    responses["304"] = {"description": "The client has it: `If-None-Match` is its ETag."}
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for status, text in _PROBLEMS.items():
        responses[status] = {"description": text, "content": problem}
    for parameter in operation.get("parameters", []):
        for schema in _kinds(parameter["schema"]):
            limit = _LIMITS.get(schema.get("type", ""))
            if limit is not None:  # what `endpoints.parameters.plain` lets through
                schema.setdefault("minimum", -limit)
                schema.setdefault("maximum", limit)


def numbers(description: dict[str, Any]) -> dict[str, str]:
    """Names of the parameters that are numbers: `integer` or `number`."""
    return {
        parameter["name"]: schema["type"]
        for operations in description["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        for schema in _kinds(parameter["schema"])
        if schema.get("type") in _LIMITS
    }


def _kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *schema.get("anyOf", ())]
