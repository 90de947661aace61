"""Kept sets: exact from one id to the whole vocabulary, small, and safe on hostile bytes."""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.store import kept
from rolltape.store.errors import DamagedShardError, SchemaError

OURS = (DamagedShardError, SchemaError)
FIELD = "supports.data"


def csr(sets):
    counts = np.array([len(ids) for ids in sets], np.int64)
    ids = np.concatenate([np.zeros(0, np.uint32), *(np.asarray(s, np.uint32) for s in sets)])
    return counts, ids.astype(np.uint32)


def round_trip(sets, vocab_size):
    counts, ids = csr(sets)
    data = kept.encode_kept(counts, ids, vocab_size=vocab_size)
    got = kept.decode_kept(data, counts, field=FIELD)
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(got, ids)
    return data


def drawn(rng, vocab, size):
    return np.sort(rng.choice(vocab, size, replace=False))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 300), known=st.booleans())
def test_round_trip(data, vocab, known):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    near = st.integers(0, vocab) | st.sampled_from([0, 1, vocab - 1, vocab])
    sizes = data.draw(st.lists(near, max_size=12))
    round_trip([drawn(rng, vocab, size) for size in sizes], vocab if known else None)


@settings(max_examples=100, deadline=None)
@given(
    sets=st.lists(st.sets(st.integers(0, 2**32 - 1), max_size=6), max_size=8),
    vocab=st.sampled_from([None, 1, 1000, 2**31, 2**32]),
)
def test_ids_beyond_the_vocabulary_are_kept_too(sets, vocab):
    round_trip([sorted(ids) for ids in sets], vocab)


@pytest.mark.parametrize("size", [0, 1, 2, 50, 5_000, 60_000, 151_000, 151_935, 151_936])
@pytest.mark.parametrize("vocab", [151_936, None])
def test_sizes_up_to_a_real_vocabulary(size, vocab):
    rng = np.random.default_rng(size)
    sets = [drawn(rng, 151_936, s) for s in (3, size, 0, size, 7)]
    round_trip(sets, vocab)


def test_each_set_takes_the_smallest_of_the_three_forms():
    rng = np.random.default_rng(1)
    head = kept._HEADER.size
    whole = round_trip([np.arange(151_936)], 151_936)
    assert len(whole) == head + 5
    assert len(round_trip([drawn(rng, 151_936, 151_930)], 151_936)) <= head + 5 + 6 * 5
    assert len(round_trip([drawn(rng, 151_936, 70_000)], 151_936)) == head + 5 + 151_936 // 8
    assert len(round_trip([drawn(rng, 151_936, 50)], 151_936)) <= head + 50 * 5
    # a run of ids is a small list even where a bitmap is an option
    assert len(round_trip([np.arange(1000, 9000)], 151_936)) == head + 4 + 7999


def test_usual_sets_are_small_and_beat_plain_lists_under_zstd():
    rng = np.random.default_rng(2)
    sets = [drawn(rng, 151_936, size) for size in rng.integers(1, 51, 3000)]
    _, ids = csr(sets)
    zstd = zstandard.ZstdCompressor(level=3)
    packed = len(zstd.compress(round_trip(sets, 151_936)))
    assert packed < 0.75 * len(zstd.compress(ids.tobytes()))


def test_ids_that_are_kept_often_cost_less():
    rng = np.random.default_rng(6)
    name = rng.permutation(151_936)
    sets = [np.unique(name[rng.zipf(1.3, size) % 151_936]) for size in rng.integers(1, 20, 3000)]
    other = [drawn(rng, 151_936, len(ids)) for ids in sets]
    zstd = zstandard.ZstdCompressor(level=3)
    often = len(zstd.compress(round_trip(sets, 151_936)))
    assert often < 0.65 * len(zstd.compress(round_trip(other, 151_936)))
    assert often < 0.8 * len(zstd.compress(csr(sets)[1].tobytes()))


def test_what_is_no_ascending_set_is_refused():
    with pytest.raises(SchemaError, match="position 1 of the row are not ascending"):
        kept.encode_kept(np.array([2, 2, 1]), np.array([5, 6, 3, 3, 1]), vocab_size=None)
    with pytest.raises(SchemaError, match="position 0 of the row are not ascending"):
        kept.encode_kept(np.array([3]), np.array([5, 6, 3]), vocab_size=10)
    with pytest.raises(SchemaError, match="add up"):
        kept.encode_kept(np.array([2, 2]), np.array([5, 6, 3]), vocab_size=None)
    with pytest.raises(SchemaError, match="add up"):
        kept.encode_kept(np.array([4, -1]), np.array([5, 6, 7]), vocab_size=None)
    with pytest.raises(SchemaError, match="fit uint32"):
        kept.encode_kept(np.array([1]), np.array([1 << 32]), vocab_size=None)


def mixed(repeats=6):
    """Sets of all kinds; with repeats also a table."""
    rng = np.random.default_rng(3)
    sizes = (1, 0, 500, 5, 260, 496, 2, 250, 1, 499)
    return [drawn(rng, 500, size) for size in sizes] + [[3, 4, 400]] * repeats


