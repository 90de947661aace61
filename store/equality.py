"""Whether two tapes say the same of everything, whatever way they store it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.columns import Masked
from rolltape.store.distributions import Distributions
from rolltape.store.index import INDEXED
from rolltape.store.keys import Key
from rolltape.store.routes import Routes
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.shards import canonical, checksum
from rolltape.store.supports import Supports

#: Tables that belong to no sequence, and stand in the copy row by row as in the original.
_WHOLE = ("engines", "steps", "weights", "tactics", "events")
_PIECE_ROWS = 1 << 16


def differences(a: Tape, b: Tape, *, sets: bool = False) -> Iterator[str]:
    """What differs, one line each: tables, sequences, and every joined column of them, bit for bit.

    Args:
        a: the original.
        b: its copy.
        sets: the copy gave up the slot order of experts, and with it the combine weights.
    """
    if a.keys() != b.keys():
        missing = [key.id for key in a.keys() if key not in b.sequence_rows]  # noqa: SIM118
        yield f"sequences: {len(a)} and {len(b)}, {len(missing)} missing, or another order"
        return
    for table in _WHOLE:
        if not _same_rows(a, b, table):
            yield f"table {table} differs"
    infos_differ = not a.facts.equals(b.facts)
    for one, other in zip(_each(a), _each(b), strict=True):
        if one.length != other.length or (infos_differ and one.info != other.info):
            yield f"{one.id}: info differs"
        for field in _differing(one, other, sets=sets):
            yield f"{one.id}: {field} differs"
    yield from _orphans(a, b)


def _each(tape: Tape) -> Iterator[Sequence]:
    """All sequences; what is read of one is let go with it."""
    for sequence in tape:
        yield sequence.window(0, sequence.length)


def _same_rows(a: Tape, b: Tape, table: str) -> bool:
    """Whether a table has the same rows in the same order, however they are cut into batches."""
    pairs = itertools.zip_longest(_pieces(a, table), _pieces(b, table))
    return all(x is not None and y is not None and x.equals(y) for x, y in pairs)


def _pieces(tape: Tape, table: str) -> Iterator[pa.Table]:
    """A table in pieces of the same number of rows, the last one with what is left."""
    held = pa.Table.from_batches([], tape.schemas[table])
    for _, _, batch in tape.batches(table):
        held = pa.concat_tables([held, pa.Table.from_batches([batch])])
        while len(held) >= _PIECE_ROWS:
            yield held.slice(0, _PIECE_ROWS)
            held = held.slice(_PIECE_ROWS)
    yield held


def _differing(a: Sequence, b: Sequence, *, sets: bool) -> Iterator[str]:
    columns = {"tokens": (a.tokens, b.tokens), "loss_mask": (a.loss_mask, b.loss_mask)}
    columns |= {name: (a.logprob(name), b.logprob(name)) for name in LOGPROBS}
    columns |= {"step": (a.step, b.step), "version": (a.weight_version, b.weight_version)}
    for name, (left, right) in columns.items():
        if not _same(left, right):
            yield name
    if _said(a.semantics) != _said(b.semantics):
        yield "semantics"
    if not a.forwards.equals(b.forwards) and _sorted(a.forwards) != _sorted(b.forwards):
        yield "forwards"
    for role in ("used", "live"):
        for again in itertools.count():
            ours, theirs = a.routes(role, again=again), b.routes(role, again=again)
            if not _same_routes(ours, theirs, sets=sets):
                yield f"{role} routes"
            if ours is None or theirs is None:
                break
    if not _same_supports(a.supports(), b.supports()):
        yield "supports"
    if not _same_distributions(a.distributions(), b.distributions()):
        yield "distributions"
    if not _same_activations(a.activations(), b.activations()):
        yield "activations"
    if _sketch_bits(a.sketches()) != _sketch_bits(b.sketches()):
        yield "sketches"
    if _exact(a.annotations) != _exact(b.annotations):
        yield "annotations"


def _said(
    spans: Iterable[tuple[int, int, Mapping[str, Any] | None]],
) -> dict[str, list[tuple[int, int]]]:
    """Where what is said: per text the positions at which the number of its spans changes.

    It does not matter how they were cut.
    """
    steps: dict[str, dict[int, int]] = {}
    for start, n, semantics in spans:
        mine = steps.setdefault(json.dumps(semantics, sort_keys=True), {})
        mine[start] = mine.get(start, 0) + 1
        mine[start + n] = mine.get(start + n, 0) - 1
    found = {text: sorted((p, d) for p, d in s.items() if d) for text, s in steps.items()}
    return {text: changes for text, changes in found.items() if changes}


def _sorted(table: pa.Table) -> list[str]:
    """Rows in an order that does not depend on how they were stored."""
    return sorted(json.dumps(row, sort_keys=True) for row in table.to_pylist())


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32) if values.dtype == np.float32 else values


def _same(a: Masked, b: Masked) -> bool:
    if a.valid.all() and b.valid.all():
        return np.array_equal(_bits(a.values), _bits(b.values))
    return np.array_equal(a.valid, b.valid) and np.array_equal(
        _bits(a.values)[a.valid], _bits(b.values)[b.valid]
    )


def _where(values: np.ndarray | None, valid: np.ndarray) -> np.ndarray:
    """Bits of the values that are valid; nothing recorded is the same as nothing valid."""
    if values is None:
        return np.zeros(0, np.uint32)
    found = _bits(values) if valid.all() else _bits(values)[valid]
    return found.reshape(-1)


def _same_routes(a: Routes | None, b: Routes | None, *, sets: bool) -> bool:
    if a is None or b is None:
        return a is b
    if (a.layers, a.num_experts) != (b.layers, b.num_experts):
        return False
    if (a.order and not sets) != b.order or a.ids.shape != b.ids.shape:
        return False
    if not np.array_equal(a.valid, b.valid):
        return False
    ids = np.sort(a.ids, axis=2) if sets else a.ids
    if not np.array_equal(_where(ids, a.valid), _where(b.ids, b.valid)):
        return False
    if not sets and not (
        np.array_equal(a.weighted, b.weighted)
        and np.array_equal(_where(a.weights, a.weighted), _where(b.weights, b.weighted))
    ):
        return False
    if (a.margin is None) != (b.margin is None):
        return False
    return np.array_equal(_where(a.margin, a.valid), _where(b.margin, b.valid)) and sorted(
        map(str, a.missing)
    ) == sorted(map(str, b.missing))


def _same_supports(a: Supports | None, b: Supports | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.derived == b.derived and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("state", "offsets", "ids")
    )


def _same_distributions(a: Distributions | None, b: Distributions | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.k == b.k
        and np.array_equal(a.valid, b.valid)
        and all(
            np.array_equal(_where(getattr(a, n), a.valid), _where(getattr(b, n), b.valid))
            for n in ("ids", "logprobs", "tail")
        )
        and _said(a.semantics) == _said(b.semantics)
    )


def _same_activations(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    for site in a:
        if len(a[site]) != len(b[site]):
            return False
        for (start, dtype, left), (begin, kind, right) in zip(a[site], b[site], strict=True):
            if (start, dtype) != (begin, kind) or not np.array_equal(_bits(left), _bits(right)):
                return False
    return True


def _sketch_bits(found: dict[str, Any]) -> dict[str, Any]:
    return {
        site: [
            (s.start, s.dtype, s.width, s.hashes.tobytes(), s.projections.tobytes()) for s in spans
        ]
        for site, spans in found.items()
    }


def _exact(facts: Mapping[str, float | str | None]) -> dict[str, Any]:
    """Numbers as bits, so that NaN is NaN."""
    return {
        name: np.float64(value).tobytes() if isinstance(value, float) else value
        for name, value in facts.items()
    }


def _orphans(a: Tape, b: Tape) -> Iterator[str]:
    """Rows of sequences that no row of `sequences` names."""
    for table in INDEXED:
        keys: dict[Key, None] = {}
        for tape in (a, b):
            found = tape.index.entries(table).code
            known = list(tape.index.codes)
            keys |= dict.fromkeys(known[code] for code in np.unique(found))
        for key in keys:
            if key not in a.sequence_rows and _digest(a, table, key) != _digest(b, table, key):
                yield f"{key.id}: {table} differs"


def _digest(tape: Tape, table: str, key: Key) -> list[str]:
    rows = tape.select(table, key)
    if table == "forwards":
        return _sorted(rows)
    return [checksum(canonical(batch)) for batch in rows.combine_chunks().to_batches()]
