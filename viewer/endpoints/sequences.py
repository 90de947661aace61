"""Sequences: the list, one of them, a window of its tokens, one token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rolltape.viewer.answers import Problem, bad_parameter, json_answer, tagged
from rolltape.viewer.columns import MAX_WINDOW, window
from rolltape.viewer.detail import token_detail
from rolltape.viewer.endpoints.parameters import ReportId, checked
from rolltape.viewer.views import Views


def router(views: Views) -> APIRouter:
    """`runs/{run}/seqs` and what is under it."""
    api = APIRouter(prefix="/runs/{run}/seqs")
    lock = views.library.lock

    @api.get("")
    def seqs(
        request: Request,
        run: str,
        rep: ReportId = None,
        sort: str | None = None,
        q: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            page = views.page(pair, sort=sort, query=q, limit=limit, after=after)
            return json_answer(request, page)

    @api.get("/{seq}")
    def seq(
        request: Request,
        run: str,
        seq: str,
        rep: ReportId = None,
        sort: str | None = None,
        q: str | None = None,
    ) -> Response:
        with lock:
            return json_answer(request, views.sequence(run, rep, checked("seq", seq), sort, q))

    @api.get("/{seq}/tokens")
    def tokens(
        request: Request,
        run: str,
        seq: str,
        start: int,
        end: int,
        rep: ReportId = None,
        cols: str | None = None,
    ) -> Response:
        if end - start > MAX_WINDOW:
            raise Problem(
                413,
                "window too large",
                f"{end - start} positions; at most {MAX_WINDOW} at a time",
                field="end",
                limit=MAX_WINDOW,
            )
        with lock:
            pair = views.pair(run, rep)
            columns = views.columns(pair, checked("seq", seq))
            if not 0 <= start <= columns.n:
                raise bad_parameter("start", f"0 to {columns.n}")
            if not start <= end <= columns.n:
                raise bad_parameter("end", f"{start} to {columns.n}")
            names = cols.split(",") if cols else None
            body = window(pair, columns, start=start, end=end, names=names)
        return tagged(request, body, "application/x-safetensors")

    @api.get("/{seq}/tokens/{position}")
    def one_token(
        request: Request, run: str, seq: str, position: int, rep: ReportId = None
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            columns = views.columns(pair, checked("seq", seq))
            if not 0 <= position < columns.n:
                raise bad_parameter("position", f"the sequence has positions 0 to {columns.n - 1}")
            return json_answer(request, token_detail(pair, seq, columns, position))

    @api.get("/{seq}/over")
    def over(
        request: Request,
        run: str,
        seq: str,
        threshold: float,
        start: Annotated[int, Query(alias="from")],
        back: bool = False,
        rep: ReportId = None,
    ) -> Response:
        with lock:
            columns = views.columns(views.pair(run, rep), checked("seq", seq))
            return json_answer(request, views.over(columns, threshold, start, back=back))

    return api
