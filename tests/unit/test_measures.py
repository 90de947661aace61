"""The formulas of docs/diff.md against arithmetic written down another way."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.replay.measures import (
    BUCKET_NAMES,
    Deltas,
    bucket_of,
    by_group,
    by_pair,
    by_position,
    by_version,
    effective_sample_size,
    histogram,
    k3_terms,
    measure,
    same_bits,
)
from rolltape.store.columns import Masked

DELTAS = st.lists(st.floats(-30, 30), min_size=1, max_size=40).map(np.array)


def _no_bits(delta: np.ndarray) -> np.ndarray:
    return np.zeros(len(delta), bool)


def test_the_measures_of_a_worked_example():
    d = np.log(np.array([1.0, 2.0, 0.5, 4.0]))
    found = measure(d, np.array([True, False, False, False]))
    assert found["tokens_compared"] == 4
    assert found["mean_abs"] == pytest.approx(math.log(2))  # (0 + 1 + 1 + 2) log 2 / 4
    assert found["max_abs"] == pytest.approx(math.log(4))
    assert found["k1"] == pytest.approx(-math.log(4) / 4)
    assert found["k3"] == pytest.approx((0 + 1 - 0.5 + 3 - math.log(4)) / 4)
    assert found["frac_ratio_gt_2"] == 0.25  # a ratio of exactly 2 is not above 2
    assert found["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert found["frac_bitwise"] == 0.25


@given(DELTAS)
def test_measures_agree_with_sums_in_plain_python(delta):
    found = measure(delta, _no_bits(delta))
    n = len(delta)
    assert found["k1"] == pytest.approx(-math.fsum(delta) / n, abs=1e-12)
    k3 = math.fsum(math.exp(d) - 1 - d for d in delta) / n
    assert found["k3"] == pytest.approx(k3, rel=1e-9, abs=1e-12)
    above = sum(max(math.exp(d), math.exp(-d)) > 2 for d in delta)
    assert found["frac_ratio_gt_2"] == pytest.approx(above / n)
    assert found["max_abs"] == max(abs(d) for d in delta)
    assert 1 / n - 1e-12 <= found["ess"] <= 1 + 1e-12


@given(DELTAS)
def test_k3_is_never_negative_and_k1_is_bounded_by_it_in_the_mean(delta):
    terms = k3_terms(delta)
    assert (terms >= 0).all()
    assert measure(delta, _no_bits(delta))["k3"] >= 0


@pytest.mark.parametrize("d", [1e-12, -1e-9, 1e-6, -1e-5, 9.9e-5, -1.1e-4, 1e-3])
def test_k3_keeps_its_digits_near_zero(d):
    x = Fraction(d)  # the first terms of the series, exactly
    exact = float(x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120 + x**6 / 720)
    assert k3_terms(np.array([d]))[0] == pytest.approx(exact, rel=1e-9)


def test_k3_overflows_to_infinity_without_a_warning_and_ess_does_not():
    delta = np.array([0.0, 800.0])
    found = measure(delta, _no_bits(delta))
    assert found["k3"] == math.inf
    assert found["ess"] == pytest.approx(0.5)
    assert found["mean_abs"] == 400.0


def test_ess_is_one_for_equal_weights_whatever_their_size():
    assert effective_sample_size(np.full(10, -700.0)) == pytest.approx(1.0)


def test_measures_of_nothing_are_missing_not_zero():
    found = measure(np.zeros(0), np.zeros(0, bool))
    assert found.pop("tokens_compared") == 0
    assert set(found.values()) == {None}


def test_bits_are_compared_not_values():
    a = np.array([0.0, np.nan, 1.0, np.inf], np.float32)
    b = np.array([-0.0, np.nan, np.nextafter(np.float32(1), np.float32(2)), np.inf], np.float32)
    assert same_bits(a, b).tolist() == [False, True, False, True]


@given(DELTAS, st.integers(0, 5))
def test_the_histogram_counts_every_token_once(delta, equal):
    bitwise = np.arange(len(delta)) < equal
    found = histogram(delta, bitwise)
    total = found["bitwise"] + found["below"] + sum(found["counts"]) + found["above"]
    assert total == len(delta)
    assert len(found["counts"]) == len(found["edges"]) - 1


def test_the_histogram_puts_a_difference_between_its_edges():
    found = histogram(np.array([0.0, 0.0, 0.02, -0.5, 500.0]), np.array([1, 0, 0, 0, 0], bool))
    assert (found["bitwise"], found["below"], found["above"]) == (1, 1, 1)
    edges = found["edges"]
    filled = [(edges[i], edges[i + 1]) for i, n in enumerate(found["counts"]) if n]
    (low, high), (low_2, high_2) = filled
    assert low <= 0.02 < high
    assert low_2 <= 0.5 < high_2


@pytest.mark.parametrize(
    ("response", "name"),
    [(0, "0-15"), (15, "0-15"), (16, "16-63"), (255, "64-255"), (256, "256-1023"), (9999, "1024+")],
)
def test_buckets_begin_where_their_names_say(response, name):
    assert BUCKET_NAMES[bucket_of(np.array([response]))[0]] == name


def test_a_prompt_position_is_in_no_bucket():
    assert bucket_of(np.array([-1]))[0] == -1


@pytest.fixture
def deltas() -> Deltas:
    return Deltas(
        delta=np.array([0.1, -0.3, 0.0, 1.0]),
        bitwise=np.array([False, False, True, False]),
        pair=np.array([0, 0, 2, 2]),
        position=np.array([5, 6, 5, 30]),
        response=np.array([0, 1, 0, 25]),
        version=Masked(np.array([3, 3, 4, 9]), np.array([True, True, True, False])),
    )


def test_slices_hold_the_same_tokens_as_the_whole(deltas):
    positions = by_position(deltas)
    assert {k: v["tokens_compared"] for k, v in positions.items()} == {"0-15": 3, "16-63": 1}
    versions = by_version(deltas)
    assert {k: v["tokens_compared"] for k, v in versions.items()} == {"3": 2, "4": 1, "unknown": 1}
    assert versions["3"]["max_abs"] == 0.3


def test_pairs_say_where_they_are_worst_and_where_they_first_leave_a_tenth_of_a_nat(deltas):
    first, empty, last = by_pair(deltas, 3)
    assert (first["max_at"], first["first_over"], first["mean_abs"]) == (6, 6, pytest.approx(0.2))
    assert (empty["tokens_compared"], empty["mean_abs"], empty["max_at"]) == (0, None, None)
    assert (last["max_at"], last["first_over"]) == (30, 30)


def test_groups_gather_their_pairs_and_pairs_without_a_group_are_left_out(deltas):
    found = by_group(deltas, ["p", "p", None])
    assert {k: v["tokens_compared"] for k, v in found.items()} == {"p": 2}
