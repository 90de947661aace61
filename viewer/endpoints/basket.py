"""The notes file: reading it, and, only where there is one, writing it."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from rolltape.viewer.answers import Problem, bad_parameter
from rolltape.viewer.basket import MAX_BYTES, Notes

#: The one address that can be written to.
ADDRESS = "/notes"


def router(notes: Notes | None) -> APIRouter:
    """`GET notes`, and `PUT notes` where there is a file."""
    api = APIRouter()

    @api.get(ADDRESS)
    def read() -> Response:
        if notes is None:
            return _answer({"file": None, "items": []}, None)
        items, tag = notes.read()
        return _answer({"file": notes.path.name, "items": items}, tag)

    if notes is None:
        return api

    @api.put(ADDRESS)
    async def write(request: Request) -> Response:
        data = b""
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BYTES:
                raise Problem(
                    413, "body too large", f"at most {MAX_BYTES:,} bytes", limit=MAX_BYTES
                )
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise bad_parameter("body", "not JSON") from error
        tag = await run_in_threadpool(notes.write, value, request.headers.get("if-match"))
        return _answer({"file": notes.path.name}, tag)

    return api


def _answer(value: object, tag: str | None) -> Response:
    headers = {"cache-control": "no-cache"} | ({"etag": tag} if tag is not None else {})
    return Response(json.dumps(value), media_type="application/json", headers=headers)
