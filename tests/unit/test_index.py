"""What the seal's index says of where rows are is what a scan finds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import DamagedShardError, Key
from rolltape.store.compact import compact
from rolltape.store.index import INDEXED, Index, grouped
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.tape import SEAL
from tests.builders import random_samples, write_tape
from tests.random_tapes import Made, tapes

QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def scanned(tape: store.Tape) -> Index:
    """Its index as if the seal had none."""
    again = store.open(tape.path)
    again.seal = {**(again.seal or {}), "index": None}
    return Index(again)


def entries(index: Index, table: str) -> list[tuple[Any, ...]]:
    """Entries by key instead of code: the numbers may differ."""
    found = index.entries(table)
    keys = {code: key for key, code in index.codes.items()}
    return sorted(
        (keys[int(c)], found.files[f], int(b), int(n), int(s), int(e))
        for c, f, b, n, s, e in zip(
            found.code, found.file, found.batch, found.rows, found.start, found.end, strict=True
        )
    )


@QUICK
@given(made=tapes(), data=st.data())
def test_the_index_of_a_seal_is_what_a_scan_finds(
    tmp_path_factory: Any, made: Made, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("t")
    path = made.write(folder / "a")
    if data.draw(st.booleans()):
        compact(path, folder / "b")
        path = folder / "b"
    tape = store.open(path)
    fresh = scanned(tape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 24), st.integers(0, 24))))
    spans: list[tuple[int | None, int | None]] = [(start, stop), (None, None)]
    assert tape.index.rollups is not None and fresh.rollups is None
    for table in INDEXED:
        assert entries(tape.index, table) == entries(fresh, table)
        for key, span in itertools.product(made.keys, spans):
            assert tape.index.find(table, key, *span) == fresh.find(table, key, *span)


def test_entries_name_every_batch_with_rows_of_a_sequence_and_no_other(tmp_path: Path) -> None:
    tape = write_tape(tmp_path / "a", random_samples(3, response=30), fragment=4)
    for table in ("tokens", "routes", "supports", "forwards"):
        for key in tape.sequence_rows:
            rows = [
                (file, number)
                for file, number, batch in tape.batches(table)
                if any(
                    (r["engine"], r["request"], r["sample"], r["pass"]) == key
                    for r in batch.to_pylist()
                )
            ]
            assert rows and tape.index.find(table, key) == rows


def extended(path: Path) -> store.Tape:
    """A sealed tape to which a row was added later: its roll-ups have to be counted."""
    first = write_tape(path, random_samples(3, response=30), fragment=4)
    key = first.keys()[0]
    with store.TapeWriter(path) as writer:
        row = {"engine": key.engine, "request": key.request, "sample": key.sample}
        writer.append("events", {**row, "writer": "w", "t_ns": 1, "kind": "abort"})
    return store.open(path)


@pytest.mark.parametrize("table", INDEXED)
def test_an_index_keeps_what_the_seal_says_however_often_it_is_asked(
    tmp_path: Path, table: str
) -> None:
    tape = extended(tmp_path / "a")
    expected = entries(scanned(tape), table)
    assert entries(tape.index, table) == expected
    for _ in range(2):
        for _, _ in tape.index.walk(table, []):
            pass
        assert entries(tape.index, table) == expected
    tape = extended(tmp_path / "b")
    for _, _ in tape.index.walk(table, []):  # before anything else was asked for
        pass
    assert entries(tape.index, table) == entries(scanned(tape), table)


def test_tokens_are_the_same_before_and_after_rollups_are_counted(tmp_path: Path) -> None:
    tape = extended(tmp_path / "a")
    before = [sequence.tokens.values.tolist() for sequence in tape]
    assert all(before)
    rollups = tape.rollups()
    assert [sequence.tokens.values.tolist() for sequence in tape] == before
    assert tape.rollups().equals(rollups)


def test_a_scan_that_fails_does_not_lose_what_the_seal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = extended(tmp_path / "a")
    expected = entries(scanned(tape), "tokens")

    def fails(*_: object) -> None:
        raise DamagedShardError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_scan", fails)
        with pytest.raises(DamagedShardError):
            tape.index.entries("tokens")
    assert entries(tape.index, "tokens") == expected


def test_rows_are_grouped_by_key_whatever_characters_it_has(tmp_path: Path) -> None:
    keys = [("a b", "c", 1, 0), ("a", "b c", 1, 0), ("a b", "c", 1, 1), ("", "\x00", 11, 0),
            ("\x00", "", 1, 10), ("a b", "c", 1, 0)]  # fmt: skip
    schema = pa.schema([TAPE_TABLES["annotations"].field(i) for i in range(4)])
    columns = zip(*keys, strict=True)
    batch = pa.record_batch([list(column) for column in columns], schema=schema)
    found = {key: rows.tolist() for key, rows in grouped(batch)}
    assert found == {Key(*key): [i for i, k in enumerate(keys) if k == key] for key in keys}
    assert list(found) == [Key(*key) for key in dict.fromkeys(keys)]


@pytest.mark.parametrize(
    ("column", "value"), [("shard", 99), ("sequence", 99), ("batch", 99), ("batch", -1)]
)
def test_an_index_that_points_nowhere_is_refused(tmp_path: Path, column: str, value: int) -> None:
    path = tmp_path / "a"
    tape = write_tape(path, random_samples(2))
    assert tape.seal is not None
    offsets = tape.table("offsets")
    values = offsets.column(column).to_numpy().copy()
    values[0] = value
    at = offsets.schema.get_field_index(column)
    offsets = offsets.set_column(at, offsets.schema.field(at), pa.array(values, pa.int32()))
    writer = store.TapeWriter(path)
    writer.write_batch("offsets", offsets.combine_chunks().to_batches()[0])
    writer.close()
    (file,) = path.glob(f"offsets/{writer.id}*")
    seal = json.loads((path / SEAL).read_text())
    listed = [e for e in seal["index"]["shards"] if not e["shard"].startswith("offsets/")]
    listed.append({"shard": f"offsets/{file.name}", "bytes": file.stat().st_size})
    seal["index"]["shards"] = listed
    del seal["xxh3"]  # as an attacker would
    (path / SEAL).write_text(json.dumps(seal))
    with pytest.raises(DamagedShardError, match="points to shards or sequences"):
        list(store.open(path))
    skipping = store.open(path, skip_damaged=True)
    assert len(list(skipping)) == 2 and skipping.problems
    np.testing.assert_array_equal(
        next(iter(skipping)).tokens.values, next(iter(tape)).tokens.values
    )
