"""A few facts of every sequence as columns, from the roll-ups that the seal has.

Lists and look-ups by id need no Python object a sequence, and no row of `sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.errors import DamagedShardError
from rolltape.store.index import KEY_COLUMNS, stored_columns
from rolltape.store.keys import Key
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.tape import Folder

#: Columns of `rollups` that are kept.
FACTS = (
    "group",
    "prompt_len",
    "length",
    "finish",
    "opened_ns",
    "loss_tokens",
    "version_min",
    "version_max",
)
_NAMES = (*KEY_COLUMNS, *FACTS)


@dataclass(frozen=True)
class StoredFacts:
    """A row a sequence, in the order in which they were opened.

    Args:
        table: `id`, the columns of a key, and `FACTS`.
        ids: the column `id`.
    """

    table: pa.Table
    ids: pa.Array

    def row(self, id_: str) -> int | None:
        """Row of a sequence; None if there is no such."""
        found = pc.index(self.ids, id_).as_py()
        return None if found < 0 else int(found)

    def key(self, row: int) -> Key:
        """Key of a row."""
        return Key(*(self.table.column(name)[row].as_py() for name in KEY_COLUMNS))


def stored_facts(folder: Folder) -> StoredFacts | None:
    """The facts that the seal has; None if it does not have those of all that is read."""
    schema = pa.schema([TAPE_TABLES["rollups"].field(name) for name in _NAMES])
    try:
        table = stored_columns(folder, "rollups", schema)
    except DamagedShardError as error:
        if not folder.skip_damaged:
            raise
        folder.note(str(error))
        return None
    # what no row of `sequences` names has roll-ups, too, but is no sequence of the tape
    if table is None or pc.any(pc.equal(table.column("finish"), "unknown")).as_py():
        return None
    return facts_of(table)


def facts_of(rollups: pa.Table) -> StoredFacts:
    """The facts in a table of roll-ups."""
    table = rollups.select(list(_NAMES)).combine_chunks()
    for name in ("engine", "group", "finish"):
        coded = table.column(name).dictionary_encode().unify_dictionaries()
        table = table.set_column(table.schema.get_field_index(name), name, coded)
    ids = _ids(table)
    return StoredFacts(table.append_column("id", ids), ids)


def _ids(table: pa.Table) -> pa.Array:
    """Ids as `Key.id` makes them."""
    engine, request, sample, scoring = (_one(table, name) for name in KEY_COLUMNS)
    short = pc.utf8_slice_codeunits(engine.dictionary, 0, 8).take(engine.indices)
    passes = pc.binary_join_element_wise(".p", scoring.cast(pa.string()), "")
    tail = pc.if_else(pc.equal(scoring, 0), "", passes)
    front = pc.binary_join_element_wise(short, request, sample.cast(pa.string()), ".")
    return pc.binary_join_element_wise(front, tail, "")


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks:
        return pa.concat_arrays(column.chunks)
    return pa.array([], column.type)
