"""Sequences: the list, one of them, a window of its tokens, one token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rolltape.viewer.answers import json_answer
from rolltape.viewer.columns import next_of, window
from rolltape.viewer.detail import token_detail
from rolltape.viewer.endpoints.parameters import (
    ARRAYS,
    ReportId,
    check_position,
    check_size,
    checked,
    checked_window,
    media,
)
from rolltape.viewer.library import Pair
from rolltape.viewer.listing import LIMIT, MAX_TABLE
from rolltape.viewer.views import Views

_TYPES = {"arrow": "application/vnd.apache.arrow.stream", "csv": "text/csv"}


def router(views: Views) -> APIRouter:
    """`runs/{run}/seqs` and what is under it."""
    api = APIRouter(prefix="/runs/{run}/seqs")
    lock = views.library.lock

    @api.get("", responses=media("application/json", *_TYPES.values()))
    def seqs(
        request: Request,
        run: str,
        rep: ReportId = None,
        sort: str | None = None,
        q: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        facets: str | None = None,
        to: Annotated[Literal["json", "arrow", "csv"], Query(alias="format")] = "json",
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            most = limit if limit is not None else LIMIT if to == "json" else MAX_TABLE
            cut: dict[str, Any] = {"sort": sort, "query": q, "limit": most, "after": after}
            if to == "json":
                return views.answer(request, pair, lambda: views.page(pair, facets=facets, **cut))
            return views.answer_bytes(
                request, pair, lambda: _table(views, pair, to, cut), _TYPES[to]
            )

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
            pair, name = views.pair(run, rep), checked("seq", seq)
            return views.answer(request, pair, lambda: views.sequence(pair, name, sort, q))

    @api.get("/{seq}/tokens", responses=ARRAYS)
    def tokens(
        request: Request,
        run: str,
        seq: str,
        start: int,
        end: int,
        rep: ReportId = None,
        cols: str | None = None,
    ) -> Response:
        check_size(start, end)
        with lock:
            pair = views.pair(run, rep)
            name = checked("seq", seq)
            names = cols.split(",") if cols else None

            def make() -> tuple[bytes, dict[str, str]]:
                columns = views.columns(pair, name)
                checked_window(columns.n, start, end)
                return window(pair, columns, name, start=start, end=end, names=names), {}

            return views.answer_bytes(request, pair, make, "application/x-safetensors")

    @api.get("/{seq}/tokens/{position}")
    def one_token(
        request: Request, run: str, seq: str, position: int, rep: ReportId = None
    ) -> Response:
        with lock:
            pair = views.pair(run, rep)
            name = checked("seq", seq)

            def make() -> dict[str, Any]:
                columns = views.columns(pair, name)
                check_position(position, columns.n)
                return token_detail(pair, name, columns, position)

            return views.answer(request, pair, make)

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
            return json_answer(request, next_of(columns.over(threshold), start, back=back))

    return api


def _table(views: Views, pair: Pair, to: str, cut: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Rows of the list for another program; the cursor of the next ones is a header."""
    body, cursor = views.listing(pair).export(to=to, **cut)
    headers = {"content-disposition": f'attachment; filename="sequences.{to}"'}
    return body, headers if cursor is None else headers | {"rolltape-next": cursor}
