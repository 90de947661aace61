"""Arrow columns from numpy, with nulls where values are missing and bits untouched elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.errors import SchemaError


@dataclass(frozen=True)
class Masked:
    """Values and where they exist. What stands in `values` where `valid` is false is undefined.

    Args:
        values: any shape and dtype.
        valid: bool, same shape.
    """

    values: np.ndarray
    valid: np.ndarray

    @classmethod
    def empty(cls, shape: int | tuple[int, ...], dtype: Any) -> Masked:
        """Nothing valid yet."""
        return cls(np.zeros(shape, dtype), np.zeros(shape, bool))

    @classmethod
    def full(cls, values: np.ndarray) -> Masked:
        """Everything valid."""
        return cls(values, np.ones(values.shape, bool))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, where: Any) -> Masked:
        return Masked(self.values[where], self.valid[where])

    def resized(self, n: int) -> Masked:
        """Over positions 0..n-1: cut, or missing where it did not reach."""
        if len(self) == n:
            return self
        out = Masked.empty(n, self.values.dtype)
        out.values[: len(self)] = self.values[:n]
        out.valid[: len(self)] = self.valid[:n]
        return out

    def fill(self, missing: Any) -> np.ndarray:
        """A copy of the values with `missing` where there is none."""
        return np.where(self.valid, self.values, missing)


#: What `make_batch` accepts as a list cell.
Cell = np.ndarray | Masked | Sequence[Any] | None


def list_column(cells: Sequence[Cell], type_: pa.ListType, *, field: str) -> pa.ListArray:
    """A list column from one-dimensional arrays; `Masked` cells give null elements."""
    arrays: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    dtype = np.dtype(type_.value_type.to_pandas_dtype())
    for cell in cells:
        source = cell.values if isinstance(cell, Masked) else cell
        values = np.asarray([] if source is None else source)
        if values.ndim != 1:
            raise SchemaError(f"{field} has a cell of shape {list(values.shape)}")
        # integers are compared with the limits of the column, floats may lose digits
        rule: Any = "safe" if dtype.kind in "iu" else "same_kind"
        if values.size and not np.can_cast(values.dtype, dtype, rule):
            if isinstance(cell, Masked):  # what stands where nothing is valid is nobody's value
                values = np.where(cell.valid, values, np.zeros(1, values.dtype))
            values = _checked_cast(values, dtype, field)
        arrays.append(values.astype(dtype, copy=False))
        masks.append(~cell.valid if isinstance(cell, Masked) else np.zeros(values.size, bool))
    offsets = np.zeros(len(cells) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    mask = np.concatenate(masks) if masks else np.zeros(0, bool)
    values = pa.array(
        np.concatenate(arrays) if arrays else np.zeros(0, dtype),
        type=type_.value_type,
        mask=mask if mask.any() else None,
        from_pandas=False,
    )
    null = np.array([cell is None for cell in cells], bool)
    return pa.ListArray.from_arrays(
        pa.array(offsets), values, type=type_, mask=pa.array(null) if null.any() else None
    )


def ragged(flat: np.ndarray, lengths: np.ndarray, type_: pa.DataType) -> pa.ListArray:
    """A list column without nulls from all its values and the length of each cell.

    Args:
        flat: values of all cells one after another.
        lengths: int [rows].
        type_: type of the values.
    """
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = pa.array(flat, type=type_, from_pandas=False)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _checked_cast(values: np.ndarray, dtype: np.dtype, field: str) -> np.ndarray:
    if values.dtype.kind not in "iu" or dtype.kind not in "iu":
        raise SchemaError(f"{field} has {values.dtype} values, the column is {dtype}")
    limits = np.iinfo(dtype)
    low, high = int(values.min()), int(values.max())
    if low < limits.min or high > limits.max:
        raise SchemaError(f"{field} has values {low}..{high}, the column is {dtype}")
    return values.astype(dtype)


def make_batch(table: str, schema: pa.Schema, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """One record batch of `schema`; absent nullable columns are null.

    Args:
        table: its name, for error messages.
        schema: what to build.
        columns: per column a sequence with one entry a row, or one scalar (str, int, float,
            bool, None) that holds for every row.

    Raises:
        SchemaError: unknown column, uneven lengths, a null where none may be, a bad value.
    """
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise SchemaError(f"table {table} has no column {sorted(unknown)[0]!r}")
    lengths = {name: len(v) for name, v in columns.items() if not _is_scalar(v)}
    rows = next(iter(lengths.values()), 1)
    for name, length in lengths.items():
        if length != rows:
            raise SchemaError(f"{table}.{name} has {length} rows, the first column has {rows}")
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        where = f"{table}.{field.name}"
        try:
            if isinstance(value, pa.Array):
                array = value.cast(field.type)
            elif _is_scalar(value):
                array = pa.repeat(pa.scalar(value, type=field.type), rows)
            elif pa.types.is_list(field.type) and not pa.types.is_string(field.type.value_type):
                array = list_column(list(value or ()), field.type, field=where)
            else:
                array = pa.array(value, type=field.type, from_pandas=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SchemaError(f"{where}: {str(error).splitlines()[0]}") from error
        if array.null_count and not field.nullable:
            raise SchemaError(f"{where} is null in row {array.is_null().index(True).as_py()}")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | int | float | bool | np.generic)
