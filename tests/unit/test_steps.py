"""Rows of an engine step, found without reading the other steps, however the tape was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rolltape import store
from rolltape.store import Key, TapeWriter, UsageError, create_tape, seal
from rolltape.store.facts import stored_facts
from rolltape.store.sequences import Tape

ENGINES = ("a1" * 16, "b2" * 16)
SEQUENCES, STEPS = 6, 40


def _write(path: Path, *, sealed: bool = True) -> Path:
    """Two engines whose steps one writer mixes, and a second writer of the first engine."""
    tape = create_tape(path, role="rollout")
    writers = [TapeWriter(tape), TapeWriter(tape)]
    for engine in ENGINES:
        for i in range(SEQUENCES):
            row = {"engine": engine, "request": f"r{i}", "sample": 0, "pass": 0, "prompt_len": 1}
            rest = {"finish": "stop", "length": STEPS + 1, "opened_ns": i, "closed_ns": 99}
            writers[0].append("sequences", {**row, **rest})
    for step in range(STEPS):
        for which, engine in enumerate(ENGINES):
            for i in range(SEQUENCES):
                writer = writers[i % 2] if engine == ENGINES[0] else writers[0]
                writer.append(
                    "forwards",
                    {
                        "engine": engine,
                        "step": step * (which + 1),
                        "row": SEQUENCES - i,
                        "request": f"r{i}",
                        "sample": 0,
                        "pass": 0,
                        "start": step,
                        "n": 1,
                        "kind": "prefill" if step == 0 else "decode",
                        "weight_version": step // 10,
                    },
                )
            facts = {"engine": engine, "step": step * (which + 1), "t_ns": 1000 * step + which}
            writers[0].append("steps", facts)
        if step % 7 == 6:
            for writer in writers:
                writer.flush()
    for writer in writers:
        writer.close()
    if sealed:
        seal(tape)
    return path


@pytest.fixture(scope="module", params=["sealed", "not sealed", "sealed before there were steps"])
def tape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tape:
    path = _write(tmp_path_factory.mktemp("steps") / "t", sealed=request.param != "not sealed")
    found = store.open(path)
    if request.param.startswith("sealed before"):
        columns, _ = found.index._offsets["forwards"]
        found.index._offsets["forwards"] = columns, None
    elif request.param == "sealed":
        assert found.index.entries("forwards").steps is not None
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step", [0, 6, 7, 20, 39, 78])
def test_rows_of_a_step_are_those_of_the_whole_table(tape: Tape, engine: str, step: int) -> None:
    whole = tape.table("forwards")
    same = pc.and_(pc.equal(whole.column("step"), step), pc.equal(whole.column("engine"), engine))
    expected = whole.filter(same).sort_by("row")
    assert tape.step_rows(engine, step).equals(expected)
    names = ["request", "start"]
    assert tape.step_rows(engine, step, names).equals(expected.select(names))


def test_an_engine_or_step_that_is_not_there_has_no_rows(tape: Tape) -> None:
    assert len(tape.step_rows("c3" * 16, 3)) == 0
    assert len(tape.step_rows(ENGINES[0], STEPS)) == 0


def test_steps_by_number_and_by_time(tape: Tape) -> None:
    whole = tape.table("steps")
    found = tape.between("steps", engine=ENGINES[1], first=10, last=30, columns=["step", "t_ns"])
    assert found.column("step").to_pylist() == list(range(10, 31, 2))
    found = tape.between("steps", t0_ns=5000, t1_ns=8000)
    keep = pc.and_(
        pc.greater_equal(whole.column("t_ns"), 5000), pc.less_equal(whole.column("t_ns"), 8000)
    )
    assert found.equals(whole.filter(keep).combine_chunks())
    with pytest.raises(UsageError, match="no time"):
        tape.between("forwards", t0_ns=1)
    with pytest.raises(UsageError, match="no rows of engine steps"):
        tape.step_spans("tokens")


def test_only_batches_that_may_hold_a_step_are_read(tape: Tape) -> None:
    spans = tape.step_spans("forwards")
    mine = spans.filter(pc.equal(spans.column("engine"), ENGINES[0]))
    assert len(mine) > 4
    assert (pc.min(mine.column("first")).as_py(), pc.max(mine.column("last")).as_py()) == (0, 39)
    read: list[int] = []
    shard = tape.shard

    def counting(table: str, file: str, *, whole: bool = False) -> object:
        read.append(1)
        return shard(table, file, whole=whole)

    tape.shard = counting  # type: ignore[assignment,method-assign]
    try:
        assert len(tape.step_rows(ENGINES[0], 10)) == SEQUENCES
    finally:
        del tape.shard
    assert len(read) == 2, "one batch of each writer"


def test_a_window_reads_the_steps_of_its_positions(tape: Tape) -> None:
    whole = tape.sequence(Key(ENGINES[0], "r3"))
    for start, stop in ((0, 3), (5, 6), (10, 30), (STEPS, STEPS + 1)):
        part = whole.window(start, stop)
        for name in ("step", "weight_version"):
            expected, found = getattr(whole, name), getattr(part, name)
            np.testing.assert_array_equal(found.valid, expected.valid[start:stop])
            np.testing.assert_array_equal(
                found.fill(-1), np.where(expected.valid, expected.values, -1)[start:stop]
            )


def test_a_sequence_is_found_by_its_id_and_says_the_same(tape: Tape) -> None:
    again = store.open(tape.path)
    if again.seal is not None:
        assert again.stored_facts is not None
        assert again.stored_facts.ids.to_pylist() == [key.id for key in tape.keys()]  # noqa: SIM118
    for sequence in tape:
        found = again.find(sequence.id)
        assert found is not None
        assert (found.key, found.length, found.closed) == (sequence.key, sequence.length, True)
        assert found.info == sequence.info
    assert again.find("nothing") is None
    # each sequence was read by itself
    assert ("_lives" in again.__dict__) == (again.seal is None)


def test_a_fact_that_an_annotation_replaces_is_never_taken_from_the_row_alone(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path / "t")
    key = Key(ENGINES[0], "r1")
    with TapeWriter(path) as writer:
        facts = {"engine": key.engine, "request": key.request, "sample": 0, "pass": 0}
        writer.append("annotations", {**facts, "name": "group", "text": "late", "t_ns": 1})
    stale = store.open(path)
    assert stored_facts(stale) is None, "the seal does not cover the annotation"
    for sealed in (False, True):
        if sealed:
            seal(path)
        found = store.open(path).find(key.id)
        assert found is not None and found.info["group"] == "late"


def test_some_columns_of_tokens_are_those_of_all(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    key = {"engine": ENGINES[0], "request": "r", "sample": 0, "pass": 0}
    with TapeWriter(path) as writer:
        writer.append("sequences", {**key, "prompt_len": 2, "finish": "stop", "length": 8})
        for start in (0, 4):
            cells = {"ids": [np.arange(start, start + 4)], "loss_mask": [np.arange(4) > 1]}
            logprobs = {"raw": [np.arange(4, dtype=np.float32)]}
            writer.append("tokens", {**key, "start": start, "n": 4, **cells, **logprobs})
    seal(path)
    sequence = next(iter(store.open(path)))
    found = sequence.token_columns(["ids", "raw", "loss_mask"])
    for name, whole in (
        ("ids", sequence.tokens),
        ("raw", sequence.logprob("raw")),
        ("loss_mask", sequence.loss_mask),
    ):
        np.testing.assert_array_equal(found[name].values, whole.values)
        assert found[name].valid.all() and found[name].values.dtype == whole.values.dtype
    part = sequence.window(3, 6).token_columns(["ids"])["ids"]
    assert part.values.tolist() == [3, 4, 5]
    assert isinstance(sequence.tape.table("tokens"), pa.Table)
