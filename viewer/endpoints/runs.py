"""Runs: which there are, and the overview of one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rolltape.viewer.answers import json_answer
from rolltape.viewer.endpoints.parameters import ReportId
from rolltape.viewer.views import Views


def router(views: Views) -> APIRouter:
    """`runs` and `runs/{run}`."""
    api = APIRouter()
    lock = views.library.lock

    @api.get("/runs")
    def runs(request: Request) -> Response:
        with lock:
            return json_answer(request, views.runs())

    @api.get("/runs/{run}")
    def run(request: Request, run: str, rep: ReportId = None) -> Response:
        with lock:
            pair = views.pair(run, rep)
            return views.answer(request, pair, lambda: views.overview(pair))

    return api
