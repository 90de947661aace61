"""Cells of a record batch as numpy, without a copy and without a Python object for each element.

The columns of a batch are taken apart once, when first asked for; a fragment is then a few slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError
from rolltape.store.index import grouped, rows_of_key
from rolltape.store.keys import Key

#: So many sequences of a batch are looked for one by one; then all of its rows are sorted.
_FEW = 8

#: Gives the cell of a row.
Cell = Callable[[int], Any]


class Cells:
    """A batch, its columns taken apart, and which rows belong to which sequence.

    Args:
        batch: any batch of a table. List cells of primitive type become numpy arrays, or `Masked`
            where they have nulls; binary cells memoryviews; all others Python objects.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._columns: dict[str, Cell] = {}
        self._asked = 0

    @property
    def nbytes(self) -> int:
        """About what it holds, with what its columns will be taken apart into."""
        # `RecordBatch.nbytes` counts slices exactly, which takes longer than the rest of a lookup
        return int(self.batch.get_total_buffer_size()) + 400 * int(self.batch.num_rows)

    @cached_property
    def rows(self) -> dict[Key, np.ndarray]:
        """Row numbers of each sequence."""
        return dict(grouped(self.batch))

    def rows_of(self, key: Key) -> np.ndarray | None:
        """Row numbers of one sequence; None if it has none here."""
        if "rows" not in self.__dict__ and self._asked < _FEW:
            self._asked += 1
            found = rows_of_key(self.batch, key)
            return found if len(found) else None
        return self.rows.get(key)

    def column(self, name: str) -> Cell:
        """The cells of a column.

        Raises:
            KeyError: there is no such column.
        """
        if name not in self._columns:
            self._columns[name] = _cells(self.batch.column(name))
        return self._columns[name]


class Fragment(Mapping[str, Any]):
    """One row of a keyed table; a cell is read when it is asked for.

    Args:
        cells: its batch.
        row: its number in the batch.
        where: (file, number) of the batch.
    """

    __slots__ = ("_cells", "row", "where")

    def __init__(self, cells: Cells, row: int, where: tuple[str, int]) -> None:
        self._cells, self.row, self.where = cells, row, where

    def __getitem__(self, name: str) -> Any:
        return self._cells.column(name)(self.row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells.batch.schema.names)

    def __len__(self) -> int:
        return len(self._cells.batch.schema)


def place(
    out: Masked, begin: int, fragment: Fragment, cell: np.ndarray | Masked, *, where: str
) -> None:
    """Put a column of a fragment into what covers the positions from `begin`.

    Positions that have a value keep it; what reaches outside is left out.

    Raises:
        SchemaError: the fragment does not fit itself.
    """
    values, valid = (
        (cell.values, cell.valid) if isinstance(cell, Masked) else (cell, np.ones(len(cell), bool))
    )
    start, end = fragment["start"], fragment["start"] + len(values)
    if len(values) != fragment["n"]:
        raise SchemaError(f"{where} has {len(values)} values at {start}, n is {fragment['n']}")
    if start < 0:
        raise SchemaError(f"{where} covers [{start}, {end}): no such positions")
    low, high = max(start, begin), min(end, begin + len(out))
    if low >= high:
        return
    inner, outer = slice(low - start, high - start), slice(low - begin, high - begin)
    fresh = valid[inner] & ~out.valid[outer]
    if fresh.all():
        out.values[outer] = values[inner]
        out.valid[outer] = True
    else:
        out.values[outer][fresh] = values[inner][fresh]
        out.valid[outer] |= fresh


def _cells(column: pa.Array) -> Cell:
    type_ = column.type
    if pa.types.is_list(type_) and pa.types.is_primitive(type_.value_type):
        return _lists(column)
    if pa.types.is_binary(type_):
        return _binary(column)
    if pa.types.is_struct(type_):  # of a batch usually few rows are looked at
        return lambda row: column[row].as_py()
    values: list[Any] = column.to_pylist()
    return values.__getitem__


def _no_rows(row: int) -> Any:
    raise IndexError(f"row {row} of an empty batch")


def _bounds(column: pa.Array) -> tuple[list[int], list[bool] | None]:
    """Offsets of the cells, as Python integers, and where there is none."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    bounds = offsets[column.offset : column.offset + len(column) + 1].tolist()
    null = column.is_null().to_numpy(zero_copy_only=False).tolist() if column.null_count else None
    return bounds or [0], null


def _lists(column: pa.Array) -> Cell:
    if not len(column):
        return _no_rows
    bounds, null = _bounds(column)
    values = column.values
    if not values.null_count:
        flat = values.to_numpy(zero_copy_only=False)

        def whole(row: int) -> np.ndarray | None:
            if null is not None and null[row]:
                return None
            cell: np.ndarray = flat[bounds[row] : bounds[row + 1]]
            return cell

        return whole
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    zero = False if pa.types.is_boolean(values.type) else 0
    filled = values.fill_null(zero).to_numpy(zero_copy_only=False)

    def masked(row: int) -> np.ndarray | Masked | None:
        if null is not None and null[row]:
            return None
        part = slice(bounds[row], bounds[row + 1])
        here = valid[part]
        return filled[part] if here.all() else Masked(filled[part], here)

    return masked


def _binary(column: pa.Array) -> Cell:
    if not len(column):
        return _no_rows
    bounds, null = _bounds(column)
    buffer = column.buffers()[2]
    data = memoryview(b"" if buffer is None else buffer).cast("B")

    def cell(row: int) -> memoryview | None:
        if null is not None and null[row]:
            return None
        return data[bounds[row] : bounds[row + 1]]

    return cell
