"""`rolltape export`: a tape as Parquet or JSONL, one row a sequence, for any other tool."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.store import Routes, Sequence, Tape
from rolltape.store import open as open_tape
from rolltape.store.columns import Masked, make_batch
from rolltape.store.errors import TapeError, TapeExistsError, UsageError
from rolltape.store.jsonable import jsonable
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.writer import new_uuid

#: A row group is closed when its cells reach this; what is in memory at a time.
GROUP_BYTES = 8 << 20

_F32S = pa.list_(pa.field("item", pa.float32()))
_U16S = pa.list_(pa.field("item", pa.uint16()))
_BOOLS = pa.list_(pa.field("item", pa.bool_()))


def _routes(prefix: str) -> dict[str, pa.DataType]:
    return {
        f"{prefix}routes": _U16S,  # [T, layers, k] flattened; null where there is no route
        f"{prefix}route_valid": _BOOLS,  # [T, layers] flattened
        f"{prefix}route_layers": pa.list_(pa.field("item", pa.int32())),
        f"{prefix}route_k": pa.int32(),
        f"{prefix}route_experts": pa.int32(),
    }


#: Columns that are always there.
_ALWAYS = {
    "engine": pa.string(),
    "request": pa.string(),
    "sample": pa.int32(),
    "pass": pa.int32(),
    "id": pa.string(),
    "group": pa.string(),
    "group_derived": pa.bool_(),
    "origin": pa.string(),
    "prompt_len": pa.int32(),
    "length": pa.int32(),
    "digest": pa.string(),
    "finish": pa.string(),
    "sampling": pa.string(),  # JSON
    "opened_ns": pa.int64(),
    "closed_ns": pa.int64(),
    "version_min": pa.int64(),
    "version_max": pa.int64(),
}

#: Name for `--columns` -> columns. All lists run over the T positions of prompt + response.
BLOCKS: dict[str, dict[str, pa.DataType]] = {
    "ids": {"ids": pa.list_(pa.field("item", pa.uint32()))},
    "loss_mask": {"loss_mask": _BOOLS},
    "raw": {"raw": _F32S},
    "scaled": {"scaled": _F32S},
    "processed": {"processed": _F32S},
    "semantics": {"semantics": pa.string()},  # JSON [[start, n, {...}], ...]
    "routes": _routes(""),
    "supports": {
        "support_state": pa.list_(pa.field("item", pa.uint8())),
        "support_counts": pa.list_(pa.field("item", pa.int32())),
        "support_ids": pa.list_(pa.field("item", pa.uint32())),
        "support_derived": pa.bool_(),
    },
    "annotations": {"annotations": pa.string()},  # JSON object
    "route_weights": {"route_weights": _F32S},  # as routes
    "route_margin": {"route_margin": _F32S},  # [T, layers] flattened
    "live_routes": _routes("live_"),
    "weight_version": {"weight_version": pa.list_(pa.field("item", pa.int64()))},
}
#: What is large and seldom wanted is left out unless it is named.
DEFAULT_BLOCKS = tuple(
    name
    for name in BLOCKS
    if name not in ("route_weights", "route_margin", "live_routes", "weight_version")
)

#: Every column that an export can have.
EXPORT_SCHEMA = pa.schema(
    {**_ALWAYS, **{name: type_ for block in BLOCKS.values() for name, type_ in block.items()}}
)

#: Tables that the rows of a sequence replace, or that say how the tape itself is stored.
_REPLACED = ("sequences", "tokens", "routes", "supports", "annotations", "rollups", "offsets")
_KEYED = ("forwards", "distributions", "activations")


@dataclass(frozen=True)
class Exported:
    """What an export wrote and what it left out.

    Args:
        path: folder or file.
        to: parquet or jsonl.
        rows: file name -> rows.
        bytes: size of all files.
        left_out: what -> why.
    """

    path: Path
    to: str
    rows: dict[str, int]
    bytes: int
    left_out: dict[str, str]


def export_tape(
    tape: str | os.PathLike[str] | Tape,
    out: str | os.PathLike[str],
    *,
    to: str,
    sequences: Iterable[str] | None = None,
    columns: Iterable[str] | None = None,
) -> Exported:
    """Write a tape as Parquet (a folder, a file a table) or as JSONL (one file).

    Args:
        tape: its path, or the open tape.
        out: must not exist.
        to: parquet or jsonl.
        sequences: ids to write; by default all. It also limits the rows of tables that belong to
            a sequence (forwards, distributions, activations).
        columns: names of `BLOCKS`, with `default` for `DEFAULT_BLOCKS` and `all` for all.

    Raises:
        TapeExistsError: there is something at `out` already.
        UsageError: an unknown sequence, column or format.
    """
    if to not in ("parquet", "jsonl"):
        raise UsageError(f"no export to {to!r}", hint="parquet | jsonl")
    opened = tape if isinstance(tape, Tape) else open_tape(tape)
    blocks = _blocks(columns)
    chosen = list(opened) if sequences is None else [opened.sequence(s) for s in sequences]
    left_out = {
        name: f"not asked for (--columns default,{name})" for name in BLOCKS if name not in blocks
    }
    path = Path(out)
    if to == "jsonl":
        rows = {path.name: _write_jsonl(path, chosen, blocks)}
        for name in TAPE_TABLES:
            if name not in _REPLACED:
                left_out[f"table {name}"] = "JSONL has a line a sequence; --to parquet has all"
        size = path.stat().st_size
    else:
        with whole_or_not(path) as folder:
            rows = _write_parquet(folder, opened, chosen, blocks, limited=sequences is not None)
        size = sum(file.stat().st_size for file in path.iterdir())
    left_out["fragments"] = "a row holds a whole sequence, not the pieces that were recorded"
    return Exported(path, to, rows, size, left_out)


@contextlib.contextmanager
def whole_or_not(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` at the end, or goes.

    Raises:
        TapeExistsError: there is something at `out` already.
    """
    if "://" in str(out):
        raise UsageError(f"{out}: only local folders", hint="copy it when it is there")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapeExistsError(f"{out} is not empty", hint="choose another -o, or remove it")
    partial = out.parent / f".{out.name}.{new_uuid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise TapeError(f"{out}: {error.strerror}", hint="choose another -o") from error
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _blocks(names: Iterable[str] | None) -> tuple[str, ...]:
    wanted: set[str] = set()
    for name in DEFAULT_BLOCKS if names is None else names:
        if name == "default":
            wanted |= set(DEFAULT_BLOCKS)
        elif name == "all":
            wanted |= set(BLOCKS)
        elif name in BLOCKS:
            wanted.add(name)
        else:
            raise UsageError(f"no column {name!r}", hint=", ".join([*BLOCKS, "default", "all"]))
    return tuple(name for name in BLOCKS if name in wanted)


