"""Tapes of every released format version are read, value for value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rolltape import store

TAPES = sorted((Path(__file__).parents[1] / "golden").glob("tape-1.*"))


def test_there_is_a_golden_tape_of_this_version() -> None:
    from rolltape.store.shards import format_version

    assert f"tape-{format_version()}" in [t.name for t in TAPES]


@pytest.mark.parametrize("path", TAPES, ids=lambda p: p.name)
def test_golden_tape(path: Path) -> None:
    tape = store.open(path)
    assert not tape.problems and tape.seal is not None
    assert [s.id for s in tape] == ["00112233.0-0.1", "00112233.0-0.2"]
    whole, empty = tape
    np.testing.assert_array_equal(whole.tokens.values, [1, 69_999, 40_000])
    np.testing.assert_array_equal(whole.loss_mask.values, [False, True, True])
    raw, processed = whole.logprob("raw"), whole.logprob("processed")
    np.testing.assert_array_equal(raw.valid, [False, True, True])
    assert raw.values[1] == -0.5 and np.isnan(raw.values[2])
    assert processed.values[1] == -0.25 and np.isneginf(processed.values[2])
    assert not whole.logprob("scaled").valid.any()
    ((start, n, semantics),) = whole.semantics
    assert (start, n, semantics["temperature"]) == (0, 3, 0.7)
    assert semantics["edits"] == ["repetition_penalty=1.1"]
    routes, supports = whole.routes(), whole.supports()
    assert routes is not None and routes.weights is not None and supports is not None
    assert routes.layers == (1, 3) and routes.ids.dtype == np.uint16
    np.testing.assert_array_equal(routes.ids[0], [[3, 299], [0, 1]])
    np.testing.assert_array_equal(routes.ids[1, 0], [256, 2])
    np.testing.assert_array_equal(routes.valid, [[True, True], [True, False], [False, False]])
    assert routes.missing == ((1, 1, 3, "not-captured"), (2, 1, None, "last"))
    assert supports.at(1) is None
    np.testing.assert_array_equal(supports.at(2), [40_000, 69_999])
    np.testing.assert_array_equal(whole.weight_version.values[1:], [4, 5])
    ((start, dtype, data),) = whole.activations()["layers.1.out"]
    assert (start, dtype, data.tolist()) == (0, "bfloat16", [[1.5, -0.0]])
    assert np.signbit(data[0, 1])
    assert tape.rows("weights")[0]["digest"] == 2**64 - 1
    assert tape.rows("events")[0]["kind"] == "gap"
    assert empty.finish == "abort" and empty.length == 1 and empty.routes() is None
