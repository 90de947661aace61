"""Layers and routing of one sequence: maps, the front, and what one token went through."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rolltape.viewer.answers import bad_parameter, json_answer, tagged
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.endpoints.parameters import (
    ARRAYS,
    ReportId,
    check_position,
    check_size,
    checked,
    checked_window,
)
from rolltape.viewer.front import front
from rolltape.viewer.heat import MAX_BINS, USUAL, extent, heat
from rolltape.viewer.layers import layers, site_values, token_layers
from rolltape.viewer.library import Pair
from rolltape.viewer.routing import routing, token_routes
from rolltape.viewer.routing_states import routes_info
from rolltape.viewer.views import Views

_SAFETENSORS = "application/x-safetensors"
_Bins = Annotated[int | None, Query(ge=1, le=MAX_BINS)]


def router(views: Views) -> APIRouter:
    """Under `runs/{run}/seqs/{seq}`: `layers`, `site-values`, `heat`, `front` and routes."""
    api = APIRouter(prefix="/runs/{run}/seqs/{seq}")
    lock = views.library.lock

    def found(run: str, seq: str, rep: str | None) -> tuple[Pair, int]:
        """The run with its report, and how many positions the sequence has."""
        pair = views.pair(run, rep)
        return pair, extent(pair, checked("seq", seq))[0]

    @api.get("/layers")
    def layers_of(request: Request, run: str, seq: str, rep: ReportId = None) -> Response:
        with lock:
            return json_answer(request, layers(views.pair(run, rep), checked("seq", seq)))

    @api.get("/layers/{position}")
    def layers_at(
        request: Request, run: str, seq: str, position: int, rep: ReportId = None
    ) -> Response:
        with lock:
            pair, n = found(run, seq, rep)
            check_position(position, n)
            return json_answer(request, token_layers(pair, seq, position))

    @api.get("/site-values", responses=ARRAYS)
    def values_of(
        request: Request,
        run: str,
        seq: str,
        start: int = 0,
        end: int | None = None,
        rep: ReportId = None,
    ) -> Response:
        with lock:
            pair, n = found(run, seq, rep)
            begin, stop = checked_window(n, start, end)
            check_size(begin, stop)
            body = site_values(pair, seq, begin, stop)
        return tagged(request, body, _SAFETENSORS)

    @api.get("/heat", responses=ARRAYS)
    def heat_of(
        request: Request,
        run: str,
        seq: str,
        metric: Literal["rel_l2", "max_abs", "cosine", "ulp", "equal", "non_finite"] = "rel_l2",
        start: int = 0,
        end: int | None = None,
        sites: Annotated[str, Query(max_length=16384)] = USUAL,
        bins: _Bins = None,
        dtype: Literal["u8", "f32"] = "u8",
        rep: ReportId = None,
    ) -> Response:
        with lock:
            pair, n = found(run, seq, rep)
            begin, stop = checked_window(n, start, end)
            body = heat(
                pair,
                seq,
                metric=metric,
                start=begin,
                end=stop,
                sites=sites,
                bins=bins,
                exact=dtype == "f32",
            )
        return tagged(request, body, _SAFETENSORS)

    @api.get("/front", responses=ARRAYS)
    def front_of(
        request: Request,
        run: str,
        seq: str,
        threshold: float | None = None,
        rep: ReportId = None,
    ) -> Response:
        _check_amount("threshold", threshold)
        with lock:
            pair, n = found(run, seq, rep)
            body = front(pair, seq, n, threshold=threshold)
        return tagged(request, body, _SAFETENSORS)

    @api.get("/routes")
    def routes_of(request: Request, run: str, seq: str, rep: ReportId = None) -> Response:
        with lock:
            return json_answer(request, routes_info(views.pair(run, rep), checked("seq", seq)))

    @api.get("/routing", responses=ARRAYS)
    def routing_of(
        request: Request,
        run: str,
        seq: str,
        start: int = 0,
        end: int | None = None,
        layers: Annotated[str | None, Query(max_length=4096)] = None,
        bins: _Bins = None,
        eps: float | None = None,
        rep: ReportId = None,
    ) -> Response:
        _check_amount("eps", eps)
        wanted = _numbers("layers", layers)
        with lock:
            pair, n = found(run, seq, rep)
            begin, stop = checked_window(
                n, start, min(n, start + MAX_WINDOW) if end is None else end
            )
            check_size(begin, stop)
            body = routing(pair, seq, start=begin, end=stop, layers=wanted, bins=bins, eps=eps)
        return tagged(request, body, _SAFETENSORS)

    @api.get("/routing/{position}")
    def routing_at(
        request: Request, run: str, seq: str, position: int, rep: ReportId = None
    ) -> Response:
        with lock:
            pair, n = found(run, seq, rep)
            check_position(position, n)
            return json_answer(request, token_routes(pair, seq, position))

    return api


def _check_amount(field: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise bad_parameter(field, "a number from 0 on")


def _numbers(field: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise bad_parameter(field, "numbers of layers, separated by commas")
    return [int(part) for part in parts]
