"""The HTTP interface: a handful of read-only endpoints over the library, and the static files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from rolltape import __version__
from rolltape.store.errors import RolltapeError
from rolltape.viewer.answers import Problem, bad_parameter, json_answer, tagged
from rolltape.viewer.assets import assets
from rolltape.viewer.columns import MAX_WINDOW, window
from rolltape.viewer.detail import token_detail
from rolltape.viewer.library import Library
from rolltape.viewer.security import Guard, check_token
from rolltape.viewer.views import Views

ReportId = Annotated[str | None, Query(alias="rep")]

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,256}")


def make_app(
    paths: Iterable[str | os.PathLike[str]],
    *,
    token: str | None = None,
    allowed_hosts: Iterable[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> FastAPI:
    """The viewer as an ASGI application; it can be mounted under any prefix.

    Args:
        paths: tapes, diff reports, or folders that hold some.
        token: what every request must carry; needed when others can reach the server.
        allowed_hosts: host names to answer to; None is loopback, or any name with a token.
        tokenizer: `tokenizer.json`, or its folder, for every run; None looks in the model folder
            that the tape names.

    Raises:
        NotATapeError: a path is neither a tape nor a report nor a folder.
        UsageError: a bad token or tokenizer.
    """
    if token is not None:
        check_token(token)
    library = Library(
        [Path(p) for p in paths], tokenizer=Path(tokenizer) if tokenizer is not None else None
    )
    app = FastAPI(
        title="rolltape", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(Guard, token=token, allowed_hosts=allowed_hosts)
    _add_errors(app)
    _add_api(app, library)
    _add_assets(app)
    return app


def _add_api(app: FastAPI, library: Library) -> None:
    views = Views(library)

    @app.get("/api/runs")
    def runs(request: Request) -> Response:
        with library.lock:
            return json_answer(request, views.runs())

    @app.get("/api/runs/{run}")
    def run(request: Request, run: str, rep: ReportId = None) -> Response:
        with library.lock:
            return json_answer(request, views.overview(views.pair(run, rep)))

    @app.get("/api/runs/{run}/seqs")
    def seqs(
        request: Request,
        run: str,
        rep: ReportId = None,
        sort: str | None = None,
        q: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Response:
        with library.lock:
            pair = views.pair(run, rep)
            page = views.page(pair, sort=sort, query=q, limit=limit, after=after)
            return json_answer(request, page)

    @app.get("/api/runs/{run}/seqs/{seq}")
    def seq(
        request: Request,
        run: str,
        seq: str,
        rep: ReportId = None,
        sort: str | None = None,
        q: str | None = None,
    ) -> Response:
        with library.lock:
            return json_answer(request, views.sequence(run, rep, _checked("seq", seq), sort, q))

    @app.get("/api/runs/{run}/seqs/{seq}/tokens")
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
        with library.lock:
            pair = views.pair(run, rep)
            columns = views.columns(pair, _checked("seq", seq))
            if not 0 <= start <= columns.n:
                raise bad_parameter("start", f"0 to {columns.n}")
            if not start <= end <= columns.n:
                raise bad_parameter("end", f"{start} to {columns.n}")
            names = cols.split(",") if cols else None
            body = window(pair, columns, start=start, end=end, names=names)
        return tagged(request, body, "application/x-safetensors")

    @app.get("/api/runs/{run}/seqs/{seq}/tokens/{position}")
    def one_token(
        request: Request, run: str, seq: str, position: int, rep: ReportId = None
    ) -> Response:
        with library.lock:
            pair = views.pair(run, rep)
            columns = views.columns(pair, _checked("seq", seq))
            if not 0 <= position < columns.n:
                raise bad_parameter("position", f"the sequence has positions 0 to {columns.n - 1}")
            return json_answer(request, token_detail(pair, seq, columns, position))

    @app.get("/api/runs/{run}/seqs/{seq}/over")
    def over(
        request: Request,
        run: str,
        seq: str,
        threshold: float,
        start: Annotated[int, Query(alias="from")],
        back: bool = False,
        rep: ReportId = None,
    ) -> Response:
        with library.lock:
            columns = views.columns(views.pair(run, rep), _checked("seq", seq))
            return json_answer(request, views.over(columns, threshold, start, back=back))


def _add_assets(app: FastAPI) -> None:
    files = assets()

    @app.get("/")
    def index(request: Request) -> Response:
        return tagged(request, *files["index.html"])

    @app.get("/static/{name:path}")
    def static(request: Request, name: str) -> Response:
        if name not in files:
            raise Problem(404, "unknown file", f"the viewer has no file {name!r}")
        return tagged(request, *files[name])


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    def problem(_: Request, error: Problem) -> Response:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return bad_parameter(str(first["loc"][-1]), str(first["msg"])).answer()

    @app.exception_handler(RolltapeError)
    def damaged(_: Request, error: RolltapeError) -> Response:
        return Problem(500, type(error).__name__, str(error)).answer()

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> Response:
        return Problem(error.status_code, "no such address", str(error.detail)).answer()


def _checked(field: str, name: str) -> str:
    if not _ID.fullmatch(name):
        raise bad_parameter(field, "letters, digits and _ . : - only, at most 256")
    return name
