"""Packed routes: lossless, stable, the same with and without numba, and safe on hostile bytes."""

import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.store import packed, ranks
from rolltape.store.errors import DamagedShardError, SchemaError

OURS = (DamagedShardError, SchemaError)


def sample(seed, n, layers, k, experts, *, tokens=7, repeats=0.0, missing=0.0):
    """Routes that depend on the token, with a bit of noise."""
    rng = np.random.default_rng(seed)
    token_ids = rng.choice(rng.integers(0, 1 << 32, tokens, dtype=np.uint64), n).astype(np.uint32)
    ids = np.zeros((n, layers, k), np.uint8 if experts <= 256 else np.uint16)
    for i in range(n):
        for layer in range(layers):
            taste = np.random.default_rng((int(token_ids[i]) + layer) % 2**32).random(experts)
            best = np.argsort(taste + 0.1 * rng.random(experts))[:k]
            if len(best) < k or rng.random() < repeats:
                best = rng.integers(0, experts, k)
            ids[i, layer] = best
    return ids, token_ids, rng.random((n, layers)) >= missing


def expected(ids, valid, order):
    rows = np.where(valid[..., None], ids, 0).astype(ids.dtype)
    return rows if order else np.sort(rows, axis=2)


def assert_round_trip(ids, token_ids, valid, experts, order):
    # numba compiles for each k anew, which takes seconds; that it agrees is another test
    data = packed._encode_block(ids, token_ids, valid, experts, order, None, ranks)
    block = packed._decode_block(data, None, None, ranks)
    assert block.ids.dtype == ids.dtype
    assert block.token_ids.dtype == np.uint32
    np.testing.assert_array_equal(block.ids, expected(ids, valid, order))
    np.testing.assert_array_equal(block.token_ids, token_ids)
    np.testing.assert_array_equal(block.valid, valid)
    assert (block.num_experts, block.order) == (experts, order)
    return data


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 40),
    layers=st.integers(0, 4),
    k=st.integers(0, 12),
    experts=st.sampled_from([1, 2, 8, 128, 255, 256, 257, 300, 1000]),
    tokens=st.integers(1, 20),
    repeats=st.sampled_from([0.0, 0.2, 1.0]),
    missing=st.sampled_from([0.0, 0.1, 1.0]),
    order=st.booleans(),
)
def test_round_trip(seed, n, layers, k, experts, tokens, repeats, missing, order):
    ids, token_ids, valid = sample(
        seed, n, layers, k, experts, tokens=tokens, repeats=repeats, missing=missing
    )
    assert_round_trip(ids, token_ids, valid, experts, order)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), order=st.booleans())
def test_round_trip_of_arbitrary_ids(data, order):
    n, layers, k = (data.draw(st.integers(0, top)) for top in (12, 3, 5))
    experts = data.draw(st.integers(1, 65_535))
    dtype = np.uint8 if experts <= 256 else np.uint16
    draw = st.lists(st.integers(0, experts - 1), min_size=n * layers * k, max_size=n * layers * k)
    ids = np.array(data.draw(draw), dtype).reshape(n, layers, k)
    words = st.integers(0, 2**32 - 1)
    token_ids = np.array(data.draw(st.lists(words, min_size=n, max_size=n)), np.uint32)
    bits = st.lists(st.booleans(), min_size=n * layers, max_size=n * layers)
    valid = np.array(data.draw(bits), bool).reshape(n, layers)
    assert_round_trip(ids, token_ids, valid, experts, order)


@pytest.mark.parametrize("order", [True, False])
def test_most_experts_and_large_ranks(order):
    ids, token_ids, valid = sample(1, 12, 1, 8, 65_535)
    ids[0, 0] = [65_534, 0, 65_533, 1, 256, 255, 254, 40_000]
    assert_round_trip(ids, token_ids, valid, 65_535, order)


