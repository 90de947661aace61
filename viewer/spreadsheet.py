"""Cells of CSV files: a spreadsheet must not take what a tape says for a formula."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_FORMULA = "=+-@\t\r"


def harmless(cell: Any) -> Any:
    """A cell as it is, with `'` before a text that a spreadsheet would compute."""
    return f"'{cell}" if isinstance(cell, str) and cell and cell[0] in _FORMULA else cell


def harmless_table(table: pa.Table) -> pa.Table:
    """The same for all columns of text."""
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            column = table.column(i)
            formula = pc.is_in(pc.utf8_slice_codeunits(column, 0, 1), pa.array([*_FORMULA]))
            quoted = pc.binary_join_element_wise("'", column, "")
            table = table.set_column(i, field, pc.if_else(formula, quoted, column))
    return table
