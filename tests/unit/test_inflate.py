"""Record batches inflated together are the batches that Arrow reads one by one."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rolltape import store
from rolltape.store import messages
from rolltape.store.errors import DamagedShardError
from rolltape.store.inflate import Decoder, parts_of
from rolltape.store.places import LocalPlace
from rolltape.store.readers import SealedShard
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.shards import canonical, checksum, column_checksums
from rolltape.store.tape import open_folder

NESTED = pa.list_(pa.struct([("start", pa.int32()), ("step", pa.int64())]))


def batches() -> list[pa.RecordBatch]:
    """Every layout that a tape has: flat, text, bytes, bits, lists, structs, nulls, none, many."""
    rng = np.random.default_rng(3)
    out = []
    for rows in (0, 1, 7, 3000):
        some = rng.random(rows) < 0.5
        columns = {
            "number": pa.array(rng.integers(0, 1 << 40, rows), pa.int64()),
            "maybe": pa.array(rng.random(rows), pa.float32(), mask=some),
            "bit": pa.array(some),
            "text": pa.array(["x" * int(n) for n in rng.integers(0, 50, rows)], pa.string()),
            "bytes": pa.array([rng.bytes(60) if s else None for s in some], pa.binary()),
            "list": pa.array([[1, None, 3]] * rows, pa.list_(pa.int32())),
            "nested": pa.array(
                [[{"start": 1, "step": i}, None] if s else None for i, s in enumerate(some)], NESTED
            ),
            "none": pa.nulls(rows, pa.int32()),
        }
        out.append(canonical(pa.record_batch(columns)))
    return out


def message(batch: pa.RecordBatch, codec: str | None = "zstd") -> bytes:
    return bytes(batch.serialize() if codec is None else compressed(batch, codec))


def compressed(batch: pa.RecordBatch, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={b"said": b"so"})
    data = memoryview(sink.getvalue())
    at = messages.message_size(data)
    return bytes(data[at : at + messages.message_size(data[at:])])


def same(found: pa.RecordBatch, wanted: pa.RecordBatch) -> None:
    found.validate(full=True)
    assert found.equals(wanted)
    # to the last buffer: the checksums of tapes are taken of these
    assert checksum(found) == checksum(wanted)
    assert column_checksums(found, 5) == column_checksums(wanted, 5)


def test_one_by_one_and_together_they_are_what_was_written() -> None:
    written = batches()
    run = [parts_of(memoryview(message(batch))) for batch in written]
    decoder = Decoder(written[0].schema)
    together = decoder.decode(run)
    assert together is not None
    for parts, batch, found in zip(run, written, together, strict=True):
        same(found, batch)
        alone = decoder.decode([parts])
        assert alone is not None
        same(alone[0], batch)
        assert parts.stored == {b"said": b"so"}


@pytest.mark.parametrize("wanted", [(0,), (3, 6), (1, 2, 4, 5, 7)])
def test_some_columns_are_read_without_the_others(wanted: tuple[int, ...]) -> None:
    written = batches()
    found = Decoder(written[0].schema, wanted).decode(
        [parts_of(memoryview(message(batch))) for batch in written]
    )
    assert found is not None
    for batch, one in zip(written, found, strict=True):
        same(one, batch.select(list(wanted)))


def test_what_it_does_not_know_is_left_to_arrow() -> None:
    batch = batches()[2]
    for codec in (None, "lz4"):
        assert Decoder(batch.schema).decode([parts_of(memoryview(message(batch, codec)))]) is None
    odd = pa.record_batch({"odd": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert Decoder(odd.schema).decode([parts_of(memoryview(message(batch)))]) is None
    large = pa.record_batch({"n": pa.array(np.zeros(1 << 21))})
    assert Decoder(large.schema).decode([parts_of(memoryview(message(large)))]) is None


def first_claim(data: bytes) -> int:
    """Where the first buffer says how large it is inflated."""
    parts = parts_of(memoryview(data))
    offset = next(o for o, n in zip(parts.buffers[::2], parts.buffers[1::2], strict=True) if n)
    return len(parts.metadata) + offset


@pytest.mark.parametrize("off", [-8, 8, 1 << 20])
def test_a_buffer_that_claims_another_size_is_damage(off: int) -> None:
    batch = batches()[2]
    data = bytearray(message(batch))
    at = first_claim(data)
    struct.pack_into("<q", data, at, struct.unpack_from("<q", data, at)[0] + off)
    with pytest.raises(DamagedShardError, match="than it claims"):
        Decoder(batch.schema).decode([parts_of(memoryview(data))])


@pytest.mark.parametrize("claim", [-2, 1 << 50])
def test_claims_have_the_limits_of_a_reader(claim: int) -> None:
    data = bytearray(message(batches()[2]))
    struct.pack_into("<q", data, first_claim(data), claim)
    for read in (parts_of, messages.check_claims):
        with pytest.raises(DamagedShardError, match="claims"):
            read(memoryview(data))


def test_no_altered_byte_of_a_message_is_anything_but_damage_or_data() -> None:
    """Both readers of claims refuse the same messages, and never fail in another way."""
    data = message(batches()[1])
    size = len(parts_of(memoryview(data)).metadata)
    refused = 0
    for at in range(size):
        for bit in (1, 16, 128):
            altered = bytearray(data)
            altered[at] ^= bit
            answers = []
            for read in (parts_of, messages.check_claims):
                try:
                    read(memoryview(altered))
                    answers.append(True)
                except DamagedShardError:
                    answers.append(False)
            assert answers[0] <= answers[1], f"byte {at}: more is let through than before"
            refused += not answers[0]
    assert refused


def test_the_head_and_every_number_of_the_metadata_may_be_damaged() -> None:
    """Whatever a word of it becomes: damage, what Arrow says of it, or the same numbers."""
    batch = batches()[2]
    data = message(batch)
    decoder = Decoder(batch.schema)
    (length,) = struct.unpack_from("<i", data, 4)
    for at in range(0, 8 + length, 4):
        for word in (
            bytes(4),
            b"\xff\xff\xff\x7f",
            struct.pack("<i", 8),
            struct.pack("<i", len(data)),
        ):
            altered = data[:at] + word + data[at + 4 :]
            if altered == data:
                continue
            try:
                found = decoder.decode([parts_of(memoryview(altered))])
                for one in found or ():
                    one.validate(full=True)
            except (DamagedShardError, pa.ArrowException, OSError, ValueError, KeyError):
                continue  # what readers take for damage


def test_a_damaged_batch_in_a_run_costs_only_itself(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    store.create_tape(tape, role="rollout")
    writer = store.TapeWriter(LocalPlace(tape))
    schema = TAPE_TABLES["steps"]
    for step in range(50):
        row = {"engine": "e" * 32, "step": step, "kind": "decode", "t_ns": step}
        writer.write_batch("steps", pa.RecordBatch.from_pylist([row], schema=schema))
    writer.close()
    store.seal(tape)
    shard = open_folder(tape).shard("steps", writer_file(tape))
    runs = list(shard.runs())
    assert runs == [range(50)]
    together = shard.read_run(runs[0], schema)
    assert together is not None
    assert all(b.equals(shard.read(i, schema)) for i, b in enumerate(together))
    assert isinstance(shard, SealedShard)
    block = shard._blocks[20]
    file = tape / "steps" / shard.file
    data = bytearray(file.read_bytes())
    data[block.offset + block.size - 60] ^= 255  # in the body
    file.write_bytes(data)
    folder = open_folder(tape, skip_damaged=True)
    found = [batch.column("step")[0].as_py() for _, _, batch in folder.batches("steps")]
    assert found == [step for step in range(50) if step != 20]
    assert len(folder.problems) == 1


def writer_file(tape: Path) -> str:
    (file,) = LocalPlace(tape).files("steps")
    return file
