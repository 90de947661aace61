"""Routes of one sequence, joined from the fragments that were recorded or packed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rolltape.store import codecs
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.packed import PackedBlock
from rolltape.store.planes import decode_split


@dataclass(frozen=True)
class Routes:
    """Expert choices of one sequence. Row p was chosen when token p was the input.

    Of a window the first row is that of its first position, and the layers are those of the
    fragments that reach into it.

    Args:
        layers: model layer number of each column; only MoE layers.
        num_experts: experts a layer.
        ids: uint8 or uint16 [T, layers, k], slot order kept; see `valid`.
        valid: bool [T, layers]; false where nothing was recorded.
        weights: float32 [T, layers, k] combine weights, or None; see `weighted`.
        weighted: bool [T, layers]; where weights were recorded. A NaN there is a recorded NaN.
        margin: float32 [T, layers], k-th minus (k+1)-th choice score, NaN where there is none;
            or None.
        missing: (start, n, layer or None, reason) of the ranges without a route.
        order: false if the rows are sets: sorted, the engine's slot order was not kept.
    """

    layers: tuple[int, ...]
    num_experts: int
    ids: np.ndarray
    valid: np.ndarray
    weights: np.ndarray | None
    weighted: np.ndarray
    margin: np.ndarray | None
    missing: tuple[tuple[int, int, int | None, str], ...]
    order: bool = True


#: Gives the block of a packed fragment: (row of `routes`, columns of layers or None for all).
Unpack = Callable[[Any, "tuple[int, ...] | None"], PackedBlock]


def join_routes(
    rows: Sequence[Mapping[str, Any]],
    span: tuple[int, int],
    name: str,
    *,
    unpack: Unpack,
    layers: Sequence[int] | None = None,
    again: int = 0,
    planes: bool = False,
) -> Routes:
    """Routes over the positions of a span; what reaches beyond it is cut.

    Fragments of different layers are merged: the stages of a pipeline write their own.

    Args:
        rows: rows of `routes` of one sequence and role, in written order.
        span: first position, and one behind the last.
        name: of the sequence, for messages.
        unpack: decodes the block of a packed fragment.
        layers: model layer numbers wanted; None is all that were recorded.
        again: how many earlier choices of a position and layer to pass over.
        planes: let the positions of a slot and layer lie together in memory, as they are stored.

    Raises:
        SchemaError: fragments that do not belong together or do not fit.
        UsageError: a layer that was not recorded.
    """
    k, experts = _kind(rows[0])
    recorded = _recorded(rows)
    _refuse_unknown(recorded, layers, name)
    chosen = recorded if layers is None else tuple(layers)
    begin, end = span
    shape = (end - begin, len(chosen), k)
    layout: Literal["C", "F"] = "F" if planes else "C"
    with _named(f"routes of {name} at {rows[0]['start']}"):
        if k < 0:
            raise SchemaError(f"k is {k}")
        ids = np.zeros(shape, codecs.route_dtype(experts), layout)
    valid = np.zeros(shape[:2], bool, layout)
    weighted = np.zeros(shape[:2], bool, layout)
    weights = margin = None
    missing: list[tuple[int, int, int | None, str]] = []
    order = True
    earlier = np.full(shape[:2], again) if again else None
    for row in in_step_order(rows):
        start, n = row["start"], row["n"]
        where = f"routes of {name} at {start}"
        if _kind(row) != (k, experts):
            raise SchemaError(f"{where}: k or num_experts differ from the first fragment")
        if start < 0 or n < 0:
            raise SchemaError(f"{where}: {n} rows from there")
        mine = _layers(row)
        to = list(range(len(chosen)))
        columns = None
        if mine != chosen:
            at = {layer: i for i, layer in enumerate(mine)}
            to = [i for i, layer in enumerate(chosen) if layer in at]
            columns = tuple(at[chosen[i]] for i in to)
        block, mask, ordered = _decode(row, columns, unpack, where)
        order &= ordered
        if again == 0:
            missing += read_missing(row["missing"], where)
        if row["weights"] is not None and weights is None:
            weights = np.full(shape, np.nan, np.float32, layout)
        if row["margin"] is not None and margin is None:
            margin = np.full(shape[:2], np.nan, np.float32, layout)
        low, high = max(start, begin), min(start + n, end)
        if low >= high or not to:
            continue
        # a slice where it can be: a view, and many times faster
        part = slice(None) if len(to) == len(chosen) else to
        inner, outer = slice(low - start, high - start), (slice(low - begin, high - begin), part)
        fresh = mask[inner] & ~valid[outer]
        if earlier is not None:
            skipped = mask[inner] & (earlier[outer] > 0)
            earlier[outer] -= skipped
            fresh &= ~skipped
        _put(ids, outer, block[inner], fresh)
        valid[outer] |= fresh
        wide = (n, len(mine))
        if row["weights"] is not None and weights is not None:
            got = _floats(row, "weights", (*wide, k), columns, where)
            _put(weights, outer, got[inner], fresh)
            weighted[outer] |= fresh
        if row["margin"] is not None and margin is not None:
            _put(margin, outer, _floats(row, "margin", wide, columns, where)[inner], fresh)
    return Routes(chosen, experts, ids, valid, weights, weighted, margin, tuple(missing), order)


def in_step_order(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Fragments as they ran: by step where all of them have one, else as they were written.

    Those that `compact` wrote stand in that order already.
    """
    if len(rows) < 2 or any(row["step"] is None or row["merged"] is not None for row in rows):
        return rows
    return sorted(rows, key=lambda row: int(row["step"]))


