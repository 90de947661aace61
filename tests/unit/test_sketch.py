"""Sketches: equal rows, unbiased distances, the rounding floor, and their place in a tape."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rolltape.recorder.sketch import signs, sketch, squared_distance
from rolltape.store.codecs import SKETCH_PROJECTIONS, decode_sketch, encode_sketch
from rolltape.store.errors import SchemaError

K = SKETCH_PROJECTIONS
FINITE = st.floats(-1e4, 1e4, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 70)), elements=FINITE)


@given(ROWS)
def test_equal_rows_have_equal_sketches(rows: np.ndarray) -> None:
    first, second = sketch(rows), sketch(rows.copy())
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1].view("<u4"), second[1].view("<u4"))
    assert not squared_distance(first[1], second[1]).any()
    # a row's sketch does not depend on those beside it
    alone = sketch(rows[-1:])
    assert alone[0][0] == first[0][-1] and np.allclose(alone[1][0], first[1][-1], rtol=1e-6)


@given(ROWS, st.data())
def test_one_bit_changes_the_hash(rows: np.ndarray, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, rows.shape[0] - 1))
    j = data.draw(st.integers(0, rows.shape[1] - 1))
    bit = data.draw(st.integers(0, 31))
    changed = rows.copy()
    changed.view("<u4")[i, j] ^= np.uint32(1 << bit)
    same = sketch(rows)[0] == sketch(changed)[0]
    assert not same[i] and same[np.arange(len(rows)) != i].all()


@given(ROWS, st.integers(0, 2**32 - 1))
def test_projections_are_linear(rows: np.ndarray, seed: int) -> None:
    other = np.random.default_rng(seed).normal(size=rows.shape).astype(np.float32)
    exact = (other.astype(np.float64) - rows) @ signs(rows.shape[1])
    found = sketch(other)[1].astype(np.float64) - sketch(rows)[1]
    size = np.abs(sketch(rows)[1]) + np.abs(sketch(other)[1])
    assert (np.abs(found - exact) <= 2.0**-23 * size + 1e-9).all()


@given(st.integers(1, 3000))
def test_signs_are_signs_and_a_wider_row_begins_with_those_of_a_narrower_one(width: int) -> None:
    found = signs(width)
    assert found.shape == (width, K) and set(np.unique(found)) <= {-1.0, 1.0}
    assert np.array_equal(found[: width // 2], signs(max(1, width // 2))[: width // 2])


def test_signs_never_change() -> None:
    """Sketches of different versions are compared: these are part of the encoding."""
    packed = np.packbits(signs(4).astype(int) > 0).tobytes().hex()
    assert packed == PINNED


PINNED = "52c0abeb0d6bc751"


def test_signs_are_balanced_and_do_not_correlate() -> None:
    found = signs(4096)
    assert (np.abs(found.mean(0)) < 5 / 64).all()  # five standard deviations
    products = found.T @ found / 4096 - np.eye(K)
    assert np.abs(products).max() < 6 / 64


@pytest.mark.parametrize("width", [128, 1024, 4096])
def test_the_estimate_is_unbiased_and_its_variance_is_as_stated(width: int) -> None:
    """Over many differences, which is the same as over many sets of signs: flipping the sign of
    component i of d flips row i of the signs."""
    rng = np.random.default_rng(width)
    n = 4000
    d = np.abs(rng.normal(size=width)).astype(np.float32)
    flips = rng.choice([-1, 1], (n, width)).astype(np.float32)
    a = np.zeros((n, width), np.float32)
    found = squared_distance(sketch(a)[1], sketch(d * flips)[1])
    d = d.astype(np.float64)
    exact = np.square(d).sum()
    variance = 2 / K * (exact**2 - (d**4).sum())
    assert found.mean() == pytest.approx(exact, abs=5 * np.sqrt(variance / n))
    assert found.var() == pytest.approx(variance, rel=0.15)
    assert found.std() / exact < np.sqrt(2 / K) * 1.1


def test_the_rounding_floor_is_as_stated() -> None:
    """Two rows that differ by far less than float32 can hold of their projections: what is
    estimated then is rounding, relative to the norm below 2^-24 times a small factor."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(500, 4096)).astype(np.float32)
    b = a.copy()
    b[:, 0] = np.nextafter(b[:, 0], np.float32(np.inf))
    exact = np.abs(b[:, 0].astype(np.float64) - a[:, 0]) / np.linalg.norm(a, axis=1)
    found = np.sqrt(squared_distance(sketch(a)[1], sketch(b)[1])) / np.linalg.norm(a, axis=1)
    assert exact.max() < 1e-8
    assert found.max() < 2**-23  # the floor
    hashes = sketch(a)[0] == sketch(b)[0]
    assert not hashes.any()  # that they differ is known all the same


@given(ROWS)
@settings(max_examples=30)
def test_bytes_and_back(rows: np.ndarray) -> None:
    hashes, projections = sketch(rows)
    data = encode_sketch(hashes, projections)
    assert len(data) == 72 * len(rows)
    back = decode_sketch(data, len(rows), field="data")
    assert np.array_equal(back[0], hashes)
    assert np.array_equal(back[1].view("<u4"), projections.view("<u4"))
    with pytest.raises(SchemaError, match="bytes"):
        decode_sketch(data[:-1], len(rows), field="data")


def test_values_that_are_not_finite_show() -> None:
    rows = np.ones((3, 8), np.float32)
    rows[1, 2], rows[2, 3] = np.nan, np.inf
    hashes, projections = sketch(rows)
    assert np.isfinite(projections).all(1).tolist() == [True, False, False]
    assert len(set(hashes.tolist())) == 3
