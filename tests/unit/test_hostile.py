"""Files made to do harm: refused in one line, in bounded memory, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import RolltapeError, messages
from rolltape.store.fsck import fsck
from rolltape.store.places import LocalPlace
from rolltape.store.readers import SealedShard
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.shards import (
    CHECKSUM,
    COLUMNS,
    canonical,
    checksum,
    column_checksums,
    list_shards,
)
from tests.builders import random_samples, write_tape
from tests.fuzz import forge

WRITER = "c" * 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "tape"
    write_tape(path, random_samples(2, response=12))
    return path


@pytest.fixture
def tape(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tape"))


@pytest.fixture
def unsealed(tape: Path) -> Path:
    (tape / "seal.json").unlink()
    return tape


def plant(tape: Path, table: str, data: bytes) -> Path:
    """A shard whose name says what its bytes hash to."""
    (tape / table).mkdir(exist_ok=True)
    path = tape / table / f"{WRITER}-0-{xxhash.xxh3_128(data).hexdigest()}.arrow"
    path.write_bytes(data)
    return path


def arrow_file(batch: pa.RecordBatch, *, rows: int | None = None, level: int = 1) -> bytes:
    """A shard of one batch with checksums that hold, whatever the batch is."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=level))
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        batch = canonical(batch)
        digests = {
            CHECKSUM: checksum(batch).encode(),
            COLUMNS: "".join(column_checksums(batch, 0)).encode(),
        }
        writer.write_batch(batch, custom_metadata=digests)
    return bytes(sink.getvalue())


def read_all(tape: Path) -> None:
    opened = store.open(tape)
    for table in opened.schemas:
        opened.table(table)
    for sequence in opened:
        for read in (sequence.routes, sequence.supports, partial(sequence.logprob, "raw")):
            read()


def attempt(action: Callable[[], Any]) -> str | None:
    """What an action says if it refuses; any other error is a failure of the test."""
    try:
        action()
    except RolltapeError as error:
        said = str(error)
    else:
        return None
    assert "\n" not in said
    return said


def refused(tape: Path, action: Callable[[Path], Any] = read_all) -> str:
    with pytest.raises(RolltapeError) as caught:
        action(tape)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command_lines(tape: Path) -> None:
    """info, show and fsck end with one line and a status, never with a traceback."""
    for command in ("info", "show", "fsck"):
        done = subprocess.run(
            [sys.executable, "-m", "rolltape", command, str(tape)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        # `show` does not read the tables that it does not need
        allowed = (0, 1, 2) if command == "show" else (1, 2)
        assert done.returncode in allowed, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1


# -- columns that are not those of the format -------------------------------------------------


def events(**columns: pa.Array) -> pa.RecordBatch:
    schema = TAPE_TABLES["events"]
    rows = len(next(iter(columns.values()))) if columns else 1
    arrays = {
        "writer": pa.array([WRITER] * rows),
        "t_ns": pa.array([0] * rows, pa.int64()),
        "kind": pa.array(["gap"] * rows),
        **columns,
    }
    return pa.RecordBatch.from_pydict(
        {name: arrays.get(name, pa.nulls(rows, schema.field(name).type)) for name in schema.names}
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(1 << 21),  # costs nothing here, and much as another type
        pa.RunEndEncodedArray.from_arrays(pa.array([1 << 21], pa.int32()), pa.array(["x"])),
        pa.array(["x"]).dictionary_encode(),
        pa.array([["x"]]),
        pa.array([1.5]),
    ],
    ids=["nulls", "run ends", "dictionary", "list", "float"],
)
def test_a_column_of_another_type_is_refused_before_it_costs_memory(
    unsealed: Path, column: pa.Array
) -> None:
    batch = pa.RecordBatch.from_arrays([column], names=["detail"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={CHECKSUM: b"0" * 16, COLUMNS: b"0" * 16})
    plant(unsealed, "events", bytes(sink.getvalue()))
    before = pa.total_allocated_bytes()
    assert "events" in refused(unsealed)
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_a_column_twice_or_not_at_all(unsealed: Path) -> None:
    batch = events()
    twice = pa.RecordBatch.from_arrays([*batch.columns, batch.column("kind")],
                                       names=[*batch.schema.names, "kind"])  # fmt: skip
    path = plant(unsealed, "events", arrow_file(twice))
    assert "2 times" in refused(unsealed)
    path.unlink()
    plant(unsealed, "events", arrow_file(batch.drop_columns(["kind"])))
    assert "column kind is missing" in refused(unsealed)


def test_nulls_where_none_may_be(unsealed: Path) -> None:
    batch = events(kind=pa.array([None], pa.string()))
    plant(unsealed, "events", arrow_file(batch))
    assert "column kind has nulls" in refused(unsealed)


# -- numbers that lie -------------------------------------------------------------------------


def test_a_bomb_is_refused_before_it_goes_off(unsealed: Path) -> None:
    text = "x" * (400 << 20)
    path = plant(unsealed, "events", arrow_file(events(detail=pa.array([text])), level=19))
    del text
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    assert "claims" in refused(unsealed)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert pool.bytes_allocated() - before < 1 << 20


def test_memory_stays_within_what_is_stated(unsealed: Path) -> None:
    text = "x" * (messages.MOST_BYTES - (1 << 20))
    path = plant(unsealed, "events", arrow_file(events(detail=pa.array([text])), level=19))
    del text
    code = """
        import sys, pyarrow as pa
        from rolltape import store
        store.open(sys.argv[1]).count("events")
        for _, _, batch in store.open(sys.argv[1]).batches("events"):
            pass
        print(pa.default_memory_pool().max_memory())
    """
    import textwrap

    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(unsealed)],
        capture_output=True,
        text=True,
        check=True,
    )
    most = messages.MOST_BYTES + messages.MOST_PER_BYTE * path.stat().st_size
    assert int(out.stdout) < 2 * most


