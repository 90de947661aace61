"""A scan of every token of a report: `runs/{run}/scan`, as lines of JSON while it runs."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from rolltape.viewer.answers import Problem, bad_parameter
from rolltape.viewer.endpoints.parameters import ReportId, media
from rolltape.viewer.scan import MAX_ROWS, ROWS, read_condition, scan
from rolltape.viewer.views import Views


def router(views: Views) -> APIRouter:
    """`runs/{run}/scan`."""
    api = APIRouter()
    lock = views.library.lock

    @api.get("/runs/{run}/scan", responses=media("application/x-ndjson"))
    def tokens(run: str, where: str, rep: ReportId = None, limit: int = ROWS) -> Response:
        if not 1 <= limit <= MAX_ROWS:
            raise bad_parameter("limit", f"1 to {MAX_ROWS}")
        node = read_condition(where)
        with lock:
            pair = views.pair(run, rep)
        if pair.report is None:
            raise Problem(404, "unknown report", "no report of this tape is open", what="report")
        lines = scan(pair.report, node, limit=limit, lock=lock)
        return StreamingResponse(
            lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"}
        )

    return api
