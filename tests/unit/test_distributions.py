"""Top-k distributions: the joined fragments, and bounds that hold for the full distributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.recorder.options import Options
from rolltape.store import SchemaError, TapeWriter, UsageError
from rolltape.store import open as open_tape
from rolltape.store.columns import Masked
from rolltape.store.distributions import (
    Distributions,
    compare_distributions,
    distribution_columns,
    join_distributions,
    raw_semantics,
)
from rolltape.store.schema import SEMANTICS
from tests.builders import random_samples, write_tape

RAW = raw_semantics(vocab_size=50, dtype="float32", source="engine")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def top(log_p: np.ndarray, k: int) -> Distributions:
    """The stored form of full distributions [n, V]."""
    order = np.argsort(-log_p, axis=1, kind="stable")
    rest = np.take_along_axis(log_p, order[:, k:], 1)
    return Distributions(
        valid=np.ones(len(log_p), bool),
        ids=order[:, :k].astype(np.uint32),
        logprobs=np.take_along_axis(log_p, order[:, :k], 1).astype(np.float32),
        tail=np.logaddexp.reduce(rest, axis=1, initial=-np.inf).astype(np.float32),
        semantics=((0, len(log_p), RAW),),
    )


def kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        terms = np.exp(log_p) * (log_p - log_q)
    return np.where(log_p == -np.inf, 0.0, terms).sum(1)


def tv(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    return np.abs(np.exp(log_p) - np.exp(log_q)).sum(1) / 2


def row(start: int, log_p: np.ndarray, k: int) -> dict[str, Any]:
    stored = top(log_p, k)
    return {
        "start": start,
        "n": len(log_p),
        "k": k,
        "ids": stored.ids.reshape(-1),
        "logprobs": stored.logprobs.reshape(-1),
        "tail": stored.tail,
        "semantics": RAW,
    }


def random_logs(n: int, vocab: int = 50, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return log_softmax(np.random.default_rng(seed).normal(size=(n, vocab)) * spread)


# -- bounds ---------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Two full distributions over one vocabulary, alike or not, some with ids ruled out."""
    vocab = draw(st.integers(2, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.3, 2.0, 20.0]))
    apart = draw(st.sampled_from([0.0, 1e-3, 0.3, 5.0]))
    a = rng.normal(size=(4, vocab)) * spread
    b = a + rng.normal(size=a.shape) * apart
    if draw(st.booleans()):
        b = b[:, rng.permutation(vocab)]
    for side in (a, b):
        if draw(st.booleans()):
            side[:, rng.integers(0, vocab)] = -np.inf
    return (
        log_softmax(a),
        log_softmax(b),
        draw(st.integers(1, vocab)),
        draw(st.integers(1, vocab)),
    )


@given(pairs())
def test_bounds_hold_for_the_full_distributions(
    case: tuple[np.ndarray, np.ndarray, int, int],
) -> None:
    log_a, log_b, k_a, k_b = case
    floor = float(log_b.min())
    found = compare_distributions(top(log_a, k_a), top(log_b, k_b), floor=floor)
    true_kl, true_tv = kl(log_a, log_b), tv(log_a, log_b)
    slack = 2e-6 * (1 + np.abs(np.where(np.isinf(true_kl), 0, true_kl)))
    assert (found.kl_lower <= true_kl + slack).all()
    assert (found.kl_upper >= true_kl - slack).all()
    assert (found.tv_lower <= true_tv + 2e-6).all()
    assert (found.tv_upper >= true_tv - 2e-6).all()
    without = compare_distributions(top(log_a, k_a), top(log_b, k_b))
    assert (without.kl_upper >= found.kl_upper).all()


@given(pairs())
def test_with_every_id_named_the_bounds_are_the_value(
    case: tuple[np.ndarray, np.ndarray, int, int],
) -> None:
    log_a, log_b, _, _ = case
    vocab = log_a.shape[1]
    found = compare_distributions(top(log_a, vocab), top(log_b, vocab))
    for value, true in (
        (found.kl_lower, kl(log_a, log_b)),
        (found.kl_upper, kl(log_a, log_b)),
        (found.tv_lower, tv(log_a, log_b)),
        (found.tv_upper, tv(log_a, log_b)),
    ):
        np.testing.assert_allclose(value, true, rtol=2e-6, atol=2e-6)
    assert (found.common == vocab).all() and (found.overlap == 1).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.1, 0.9]))
