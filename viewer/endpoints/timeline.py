"""The schedule: a window of steps, one step, the choices of kernels."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from rolltape.viewer.answers import Problem, bad_parameter
from rolltape.viewer.endpoints.parameters import ReportId, media, open_tape_of
from rolltape.viewer.rows import step_detail
from rolltape.viewer.tactics import tactics
from rolltape.viewer.timeline import MAX_SPANS, exported, timeline
from rolltape.viewer.views import Views

StepNumber = Annotated[int, Path(ge=0, le=(1 << 62))]
#: A time, ns since the epoch, or a number of a step.
Time = Annotated[int | None, Query(ge=0, le=(1 << 62))]

_EXPORTS = media("application/json", "text/csv")


def router(views: Views) -> APIRouter:
    """`runs/{run}/timeline`, `/steps/{engine}/{step}`, `/tactics`."""
    api = APIRouter(prefix="/runs/{run}")
    lock = views.library.lock

    @api.get("/timeline", responses=_EXPORTS)
    def window(
        request: Request,
        run: str,
        rep: ReportId = None,
        t0: Time = None,
        t1: Time = None,
        lanes: Annotated[str | None, Query(max_length=8192)] = None,
        max_spans: int = 10_000,
        format: str = "json",
    ) -> Response:
        if format not in ("json", "perfetto", "csv"):
            raise bad_parameter("format", "json, perfetto or csv")
        if max_spans < 0:
            raise bad_parameter("max_spans", f"0 to {MAX_SPANS}")
        if max_spans > MAX_SPANS:
            raise Problem(
                413,
                "window too large",
                f"{max_spans} spans; at most {MAX_SPANS} at a time",
                field="max_spans",
                limit=MAX_SPANS,
            )
        names = lanes.split(",") if lanes else None
        with lock:
            pair = views.pair(run, rep)
            tape = open_tape_of(pair)
            if format != "json":
                name = "timeline.csv" if format == "csv" else "timeline.json"
                media_type = "text/csv" if format == "csv" else "application/json"
                headers = {"content-disposition": f'attachment; filename="{name}"'}

                def saved() -> tuple[bytes, dict[str, str]]:
                    return exported(tape, format, t0=t0, t1=t1, lanes=names), headers

                return views.answer_bytes(request, pair, saved, media_type)

            def shown() -> tuple[bytes, dict[str, str]]:
                found = timeline(tape, t0=t0, t1=t1, lanes=names, max_spans=max_spans)
                # after the tables were read
                found["problems"] = pair.problems
                # Python's own integers and texts alone: nothing to convert, and there are many
                text = json.dumps(found, allow_nan=False, separators=(",", ":"))
                return text.encode(), {}

            return views.answer_bytes(request, pair, shown, "application/json")

    @api.get("/steps/{engine}/{step}")
    def one_step(
        request: Request, run: str, engine: str, step: StepNumber, rep: ReportId = None
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            tape = open_tape_of(pair)
            return views.answer(request, pair, lambda: step_detail(tape, engine, step))

    @api.get("/tactics")
    def choices(
        request: Request,
        run: str,
        rep: ReportId = None,
        q: Annotated[str | None, Query(max_length=1024)] = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            return views.answer(
                request, pair, lambda: tactics(pair, query=q, after=after, limit=limit)
            )

    return api
