"""Shards: nothing damaged is taken for data, and a kill costs at most the torn tail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import (
    DamagedShardError,
    NewerFormatError,
    NotATapeError,
    StorageError,
    TapeExistsError,
)
from rolltape.store.compact import compact
from rolltape.store.fsck import fsck
from rolltape.store.messages import CUT_OFF
from rolltape.store.places import LocalPlace
from rolltape.store.readers import LiveShard
from rolltape.store.shards import LIVE, list_shards, row_checksum
from tests.builders import random_samples, write_tape

ROW = {
    "engine": "e" * 32,
    "request": "0",
    "sample": 0,
    "pass": 0,
    "prompt_len": 1,
    "finish": "stop",
}


def make(path: Path, rows: int = 3) -> Path:
    root = store.create_tape(path, role="rollout")
    with store.TapeWriter(root) as writer:
        for i in range(rows):
            writer.append("sequences", {**ROW, "request": str(i)})
            writer.flush()
    return root


def shard(root: Path, table: str = "sequences") -> Path:
    (path,) = list_shards(root / table)
    return path


def live(path: Path, rows: int = 3) -> tuple[Path, store.TapeWriter]:
    root = store.create_tape(path, role="rollout")
    writer = store.TapeWriter(root)
    for i in range(rows):
        writer.append("sequences", {**ROW, "request": str(i)})
        writer.flush()
    return root, writer


def test_every_flipped_byte_of_a_sealed_shard_is_found_and_named(tmp_path: Path) -> None:
    path = shard(make(tmp_path / "a"))
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 7):
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedShardError, match=path.name):
            store.open(tmp_path / "a").table("sequences")
        data[position] ^= 1
    path.write_bytes(data)
    assert len(store.open(tmp_path / "a")) == 3


def test_no_flipped_byte_of_a_live_shard_passes_for_data(tmp_path: Path) -> None:
    root, writer = live(tmp_path / "a")
    path = shard(root)
    data = bytearray(path.read_bytes())
    whole = store.open(root).table("sequences").to_pylist()
    for position in range(0, len(data), 11):
        data[position] ^= 0x10
        path.write_bytes(data)
        tape = store.open(root)
        try:
            rows = tape.table("sequences").to_pylist()
        except DamagedShardError:
            continue  # the schema message itself was hit
        finally:
            data[position] ^= 0x10
        # either the byte does not matter (padding), or the batch is left out and that is said
        assert rows == whole[: len(rows)], position
        assert len(rows) == 3 or tape.problems, position
    path.write_bytes(data)
    writer.close()


@pytest.mark.parametrize("cut", [1, 9, 500, 1500])
def test_a_torn_tail_is_ignored_and_reported(tmp_path: Path, cut: int) -> None:
    root, writer = live(tmp_path / "a")
    path = shard(root)
    path.write_bytes(path.read_bytes()[:-cut])
    tape = store.open(root)
    assert len(tape) == 2
    assert "bytes after the last whole batch were ignored" in tape.problems[0]
    writer.close()


def test_a_truncated_sealed_shard_is_an_error(tmp_path: Path) -> None:
    root = make(tmp_path / "a")
    path = shard(root)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DamagedShardError, match="truncated or altered"):
        store.open(root).table("sequences")
    tape = store.open(root, skip_damaged=True)
    assert len(tape) == 0 and path.name in tape.problems[0]


def test_a_sealed_tape_misses_no_shard_silently(tmp_path: Path) -> None:
    root = make(tmp_path / "a")
    store.seal(root)
    shard(root).unlink()
    with pytest.raises(DamagedShardError, match=r"listed in seal\.json but missing"):
        store.open(root)


def test_a_live_tape_can_be_read_while_it_grows(tmp_path: Path) -> None:
    root, writer = live(tmp_path / "a", rows=1)
    assert len(store.open(root)) == 1
    writer.append("sequences", {**ROW, "request": "later"})
    assert len(store.open(root)) == 1, "what is not flushed is not visible"
    writer.flush()
    assert len(store.open(root)) == 2
    writer.close()
    assert len(store.open(root)) == 2


def test_seal_leaves_a_living_writer_alone_and_says_so(tmp_path: Path) -> None:
    root, writer = live(tmp_path / "a")
    sealed = store.seal(root)
    assert len(sealed["live"]) == 1 and not sealed["recovered"]
    writer.append("sequences", {**ROW, "request": "after the seal"})
    writer.close()
    assert len(store.open(root)) == 4


def test_what_a_killed_writer_flushed_is_recovered(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    code = f"""
        import os, signal
        from rolltape import store
        writer = store.TapeWriter({str(root)!r})
        for i in range(5):
            writer.append("sequences", {{**{ROW!r}, "request": str(i)}})
            writer.flush()
        writer.append("sequences", {{**{ROW!r}, "request": "never flushed"}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert shard(root).name.endswith(LIVE)
    sealed = store.seal(root)
    assert sealed["recovered"][0]["rows"] == 5 and sealed["recovered"][0]["torn"] == 0
    assert not shard(root).name.endswith(LIVE)
    tape = store.open(root)
    assert [s.key.request for s in tape] == list("01234") and not tape.problems


def test_shards_roll_over_at_the_size_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rolltape.store.writer.SHARD_BYTES", 4000)
    root = make(tmp_path / "a", rows=4)
    assert len(list(list_shards(root / "sequences"))) > 1
    assert [s.key.request for s in store.open(root)] == list("0123")


def test_two_writers_of_one_tape_do_not_meet(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as one, store.TapeWriter(root) as two:
        one.append("sequences", {**ROW, "request": "one"})
        two.append("sequences", {**ROW, "request": "two"})
    assert {s.key.request for s in store.open(root)} == {"one", "two"}


# -- what is not a tape -----------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "\x00", '{"format": "x", "uuid": "1"}'])
def test_what_is_not_a_tape_is_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tape.json").write_text(content)
    with pytest.raises(NotATapeError) as caught:
        store.open(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotATapeError, match="no such file or folder"):
        store.open(tmp_path / "nowhere")


def test_a_report_is_not_a_tape_and_is_called_a_report(tmp_path: Path) -> None:
    root = store.create_report(tmp_path / "r", summary={"verdict": "identical"})
    with pytest.raises(NotATapeError, match="it is a report"):
        store.open(root)
    assert store.open_report(root).summary == {"verdict": "identical"}
    assert store.kind_of(root) == "report" and store.kind_of(tmp_path) is None


def test_a_newer_major_version_is_refused_and_a_newer_minor_is_read(tmp_path: Path) -> None:
    root = make(tmp_path / "a")
    header = json.loads((root / "tape.json").read_text())
    header.pop("xxh3")
    for version, fine in (("1.9", True), ("2.0", False)):
        (root / "tape.json").write_text(json.dumps({**header, "format": version}))
        if fine:
            assert len(store.open(root)) == 3
        else:
            with pytest.raises(NewerFormatError, match="upgrade rolltape"):
                store.open(root)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").touch()
    with pytest.raises(TapeExistsError, match="not empty"):
        store.create_tape(tmp_path / "a", role="rollout")


def test_unknown_columns_are_ignored_and_absent_ones_are_null(tmp_path: Path) -> None:
    import pyarrow as pa

    from rolltape.store.schema import TAPE_TABLES
    from rolltape.store.shards import ShardWriter

    root = store.create_tape(tmp_path / "a", role="rollout")
    old = TAPE_TABLES["sequences"]
    schema = old.remove(old.get_field_index("group")).append(pa.field("of the future", pa.int8()))
    row = {**dict.fromkeys(schema.names), **ROW}
    writer = ShardWriter(root / "sequences", writer="a" * 32, number=0, schema=schema)
    writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    writer.close()
    (sequence,) = store.open(root)
    assert sequence.info["group"] is None and "of the future" not in sequence.info


def test_routes_whose_bytes_do_not_fit_their_shape_are_refused(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    key = {name: ROW[name] for name in ("engine", "request", "sample", "pass")}
    route = {**key, "role": "used", "layers": [[0]], "k": 2, "num_experts": 4, "encoding": "plain"}
    with store.TapeWriter(root) as writer:
        writer.append("sequences", {**ROW, "length": 9})
        writer.append("routes", {**route, "start": 0, "n": 4, "ids": [b"123"]})
    with pytest.raises(store.SchemaError, match="3 bytes, its shape needs 8"):
        store.open(root).sequence("0.0").routes()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ids": [bytes([9] * 8)]}, "has id 9, num_experts is 4"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"k": -1}, "k is -1"),
        ({"encoding": "rows", "ids": [bytes([9] * 8)]}, "has id 9, num_experts is 4"),
        ({"valid": [b"123"]}, "3 bytes, its shape needs 1"),
        ({"missing": "[[1]]"}, "missing"),
        ({"missing": "[[0, 1, null"}, "missing"),
        ({"missing": '{"a": 1}'}, "missing"),
        ({"missing": '[["a", 1, null, "x"]]'}, "missing"),
        ({"missing": '[[0, 1e999, null, "x"]]'}, "missing"),
    ],
)
def test_routes_that_do_not_decode_name_the_sequence_and_the_position(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    key = {name: ROW[name] for name in ("engine", "request", "sample", "pass")}
    route = {**key, "role": "used", "layers": [[0]], "k": 2, "num_experts": 4, "encoding": "plain"}
    route |= {"start": 3, "n": 4, "ids": [bytes(8)]}
    with store.TapeWriter(root) as writer:
        writer.append("sequences", {**ROW, "length": 9})
        writer.append("routes", {**route, **changes})
    sequence = store.open(root).sequence("0.0")
    with pytest.raises(store.SchemaError, match=f"routes of {sequence.id} at 3.*{match}"):
        sequence.routes()


def test_idle_import_costs_nothing_heavy() -> None:
    code = "import sys, rolltape; print([m for m in ('numpy', 'pyarrow') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert out.stdout.strip() == "[]"


def test_a_sealing_that_was_cut_short_can_be_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    root, writer = live(tmp_path / "a")
    writer.abandon()
    dead, real = shard(root), Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == dead:
            raise OSError("cut short")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(StorageError, match="cut short"):
        store.seal(root)
    monkeypatch.undo()
    assert len(list((root / "sequences").iterdir())) == 2, "the live shard and its finished twin"
    assert store.open(root).table("sequences").num_rows == 3
    for _ in range(2):
        store.seal(root)
        assert len(list((root / "sequences").iterdir())) == 1
        assert store.open(root).table("sequences").num_rows == 3


def test_recovery_keeps_what_was_written_first_the_record(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rolltape.store.writer.SHARD_BYTES", 1)
    key = {name: ROW[name] for name in ("engine", "request", "sample", "pass")}
    root = store.create_tape(tmp_path / "a", role="rollout")
    writer = store.TapeWriter(root)
    for value in (1.0, 7.0):  # the second shard repeats the positions of the first
        fragment = {**key, "start": 0, "n": 1, "ids": [[3]], "raw": [[value]]}
        writer.append("tokens", fragment)
        writer.flush()
        monkeypatch.setattr("rolltape.store.writer.SHARD_BYTES", 1 << 20)
    writer.append("sequences", {**ROW, "length": 1})
    writer.flush()
    writer.abandon()
    for _ in range(2):
        assert store.open(root).sequence("0.0").logprob("raw").values.tolist() == [1.0]
        store.seal(root)


def test_many_small_flushes_do_not_make_reading_quadratic(tmp_path: Path) -> None:
    tape = store.open(make(tmp_path / "a", rows=50))
    assert tape.table("sequences").column("request").num_chunks == 1


# -- every byte counts ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed tape with an index."""
    path = tmp_path_factory.mktemp("sealed") / "tape"
    write_tape(path, random_samples(2, response=10))
    return path


@pytest.fixture(scope="module")
def packed(sealed: Path) -> Path:
    """The same, compacted."""
    path = sealed.parent / "packed"
    compact(sealed, path)
    return path


def _facts(root: Path) -> list[Any]:
    """What lazy reading gives."""
    found: list[Any] = []
    for sequence in store.open(root):
        routes, supports = sequence.routes(), sequence.supports()
        found += [sequence.id, sequence.tokens.values.tobytes(), sequence.info["finish"]]
        found += [sequence.logprob("raw").values.tobytes(), sequence.loss_mask.values.tobytes()]
        found += [routes.ids.tobytes(), routes.valid.tobytes(), supports.ids.tobytes()]
        found += [sequence.step.values.tobytes(), sequence.weight_version.values.tobytes()]
    return found


_FACTS: dict[Path, list[Any]] = {}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_bit_of_any_shard_is_named_or_does_no_harm(
    sealed: Path, packed: Path, data: st.DataObject
) -> None:
    root = data.draw(st.sampled_from([sealed, packed]))
    whole = _FACTS.get(root) or _FACTS.setdefault(root, _facts(root))
    paths = sorted(root.glob("*/*.arrow"))
    path = data.draw(st.sampled_from(paths))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    table = path.parent.name
    try:
        path.write_bytes(flipped)
        # read in full: always found
        with pytest.raises(DamagedShardError, match=path.name):
            store.open(root).table(table)
        # read lazily: found, or what is read is right
        said = ""
        try:
            assert _facts(root) == whole
        except DamagedShardError as error:
            said = str(error)
        assert not said or (path.name in said and "\n" not in said)
        lenient = store.open(root, skip_damaged=True)
        lenient.table(table)
        assert any(path.name in problem for problem in lenient.problems)
    finally:
        path.write_bytes(content)


def test_fsck_names_the_shard_of_any_flipped_byte(sealed: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sealed, tmp_path / "tape"))
    for path in sorted(root.glob("*/*.arrow")):
        content = path.read_bytes()
        for position in (0, 9, len(content) // 3, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[position] ^= 4
            path.write_bytes(flipped)
            named = [f.where for f in fsck(root).findings if f.code == "damaged"]
            assert named == [f"{path.parent.name}/{path.name}"]
        path.write_bytes(content)
    assert not fsck(root).findings


def test_a_live_shard_cut_at_any_byte_keeps_every_whole_batch(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    writer = store.TapeWriter(root)
    ends = []
    for i in range(2):
        row = {name: ROW[name] for name in ("engine", "request", "sample", "pass")}
        writer.append("annotations", {**row, "name": "reward", "number": float(i), "t_ns": i})
        writer.flush()
        ends.append(shard(root, "annotations").stat().st_size)
    path = shard(root, "annotations")
    data = path.read_bytes()
    writer.abandon()
    place = LocalPlace(root)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        found = LiveShard(place, "annotations", path.name)
        assert found.batches == sum(end <= size for end in ends)
        assert found.torn == 0 or (found.reason == CUT_OFF and size not in ends)
        found.close()
    for size in (*ends, ends[-1] - 1, ends[0] - 1, 5):
        cut = Path(shutil.copytree(root, tmp_path / f"{size}"))
        (cut / "annotations" / path.name).write_bytes(data[:size])
        (entry,) = store.seal(cut, index=False)["recovered"]
        assert (
            entry["rows"]
            == sum(end <= size for end in ends)
            == store.open(cut).count("annotations")
        )


def test_a_shard_that_could_not_be_written_gets_no_footer(tmp_path: Path) -> None:
    root, writer = live(tmp_path / "a", rows=2)
    opened = writer._open["sequences"]
    size = shard(root).stat().st_size

    class Full:
        def write(self, data: memoryview) -> int:
            os.write(opened._file.fileno(), data[:100])
            raise OSError(28, "No space left on device")

    opened._batches._sink.file = Full()
    writer.append("sequences", {**ROW, "request": "lost"})
    with pytest.raises(StorageError, match="No space left on device"):
        writer.flush()
    assert shard(root).stat().st_size == size, "the torn part gives its room back"
    writer.append("sequences", {**ROW, "request": "too late"})
    with pytest.raises(StorageError, match="an earlier write failed"):
        writer.flush()
    writer.close()
    assert shard(root).name.endswith(LIVE)
    store.seal(root)
    assert [s.key.request for s in store.open(root)] == ["0", "1"]


def test_with_fsync_the_name_of_a_live_shard_survives_power_loss_too(
    tmp_path: Path, monkeypatch: Any
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with store.TapeWriter(root, fsync=True) as writer:
        writer.append("sequences", ROW)
        writer.flush()
        (path,) = (root / "sequences").iterdir()
        assert synced == [str(path.parent), str(root), str(path)]


def test_short_writes_are_finished(tmp_path: Path) -> None:
    root, writer = live(tmp_path / "a", rows=1)
    opened = writer._open["sequences"]

    class Slow:
        def write(self, data: memoryview) -> int:
            return opened._file.write(data[:17])

    opened._batches._sink.file = Slow()
    writer.append("sequences", {**ROW, "request": "slow"})
    writer.close()
    assert len(store.open(root)) == 2


def test_a_commit_log_has_a_line_a_row_with_positions(tmp_path: Path) -> None:
    root, log = store.create_tape(tmp_path / "a", role="rollout"), tmp_path / "log"
    key = {name: ROW[name] for name in ("engine", "request", "sample", "pass")}
    with store.TapeWriter(root, commit_log=log) as writer:
        writer.append("sequences", ROW)
        writer.append("events", {"writer": writer.id, "t_ns": 0, "kind": "gap", "start": 3, "n": 1})
        writer.append("tokens", {**key, "start": [0, 2], "n": [2, 1], "ids": [[1, 2], [3]]})
        assert log.read_text() == "", "nothing is committed yet"
        writer.flush()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    batch = store.open(root).table("tokens").to_batches()[0]
    assert lines == [
        {"table": "tokens", **key, "start": s, "n": n, "checksum": row_checksum(batch, i)}
        for i, (s, n) in enumerate([(0, 2), (2, 1)])
    ]


def test_a_commit_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with pytest.raises(store.UsageError, match=r"--commit-log .*: No such file") as caught:
        store.TapeWriter(root, commit_log=tmp_path / "no" / "log")
    assert "\n" not in str(caught.value)
