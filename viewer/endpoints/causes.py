"""Findings and causes: hypotheses with their evidence, of a run and of one sequence."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rolltape.viewer.answers import json_answer
from rolltape.viewer.causes import Board
from rolltape.viewer.endpoints.parameters import ReportId, checked
from rolltape.viewer.library import Pair
from rolltape.viewer.notices import notices
from rolltape.viewer.overview import run_summary
from rolltape.viewer.paired import MOST
from rolltape.viewer.views import Views

_KEPT = 4


def router(views: Views) -> APIRouter:
    """`runs/{run}/causes` and `runs/{run}/seqs/{seq}/causes`."""
    api = APIRouter(prefix="/runs/{run}")
    lock = views.library.lock
    kept: OrderedDict[tuple[object, ...], Board] = OrderedDict()

    def board(pair: Pair) -> Board:
        reports = [r.uuid for r in pair.run.reports]
        shown = pair.report.uuid if pair.report is not None else None
        key = (pair.run.id, shown, *reports, views.library.generation)
        if key not in kept:
            others = (views.library.pair(pair.run.id, uuid) for uuid in reports[-MOST:])
            kept[key] = Board(pair, others)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def around(pair: Pair) -> dict[str, Any]:
        return {"run": run_summary(pair), "notices": notices(pair), "problems": pair.problems}

    @api.get("/causes")
    def of_run(request: Request, run: str, rep: ReportId = None) -> Response:
        with lock:
            pair = views.pair(run, rep)
            return json_answer(request, board(pair).plain() | around(pair))

    @api.get("/seqs/{seq}/causes")
    def of_sequence(request: Request, run: str, seq: str, rep: ReportId = None) -> Response:
        with lock:
            pair = views.pair(run, rep)
            found = board(pair).of_sequence(pair, checked("seq", seq))
            return json_answer(request, found | around(pair))

    return api
