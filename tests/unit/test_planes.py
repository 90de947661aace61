"""Byte-split floats: every bit kept, and what no shape explains is refused."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.store.codecs import encode_floats
from rolltape.store.errors import SchemaError
from rolltape.store.planes import decode_split, encode_split


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_every_bit_is_kept(data, shape):
    count = int(np.prod(shape))
    words = st.integers(0, 2**32 - 1)
    bits = np.array(data.draw(st.lists(words, min_size=count, max_size=count)), np.uint32)
    values = bits.view(np.float32).reshape(shape)
    got = decode_split(encode_split(values), tuple(shape), field="routes.weights")
    assert got.dtype == np.float32
    assert got.shape == tuple(shape)
    np.testing.assert_array_equal(got.view(np.uint32), values.view(np.uint32))


def test_special_values_keep_their_bits():
    bits = np.array([0x7FC00001, 0xFFA00000, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    got = decode_split(encode_split(bits.view(np.float32)), (5,), field="routes.margin")
    np.testing.assert_array_equal(got.view(np.uint32), bits)


def test_layout_is_planes_from_the_least_significant_byte_of_runs_per_trailing_index():
    values = np.array([[0x03020100, 0x13121110], [0x23222120, 0x33323130]], np.uint32)
    assert encode_split(values.view(np.float32)).hex() == "00201030012111310222123203231333"


def test_views_that_are_not_contiguous_are_encoded_alike():
    values = np.random.default_rng(0).random((6, 4), np.float32)
    assert encode_split(values[::2, ::-1]) == encode_split(values[::2, ::-1].copy())


def test_zstd_makes_more_of_it_than_of_whole_floats():
    logits = np.random.default_rng(1).normal(size=(4000, 3, 8)).astype(np.float32)
    weights = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    zstd = zstandard.ZstdCompressor(level=3)
    split, whole = (
        len(zstd.compress(encode_split(weights))),
        len(zstd.compress(encode_floats(weights))),
    )
    assert split < 0.95 * whole


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (-4, -1), (2**40, 2**40), (0, 5)])
def test_other_shapes_are_refused(shape):
    data = encode_split(np.zeros((4, 1), np.float32))
    with pytest.raises(SchemaError, match=r"routes\.weights has 16 bytes"):
        decode_split(data, shape, field="routes.weights")
