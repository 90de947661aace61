"""Which weight versions made the tokens: by engine, by sequence, and how stale they were."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.index import KEY_COLUMNS, stored_columns
from rolltape.store.sequences import Tape
from rolltape.viewer.happenings import weight_states
from rolltape.viewer.ids import ids_of
from rolltape.viewer.library import Pair

_SHOWN = 100
_COLUMNS = (*KEY_COLUMNS, "version_min", "version_max", "length", "closed_ns", "finish")

_KEPT: WeakKeyDictionary[Tape, pa.Table] = WeakKeyDictionary()


def made_by(tape: Tape) -> pa.Table:
    """`_COLUMNS` of the roll-ups, a row a sequence.

    Where the seal has them nothing else is read.
    """
    if tape not in _KEPT:
        schema = pa.schema([tape.schemas["rollups"].field(name) for name in _COLUMNS])
        found = None
        with tape.damage():
            found = stored_columns(tape, "rollups", schema)
        # what no row of `sequences` names has roll-ups, too, but is no sequence of the tape
        if found is None or pc.any(pc.equal(found.column("finish"), "unknown")).as_py():
            found = tape.rollups().select(list(_COLUMNS))
        _KEPT[tape] = found
    return _KEPT[tape]


def used_versions(tape: Tape) -> dict[str, tuple[int, int]]:
    """Least and greatest version that made a token, of each engine that any is known of."""
    found = (
        made_by(tape).group_by("engine").aggregate([("version_min", "min"), ("version_max", "max")])
    )
    return {
        row["engine"]: (row["version_min_min"], row["version_max_max"])
        for row in found.to_pylist()
        if row["version_min_min"] is not None
    }


@dataclass(frozen=True, kw_only=True)
class Made:
    """Which versions made tokens of one engine, as far as the roll-ups tell.

    Of a sequence they have the least and the greatest version. Each of the two made a token; what
    lies between them may have.

    Args:
        known: versions that made a token.
        spans: least and greatest version of sequences made by more than one.
    """

    known: frozenset[int]
    spans: frozenset[tuple[int, int]]

    def says(self, version: int) -> str:
        """`yes`, `maybe` or `no`."""
        if version in self.known:
            return "yes"
        return "maybe" if any(low < version < high for low, high in self.spans) else "no"


def made_versions(tape: Tape) -> dict[str, Made]:
    """Of each engine that any version is known of: which ones made tokens."""
    names = ["engine", "version_min", "version_max"]
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in made_by(tape).group_by(names).aggregate([]).to_pylist():
        if row["version_min"] is not None:
            found[row["engine"]].add((row["version_min"], row["version_max"]))
    return {
        engine: Made(
            known=frozenset(version for span in spans for version in span),
            spans=frozenset(span for span in spans if span[0] != span[1]),
        )
        for engine, spans in found.items()
    }


def straddling(tape: Tape) -> dict[str, Any]:
    """Sequences whose tokens were made by more than one version."""
    table = made_by(tape)
    known = table.filter(pc.is_valid(table.column("version_min")))
    found = known.filter(pc.not_equal(known.column("version_min"), known.column("version_max")))
    shown = found.slice(0, _SHOWN)
    rows = [
        {
            "seq": name,
            "from": row["version_min"],
            "to": row["version_max"],
            "length": row["length"],
        }
        for name, row in zip(ids_of(shown).to_pylist(), shown.to_pylist(), strict=True)
    ]
    return {"count": found.num_rows, "known": known.num_rows, "of": table.num_rows, "rows": rows}


def staleness(pair: Pair, tape: Tape) -> dict[str, Any]:
    """How many versions behind the oldest token of a sequence was: `lags`, and by which `basis`.

    * `trainer`: the version that the trainer scored the sequence with - `version_min`, where B is
      a trainer's own tape. Both sides count from the weights that they loaded.
    * `close`: the version in place when the sequence closed - `version_min`. It is what the engine
      knew; what the optimiser had done by then is not in a rollout tape.

    `unknown` sequences lack a version or a time.
    """
    table = made_by(tape)
    oldest = table.column("version_min").fill_null(-1).to_numpy()
    b = pair.b
    own = b is not None and b.role == "trainer" and b.parent != tape.uuid
    basis = "trainer" if own else "close"
    latest = _scored_with(pair, table) if own else _at_close(tape, table)
    known = (oldest >= 0) & (latest >= 0)
    lags, counts = np.unique(latest[known] - oldest[known], return_counts=True)
    rows = zip(lags.tolist(), counts.tolist(), strict=True)
    return {
        "basis": basis,
        "lags": [{"lag": lag, "sequences": n} for lag, n in rows],
        "unknown": int((~known).sum()),
        "of": table.num_rows,
    }


def _at_close(tape: Tape, table: pa.Table) -> np.ndarray:
    """int64 [sequences]: the version in place when each one closed; -1 unknown."""
    out = np.full(table.num_rows, -1, np.int64)
    codes = table.column("engine").combine_chunks().dictionary_encode()
    of = codes.indices.to_numpy()
    closed = table.column("closed_ns").fill_null(-1).to_numpy()
    times = _in_place(tape)
    for code, engine in enumerate(codes.dictionary.to_pylist()):
        if engine in times:
            t, version = times[engine]
            mine = np.flatnonzero((of == code) & (closed >= 0))
            at = np.searchsorted(t, closed[mine], side="right") - 1
            out[mine[at >= 0]] = version[at[at >= 0]]
    return out


def _scored_with(pair: Pair, table: pa.Table) -> np.ndarray:
    """int64 [sequences]: the version that B scored each one with; -1 unknown."""
    out = np.full(table.num_rows, -1, np.int64)
    if pair.b is None or pair.report is None:
        return out
    theirs = made_by(pair.b)
    versions = theirs.column("version_max").fill_null(-1).to_pylist()
    scored = dict(zip(ids_of(theirs).to_pylist(), versions, strict=True))
    pairs = pair.report_columns(["a", "b"])
    partner = dict(zip(*(column.to_pylist() for column in pairs.columns), strict=True))
    out[:] = [scored.get(partner.get(name, ""), -1) for name in ids_of(table).to_pylist()]
    return out


def _in_place(tape: Tape) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per engine when which version was complete: times and numbers, in the order of time."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in weight_states(tape):
        if row["state"] == "complete" and row["t_ns"] is not None:
            found[row["engine"]].append((row["t_ns"], row["version"]))
    return {
        engine: (np.array([t for t, _ in rows]), np.array([v for _, v in rows]))
        for engine, rows in found.items()
    }