# -- one sequence -------------------------------------------------------------------------


def _record(sequence: Sequence, blocks: tuple[str, ...]) -> dict[str, Any]:
    """The cells of one sequence: scalars, text, and `Masked` or arrays for lists."""
    # a view of its own: what it reads is dropped with it, the tape keeps nothing
    sequence = sequence.window(0, sequence.length)
    info, key = sequence.info, sequence.key
    version = sequence.weight_version
    seen = version.values[version.valid]
    cells: dict[str, Any] = {
        "engine": key.engine,
        "request": key.request,
        "sample": key.sample,
        "pass": key.scoring,
        "id": sequence.id,
        **{name: info[name] for name in ("group", "group_derived", "origin", "digest")},
        **{name: info[name] for name in ("opened_ns", "closed_ns")},
        "prompt_len": sequence.prompt_len,
        "length": sequence.length,
        "finish": sequence.finish,
        "sampling": _json(info["sampling"] or {}),
        "version_min": int(seen.min()) if seen.size else None,
        "version_max": int(seen.max()) if seen.size else None,
    }
    if "ids" in blocks:
        cells["ids"] = sequence.tokens
    if "loss_mask" in blocks:
        cells["loss_mask"] = sequence.loss_mask
    for name in ("raw", "scaled", "processed"):
        if name in blocks:
            cells[name] = sequence.logprob(name)
    if "semantics" in blocks:
        cells["semantics"] = _json(sequence.semantics)
    if "weight_version" in blocks:
        cells["weight_version"] = version
    if "annotations" in blocks:
        cells["annotations"] = _json(sequence.annotations)
    if "supports" in blocks:
        cells.update(_support_cells(sequence))
    if set(blocks) & {"routes", "route_weights", "route_margin"}:
        routes = sequence.routes()
        if "routes" in blocks:
            cells.update(_route_cells(routes, ""))
        if "route_weights" in blocks:
            cells["route_weights"] = _weights(routes)
        if "route_margin" in blocks:
            cells["route_margin"] = _margin(routes)
    if "live_routes" in blocks:
        cells.update(_route_cells(sequence.routes("live"), "live_"))
    return cells