def test_rows_without_bytes(unsealed: Path) -> None:
    data = bytearray((next(list_shards(unsealed / "sequences"))).read_bytes())
    path = plant(unsealed, "events", arrow_file(events()))
    data = bytearray(path.read_bytes())
    path.unlink()
    where = forge.batch_field(data, 0)
    struct.pack_into("<q", data, where, 1 << 50)
    plant(unsealed, "events", bytes(data))
    assert f"a batch of {1 << 50} rows" in refused(unsealed)


@pytest.mark.parametrize("value", [-1, 1, 7, 1 << 31, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("target", ["node", "nulls", "offset", "length", "claim", "body"])
def test_forged_lengths(unsealed: Path, target: str, value: int) -> None:
    data = bytearray(arrow_file(events(detail=pa.array(["some text that is compressed" * 9]))))
    if forge.set_number(data, target, value):
        plant(unsealed, "events", bytes(data))
        attempt(lambda: read_all(unsealed))


@pytest.mark.parametrize("count", [1 << 20, (1 << 32) - 1])
def test_vectors_longer_than_the_message(unsealed: Path, count: int) -> None:
    data = bytearray(arrow_file(events()))
    for where in forge.vectors(data):
        forged = bytearray(data)
        struct.pack_into("<I", forged, where, count)
        path = plant(unsealed, "events", bytes(forged))
        refused(unsealed)
        path.unlink()


def test_a_footer_that_names_one_batch_many_times(unsealed: Path) -> None:
    batch = events()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        for number in range(3):
            digests = "".join(column_checksums(canonical(batch), number)).encode()
            writer.write_batch(batch, custom_metadata={COLUMNS: digests, CHECKSUM: b""})
    data = bytearray(sink.getvalue())
    first, second, _ = forge.footer_blocks(data)
    data[second : second + 24] = data[first : first + 24]
    plant(unsealed, "events", bytes(data))
    assert "outside the file" in refused(unsealed)


def test_what_is_not_arrow_at_all(unsealed: Path) -> None:
    for data in (b"", b"ARROW1", b"ARROW1\0\0" * 2, b"ARROW1\0\0\0\0\0\0ARROW1", b"\xff" * 100):
        path = plant(unsealed, "events", data)
        refused(unsealed)
        path.unlink()
    plant(unsealed, "events", os.urandom(1000))
    command_lines(unsealed)


# -- names and links --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evil.arrow", f"{WRITER}-0.arrow", f"{WRITER}-x-{WRITER}.arrow"])
def test_names_that_no_writer_gives(unsealed: Path, name: str) -> None:
    (unsealed / "events").mkdir(exist_ok=True)
    (unsealed / "events" / name).write_bytes(arrow_file(events()))
    assert "not the name of a shard" in refused(unsealed)
    command_lines(unsealed)


def test_a_live_name_that_no_writer_gives_is_neither_read_nor_removed(unsealed: Path) -> None:
    path = unsealed / "tokens" / "evil.arrow.live"
    path.write_bytes(b"ARROW1\0\0")
    assert "not the name of a shard" in refused(unsealed)
    store.seal(unsealed, index=False)
    assert path.exists()


def test_a_pipe_or_device_in_the_place_of_a_file(tape: Path) -> None:
    os.mkfifo(tape / "tokens" / f"{WRITER}-0-{WRITER}.arrow")
    os.mkfifo(tape / "tokens" / f"{WRITER}-1.arrow.live")
    read_all(tape)  # not listed
    assert not fsck(tape).findings
    (tape / "tape.json").unlink()
    (tape / "tape.json").symlink_to("/dev/zero")
    assert "not a tape" in refused(tape, store.open)


def test_a_shard_may_be_a_link_as_in_caches_of_downloads(tape: Path, tmp_path: Path) -> None:
    (path,) = list_shards(tape / "tokens")
    blob = tmp_path / "blob"
    path.rename(blob)
    path.symlink_to(blob)
    read_all(tape)
    assert not fsck(tape).findings
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    fsck(tape, repair=True)
    assert blob.read_bytes() == data, "what the link leads to is not written to"


# -- a shard with any bytes whose checksums hold ----------------------------------------------


@pytest.fixture(scope="module")
def scratch(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "tape"
    shutil.copytree(whole, path)
    (path / "seal.json").unlink()
    return path


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_shards_whose_hashes_hold(scratch: Path, data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(["tokens", "routes", "supports", "sequences"]))
    original = (scratch / table).glob("*.arrow")
    whole = next(p for p in original if not p.name.startswith(WRITER)).read_bytes()
    edits = data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=8))))
    forged = forge.mutate(whole, edits, rehash=data.draw(st.booleans()))
    place = LocalPlace(scratch)
    path = plant(scratch, table, forged)

    def read() -> None:
        shard = SealedShard(place, table, path.name, whole=True)
        for number in range(shard.batches):
            shard.read(number, TAPE_TABLES[table])
        shard.close()
        read_all(scratch)

    try:
        attempt(read)
    finally:
        path.unlink()
