"""Recordings with something changed in them, for controls that must be found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import rolltape
from rolltape.store import Tape, TapeWriter, create_tape, seal
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES


def edited(tape: Tape, out: Path, **changes: Callable[[list[dict[str, Any]]], None]) -> Tape:
    """A copy of a recording with some rows changed; it says that it is the same recording.

    Args:
        tape: the recording.
        out: folder of the copy.
        changes: table -> what is called with its rows, to change in place.
    """
    create_tape(out, role=tape.role, parent=tape.parent, uuid=tape.uuid)
    with TapeWriter(out) as writer:
        for name in (n for n in TAPE_TABLES if n not in DERIVED_TABLES):
            table = tape.table(name)
            if name in changes:
                rows = table.to_pylist()
                changes[name](rows)
                table = pa.Table.from_pylist(rows, table.schema)
            if table.num_rows:
                columns = {c: table.column(c).combine_chunks() for c in table.schema.names}
                writer.append(name, columns)
    seal(out)
    return rolltape.open(out)