def _route_cells(routes: Routes | None, prefix: str) -> dict[str, Any]:
    if routes is None:
        return dict.fromkeys(_routes(prefix))
    return {
        f"{prefix}routes": Masked(routes.ids.ravel(), _per_slot(routes.valid, routes)),
        f"{prefix}route_valid": routes.valid.ravel(),
        f"{prefix}route_layers": np.asarray(routes.layers, np.int32),
        f"{prefix}route_k": routes.ids.shape[2],
        f"{prefix}route_experts": routes.num_experts,
    }


def _per_slot(mask: np.ndarray, routes: Routes) -> np.ndarray:
    return np.repeat(mask.ravel(), routes.ids.shape[2])


def _weights(routes: Routes | None) -> Masked | None:
    if routes is None or routes.weights is None:
        return None
    return Masked(routes.weights.ravel(), _per_slot(routes.weighted, routes))


def _margin(routes: Routes | None) -> Masked | None:
    if routes is None or routes.margin is None:
        return None
    # NaN in memory is one that was not recorded, or one recorded as NaN: they cannot be told apart
    flat = routes.margin.ravel()
    return Masked(flat, ~np.isnan(flat))


def _support_cells(sequence: Sequence) -> dict[str, Any]:
    supports = sequence.supports()
    if supports is None:
        return {name: None for name in BLOCKS["supports"]}
    return {
        "support_state": supports.state,
        "support_counts": np.diff(supports.offsets).astype(np.int32),
        "support_ids": supports.ids,
        "support_derived": supports.derived,
    }


def _json(value: Any) -> str:
    return json.dumps(jsonable(value), allow_nan=False)


# -- files --------------------------------------------------------------------------------


def _write_jsonl(path: Path, sequences: list[Sequence], blocks: tuple[str, ...]) -> int:
    if path.exists():
        raise TapeExistsError(f"{path} exists", hint="choose another -o, or remove it")
    partial = path.with_name(f".{path.name}.{new_uuid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            for sequence in sequences:
                cells = _record(sequence, blocks)
                for name in ("sampling", "semantics", "annotations"):
                    if name in cells:  # JSON in JSON: the object itself, not its text
                        cells[name] = json.loads(cells[name])
                file.write(_json(cells) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise TapeError(f"{path}: {error.strerror}", hint="choose another -o") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(sequences)


def _write_parquet(
    folder: Path, tape: Tape, sequences: list[Sequence], blocks: tuple[str, ...], *, limited: bool
) -> dict[str, int]:
    header = {k: tape.header.get(k) for k in ("format", "uuid", "role", "parent", "provenance")}
    names = [*_ALWAYS, *(name for block in blocks for name in BLOCKS[block])]
    schema = pa.schema(
        [EXPORT_SCHEMA.field(name) for name in names], metadata={"rolltape": _json(header)}
    )
    rows = {}
    with _writer(folder / "sequences.parquet", schema) as writer:
        for batch in _batches(sequences, schema, blocks):
            writer.write_batch(batch)
    rows["sequences.parquet"] = len(sequences)
    for name, table_schema in TAPE_TABLES.items():
        if name in _REPLACED:
            continue
        parts: Iterable[pa.Table]
        if limited and name in _KEYED:
            parts = (tape.select(name, sequence.key) for sequence in sequences)
        else:
            parts = (pa.Table.from_batches([batch]) for _, _, batch in tape.batches(name))
        count = 0
        with _writer(folder / f"{name}.parquet", table_schema) as writer:
            for table in parts:
                count += len(table)
                for piece in _pieces(table):
                    writer.write_table(piece)
        rows[f"{name}.parquet"] = count
    return rows


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd")


def _batches(
    sequences: list[Sequence], schema: pa.Schema, blocks: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    size = 0
    for sequence in sequences:
        cells = _record(sequence, blocks)
        for name, column in columns.items():
            column.append(cells[name])
        size += sum(_size(cell) for cell in cells.values())
        if size >= GROUP_BYTES:
            yield make_batch("sequences", schema, columns)
            columns = {name: [] for name in schema.names}
            size = 0
    if columns["id"]:
        yield make_batch("sequences", schema, columns)


def _size(cell: Any) -> int:
    if isinstance(cell, Masked):
        return int(cell.values.nbytes + cell.valid.nbytes)
    return int(cell.nbytes) if isinstance(cell, np.ndarray) else len(str(cell))


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Slices of about `GROUP_BYTES`."""
    if not len(table):
        return
    rows = max(1, int(len(table) * GROUP_BYTES / max(table.nbytes, 1)))
    for start in range(0, len(table), rows):
        yield table.slice(start, rows)
