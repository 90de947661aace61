"""Two reports of one tape next to each other."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rolltape.viewer.answers import json_answer, tagged
from rolltape.viewer.columns import next_of
from rolltape.viewer.endpoints.parameters import ARRAYS, check_size, checked, checked_window
from rolltape.viewer.library import Pair
from rolltape.viewer.overview import run_summary
from rolltape.viewer.sides import Sides, info, load_sides, window
from rolltape.viewer.views import Views

_KEPT = 4

First = Annotated[str, Query(alias="a", max_length=256)]
Second = Annotated[str, Query(alias="b", max_length=256)]


def router(views: Views) -> APIRouter:
    """`runs/{run}/seqs/{seq}/sides` and what is under it."""
    api = APIRouter(prefix="/runs/{run}/seqs/{seq}/sides")
    lock = views.library.lock
    kept: OrderedDict[tuple[object, ...], Sides] = OrderedDict()

    def both(run: str, a: str, b: str, seq: str) -> tuple[Pair, Pair, Sides]:
        one, other = views.pair(run, checked("a", a)), views.pair(run, checked("b", b))
        key = (run, a, b, checked("seq", seq), views.library.generation)
        if key not in kept:
            kept[key] = load_sides(one, other, seq)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return one, other, kept[key]

    @api.get("", responses=ARRAYS)
    def sides(
        request: Request, run: str, seq: str, a: First, b: Second, start: int, end: int
    ) -> Response:
        check_size(start, end)
        with lock:
            _, _, found = both(run, a, b, seq)
            checked_window(found.n, start, end)
            body = window(found, start=start, end=end)
        return tagged(request, body, "application/x-safetensors")

    @api.get("/info")
    def facts(request: Request, run: str, seq: str, a: First, b: Second) -> Response:
        with lock:
            one, other, found = both(run, a, b, seq)
            answer = info(one, other, found, seq) | {"run": run_summary(one)}
            return json_answer(request, answer)

    @api.get("/over")
    def over(
        request: Request,
        run: str,
        seq: str,
        a: First,
        b: Second,
        threshold: float,
        start: Annotated[int, Query(alias="from")],
        show: Literal["a", "b", "diff"] = "diff",
        back: bool = False,
    ) -> Response:
        with lock:
            _, _, found = both(run, a, b, seq)
            return json_answer(request, next_of(found.over(show, threshold), start, back=back))

    return api