def test_scores_are_rescaled_without_loss():
    # one token, far more than the 50 turns after which scores reach their limit
    ids, token_ids, valid = sample(2, 400, 1, 4, 16, tokens=1)
    assert_round_trip(ids, token_ids, valid, 16, True)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 150),
    k=st.sampled_from([0, 4, 18]),
    experts=st.sampled_from([1, 16, 70, 256, 400]),
    repeats=st.sampled_from([0.0, 0.2]),
    missing=st.sampled_from([0.0, 0.3]),
    order=st.booleans(),
)
def test_numba_and_python_agree(seed, n, k, experts, repeats, missing, order):
    pytest.importorskip("numba")
    fast, slow = ranks.compiled(), ranks
    assert fast is not None
    ids, token_ids, valid = sample(seed, n, 2, k, experts, repeats=repeats, missing=missing)
    data = packed._encode_block(ids, token_ids, valid, experts, order, None, fast)
    assert data == packed._encode_block(ids, token_ids, valid, experts, order, None, slow)
    for kernels in (fast, slow):
        block = packed._decode_block(data, None, None, kernels)
        np.testing.assert_array_equal(block.ids, expected(ids, valid, order))
        np.testing.assert_array_equal(block.valid, valid)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    experts=st.sampled_from([16, 400]),
    repeats=st.sampled_from([0.0, 0.2]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    order=st.booleans(),
)
def test_wanted_layers_are_those_of_the_whole_block(data, experts, repeats, missing, order):
    ids, token_ids, valid = sample(8, 30, 11, 4, experts, repeats=repeats, missing=missing)
    block = packed.encode_block(ids, token_ids, valid, num_experts=experts, order=order)
    wanted = data.draw(st.lists(st.integers(0, 10), max_size=12))
    part = packed.decode_block(block, layers=wanted)
    assert part.ids.shape == (30, len(wanted), 4)
    np.testing.assert_array_equal(part.ids, expected(ids, valid, order)[:, wanted])
    np.testing.assert_array_equal(part.valid, valid[:, wanted])
    np.testing.assert_array_equal(part.token_ids, token_ids)


def test_a_layer_that_the_block_lacks_is_refused(good):
    for wanted in ([3], [0, -1]):
        with pytest.raises(SchemaError, match="3 layers"):
            packed.decode_block(good, layers=wanted)


@pytest.mark.parametrize("order", [True, False])
def test_bytes_do_not_depend_on_threads(monkeypatch, order):
    monkeypatch.setattr(packed, "_FEW", 0)
    ids, token_ids, valid = sample(9, 60, 21, 4, 300, repeats=0.1, missing=0.1)
    blocks = {
        threads: packed.encode_block(
            ids, token_ids, valid, num_experts=300, order=order, threads=threads
        )
        for threads in (1, 2, 5, 100, None)
    }
    assert len(set(blocks.values())) == 1
    for threads, data in blocks.items():
        block = packed.decode_block(data, threads=threads)
        np.testing.assert_array_equal(block.ids, expected(ids, valid, order))


def test_damage_is_found_by_whichever_thread_meets_it(monkeypatch):
    monkeypatch.setattr(packed, "_FEW", 0)
    ids, token_ids, valid = sample(10, 60, 12, 4, 16)
    data = packed.encode_block(ids, token_ids, valid, num_experts=16)
    forged = bytearray(data)
    forged[-12] ^= 1  # a word of the last layer
    for threads in (1, 4):
        with pytest.raises(DamagedShardError, match="ranks are impossible"):
            packed.decode_block(sealed(forged), threads=threads)
    # which is not looked at by those who want another
    block = packed.decode_block(sealed(forged), layers=[2])
    np.testing.assert_array_equal(block.ids, ids[:, [2]])


def test_compiled_kernels_work_where_nothing_may_be_written(monkeypatch):
    pytest.importorskip("numba")
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    jit = pytest.importorskip("rolltape.store.ranks_jit")._jit

    def more(x):
        return x + 1

    with pytest.raises(RuntimeError, match="no locator"):
        pytest.importorskip("numba").njit(cache=True)(more)
    assert jit(more)(1) == 2


def test_blocks_hold_as_many_tokens_as_fit():
    assert packed.block_tokens(16, 8) == packed.MAX_TOKENS
    assert packed.block_tokens(48, 8) == (1 << 22) // (48 * 8)
    assert packed.block_tokens(0, 0) == packed.MAX_TOKENS
    assert packed.block_tokens(65_535, 65_535) == 1
    for layers, k in ((16, 8), (61, 8), (94, 10), (1, 1), (65_535, 8)):
        n = packed.block_tokens(layers, k)
        packed._check_limits(n, layers, k, 65_535)


