"""Sketches of activations as a tape holds them; what they mean is in `rolltape.recorder.sketch`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.store import codecs
from rolltape.store.errors import SchemaError


@dataclass(frozen=True)
class Sketched:
    """Sketches of one site over positions [start, start + n).

    Args:
        start: first position.
        dtype: torch dtype name that the rows had.
        width: values of a row.
        hashes: uint64 [n], of the float32 bytes of a row.
        projections: float32 [n, K].
    """

    start: int
    dtype: str
    width: int
    hashes: np.ndarray
    projections: np.ndarray


def read_sketches(rows: Iterable[Any], length: int, id_: str) -> dict[str, list[Sketched]]:
    """Spans by site, in position order, from the rows of `activations` of a sequence.

    Args:
        rows: fragments.
        length: positions of the sequence; what reaches further is left out.
        id_: of the sequence, for messages.

    Raises:
        SchemaError: an encoding that this version does not know, or bytes that do not fit.
    """
    out: dict[str, list[Sketched]] = {}
    found = [row for row in rows if row["encoding"] is not None]
    for encoding in {row["encoding"] for row in found} - {codecs.SKETCH}:
        raise SchemaError(
            f"activations of {id_}: unknown encoding {encoding!r}", hint="upgrade rolltape"
        )
    for row in sorted(found, key=lambda row: int(row["start"])):
        start, n = int(row["start"]), int(row["n"])
        left = length - start
        if left <= 0 < n:
            continue
        data, name = row["data"], f"activations.data of {id_}"
        hashes, projections = codecs.decode_sketch(data, n, field=name)
        span = Sketched(start, row["dtype"], row["width"], hashes[:left], projections[:left])
        out.setdefault(row["site"], []).append(span)
    return out
