"""Parameters that several endpoints share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query, Request

from rolltape.store.sequences import Tape
from rolltape.viewer.answers import Problem, bad_parameter, unknown
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.library import Pair

#: Which report; without it, the one that the run opens with.
ReportId = Annotated[str | None, Query(alias="rep", max_length=256)]


def media(*types: str) -> dict[int | str, dict[str, Any]]:
    """What an endpoint that does not only answer JSON says of itself: `responses=media(...)`."""
    schemas = {t: {"type": "object" if t == "application/json" else "string"} for t in types}
    return {200: {"content": {t: {"schema": schema} for t, schema in schemas.items()}}}


#: Of an endpoint that answers named arrays, see `rolltape.viewer.arrays`.
ARRAYS = media("application/x-safetensors")

#: Numbers in an address are at most this large, so that they fit the columns they are compared to.
MAX_INT = (1 << 62) - 1
MAX_FLOAT = 3e38
#: Characters of a value in an address.
MAX_TEXT = 16_384

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,256}")


def checked(field: str, name: str) -> str:
    """An id from the address.

    Raises:
        Problem: 400, it cannot be one.
    """
    if not _ID.fullmatch(name):
        raise bad_parameter(field, "letters, digits and _ . : - only, at most 256")
    return name


def plain(request: Request) -> None:
    """Refuse what no parameter can mean; runs before every endpoint.

    Raises:
        Problem: 400, a number that does not fit 63 bits or a float32, or is none; a NUL or half a
            character; too long.
    """
    kinds: Mapping[str, str] = request.app.state.numbers
    for field, text in (*request.path_params.items(), *request.query_params.multi_items()):
        if len(text) > MAX_TEXT:
            raise bad_parameter(field, f"at most {MAX_TEXT} characters")
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise bad_parameter(field, "a character that is none")
        limit = {"integer": MAX_INT, "number": MAX_FLOAT}.get(kinds.get(field, ""))
        if limit is not None and not _fits(text, limit):
            raise bad_parameter(field, f"a number from -{limit:g} to {limit:g}")


def _fits(text: str, limit: float) -> bool:
    if len(text) > 64:
        return False
    try:
        value = int(text) if isinstance(limit, int) else float(text)
    except ValueError:
        return True  # what it is instead, if it is anything, the endpoint's type says
    return abs(value) <= limit  # NaN is not


def open_tape_of(pair: Pair) -> Tape:
    """The tape itself, for what no report holds.

    Raises:
        Problem: 404, it is not open; with the command that opens it.
    """
    if pair.tape is None:
        paths = [str(pair.side("a").get("path") or "TAPE_A"), str(pair.report and pair.report.path)]
        command = shlex.join(["rolltape", "view", *paths])
        raise unknown("tape", pair.run.name, f"only its report is open: {command} opens both")
    return pair.tape


def checked_window(n: int, start: int, end: int | None) -> tuple[int, int]:
    """A range of positions from the address; None is up to the end.

    Raises:
        Problem: 400, it is not within the sequence.
    """
    stop = n if end is None else end
    if not 0 <= start <= n:
        raise bad_parameter("start", f"0 to {n}")
    if not start <= stop <= n:
        raise bad_parameter("end", f"{start} to {n}")
    return start, stop


def check_size(start: int, end: int) -> None:
    """How much of a sequence one answer holds.

    Raises:
        Problem: 413, more than `MAX_WINDOW` positions.
    """
    if end - start > MAX_WINDOW:
        text = f"{end - start} positions; at most {MAX_WINDOW} at a time"
        raise Problem(413, "window too large", text, field="end", limit=MAX_WINDOW)


def check_position(position: int, n: int) -> None:
    """A position of a sequence of n.

    Raises:
        Problem: 400, it has none such.
    """
    if not 0 <= position < n:
        raise bad_parameter("position", f"the sequence has positions 0 to {n - 1}")
