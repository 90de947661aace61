"""A window reads fewer fragments and says the same as that part of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import UsageError
from rolltape.store.compact import compact
from tests import reference
from tests.builders import random_samples, write_tape
from tests.random_tapes import Made, tapes

QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(made=tapes(), data=st.data())
def test_a_window_is_a_slice_of_the_whole(tmp_path_factory: Any, made: Made, data: Any) -> None:
    folder = tmp_path_factory.mktemp("t")
    made.write(folder / "a")
    form = data.draw(st.sampled_from(["", "plain", "packed"]))
    if form:
        compact(folder / "a", folder / form, routes=form)
    tape = store.open(folder / (form or "a"))
    for sequence in tape:
        start = data.draw(st.integers(0, sequence.length))
        stop = data.draw(st.integers(start, sequence.length))
        whole = reference.expected(made, sequence.key)
        found = reference.read(sequence.window(start, stop))
        assert reference.window(found) == reference.cut(whole, start, stop)


@QUICK
@given(made=tapes(), data=st.data())
def test_some_layers_are_columns_of_all(tmp_path_factory: Any, made: Made, data: Any) -> None:
    folder = tmp_path_factory.mktemp("t")
    made.write(folder / "a")
    if data.draw(st.booleans()):
        compact(folder / "a", folder / "packed")
    tape = store.open(folder / ("packed" if (folder / "packed").exists() else "a"))
    for sequence in tape:
        for role in ("used", "live"):
            whole = reference.expected(made, sequence.key)[role]
            if whole is None:
                assert reference.read_routes(sequence, role, []) is None
                continue
            layers, rows, missing = whole
            wanted = data.draw(st.lists(st.sampled_from(layers), max_size=4)) if layers else []
            at = [layers.index(layer) for layer in wanted]
            found = reference.read_routes(sequence, role, wanted)
            assert found == (tuple(wanted), [[row[i] for i in at] for row in rows], missing)


def test_a_layer_that_was_not_recorded_and_a_window_outside_are_refused(tmp_path: Path) -> None:
    sequence = next(iter(write_tape(tmp_path / "a", random_samples(1, response=4))))
    with pytest.raises(UsageError, match="no routes of layer 9"):
        sequence.routes(layers=[9])
    with pytest.raises(UsageError, match="no positions 3:11"):
        sequence.window(3, 11)


def test_a_window_of_a_long_packed_sequence_says_why_its_rows_are_missing(tmp_path: Path) -> None:
    samples = random_samples(1, response=40)
    used = samples[0].used
    assert used is not None
    used.valid[20:23] = False
    used.missing = [[20, 3, None, "dropped"], [45, 1, None, "last"]]
    write_tape(tmp_path / "a", samples)
    compact(tmp_path / "a", tmp_path / "b")
    routes = next(iter(store.open(tmp_path / "b"))).window(18, 25).routes()
    assert routes is not None and (20, 3, None, "dropped") in routes.missing
    np.testing.assert_array_equal(routes.valid.any(axis=1), [1, 1, 0, 0, 0, 1, 1])
