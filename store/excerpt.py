"""Some sequences of a tape, cut behind a position, as a tape of their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.compact_routes import RouteWriter
from rolltape.store.index import KEY_COLUMNS
from rolltape.store.keys import Key, token_digest
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.seal import seal
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.writer import TapeWriter, create_tape


def write_excerpt(
    source: Tape,
    out: str | os.PathLike[str],
    lengths: Mapping[Key, int],
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write the first positions of some sequences as a tape whose parent the source is.

    Keys, engines and weights are those of the source. Taken over are tokens, logprobs, kept sets,
    routes and the forwards; activations, sketches, distributions, events and annotations are not.
    The last token that is kept of a longer sequence has no forward, like the last one of any.

    Args:
        source: the tape.
        out: folder of the new tape; must not exist or be empty.
        lengths: how many positions to keep of which sequences.
        provenance: for the header of the new tape.

    Raises:
        TapeExistsError: there is something at `out`.
        UsageError: a sequence without so many positions.
    """
    root = Path(out)
    create_tape(
        root,
        role=source.role,
        parent=source.uuid,
        provenance=dict(provenance or {"argv": sys.argv}),
    )
    engines = {key.engine for key in lengths}
    with TapeWriter(root) as writer:
        for table in ("engines", "weights"):
            _write(writer, table, _of(source.table(table), "engine", engines))
        routes = _Routes(source, writer, packed=False, order=True)
        for key in (k for k in source.keys() if k in lengths):  # noqa: SIM118 - no mapping
            whole = source.sequence(key)
            whole.window(0, lengths[key])  # raises if there are not so many
            stop = lengths[key]
            sequence = _first(whole, stop)
            cut = stop < whole.length
            writer.append("sequences", _row(sequence, cut=cut))
            _tokens(writer, sequence)
            _supports(writer, sequence)
            routes.add(_first(whole, _inputs(stop, cut)))
        routes.flush()
        _forwards(writer, source, lengths)
    seal(root, status={"excerpt": "ok"})
    return root


def _first(sequence: Sequence, n: int) -> Sequence:
    return Sequence(sequence.tape, sequence.key, n, (0, n), sequence.closed)


def _inputs(stop: int, cut: bool) -> int:
    """How many tokens are the input of a forward that is kept."""
    return max(stop - 1, 0) if cut else stop


class _Routes(RouteWriter):
    """Plain routes, without reasons for positions that are cut off."""

    def _parts(self, sequence: Sequence) -> Iterator[Any]:
        for part in super()._parts(sequence):
            missing = tuple(
                (start, min(n, sequence.length - start), layer, reason)
                for start, n, layer, reason in part.routes.missing
                if start < sequence.length
            )
            if part.end == sequence.length < self._source.sequence(sequence.key).length:
                missing += ((part.end, 1, None, "last"),)
            yield replace(part, routes=replace(part.routes, missing=missing))


def _row(sequence: Sequence, *, cut: bool) -> dict[str, list[Any]]:
    info = {**sequence.info, "sampling": json.dumps(sequence.info["sampling"])}
    tokens = sequence.tokens
    info["length"] = sequence.length
    whole = bool(tokens.valid.all())
    info["digest"] = token_digest(sequence.prompt_len, tokens.values) if whole else None
    if cut:
        info["finish"] = "length"
    return {name: [info.get(name)] for name in TAPE_TABLES["sequences"].names}


def _key(key: Key) -> dict[str, Any]:
    return {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": key.scoring}


def _tokens(writer: TapeWriter, sequence: Sequence) -> None:
    schema = TAPE_TABLES["tokens"]
    for row in sequence.tape.select("tokens", sequence.key).to_pylist():
        n = min(row["n"], sequence.length - row["start"])
        if n <= 0:
            continue
        for name in ("ids", "loss_mask", *LOGPROBS):
            row[name] = None if row[name] is None else row[name][:n]
        row["n"] = n
        writer.append("tokens", {f.name: pa.array([row[f.name]], f.type) for f in schema})


def _supports(writer: TapeWriter, sequence: Sequence) -> None:
    supports = sequence.supports()
    if supports is None:
        return
    writer.append(
        "supports",
        {
            **_key(sequence.key),
            "start": [0],
            "n": [sequence.length],
            "derived": supports.derived,
            "state": [supports.state],
            "counts": [np.diff(supports.offsets).astype(np.int32)],
            "ids": [supports.ids],
        },
    )


def _forwards(writer: TapeWriter, source: Tape, lengths: Mapping[Key, int]) -> None:
    """The forwards of what is kept, and their steps as they were: with all their rows."""
    table = source.table("forwards")
    columns = (table.column(name).to_pylist() for name in KEY_COLUMNS)
    known = {
        key: _inputs(stop, stop < source.sequence(key).length) for key, stop in lengths.items()
    }
    stops = np.array([known.get(Key(*row), 0) for row in zip(*columns, strict=True)], np.int64)
    starts, n = (table.column(name).to_numpy() for name in ("start", "n"))
    kept = np.minimum(n, stops - starts)
    cut = table.set_column(
        table.schema.get_field_index("n"),
        table.schema.field("n"),
        pa.array(kept, table.schema.field("n").type),
    ).filter(pa.array(kept > 0))
    _write(writer, "forwards", cut)
    ran = set(zip(*(cut.column(name).to_pylist() for name in ("engine", "step")), strict=True))
    steps = source.table("steps")
    names = zip(*(steps.column(name).to_pylist() for name in ("engine", "step")), strict=True)
    _write(writer, "steps", steps.filter(pa.array([name in ran for name in names], pa.bool_())))


def _of(table: pa.Table, column: str, values: set[str]) -> pa.Table:
    return table.filter(pc.is_in(table.column(column), pa.array(sorted(values))))


def _write(writer: TapeWriter, table: str, rows: pa.Table) -> None:
    for batch in rows.combine_chunks().to_batches():
        writer.append_batch(table, batch)