def overlap(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a position stands in two fragments."""
    spans = sorted((int(row["start"]), int(row["n"])) for row in rows)
    return any(b[0] < a[0] + a[1] for a, b in itertools.pairwise(spans))


def read_missing(text: str | None, where: str) -> list[tuple[int, int, int | None, str]]:
    """What `routes.missing` says: (start, n, layer or None, reason) of ranges without a route.

    Args:
        text: the cell.
        where: names the fragment in messages.

    Raises:
        SchemaError: it says something else.
    """
    try:
        entries = json.loads(text) if text else []
        fine = isinstance(entries, list) and all(_is_missing(entry) for entry in entries)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise SchemaError(f"{where}: missing is not a list of [start, n, layer or null, reason]")
    return [(start, n, layer, reason) for start, n, layer, reason in entries]


def _is_missing(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and isinstance(entry[0], int)
        and isinstance(entry[1], int)
        and isinstance(entry[2], int | None)
        and isinstance(entry[3], str)
    )


def _kind(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["k"], row["num_experts"]


def _layers(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(np.asarray(row["layers"]).tolist())


def _recorded(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Layers of all fragments: as they stand in the first if it has all of them, else ascending."""
    first = _layers(rows[0])
    more = set().union(*(_layers(row) for row in rows[1:])) - set(first)
    return tuple(sorted({*first, *more})) if more else first


def _refuse_unknown(recorded: tuple[int, ...], layers: Sequence[int] | None, name: str) -> None:
    unknown = [layer for layer in layers or () if layer not in recorded]
    if unknown:
        known = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise UsageError(f"{name} has no routes of layer {unknown[0]}", hint=f"it has {known}")


def _put(out: np.ndarray, where: Any, values: np.ndarray, fresh: np.ndarray) -> None:
    if fresh.all():  # the usual case, and many times faster
        out[where] = values
    elif fresh.any():
        part = out[where]  # a view of a slice, a copy of chosen columns
        part[fresh] = values[fresh]
        out[where] = part


def _decode(
    row: Mapping[str, Any], columns: tuple[int, ...] | None, unpack: Unpack, where: str
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Ids [n, layers, k] of a fragment, where they are valid, and whether slots are in order."""
    with _named(where):
        return _decode_block(row, columns, unpack, where)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Say which fragment it is, where an error does not."""
    try:
        yield
    except SchemaError as error:
        text = str(error.args[0])
        if text.startswith(where):
            raise
        raise SchemaError(f"{where}: {text}", hint=error.hint) from error


def _decode_block(
    row: Mapping[str, Any], columns: tuple[int, ...] | None, unpack: Unpack, where: str
) -> tuple[np.ndarray, np.ndarray, bool]:
    n, width, k, experts = row["n"], len(row["layers"]), row["k"], row["num_experts"]
    if row["encoding"] in ("plain", "rows"):
        if row["ids"] is None:
            raise SchemaError(f"{where}: no ids")
        if row["encoding"] == "plain":
            # as they lie: who joins them copies them anyway
            ids = codecs.decode_rows(row["ids"], (k, width, n), experts).transpose(2, 1, 0)
        else:
            ids = codecs.decode_rows(row["ids"], (n, width, k), experts)
        ids = ids if columns is None else ids[:, list(columns)]
        if row["valid"] is None:
            return ids, np.ones(ids.shape[1::-1], bool).T, True
        valid = codecs.decode_bits(row["valid"], (n, width), field=where)
        return ids, valid if columns is None else valid[:, list(columns)], True
    if row["encoding"] != "packed":
        raise SchemaError(f"{where}: unknown encoding {row['encoding']!r}", hint="upgrade rolltape")
    block = unpack(row, columns)
    at = row["at"]
    got = (block.ids.shape[1:], block.num_experts)
    if got != ((width if columns is None else len(columns), k), experts):
        raise SchemaError(f"{where}: its block has another shape")
    if at is None or at < 0 or at + n > len(block.ids):
        raise SchemaError(f"{where}: its block has {len(block.ids)} rows, it begins at {at}")
    return block.ids[at : at + n], block.valid[at : at + n], block.order


def _floats(
    row: Mapping[str, Any],
    field: str,
    shape: tuple[int, ...],
    columns: tuple[int, ...] | None,
    where: str,
) -> np.ndarray:
    name = f"{field} of {where}"
    if row["encoding"] == "packed":
        values = decode_split(row[field], shape, field=name)
    else:
        # plane by plane; in one dimension they are not put in order, which would be a copy
        flat = codecs.decode_floats(row[field], (int(np.prod(shape)),), field=name)
        values = np.moveaxis(flat.reshape(*shape[1:], shape[0]), -1, 0)
    return values if columns is None else values[:, list(columns)]