def test_the_lower_bound_is_the_least_that_any_full_distribution_gives(
    seed: int, tail_a: float, tail_b: float
) -> None:
    """Two ids a side, one of them common; the rest is searched over a grid."""
    rng = np.random.default_rng(seed)
    named_a = rng.dirichlet([1, 1]) * (1 - tail_a)
    named_b = rng.dirichlet([1, 1]) * (1 - tail_b)

    def stored(ids: list[int], named: np.ndarray, tail: float) -> Distributions:
        order = np.argsort(-named)
        return Distributions(
            valid=np.ones(1, bool),
            ids=np.array(ids, np.uint32)[None, order],
            logprobs=np.log(named)[None, order].astype(np.float32),
            tail=np.log([tail]).astype(np.float32),
        )

    found = compare_distributions(stored([7, 8], named_a, tail_a), stored([7, 9], named_b, tail_b))
    # how much of a's tail falls on 9, and of b's on 8; the ends included, the remainder elsewhere
    share = np.concatenate([[1e-12], np.linspace(0, 1, 401)[1:-1], [1 - 1e-12]])
    y, x = tail_a * share[:, None], tail_b * share[None, :]
    a8, b9 = named_a[1], named_b[1]
    values = (
        named_a[0] * np.log(named_a[0] / named_b[0])
        + a8 * np.log(a8 / x)
        + y * np.log(y / b9)
        + (tail_a - y) * np.log((tail_a - y) / (tail_b - x))
    )
    least = max(0.0, float(values.min()))
    assert found.kl_lower[0] <= least + 1e-6
    assert found.kl_lower[0] == pytest.approx(least, abs=5e-3)


def test_what_only_one_side_names_counts_as_the_tail_of_the_other() -> None:
    a = np.log([[0.5, 0.3, 0.1, 0.1]])
    b = np.log([[0.5, 0.1, 0.3, 0.1]])
    found = compare_distributions(top(a, 2), top(b, 2))
    # a names 0 and 1, b names 0 and 2; a_o = b_o = 0.3 and both tails have 0.2: too little room
    assert found.common.tolist() == [1] and found.overlap.tolist() == [0.5]
    want = 0.3 * np.log(0.3 / 0.2) + 0.2 * np.log(0.2 / 0.3)
    assert found.kl_lower[0] == pytest.approx(want, abs=1e-6)
    assert found.kl_upper[0] == np.inf
    assert found.tv_lower[0] == pytest.approx(0.1, abs=1e-6)
    assert found.tv_upper[0] == pytest.approx(0.5, abs=1e-6)


def test_equal_rows_differ_by_nothing_and_a_ruled_out_id_by_infinity() -> None:
    log_p = random_logs(3)
    same = compare_distributions(top(log_p, 5), top(log_p, 5))
    assert (same.kl_lower == 0).all() and (same.tv_lower == 0).all()
    b = log_p.copy()
    b[1, log_p[1].argmax()] = -np.inf
    found = compare_distributions(top(log_p, 5), top(log_softmax(b), 50))
    assert np.isinf(found.kl_lower).tolist() == [False, True, False]


def test_the_common_range_is_compared_where_both_sides_have_something() -> None:
    a, b = top(random_logs(6), 4), top(random_logs(4, seed=1), 3)
    valid = np.array([False, True, True, False, True, True])
    holes = Distributions.empty(6, 4)
    for name in ("ids", "logprobs", "tail"):
        getattr(holes, name)[valid] = getattr(a, name)[valid]
    a = replace(holes, valid=valid, semantics=a.semantics)
    found = compare_distributions(a, b)
    assert found.valid.tolist() == [False, True, True, False]
    whole = compare_distributions(top(random_logs(6), 4), b)
    np.testing.assert_array_equal(found.kl_lower[found.valid], whole.kl_lower[found.valid])
    np.testing.assert_array_equal(found.common[found.valid], whole.common[found.valid])


