"""Routes plane by plane are the same routes; rows of a key are found in few rows and in many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.store import Key, codecs
from rolltape.store.index import KEY_COLUMNS, rows_of_key
from rolltape.store.routes import join_routes

EXPERTS, K = 64, 4


def fragment(rng: np.random.Generator, start: int, n: int, layers: list[int]) -> dict[str, Any]:
    shape = (n, len(layers))
    valid = rng.random(shape) < 0.9
    return {
        "start": start,
        "n": n,
        "k": K,
        "num_experts": EXPERTS,
        "layers": layers,
        "encoding": "plain",
        "ids": codecs.encode_plain(rng.integers(0, EXPERTS, (*shape, K)), EXPERTS),
        "weights": codecs.encode_floats(rng.random((*shape, K), np.float32)),
        "margin": codecs.encode_floats(rng.random(shape, np.float32)),
        "valid": None if start == 0 else codecs.encode_bits(valid),
        "missing": None,
        "step": None,
        "merged": None,
    }


def no_block(*_: Any) -> Any:
    raise AssertionError("nothing is packed")


@pytest.mark.parametrize("layers", [None, [3], [5, 1]])
def test_planes_hold_the_same_and_lie_otherwise(layers: list[int] | None) -> None:
    rng = np.random.default_rng(5)
    # the second overlaps the first, the third is of another stage of a pipeline
    rows = [
        fragment(rng, 0, 6, [1, 3]),
        fragment(rng, 4, 9, [1, 3]),
        fragment(rng, 2, 8, [5]),
    ]
    one, other = (
        join_routes(rows, (1, 12), "s", unpack=no_block, layers=layers, planes=planes)
        for planes in (False, True)
    )
    assert one.layers == other.layers
    for name in ("ids", "valid", "weights", "weighted", "margin"):
        a, b = getattr(one, name), getattr(other, name)
        np.testing.assert_array_equal(a, b, err_msg=name)
        assert a.flags.c_contiguous, name
        assert b.flags.f_contiguous, name
    assert one.valid.any()
    assert one.weights is not None
    first = codecs.decode_plain(rows[0]["ids"], 6, 2, K, EXPERTS)
    if layers is None:
        np.testing.assert_array_equal(one.ids[:5, :2], first[1:])


@pytest.mark.parametrize("rows", [0, 1, 20, 500])
def test_rows_of_a_key_in_batches_of_any_size(rows: int) -> None:
    rng = np.random.default_rng(rows)
    keys = [
        Key(f"e{rng.integers(2)}", f"r{rng.integers(3)}", int(rng.integers(2)), 0)
        for _ in range(rows)
    ]
    columns = zip(*keys, strict=True) if keys else ([] for _ in KEY_COLUMNS)
    types = (pa.string(), pa.string(), pa.int32(), pa.int32())
    batch = pa.record_batch(
        [pa.array(list(c), t) for c, t in zip(columns, types, strict=True)], KEY_COLUMNS
    )
    for key in (Key("e0", "r1", 1, 0), Key("e1", "r2", 0, 0), Key("e1", "r2", 0, 1)):
        found = rows_of_key(batch, key)
        assert found.tolist() == [i for i, other in enumerate(keys) if other == key]
        assert found.dtype == np.int64
