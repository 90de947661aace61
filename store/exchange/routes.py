"""Routes of a dump: one canonical array, and which of its rows can be what a router chose.

An array of the right shape proves nothing. k chosen experts are k different ones, so a row with a
repeated id, above all a row of zeros, is a buffer that nobody wrote. What fails is left out row by
row and counted; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from rolltape.store.codecs import MAX_EXPERTS
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.exchange.rows import Carried, Row

#: Why a (position, layer) has no route; index is the code, 0 is a valid row.
REASONS = (
    "",
    "missing (-1)",
    "partly negative",
    "zeros",
    "repeated expert",
    "placeholder 0..k-1",
    f"an id above {MAX_EXPERTS:,}",
)
_MISSING, _PARTLY, _ZEROS, _REPEATED, _PLACEHOLDER, _ABOVE = range(1, 7)

#: Below this many rows a one-expert array of zeros may be what happened.
_PLAUSIBLE_ZEROS = 16


def route_array(value: Any, rows: int) -> np.ndarray:
    """Expert ids [n, layers, k] from an array, nested lists, or a list of pieces of any of them.

    Resumed rollouts leave lists that mix arrays, lists and None. A None among rows is one missing
    row; one None among pieces stands for as many rows as `rows` lacks.

    Args:
        value: as the dump holds it.
        rows: rows expected, T - 1.

    Returns:
        int64 or narrower, -1 in missing rows.

    Raises:
        SchemaError: not of that form; the message is a reason without a place.
    """
    if isinstance(value, np.ndarray):
        return _checked(value)
    if not isinstance(value, list):
        raise SchemaError(f"a {type(value).__name__}")
    parts: list[np.ndarray | None] = []
    of_rows = False
    for item in value:
        if item is None or (isinstance(item, list) and not item):
            parts.append(None)
            continue
        try:
            array = np.asarray(item)
        except ValueError:
            array = route_array(item, 0)  # a piece that is ragged itself
        if array.ndim == 2:
            of_rows = True
            array = array[None]
        if array.ndim == 4 and array.shape[0] == 1:
            array = array[0]
        parts.append(_checked(array))
    known = [part for part in parts if part is not None]
    if not known:
        raise SchemaError("nothing but None")
    shape = known[0].shape[1:]
    if any(part.shape[1:] != shape for part in known):
        raise SchemaError("pieces of different shapes")
    absent = len(parts) - len(known)
    hole = 1 if of_rows else rows - sum(len(part) for part in known)
    if absent and not of_rows and (absent > 1 or hole < 0):
        raise SchemaError("None pieces of unknown length")
    fill = np.full((max(hole, 0), *shape), -1, np.int64)
    return np.concatenate([fill if part is None else part for part in parts])


def _checked(array: np.ndarray) -> np.ndarray:
    if array.ndim != 3:
        raise SchemaError(f"shape {list(array.shape)} instead of [tokens, layers, k]")
    if array.dtype.kind not in "iu":
        raise SchemaError(f"{array.dtype} instead of integers")
    if not array.shape[1] or not array.shape[2]:
        raise SchemaError(f"shape {list(array.shape)}: no layer or no expert")
    return array


def judge(ids: np.ndarray, *, placeholders: bool) -> np.ndarray:
    """Why each row is not a route, uint8 [n, layers] (index into `REASONS`, 0 where it is one).

    Args:
        ids: integers [n, layers, k].
        placeholders: whether the framework fills rows without a route with 0..k-1.
    """
    n, layers, k = ids.shape
    code = np.zeros((n, layers), np.uint8)
    if not n:
        return code
    if k > 1:
        ordered = np.sort(ids, -1)
        code[(ordered[..., 1:] == ordered[..., :-1]).any(-1)] = _REPEATED
    low, high = ids.min(-1), ids.max(-1)
    if k > 1 or (n * layers >= _PLAUSIBLE_ZEROS and not high.any() and not low.any()):
        code[(high == 0) & (low == 0)] = _ZEROS
    if placeholders and layers * k > 4:
        code[(ids == np.arange(k)).all((1, 2))] = _PLACEHOLDER
    code[high > MAX_EXPERTS - 1] = _ABOVE
    code[low < 0] = _PARTLY
    code[(ids == -1).all(-1)] = _MISSING
    return code


@dataclass(frozen=True)
class Found:
    """Routes that may be written.

    Args:
        ids: integers [T - 1, layers, k], 0 where there is no route.
        code: uint8 [T - 1, layers], index into `REASONS`.
    """

    ids: np.ndarray
    code: np.ndarray

    def missing(self, layers: tuple[int, ...]) -> list[list[Any]]:
        """[start, n, layer or None, reason] of the ranges without a route."""
        out: list[list[Any]] = []
        whole = (self.code == self.code[:, :1]).all(1) if len(self.code) else np.zeros(0, bool)
        out += _runs(np.where(whole, self.code[:, 0], 0), None)
        for column, layer in enumerate(layers):
            out += _runs(np.where(whole, 0, self.code[:, column]), layer)
        return out


def _runs(code: np.ndarray, layer: int | None) -> list[list[Any]]:
    edges = np.flatnonzero(np.diff(code)) + 1
    bounds = [0, *edges.tolist(), len(code)]
    return [
        [start, stop - start, layer, REASONS[code[start]]]
        for start, stop in pairwise(bounds)
        if stop > start and code[start]
    ]


class Survey:
    """Looks at the routes of all sequences of a file before any is written.

    Args:
        carried: gets the counts.
        name: field of the dump.
        placeholders: see `judge`.
        short: whether the arrays begin at position 0 even if they end early.
    """

    def __init__(
        self, carried: Carried, *, name: str, placeholders: bool = False, short: bool = False
    ) -> None:
        self._carried, self._name = carried, name
        self._placeholders, self._short = placeholders, short
        self._shape: tuple[int, int] | None = None
        self._columns: np.ndarray | None = None
        self.largest = -1

    def look(self, rows: list[Row]) -> None:
        """Find the shape that most sequences have, the layers with any route, the largest id."""
        shapes: Counter[tuple[int, int]] = Counter()
        arrays = 0
        for row in rows:
            array = self._array(row, count=True)
            if array is not None:
                shapes[array.shape[1], array.shape[2]] += 1
                arrays += 1
        if not arrays:
            return
        self._shape = shapes.most_common(1)[0][0]
        self._columns = np.zeros(self._shape[0], bool)
        others = arrays - shapes[self._shape]
        if others:
            layers, k = self._shape
            self._carried.drop(
                self._name, f"sequences: another shape than {layers} layers x {k} experts", others
            )
        seen: dict[str, str] = {}
        alike = 0
        for row in rows:
            found = self.found(row, cut=False)
            if found is None:
                continue
            for code, count in enumerate(np.bincount(found.code.ravel(), minlength=len(REASONS))):
                if code and count:
                    self._carried.drop(self._name, f"rows: {REASONS[code]}", int(count))
            good = found.code == 0
            if not good.any():
                if row.length > 1:
                    self._carried.drop(self._name, "sequences: no row of the array is a route")
                continue
            self._columns |= good.any(0)
            self.largest = max(self.largest, int(found.ids[good].max()))
            self._carried.keep(self._name, "routes.ids", int(good.sum()))
            content = xxhash.xxh3_128_hexdigest(found.ids.tobytes())
            tokens = xxhash.xxh3_128_hexdigest(row.ids[: len(found.ids)].tobytes())
            alike += seen.setdefault(content, tokens) != tokens
        if alike:
            self._carried.note(
                f"{self._name}: {alike} sequences have exactly the routes of another sequence "
                "with other tokens; they may be another request's"
            )
        empty = np.flatnonzero(~self._columns)
        if len(empty) and self._columns.any():
            self._carried.drop(self._name, "layers: no sequence has a route there", len(empty))

    @property
    def columns(self) -> np.ndarray:
        """Columns of the dump that hold any route, ascending."""
        return np.flatnonzero(self._columns) if self._columns is not None else np.zeros(0, int)

    @property
    def width(self) -> int:
        """Layers of the arrays of the dump; 0 where it has none."""
        return self._shape[0] if self._shape else 0

    @property
    def k(self) -> int:
        """Experts a token; 0 where the dump has no routes."""
        return self._shape[1] if self._shape else 0

    def found(self, row: Row, *, cut: bool = True) -> Found | None:
        """The routes of a sequence, None where none can be written.

        Args:
            row: the sequence.
            cut: leave out the layers in which no sequence has a route.
        """
        array = self._array(row, count=False)
        if array is None or array.shape[1:] != self._shape:
            return None
        code = judge(array, placeholders=self._placeholders)
        ids = np.where(code[..., None] == 0, array, 0)
        if not cut:
            return Found(ids, code)
        return Found(ids[:, self.columns], code[:, self.columns]) if (code == 0).any() else None

    def _array(self, row: Row, *, count: bool) -> np.ndarray | None:
        if row.routes is None or row.length < 2:
            return None
        rows = row.length - 1
        try:
            array = route_array(row.routes, rows)
            # one row more than T - 1 is the last token's, which no engine uses
            if len(array) > row.length or (len(array) < rows and not self._short):
                raise SchemaError(f"rows do not match: {len(array)} for {row.length} tokens")
        except SchemaError as error:
            if count:
                # the counts of one kind of failure belong together, whatever the numbers
                self._carried.drop(self._name, f"sequences: {_kind(str(error))}")
                self._carried.note(f"{row.where}: {self._name}: {error}")
            return None
        if len(array) < rows:
            if count:
                self._carried.drop(
                    self._name, "positions: behind the last row of the array", rows - len(array)
                )
            tail = np.full((rows - len(array), *array.shape[1:]), -1, np.int64)
            array = np.concatenate([array, tail])
        return array[:rows]


def _kind(reason: str) -> str:
    return reason.partition(":")[0] if reason.startswith("rows") else reason


def layer_numbers(text: str) -> tuple[int, ...]:
    """`3:6,9` as (3, 4, 5, 9): ranges without their end, and single numbers.

    Raises:
        UsageError: not of that form, or not ascending.
    """
    out: list[int] = []
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        if not first.isdecimal() or (colon and not last.isdecimal()):
            raise UsageError(
                f"--layers {text}: not layer numbers", hint="for example 3:61 or 0,2,4"
            )
        out += range(int(first), int(last)) if colon else [int(first)]
    if not out or any(a >= b for a, b in pairwise(out)):
        raise UsageError(f"--layers {text}: layers must ascend", hint="for example 3:61 or 0,2,4")
    return tuple(out)
