"""The ASGI application: endpoints, static files, errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from rolltape import __version__
from rolltape.store.errors import RolltapeError
from rolltape.viewer.answers import Problem, bad_parameter, json_answer
from rolltape.viewer.assets import assets
from rolltape.viewer.basket import Notes
from rolltape.viewer.endpoints import (
    basket,
    causes,
    layers,
    runs,
    scan,
    sequences,
    sides,
    timeline,
    weights,
)
from rolltape.viewer.endpoints.parameters import plain
from rolltape.viewer.library import Library
from rolltape.viewer.openapi import describe, numbers
from rolltape.viewer.security import Guard, check_token
from rolltape.viewer.views import Views

_AREAS = (runs, sequences, scan, layers, causes, timeline, weights, sides)


def make_app(
    paths: Iterable[str | os.PathLike[str]],
    *,
    token: str | None = None,
    allowed_hosts: Iterable[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    notes: str | os.PathLike[str] | None = None,
    follow: bool = False,
) -> FastAPI:
    """The viewer as an ASGI application; it can be mounted under any prefix.

    Args:
        paths: tapes, diff reports, or folders that hold some.
        token: what every request must carry; needed when others can reach the server.
        allowed_hosts: host names to answer to; None is loopback, or any name with a token.
        tokenizer: `tokenizer.json`, or its folder, for every run; None looks in the model folder
            that the tape names.
        notes: JSON file that the basket is kept in, the only thing that is ever written; None
            leaves it to the browser.
        follow: open tapes and reports that appear in the folders later.

    Raises:
        NotATapeError: a path is neither a tape nor a report nor a folder.
        UsageError: a bad token, tokenizer or file of notes.
    """
    if token is not None:
        check_token(token)
    library = Library(
        [Path(p) for p in paths],
        tokenizer=Path(tokenizer) if tokenizer is not None else None,
        follow=follow,
    )
    kept = Notes(Path(notes)) if notes is not None else None
    app = FastAPI(
        title="rolltape", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    writes = [f"/api{basket.ADDRESS}"] if kept is not None else []
    app.add_middleware(Guard, token=token, allowed_hosts=allowed_hosts, writes=writes)
    _add_errors(app)
    _add_api(app, library)
    app.include_router(basket.router(kept), prefix="/api", dependencies=[Depends(plain)])
    _add_description(app)
    _add_assets(app)
    return app


def _add_api(app: FastAPI, library: Library) -> None:
    views = Views(library)
    for area in _AREAS:
        app.include_router(area.router(views), prefix="/api", dependencies=[Depends(plain)])


def _add_description(app: FastAPI) -> None:
    description = describe(app)
    app.state.numbers = numbers(description)

    @app.get("/api/openapi.json", include_in_schema=False)
    def openapi(request: Request) -> Response:
        return json_answer(request, description)


def _add_assets(app: FastAPI) -> None:
    files = assets()

    @app.get("/", include_in_schema=False)
    def index(request: Request) -> Response:
        return files["index.html"].answer(request)

    @app.get("/static/{name:path}", include_in_schema=False)
    def static(request: Request, name: str) -> Response:
        if name not in files:
            raise Problem(404, "unknown file", f"the viewer has no file {name!r}")
        return files[name].answer(request)


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
