"""Sequences by their ids, without an object for each."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.rollups import sequence_facts
from rolltape.store.sequences import Tape

_KEPT: WeakKeyDictionary[Tape, tuple[pa.Array, np.ndarray]] = WeakKeyDictionary()


def _facts(tape: Tape) -> tuple[pa.Array, np.ndarray]:
    """Ids of the sequences of a tape, and their prompt lengths."""
    if tape not in _KEPT:
        facts = sequence_facts(tape)
        lengths = facts.column("prompt_len").fill_null(0).to_numpy()
        _KEPT[tape] = facts.column("id").combine_chunks(), lengths
    return _KEPT[tape]


def ids_of(rows: pa.Table) -> pa.Array:
    """Ids of rows with `engine`, `request`, `sample` and, if they have one, `pass`.

    Null where there is no request.
    """
    short = pc.utf8_slice_codeunits(rows.column("engine"), 0, 8)
    sample = rows.column("sample").fill_null(0).cast(pa.string())
    ids = pc.binary_join_element_wise(short, rows.column("request"), sample, ".")
    if "pass" in rows.schema.names:
        scoring = rows.column("pass")
        tail = pc.binary_join_element_wise(".p", scoring.cast(pa.string()), "")
        ids = pc.binary_join_element_wise(ids, pc.if_else(pc.equal(scoring, 0), "", tail), "")
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def known(tape: Tape, ids: pa.Array) -> np.ndarray:
    """bool [n]: the tape has a sequence of that id."""
    return np.asarray(pc.is_in(ids, value_set=_facts(tape)[0]).to_numpy(zero_copy_only=False))


def prompt_lengths(tape: Tape, ids: pa.Array) -> np.ndarray:
    """int64 [n]: prompt tokens of the sequence of each id; 0 where there is none."""
    every, lengths = _facts(tape)
    place = pc.index_in(ids, value_set=every).fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(np.where(place >= 0, np.append(lengths, 0)[place], 0))
