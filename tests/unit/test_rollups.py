"""Roll-ups are what the joined sequences add up to, stored or counted, however often sealed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings

from rolltape import store
from rolltape.store.compact import compact
from rolltape.store.rollups import count
from rolltape.store.schema import TAPE_TABLES
from tests import reference
from tests.builders import random_samples, write_tape
from tests.random_tapes import Made, cells, tapes

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def fresh(path: Path, **options: Any) -> pa.Table:
    """Counted anew, whatever the seal has."""
    tape = store.open(path, **options)
    tape.seal = {**(tape.seal or {}), "index": None}
    table = count(tape)
    return table.take(pa.array([tape.index.codes[key] for key in tape.sequence_rows], pa.int64()))


def agree(table: pa.Table, made: Made) -> None:
    assert table.schema == TAPE_TABLES["rollups"]
    rows = table.to_pylist()
    assert len(rows) == len(made.keys)
    for row, key in zip(rows, made.keys, strict=True):
        sequence = reference.expected(made, key)
        wanted = reference.rollup(sequence, made, key)
        for name, value in wanted.items():
            if name.endswith("_sum") and isinstance(value, float):
                # the order of a sum is not laid down
                scale = max(abs(value), 1e38 if abs(value) > 1e30 else 1.0)
                assert math.isclose(row[name], value, abs_tol=1e-9 * scale), f"{name} of {key.id}"
            else:
                assert row[name] == value, f"{name} of {key.id}"


@QUICK
@given(made=tapes())
def test_stored_counted_and_brute_force_are_the_same(tmp_path_factory: Any, made: Made) -> None:
    path = made.write(tmp_path_factory.mktemp("t") / "a")
    stored = store.open(path)
    assert stored.index.rollups is not None
    agree(stored.rollups(), made)
    assert stored.rollups().equals(fresh(path))


@QUICK
@given(made=tapes())
def test_what_is_added_later_counts_and_an_old_version_stays_what_it_was(
    tmp_path_factory: Any, made: Made
) -> None:
    path = tmp_path_factory.mktemp("t") / "a"
    half = len(made.rows) // 2
    first = Made(made.rows[:half], made.writers[:half])
    first.keys = [key for key in made.keys if first.of("sequences", key)]
    first.write(path)
    # the second writer of a position is never the record of it: its rows come after
    names = sorted(p.name for p in path.glob("*/*.arrow"))
    writers: list[store.TapeWriter] = []
    while not writers or writers[-1].id < max(names, default="")[:32]:
        writers.append(store.TapeWriter(path))
    late = writers[-1]
    for table, columns in made.rows[half:]:
        late.append(table, cells(table, columns))
    late.flush()
    try:
        live = store.open(path)  # what was sealed, and a shard that is being written
        assert live.index.rollups is None or half == len(made.rows)
        if live.keys() == made.keys:
            agree(live.rollups(), made)
    finally:
        late.close()
    assert store.seal(path)["version"] == 2
    again = store.open(path)
    agree(again.rollups(), made)
    assert again.rollups().equals(fresh(path))
    agree(store.open(path, version=1).rollups(), first)


def test_a_tape_without_sequences_has_no_roll_ups(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    store.seal(root)
    tape = store.open(root)
    assert tape.rollups().num_rows == 0 and tape.rollups().schema == TAPE_TABLES["rollups"]


def test_overlapping_fragments_count_once(tmp_path: Path) -> None:
    tape = write_tape(tmp_path / "a", random_samples(2, response=10, prompt=4))
    before = tape.rollups().to_pylist()[0]
    key = tape.keys()[0]
    row = {"engine": key.engine, "request": key.request, "sample": 0, "pass": 0}
    with store.TapeWriter(tmp_path / "a") as writer:
        for start in (0, 5):  # a recompute after a preemption
            writer.append(
                "tokens", {**row, "start": start, "n": 6, "raw": [np.full(6, -99, np.float32)]}
            )
    store.seal(tmp_path / "a")
    again = store.open(tmp_path / "a")
    assert again.rollups().to_pylist()[0]["raw_count"] == before["raw_count"] == 10
    same = fresh(tmp_path / "a").to_pylist()[0]
    assert again.rollups().to_pylist()[0] == same
    joined = again.sequence(key).logprob("raw")
    finite = joined.values[4:].astype(np.float64)
    assert same["raw_min"] == finite.min() and math.isclose(same["raw_sum"], finite.sum())


def _versions(tmp_path: Path, *forwards: tuple[int, int, str, int | None]) -> tuple[Any, Any]:
    """Stored version_min and _max of 8 tokens, 4 of them prompt; of (start, n, kind, version)."""
    root = store.create_tape(tmp_path, role="rollout")
    row = {"engine": "e", "request": "r", "sample": 0, "pass": 0}
    with store.TapeWriter(root) as writer:
        writer.append("sequences", {**row, "prompt_len": 4, "length": 8, "finish": "stop"})
        writer.append("tokens", {**row, "start": 0, "n": 8, "ids": [list(range(8))]})
        for step, (start, n, kind, version) in enumerate(forwards):
            where = {**row, "step": step, "row": 0, "start": start, "n": n, "kind": kind}
            writer.append("forwards", {**where, "weight_version": version})
            if step % 3 == 2:
                writer.flush()
    store.seal(root)
    tape = store.open(root)
    joined = next(iter(tape)).weight_version
    known = joined.values[joined.valid].tolist()
    found = tape.rollups().to_pylist()[0]
    both = found["version_min"], found["version_max"]
    assert both == (min(known, default=None), max(known, default=None))
    return both


def test_versions_are_those_of_forwards_that_gave_a_logprob(tmp_path: Path) -> None:
    decodes = [(p, 1, "decode", 4) for p in range(4, 7)]
    last = (2, 2, "prefill", 4)
    cases: list[tuple[list[Any], Any]] = [
        ([(0, 2, "prefill", 3), last, *decodes], (4, 4)),  # an unfinished chunk
        ([(0, 4, "prefill", 3), *decodes], (3, 4)),
        ([last, *decodes, (0, 7, "recompute", 9)], (4, 4)),  # of a position that was there
        ([last, *decodes[:2], (0, 7, "recompute", 9)], (4, 9)),  # of a new one
        ([last, *decodes, (0, 8, "recompute", 9)], (4, 4)),  # behind the end
        ([(0, 7, "score", 2), *decodes], (2, 2)),
        ([(4, 1, "decode", 4), (3, 4, "score", 5)], (4, 5)),
        ([(4, 1, "decode", None), (4, 1, "recompute", 7), (4, 1, "decode", 8)], (7, 7)),
        ([(0, 8, "dummy", 1), *decodes], (4, 4)),
        ([(0, 2, "prefill", 3)], (None, None)),
    ]
    for i, (forwards, wanted) in enumerate(cases):
        assert _versions(tmp_path / str(i), *forwards) == wanted, forwards


def test_packed_routes_count_as_what_they_were(tmp_path: Path) -> None:
    samples = random_samples(3, response=9)
    assert samples[0].used is not None
    samples[0].used.valid[[2, 5], 1] = False
    samples[0].used.valid[3] = False
    before = write_tape(tmp_path / "a", samples).rollups()
    for form in ("packed", "plain"):
        compact(tmp_path / "a", tmp_path / form, routes=form)
        after = store.open(tmp_path / form).rollups()
        for name in ("routed", "route_rows", "live_rows", "kept_sum", "kept_max", "raw_min_at"):
            assert after.column(name).to_pylist() == before.column(name).to_pylist(), name


def test_a_sequence_that_cannot_be_joined_does_not_keep_a_tape_from_being_sealed(
    tmp_path: Path,
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    row = {"engine": "e", "request": "r", "sample": 0, "pass": 0}
    with store.TapeWriter(root) as writer:
        writer.append("sequences", {**row, "prompt_len": 0, "length": 2, "finish": "stop"})
        for start in (0, 1):  # the second one reaches behind the end
            writer.append(
                "tokens", {**row, "start": start, "n": 2, "ids": [[1, 2]], "raw": [[-1.0, -2.0]]}
            )
    store.seal(root)
    assert store.open(root).rollups().to_pylist()[0]["length"] == 2
