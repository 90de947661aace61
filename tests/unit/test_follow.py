"""Following a tape that is being written: every batch once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.store import TapeWriter, create_tape, seal
from rolltape.store.errors import (
    DamagedShardError,
    NewerFormatError,
    NotATapeError,
    StorageError,
    UsageError,
)
from rolltape.store.follow import Arrival, Follower
from rolltape.store.shards import LIVE

ENGINE = "a1" * 16


def event(writer: TapeWriter, n: int) -> None:
    writer.append("events", {"writer": writer.id, "t_ns": n, "kind": "notice"})
    writer.flush()


def times(arrivals: list[Arrival]) -> list[int]:
    return [t for a in arrivals for t in a.batch.column("t_ns").to_pylist()]


def follower(path: Path, state: Any = None) -> Follower:
    return Follower(path, state, tables=("events",))


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    return create_tape(tmp_path / "a", role="rollout")


def test_every_batch_is_given_once_as_it_is_committed(tape: Path) -> None:
    following = follower(tape)
    assert following.poll() == []
    with TapeWriter(tape) as writer:
        for n in range(5):
            event(writer, n)
            (arrival,) = following.poll()
            assert arrival[:4] == ("events", writer.id, 0, n) and times([arrival]) == [n]
            assert following.poll() == []
        event(writer, 5)
    assert times(following.poll()) == [5]  # from under its final name
    assert not following.ended
    seal(tape)
    assert following.poll() == [] and following.ended


def test_shards_follow_each_other(tape: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rolltape.store.writer.SHARD_BYTES", 1)
    following = follower(tape)
    with TapeWriter(tape) as writer:
        for n in range(4):
            event(writer, n)
        found = following.poll()
        event(writer, 4)
    found += following.poll()
    assert times(found) == [0, 1, 2, 3, 4]
    assert [(a.number, a.batch_index) for a in found] == [(n, 0) for n in range(5)]


@settings(max_examples=30, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["a", "b", "poll", "resume", "close"]), max_size=40),
    small=st.booleans(),
)
def test_any_interleaving_gives_everything_once(
    tmp_path_factory: Any, actions: list[str], small: bool
) -> None:
    path = create_tape(tmp_path_factory.mktemp("t") / "a", role="rollout")
    patch = pytest.MonkeyPatch()
    patch.setattr("rolltape.store.writer.SHARD_BYTES", 3000 if small else 1 << 30)
    writers: dict[str, TapeWriter] = {}
    written: dict[str, list[int]] = {}
    found: list[Arrival] = []
    following = follower(path)
    for n, action in enumerate(actions):
        if action == "poll":
            found += following.poll()
        elif action == "resume":
            following = follower(path, json.loads(json.dumps(following.state)))
        elif action == "close":
            for writer in writers.values():
                writer.close()
            writers.clear()
        else:
            writer = writers.setdefault(action, TapeWriter(path))
            event(writer, n)
            written.setdefault(writer.id, []).append(n)
    for writer in writers.values():
        writer.close()
    patch.undo()
    seal(path)
    found += following.poll()
    assert following.ended
    for writer_id, numbers in written.items():
        assert times([a for a in found if a.writer == writer_id]) == numbers
    places = [a[:4] for a in found]
    assert len(set(places)) == len(places)


def test_a_torn_tail_is_not_there_yet(tape: Path) -> None:
    writer = TapeWriter(tape)
    event(writer, 0)
    event(writer, 1)
    (live,) = (tape / "events").glob(f"*{LIVE}")
    whole = live.read_bytes()
    following = follower(tape)
    seen = []
    cut = tape / "events" / f"{'c' * 32}-0{LIVE}"
    for size in [*range(0, len(whole) - 1, 7), len(whole) - 1, len(whole)]:
        cut.write_bytes(whole[:size])
        seen += [a for a in following.poll() if a.writer == "c" * 32]
        if size == len(whole) - 1:
            assert times(seen) == [0]
    assert times(seen) == [0, 1]
    writer.close()


def test_bytes_already_given_are_not_read_again(tape: Path, monkeypatch: Any) -> None:
    writer = TapeWriter(tape)
    following = follower(tape)
    read: list[int] = []
    opened = following.place.open

    def counting(name: str) -> Any:
        source = opened(name)

        class Counted:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: Any) -> None:
                source.close()

            def size(self) -> int:
                return source.size()

            def read_at(self, n: int, at: int) -> Any:
                read.append(n)
                return source.read_at(n, at)

        return Counted()

    monkeypatch.setattr(following.place, "open", counting)
    sizes = []
    for n in range(20):
        event(writer, n)
        before = sum(read)
        assert len(following.poll()) == 1
        sizes.append(sum(read) - before)
    (live,) = (tape / "events").glob(f"*{LIVE}")
    assert sum(read) == live.stat().st_size
    assert max(sizes[1:]) < 2 * min(sizes[1:])
    following.poll()
    assert sum(read) == live.stat().st_size
    writer.close()


def test_a_damaged_batch_is_never_given_as_something_else(tape: Path) -> None:
    writer = TapeWriter(tape)
    event(writer, 0)
    (live,) = (tape / "events").glob(f"*{LIVE}")
    first = live.stat().st_size
    event(writer, 1)
    intact = follower(tape).poll()[1].batch
    data = bytearray(live.read_bytes())
    noticed = 0
    for at in range(first, len(data), 3):
        data[at] ^= 0x10
        live.write_bytes(data)
        found = follower(tape).poll()
        data[at] ^= 0x10
        noticed += times(found) == [0]
        # a flip in padding between buffers changes nothing that is read
        assert times(found) == [0] or found[1].batch.equals(intact), at
    assert noticed > 0.5 * (len(data) - first) / 3
    live.write_bytes(data)
    writer.close()


def test_a_damaged_finished_shard_is_an_error(tape: Path) -> None:
    with TapeWriter(tape) as writer:
        event(writer, 0)
    (final,) = (tape / "events").glob("*.arrow")
    data = bytearray(final.read_bytes())
    data[len(data) // 2] ^= 1
    final.write_bytes(data)
    with pytest.raises(DamagedShardError, match="the name says"):
        follower(tape).poll()


def test_what_a_dead_writer_left_goes_on_under_the_recovered_shard(tape: Path) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        writer = TapeWriter(tape)
        event(writer, 0)
        event(writer, 1)
        os.write(write_end, b"x")
        os._exit(1)
    os.read(read_end, 1)
    following = follower(tape)
    assert times(following.poll()) == [0, 1]
    os.waitpid(child, 0)
    (live,) = (tape / "events").glob(f"*{LIVE}")
    with live.open("ab") as file:
        file.write(b"torn")
    assert following.poll() == []
    seal(tape)
    assert following.poll() == [] and following.ended
    assert times(follower(tape).poll()) == [0, 1]


def test_a_state_belongs_to_its_tape(tape: Path, tmp_path: Path) -> None:
    other = create_tape(tmp_path / "b", role="rollout")
    with pytest.raises(UsageError, match="the state is of tape"):
        Follower(tape, follower(other).state)
    with pytest.raises(NotATapeError, match="is not a tape"):
        Follower(tmp_path / "nothing")


def test_a_tape_of_a_newer_format_is_refused(tape: Path) -> None:
    header = json.loads((tape / "tape.json").read_text())
    del header["xxh3"]
    (tape / "tape.json").write_text(json.dumps({**header, "format": "9.0"}))
    with pytest.raises(NewerFormatError, match=r"has format 9\.0"):
        follower(tape)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"uuid": "a"}'])
def test_a_header_that_is_none_is_refused_in_one_line(tape: Path, text: str) -> None:
    (tape / "tape.json").write_text(text)
    with pytest.raises(NotATapeError, match=r"tape\.json: "):
        follower(tape)


@pytest.mark.parametrize("moment", ["listing", "reading"])
def test_a_poll_that_fails_loses_nothing(tape: Path, monkeypatch: Any, moment: str) -> None:
    with TapeWriter(tape) as writer:
        event(writer, 0)
        writer.append("engines", {"engine": ENGINE, "writer": writer.id, "role": "rollout",
                                  "adapter": "double"})  # fmt: skip
    open_ = TapeWriter(tape)
    event(open_, 1)
    following = Follower(tape, tables=("events", "engines"))
    state = following.state
    name = "files" if moment == "listing" else "open"
    real = getattr(following.place, name)

    def away(what: str = "") -> Any:
        if what.startswith("engines"):
            raise StorageError("the store is away")
        return real(what)

    with monkeypatch.context() as patch:
        patch.setattr(type(following.place), name, lambda self, what="": away(what))
        for _ in range(2):
            with pytest.raises(StorageError, match="away"):
                following.poll()
            assert following.state == state  # a state taken now skips nothing either
    event(open_, 2)
    found = following.poll()
    assert sorted(times([a for a in found if a.table == "events"])) == [0, 1, 2]
    assert [a.table for a in found].count("engines") == 1
    assert following.poll() == []
    open_.close()


def test_shards_of_an_object_store_arrive_as_they_are_put(tape: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")

    def put(name: str) -> None:
        memory.pipe(f"/followed/{name}", (tape / name).read_bytes())

    put("tape.json")
    following = Follower("memory://followed", tables=("events",))
    assert following.poll() == []
    for n in range(2):
        with TapeWriter(tape) as writer:
            event(writer, n)
        for file in (tape / "events").iterdir():
            put(f"events/{file.name}")
        assert times(following.poll()) == [n]
    seal(tape)
    put("seal.json")
    assert following.poll() == [] and following.ended
    memory.rm("/followed", recursive=True)
