"""Shards: nothing damaged is taken for data, and a kill costs at most the torn tail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.store import (
    DamagedShardError,
    NewerFormatError,
    NotATapeError,
    StorageError,
    TapeExistsError,
)
from rolltape.store.shards import LIVE, list_shards

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
    for position in range(0, len(data), 5):
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