def pattern():
    """A fixed input that needs no random generator, whose streams are not promised to be stable."""
    i = np.arange(60)[:, None, None]
    layer = np.arange(3)[None, :, None]
    slot = np.arange(4)[None, None, :]
    ids = ((i % 5) * 7 + layer * 3 + slot * (1 + i % 3)) % 30
    valid = (i + layer)[:, :, 0] % 11 != 0
    return ids.astype(np.uint8), (np.arange(60, dtype=np.uint32) % 5) * 1000, valid


@pytest.mark.parametrize(
    ("order", "digest"),
    [(True, "c146d8bdce9a5418"), (False, "c921f4bf2dd49019")],
)
def test_bytes_of_version_1_are_stable(order, digest):
    """A changed digest is another format: count the version up and keep reading this one."""
    ids, token_ids, valid = pattern()
    data = packed.encode_block(ids, token_ids, valid, num_experts=30, order=order)
    # the kernels' own output; zstd may choose other bytes for the small sections in a later version
    assert xxhash.xxh3_64_hexdigest(contents(data)) == digest
    for same in (data, memoryview(b"." + data)[1:]):
        block = packed.decode_block(same)
        np.testing.assert_array_equal(block.ids, expected(ids, valid, order))


#: `pattern()[:20]` as version 1 wrote it.
STORED = bytes.fromhex(
    "7274700103041e0014000000030000000400000027010000141400e8e8e8e800030303030000000000000000"
    "0000281628b52ffd20286d000028000102030402002001408a160808fef7ffbffffffd0f80043828b52ffd60"
    "000175010034028d49a480ed4980242436491249495b366d3649361280362492362436240004010101000200"
    "784069bf1470022e2edbf12801f563be06e27029d0ddfa5201022b3c0a12d3bc3c663dd9432fceaf53d93647"
    "fe2b125117ec7f0fe20d313030a2588a030e727c0ae322d004771b9706c4fb9cb815fb0c54b6bde600d6e3e4"
    "ded936f56e3d125702bed70fe262117ff230307f4a6b30f6e01133d441060082a26e11691b618ac4238e4c2e"
    "e8553914f26cee0052d118c49ffc82dacbf5b6d0c0052163df82c80c4b2ec0"
)


def test_a_stored_block_of_version_1_is_read():
    ids, token_ids, valid = pattern()
    block = packed.decode_block(STORED)
    np.testing.assert_array_equal(block.ids, expected(ids, valid, True)[:20])
    np.testing.assert_array_equal(block.token_ids, token_ids[:20])
    np.testing.assert_array_equal(block.valid, valid[:20])
    assert (block.num_experts, block.order) == (30, True)


def contents(data):
    """Header but the length, and every section, uncompressed."""
    parts = [data[:20]]
    reader = packed._Sections(data, packed._HEADER.size, len(data) - 8)
    while reader.at < len(data) - 8:
        parts.append(reader.take("section", most=1 << 24))
    return b"|".join(parts)


def sealed(data):
    """The block with a length and a checksum that fit, as an attacker would write it."""
    data = bytearray(data)
    struct.pack_into("<I", data, 20, len(data))
    struct.pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    return bytes(data)


@pytest.fixture(scope="module")
def good():
    ids, token_ids, valid = sample(3, 80, 3, 4, 300, repeats=0.1, missing=0.1)
    return packed.encode_block(ids, token_ids, valid, num_experts=300)


def test_every_truncation_is_refused(good):
    for size in range(0, len(good), 7):
        with pytest.raises(DamagedShardError):
            packed.decode_block(good[:size])
    with pytest.raises(DamagedShardError):
        packed.decode_block(good + b"\0")


def test_every_flipped_byte_is_detected(good):
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        with pytest.raises(OURS):
            packed.decode_block(bytes(data))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_forged_blocks_never_escape_our_errors(good, data):
    forged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        forged[data.draw(st.integers(4, len(forged) - 9))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(packed._HEADER.size, len(forged) - 9)))
    if cut is not None:
        del forged[cut : data.draw(st.integers(cut, len(forged) - 8))]
    try:
        block = packed.decode_block(sealed(forged))
    except OURS:
        return
    # forged but consistent: still within what it claims
    assert block.ids.size == 0 or int(block.ids.max()) < block.num_experts


