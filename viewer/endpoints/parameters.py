"""Parameters that several endpoints share."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query

from rolltape.viewer.answers import bad_parameter

#: Which report; without it, the newest.
ReportId = Annotated[str | None, Query(alias="rep", max_length=256)]

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,256}")


def checked(field: str, name: str) -> str:
    """An id from the address.

    Raises:
        Problem: 400, it cannot be one.
    """
    if not _ID.fullmatch(name):
        raise bad_parameter(field, "letters, digits and _ . : - only, at most 256")
    return name
