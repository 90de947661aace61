"""The versions of the weights."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rolltape.viewer.endpoints.parameters import ReportId, open_tape_of
from rolltape.viewer.views import Views
from rolltape.viewer.weights import weights


def router(views: Views) -> APIRouter:
    """`runs/{run}/weights`."""
    api = APIRouter(prefix="/runs/{run}")

    @api.get("/weights")
    def all_of_them(
        request: Request,
        run: str,
        rep: ReportId = None,
        version: Annotated[int | None, Query(ge=0, le=(1 << 62))] = None,
    ) -> Response:
        with views.library.lock:
            pair = views.pair(run, rep)
            tape = open_tape_of(pair)

            def found() -> tuple[bytes, dict[str, str]]:
                answer = weights(pair, tape, version) | {"problems": pair.problems}
                # Python's own integers and texts alone: nothing to convert, and there are many
                return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode(), {}

            return views.answer_bytes(request, pair, found, "application/json")

    return api
