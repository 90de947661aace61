"""Tapes of every released format version are read, value for value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rolltape import store
from rolltape.store.equality import differences
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.shards import format_version

TAPES = sorted((Path(__file__).parents[1] / "golden").glob("tape-1.*"))


def test_there_is_a_golden_tape_of_this_version() -> None:
    names = [t.name for t in TAPES]
    assert f"tape-{format_version()}" in names and f"tape-{format_version()}-packed" in names


def test_golden_tapes_stay_small() -> None:
    files = [f for tape in TAPES if tape.name != "tape-1.0" for f in tape.rglob("*")]
    assert sum(f.stat().st_size for f in files if f.is_file()) < 300_000


@pytest.mark.parametrize("path", [t for t in TAPES if t.name != "tape-1.0"], ids=lambda p: p.name)
def test_golden_tape_since_version_1_1_has_every_table(path: Path) -> None:
    tape = store.open(path)
    version = path.name.removeprefix("tape-").removesuffix("-packed")
    assert tape.header["format"] == version
    for table in TAPE_TABLES:
        if (version, table) != ("1.1", "tactics"):  # there since 1.2
            assert tape.count(table) > 0, table


@pytest.mark.parametrize("path", [t for t in TAPES if t.name != "tape-1.0"], ids=lambda p: p.name)
def test_golden_tape_since_version_1_1(path: Path) -> None:
    tape = store.open(path)
    whole = next(iter(tape))
    live = whole.routes("live")
    assert live is not None and live.margin is not None and live.weights is None
    np.testing.assert_array_equal(live.ids[0], [[0, 1], [3, 299]])
    np.testing.assert_array_equal(live.ids[1], [[7, 8], [256, 2]])
    np.testing.assert_array_equal(live.valid, [[True, True], [True, True], [False, False]])
    np.testing.assert_array_equal(live.margin[:2], [[0.5, 0.0], [np.nan, 0.25]])
    assert np.signbit(live.margin[0, 1])
    used = whole.routes()
    assert used is not None and used.weights is not None
    np.testing.assert_array_equal(used.weights[used.valid], np.full((3, 2), 0.5))
    found = whole.distributions()
    assert found is not None and found.k == 2
    np.testing.assert_array_equal(found.valid, [False, True, False])
    assert found.ids[1].tolist() == [69_999, 40_000]
    assert found.logprobs[1].tolist() == [-0.5, -1.0] and found.tail[1] == -3.5
    ((start, n, semantics),) = found.semantics
    assert semantics is not None
    assert (start, n, semantics["source"]) == (1, 2, "recomputed")
    late = {"group": "prompt-7", "advantage": 0.75} if "1.1" not in path.name else {}
    assert whole.annotations == {"reward": -1.5, "filter": "too long", **late}
    assert tape.table("steps").column("kind").to_pylist() == ["prefill", "decode"]
    assert whole.window(1, 2).tokens.values.tolist() == [69_999]
    first, second = tape.rollups().to_pylist()
    wanted = {
        "length": 3,
        "finish": "stop",
        "loss_tokens": 2,
        "raw_count": 2,
        "raw_non_finite": 1,
        "raw_sum": -0.5,
        "raw_min": -0.5,
        "raw_min_at": 1,
        "scaled_count": 0,
        "scaled_sum": None,
        "routed": 2,
        "route_rows": 3,
        "live_rows": 4,
        "explicit": 1,
        "kept_sum": 2,
        "kept_max": 2,
        "version_min": 4,
        "version_max": 5,
    }
    assert {name: first[name] for name in wanted} == wanted
    assert (second["length"], second["finish"], second["raw_min_at"]) == (1, "abort", None)


@pytest.mark.parametrize(
    "path", [t for t in TAPES if t.name.startswith("tape-1.2")], ids=lambda p: p.name
)
def test_golden_tape_of_version_1_2(path: Path) -> None:
    tape = store.open(path)
    assert [row["process"] for row in tape.processes] == ["worker", "frontend"]
    (engine,) = tape.engines.values()
    assert engine["num_experts"] == 300 and engine["process"] is None
    assert engine["effective"] == {"attention": "sdpa", "threads": 2}
    assert list(engine["disagreements"]) == ["effective.attention"]
    whole = tape.sequence("chat-7")
    assert (whole.info["group"], whole.info["group_derived"]) == ("prompt-7", False)
    assert whole.info["external"] == "chat-7"
    assert tape.rollups().column("group").to_pylist() == ["prompt-7", None]
    chosen, unseen = tape.rows("tactics")
    assert (chosen["source"], chosen["tactic"]) == ("chosen", "(3, 1)")
    assert (unseen["engine"], unseen["source"]) == ("", "unrecorded")
    assert [row["label"] for row in tape.rows("weights")] == ["step-100", None]
    assert tape.rows("weights")[1]["reason"] == "repacked by the engine"


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_the_packed_golden_tape_is_packed(version: str) -> None:
    path = next(t.parent for t in TAPES) / f"tape-{version}-packed"
    tape = store.open(path)
    assert set(tape.table("routes").column("encoding").to_pylist()) == {"packed"}
    assert set(tape.table("supports").column("encoding").to_pylist()) == {"kept"}
    original = store.open(path.with_name(f"tape-{version}"))
    assert tape.uuid == original.uuid and list(differences(original, tape)) == []


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