def test_every_truncation_and_other_counts_are_refused():
    counts, ids = csr(mixed())
    data = kept.encode_kept(counts, ids, vocab_size=500)
    parts = kept._split(data, counts, FIELD)
    assert set(parts.kinds.tolist()) == {1, 2}
    assert parts.table.size
    for size in range(len(data)):
        with pytest.raises(OURS):
            kept.decode_kept(data[:size], counts, field=FIELD)
    with pytest.raises(DamagedShardError):
        kept.decode_kept(data + b"\0", counts, field=FIELD)
    for p in range(len(counts)):
        for change in (-1, 1, 1 << 31, 1 << 40):
            other = counts.copy()
            other[p] += change
            with pytest.raises(OURS):
                kept.decode_kept(data, other, field=FIELD)
    with pytest.raises(DamagedShardError, match="the row has 15"):
        kept.decode_kept(data, counts[:-1], field=FIELD)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_hostile_bytes_raise_our_errors_or_give_sets_of_those_counts(data):
    counts, ids = csr(mixed(data.draw(st.sampled_from([0, 6]))))
    forged = bytearray(kept.encode_kept(counts, ids, vocab_size=500))
    top = st.sampled_from([len(forged) - 1, kept._HEADER.size + 20])
    for _ in range(data.draw(st.integers(1, 4))):
        forged[data.draw(st.integers(0, data.draw(top)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del forged[data.draw(st.integers(0, len(forged))) :]
    try:
        got = kept.decode_kept(bytes(forged), counts, field=FIELD)
    except OURS:
        return
    assert len(got) == counts.sum()
    for part in np.split(got.astype(np.int64), np.cumsum(counts)[:-1]):
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("at", range(4, 36, 4))
@pytest.mark.parametrize("value", [0, 1, 500, 1 << 31, 2**32 - 1])
def test_huge_claims_allocate_nothing(at, value):
    counts, ids = csr(mixed())
    forged = bytearray(kept.encode_kept(counts, ids, vocab_size=500))
    if struct.unpack_from("<I", forged, at)[0] == value:
        return
    struct.pack_into("<I", forged, at, value)
    tracemalloc.start()
    try:
        with pytest.raises(OURS):
            kept.decode_kept(bytes(forged), counts, field=FIELD)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_vocabulary_that_the_counts_do_not_support_allocates_nothing():
    # one complement of nothing, as a set of one id would have it of 4 billion
    data = kept.encode_kept(np.array([16]), np.arange(16), vocab_size=16)
    forged = bytearray(data)
    struct.pack_into("<I", forged, 4, 2**32 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError):
            kept.decode_kept(bytes(forged), np.array([16]), field=FIELD)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "sizes", [[3] * 20_000, [3] * 100_000, [151_936] * 5, [20_000] * 10, [200] * 1000]
)
def test_memory_is_as_stated(sizes):
    rng = np.random.default_rng(4)
    counts, ids = csr([drawn(rng, 151_936, size) for size in sizes])
    data = kept.encode_kept(counts, ids, vocab_size=151_936)
    tracemalloc.start()
    try:
        kept.decode_kept(data, counts, field=FIELD)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * len(data) + 64 * len(counts) + 12 * len(ids) + (1 << 16)


def test_newer_version_is_refused_by_name():
    forged = bytearray(kept.encode_kept(np.array([1]), np.array([5]), vocab_size=None))
    forged[3] = 2
    with pytest.raises(SchemaError, match="version 2"):
        kept.decode_kept(bytes(forged), np.array([1]), field=FIELD)


def bomb(vocab):
    """One complement of nothing: a whole vocabulary in 41 bytes."""
    return struct.pack("<3sB8I", b"rtk", 1, vocab, 1, 0, 0, 0, 1, 0, 0) + bytes(4) + b"\1"


def test_few_bytes_never_become_many_ids():
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError, match="41 bytes"):
            kept.decode_kept(bomb(1 << 26), np.array([1 << 26]), field=FIELD)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    most = 41 * kept.MAX_IDS_PER_BYTE
    assert len(kept.decode_kept(bomb(most), np.array([most]), field=FIELD)) == most
    with pytest.raises(DamagedShardError, match="41 bytes"):
        kept.decode_kept(bomb(most + 1), np.array([most + 1]), field=FIELD)


def test_sets_that_would_be_too_small_are_padded_with_zeros():
    vocab, n = 151_936, 40
    counts = np.full(n, vocab)
    data = kept.encode_kept(counts, np.tile(np.arange(vocab), n), vocab_size=vocab)
    assert len(data) > kept._HEADER.size + 5 * n
    assert n * vocab <= kept.MAX_IDS_PER_BYTE * len(data)
    got = kept.decode_kept(data, counts, field=FIELD)
    assert (got.reshape(n, vocab) == np.arange(vocab)).all()
    for other in (data[:-1], data + b"\0", data[:-1] + b"\1"):
        with pytest.raises(DamagedShardError):
            kept.decode_kept(other, counts, field=FIELD)