@pytest.mark.parametrize(
    ("n", "layers", "k"),
    [
        (32_768, 64, 64),
        (2**32 - 1, 2**32 - 1, 2**32 - 1),
        (32_768, 65_535, 0),
        (1, 65_535, 65_535),
        (32_769, 1, 1),
        (32_768, 16, 8),
    ],
)
@pytest.mark.parametrize("experts", [0, 8, 65_535])
def test_huge_claims_allocate_nothing(good, n, layers, k, experts):
    forged = bytearray(good)
    struct.pack_into("<HIII", forged, 6, experts, n, layers, k)
    data = sealed(forged)
    tracemalloc.start()
    try:
        with pytest.raises(OURS):
            packed.decode_block(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_sections_that_claim_too_much_are_refused(good):
    start = packed._HEADER.size
    # a zstd frame of 64 MiB of zeros is a few kB
    bomb = packed._section(bytes(64 << 20))
    data = sealed(good[:start] + bomb + good[start:])
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError, match="token ids"):
            packed.decode_block(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_half_a_word_is_refused():
    reader = packed._Sections(STORED, packed._HEADER.size, len(STORED) - 8)
    while reader.at < len(STORED) - 8:
        last = reader.at
        reader.take("section", most=1 << 24)
    with pytest.raises(DamagedShardError, match="words has 5 bytes"):
        packed.decode_block(sealed(STORED[:last] + bytes([5, 5]) + bytes(5) + bytes(8)))


def test_memory_of_the_most_compressible_block():
    n, layers, k = 4096, 32, 4
    ids = np.zeros((n, layers, k), np.uint8)
    nothing = np.zeros((n, layers), bool)
    data = packed.encode_block(ids, np.zeros(n, np.uint32), nothing, num_experts=128)
    assert n * layers * k <= packed.MAX_IDS_PER_BYTE * len(data)
    tracemalloc.start()
    try:
        packed.decode_block(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    per_id, fixed = (16, 8) if packed.uses_numba() else (80, 24)
    assert peak <= per_id * n * layers * k + (fixed << 20)


def test_missing_rows_cost_little():
    ids, token_ids, valid = sample(4, 300, 4, 4, 32)
    full = packed.encode_block(ids, token_ids, valid, num_experts=32)
    valid[100:] = False
    part = packed.encode_block(ids, token_ids, valid, num_experts=32)
    whole = packed.encode_block(ids[:100], token_ids[:100], valid[:100], num_experts=32)
    assert len(part) < len(full)
    assert len(part) <= len(whole) + 200  # the token ids of the others, and the bitmap


def test_few_tokens_do_not_pay_for_many_frequencies():
    ids, token_ids, valid = sample(7, 64, 4, 4, 128)
    data = packed.encode_block(ids, token_ids, valid, num_experts=128)
    assert len(data) < ids.size


def test_ids_of_missing_rows_are_ignored():
    ids, token_ids, valid = sample(5, 20, 2, 4, 16, missing=0.5)
    other = ids.copy()
    other[~valid] = 200
    assert packed.encode_block(ids, token_ids, valid, num_experts=16) == packed.encode_block(
        other, token_ids, valid, num_experts=16
    )


def test_refusals_name_the_reason():
    ids, token_ids, valid = sample(6, 5, 2, 4, 8)
    with pytest.raises(SchemaError, match="num_experts is 4"):
        packed.encode_block(ids + np.uint8(4), token_ids, valid, num_experts=4)
    with pytest.raises(SchemaError, match="65535 are supported"):
        packed.encode_block(ids, token_ids, valid, num_experts=65_536)
    with pytest.raises(SchemaError, match="expected"):
        packed.encode_block(ids, token_ids[:-1], valid, num_experts=8)
    with pytest.raises(SchemaError, match="32769 tokens"):
        packed.encode_block(
            np.zeros((32_769, 1, 1), np.uint8),
            np.zeros(32_769, np.uint32),
            np.ones((32_769, 1), bool),
            num_experts=8,
        )


def test_newer_version_is_refused_by_name(good):
    forged = bytearray(good)
    forged[3] = 2
    with pytest.raises(SchemaError, match="version 2"):
        packed.decode_block(sealed(forged))
