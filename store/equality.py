"""Whether two tapes say the same of every sequence, whatever way they store it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.routes import Routes
from rolltape.store.sequences import LOGPROBS, Sequence, Tape


def differences(a: Tape, b: Tape, *, sets: bool = False) -> Iterator[str]:
    """What differs, one line each: sequences, and every joined column of them, bit for bit.

    Args:
        a: the original.
        b: its copy.
        sets: the copy gave up the slot order of experts, and with it the combine weights.
    """
    if a.keys() != b.keys():
        missing = [key.id for key in a.keys() if key not in b.sequence_rows]  # noqa: SIM118
        yield f"sequences: {len(a)} and {len(b)}, {len(missing)} missing"
        return
    for one, other in zip(a, b, strict=True):
        for field in _differing(one, other, sets=sets):
            yield f"{one.id}: {field} differs"


def _differing(a: Sequence, b: Sequence, *, sets: bool) -> Iterator[str]:
    if a.info != b.info or a.length != b.length:
        yield "info"
    columns = {"tokens": (a.tokens, b.tokens), "loss_mask": (a.loss_mask, b.loss_mask)}
    columns |= {name: (a.logprob(name), b.logprob(name)) for name in LOGPROBS}
    columns |= {"step": (a.step, b.step), "version": (a.weight_version, b.weight_version)}
    for name, (left, right) in columns.items():
        if not _same(left, right):
            yield name
    if _said(a) != _said(b):
        yield "semantics"
    for role in ("used", "live"):
        if not _same_routes(a.routes(role), b.routes(role), sets=sets):
            yield f"{role} routes"
    left_kept, right_kept = a.supports(), b.supports()
    if (left_kept is None) != (right_kept is None):
        yield "supports"
    elif left_kept is not None and right_kept is not None:
        same = left_kept.derived == right_kept.derived and all(
            np.array_equal(getattr(left_kept, n), getattr(right_kept, n))
            for n in ("state", "offsets", "ids")
        )
        if not same:
            yield "supports"
    if not _same_plain(a.activations(), b.activations()):
        yield "activations"
    if a.annotations != b.annotations:
        yield "annotations"


def _said(sequence: Sequence) -> list[tuple[int, Any]]:
    """Semantics by position: how they were cut into spans does not matter."""
    out: list[tuple[int, Any]] = []
    for start, n, semantics in sequence.semantics:
        out += [(p, semantics) for p in range(start, start + n)]
    return out


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32) if values.dtype == np.float32 else values


def _same(a: Masked, b: Masked) -> bool:
    return np.array_equal(a.valid, b.valid) and np.array_equal(
        _bits(a.values)[a.valid], _bits(b.values)[b.valid]
    )


def _same_routes(a: Routes | None, b: Routes | None, *, sets: bool) -> bool:
    if a is None or b is None:
        return a is b
    if (a.layers, a.num_experts) != (b.layers, b.num_experts):
        return False
    ids = np.sort(a.ids, axis=2) if sets else a.ids
    same = np.array_equal(a.valid, b.valid) and np.array_equal(ids[a.valid], b.ids[b.valid])
    if not sets:
        same = same and np.array_equal(a.weighted, b.weighted)
        if a.weights is not None and b.weights is not None:
            same = same and np.array_equal(
                _bits(a.weights)[a.weighted], _bits(b.weights)[b.weighted]
            )
        same = same and (a.weights is None) == (b.weights is None)
    if (a.margin is None) != (b.margin is None):
        return False
    if a.margin is not None and b.margin is not None:
        same = same and np.array_equal(_bits(a.margin)[a.valid], _bits(b.margin)[b.valid])
    return same and sorted(map(str, a.missing)) == sorted(map(str, b.missing))


def _same_plain(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    for site in a:
        if len(a[site]) != len(b[site]):
            return False
        for (start, dtype, left), (begin, kind, right) in zip(a[site], b[site], strict=True):
            if (start, dtype) != (begin, kind) or not np.array_equal(_bits(left), _bits(right)):
                return False
    return True
