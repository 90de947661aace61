"""The small columns of a sequence's rows: what a tape holds of it, without reading the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.index import KEY_COLUMNS
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.sequences import Sequence


def recorded(sequence: Sequence, table: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rows of a keyed table of one sequence, some columns only.

    Args:
        sequence: whose rows.
        table: `routes` or `activations`, say.
        columns: names; large ones are what this is there to avoid.
    """
    tape, key = sequence.tape, sequence.key
    if not tape.files(table):
        return
    fields = TAPE_TABLES[table]
    schema = pa.schema([fields.field(name) for name in (*KEY_COLUMNS, *columns)])
    mine = (key.engine, key.request, key.sample, key.scoring)
    for file, number in tape.index.find(table, key):
        with tape.damage():
            batch = tape.shard(table, file).read(number, schema)
            keep = np.ones(batch.num_rows, bool)
            for name, value in zip(KEY_COLUMNS, mine, strict=True):
                keep &= batch.column(name).to_numpy(zero_copy_only=False) == value
            yield from batch.select(columns).filter(pa.array(keep)).to_pylist()
