"""A right-shaped array of expert ids proves nothing: which rows are routes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.store import SchemaError, UsageError
from rolltape.store.exchange.routes import REASONS, Survey, judge, layer_numbers, route_array
from rolltape.store.exchange.rows import Carried, Row


def distinct(rng, n, layers, k, experts):
    return np.argsort(rng.random((n, layers, experts)), -1)[..., :k].astype(np.int32)


def row(routes, total, seed=0):
    ids = np.random.default_rng(seed).integers(0, 1000, total).astype(np.uint32)
    return Row("a: sample 0", "0-0", 0, 1, ids, "stop", routes=routes)


def surveyed(*rows, **options):
    carried = Carried()
    survey = Survey(carried, name="routes", **options)
    survey.look(list(rows))
    return survey, carried


@st.composite
def pieces(draw):
    """An array, and the same rows as a resumed rollout leaves them: pieces of any type, a None."""
    k, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    hole = draw(st.integers(0, len(sizes) - 1)) if draw(st.booleans()) else None
    whole: list[np.ndarray] = []
    parts: list[object] = []
    for i, size in enumerate(sizes):
        block = distinct(rng, size, layers, k, 300)
        if i == hole:
            whole.append(np.full_like(block, -1))
            parts.append(None)
            continue
        whole.append(block)
        form = draw(st.sampled_from(["array", "list", "int16"]))
        parts.append(
            block if form == "array" else block.tolist() if form == "list" else block.astype("i2")
        )
    return np.concatenate(whole), parts


@given(pieces())
def test_mixed_pieces_of_list_array_and_none_are_one_array(case):
    whole, parts = case
    np.testing.assert_array_equal(route_array(parts, len(whole)), whole)


def test_a_none_among_rows_is_one_missing_row():
    a, b = [[1, 2], [3, 4]], np.array([[5, 6], [7, 8]])
    got = route_array([a, None, b], 3)
    assert got.tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]], [[5, 6], [7, 8]]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros((3, 4), int), "shape"),
        (np.zeros((3, 2, 2)), "float64"),
        ([None, None], "None"),
        ([np.zeros((2, 2, 2), int), np.zeros((2, 3, 2), int)], "different shapes"),
        ([np.zeros((2, 2, 2), int), None, None], "unknown length"),
        ("abc", "str"),
        (np.zeros((3, 0, 2), int), "no layer"),
    ],
)
def test_what_is_no_array_of_routes_is_refused_with_a_reason(value, reason):
    with pytest.raises(SchemaError, match=reason):
        route_array(value, 9)


def test_every_kind_of_bad_row_has_its_reason():
    ids = distinct(np.random.default_rng(0), 7, 2, 4, 500)
    ids[1, 0] = -1
    ids[2, 0] = [3, -1, 4, 5]
    ids[3, 0] = 0
    ids[4, 0] = [7, 8, 9, 7]
    ids[5] = np.arange(4)
    ids[6, 0] = [1, 2, 3, 70_000]
    code = judge(ids, placeholders=True)
    said = [REASONS[c] for c in code[:, 0]]
    assert said == [
        "",
        "missing (-1)",
        "partly negative",
        "zeros",
        "repeated expert",
        "placeholder 0..k-1",
        "an id above 65,535",
    ]
    assert code[[0, 1, 2, 3, 4, 6], 1].tolist() == [0] * 6
    # only a framework that fills with 0..k-1 makes it suspicious
    assert not judge(ids, placeholders=False)[5].any()


def test_expert_0_is_an_expert_and_an_array_of_it_is_not_a_route():
    ids = np.random.default_rng(0).integers(0, 8, (40, 2, 1))
    assert not judge(ids, placeholders=False).any()
    assert (judge(np.zeros((40, 2, 1), int), placeholders=False) == REASONS.index("zeros")).all()


def test_missing_ranges_name_positions_layer_and_reason():
    ids = distinct(np.random.default_rng(0), 9, 2, 2, 50)
    ids[2:5] = -1
    ids[7, 1] = 0
    survey, _ = surveyed(row(ids, 10))
    found = survey.found(row(ids, 10))
    assert found.missing((3, 6)) == [[2, 3, None, "missing (-1)"], [7, 1, 6, "zeros"]]


def test_a_sequence_of_zeros_is_reported_and_not_carried():
    rng = np.random.default_rng(0)
    good, zero = row(distinct(rng, 9, 3, 2, 50), 10), row(np.zeros((9, 3, 2), int), 10, 1)
    survey, carried = surveyed(good, zero)
    assert survey.found(zero) is None and survey.found(good) is not None
    assert carried.dropped["routes"] == {
        "rows: zeros": 27,
        "sequences: no row of the array is a route": 1,
    }
    assert carried.kept["routes"] == {"into": "routes.ids", "sequences": 1, "values": 27}


def test_another_number_of_layers_is_reported_and_not_carried():
    rng = np.random.default_rng(0)
    rows = [row(distinct(rng, 9, layers, 2, 50), 10) for layers in (3, 3, 2)]
    survey, carried = surveyed(*rows)
    assert carried.dropped["routes"] == {"sequences: another shape than 3 layers x 2 experts": 1}
    assert [survey.found(r) is None for r in rows] == [False, False, True]


@pytest.mark.parametrize("rows", [4, 8, 11, 30])
def test_a_row_count_that_is_not_that_of_the_tokens_is_not_guessed_at(rows):
    wrong = row(distinct(np.random.default_rng(0), rows, 2, 2, 50), 10)
    survey, carried = surveyed(wrong)
    assert survey.found(wrong) is None
    assert carried.dropped["routes"] == {"sequences: rows do not match": 1}
    assert f"{rows} for 10 tokens" in carried.notes[0]


def test_one_row_more_is_the_last_tokens_and_is_cut():
    ids = distinct(np.random.default_rng(0), 10, 2, 2, 50)
    survey, carried = surveyed(row(ids, 10))
    np.testing.assert_array_equal(survey.found(row(ids, 10)).ids, ids[:9])
    assert "routes" not in carried.dropped


def test_an_array_known_to_begin_at_0_may_end_early():
    ids = distinct(np.random.default_rng(0), 6, 2, 2, 50)
    survey, carried = surveyed(row(ids, 10), short=True)
    found = survey.found(row(ids, 10))
    assert (found.code == 0).all(1).tolist() == [True] * 6 + [False] * 3
    assert carried.dropped["routes"]["positions: behind the last row of the array"] == 3


def test_a_layer_without_any_route_is_no_column():
    ids = distinct(np.random.default_rng(0), 9, 4, 2, 50)
    ids[:, [0, 2]] = 0
    survey, carried = surveyed(row(ids, 10))
    assert survey.columns.tolist() == [1, 3]
    assert survey.found(row(ids, 10)).ids.shape == (9, 2, 2)
    assert carried.dropped["routes"]["layers: no sequence has a route there"] == 2


def test_the_routes_of_another_request_are_noticed():
    ids = distinct(np.random.default_rng(0), 9, 2, 2, 50)
    _, carried = surveyed(row(ids, 10, seed=1), row(ids, 10, seed=2))
    assert "1 sequences have exactly the routes of another" in carried.notes[0]
    _, carried = surveyed(row(ids, 10, seed=1), row(ids, 10, seed=1))
    assert not carried.notes


def test_layer_numbers_are_ranges_and_single_numbers():
    assert layer_numbers("3:6,9") == (3, 4, 5, 9)
    for wrong in ("3:", "a", "4,3", "5:5", "", "1,1"):
        with pytest.raises(UsageError, match="--layers"):
            layer_numbers(wrong)