def test_another_temperature_is_not_compared() -> None:
    a = top(random_logs(2), 3)
    b = replace(a, semantics=((0, 2, {**RAW, "temperature": 0.7}),))
    with pytest.raises(UsageError, match=r"0\.7"):
        compare_distributions(a, b)
    # who computed it, and in which dtype, is what a comparison is about
    other = {**RAW, "source": "recomputed", "dtype": "float64", "vocab_size": 64}
    assert compare_distributions(a, replace(a, semantics=((0, 2, other),))).valid.all()


# -- rows -----------------------------------------------------------------------------------


def test_fragments_are_joined_and_the_first_one_counts() -> None:
    first, second = random_logs(3, seed=1), random_logs(4, seed=2)
    joined = join_distributions([row(2, first, 3), row(4, second, 3)], 10, "s")
    assert joined.valid.tolist() == [False, False] + [True] * 6 + [False, False]
    assert joined.k == 3 and len(joined) == 10
    want = np.concatenate([top(first, 3).ids, top(second, 3).ids[1:]])
    np.testing.assert_array_equal(joined.ids[2:8], want)
    assert [span[:2] for span in joined.semantics] == [(2, 3), (4, 4)]


def test_null_elements_are_missing_and_minus_infinity_is_not() -> None:
    log_p = np.log(np.array([[0.6, 0.4, 0, 0], [0.5, 0.5, 0, 0], [0.7, 0.1, 0.1, 0.1]]) + 0.0,
                   where=np.array([[1, 1, 0, 0]] * 2 + [[1] * 4], bool),
                   out=np.full((3, 4), -np.inf))  # fmt: skip
    entry = row(0, log_p, 3)
    known = np.ones(9, bool)
    known[4] = False  # one logprob of position 1
    entry["logprobs"] = Masked(entry["logprobs"], known)
    joined = join_distributions([entry], 3, "s")
    assert joined.valid.tolist() == [True, False, True]
    assert joined.logprobs[0, 2] == -np.inf and joined.tail[0] == -np.inf


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"k": 4}, "k is 4"),
        ({"n": 4}, "do not fit"),
        ({"tail": np.zeros(2, np.float32)}, "do not fit"),
        ({"start": -1}, "3 positions from there"),
        ({"ids": np.zeros(9, np.uint32)}, "twice"),
        ({"logprobs": np.arange(9, dtype=np.float32)}, "best first"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    rows = [row(0, random_logs(2), 3), {**row(4, random_logs(3), 3), **changes}]
    with pytest.raises(SchemaError, match=f"distributions of engine.0-0 at .*{what}"):
        join_distributions(rows, 10, "engine.0-0")


def test_a_tape_gives_back_what_was_written(tmp_path: Path) -> None:
    samples = random_samples(1, layers=())
    write_tape(tmp_path / "a", samples, sealed=False)
    (key,) = open_tape(tmp_path / "a").keys()
    log_p = random_logs(5)
    log_p[2, 7:] = -np.inf  # seven ids are left: some of the ten best have no mass, and no tail
    log_p = log_softmax(log_p)
    stored = top(log_p, 10)
    keys = {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": 0}
    with TapeWriter(tmp_path / "a") as writer:
        columns = distribution_columns(
            stored.ids, stored.logprobs, stored.tail, lengths=np.array([2, 3])
        )
        semantics = pa.repeat(pa.scalar(RAW, type=SEMANTICS), 2)
        writer.append(
            "distributions",
            {"start": [6, 8], "n": [2, 3], **keys, **columns, "semantics": semantics},
        )
    tape = open_tape(tmp_path / "a")
    sequence = tape.sequence(key)
    joined = sequence.distributions()
    assert np.flatnonzero(joined.valid).tolist() == [6, 7, 8, 9, 10]
    for name in ("ids", "logprobs", "tail"):
        got, want = getattr(joined, name)[6:11], getattr(stored, name)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert joined.semantics == ((6, 2, RAW), (8, 3, RAW))


def test_the_option_travels_by_environment_and_cannot_be_negative(tmp_path: Path) -> None:
    options = Options(top_logprobs=12)
    assert Options.from_environment(options.environment(str(tmp_path))) == options
    assert Options.from_environment({}).top_logprobs == 0
    for make in (
        lambda: Options(top_logprobs=-1),
        lambda: Options.from_environment({"ROLLTAPE_TOP_LOGPROBS": "-1"}),
    ):
        with pytest.raises(UsageError, match="top_logprobs is -1"):
            make()
