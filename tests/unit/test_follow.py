"""Following a tape that is being written: every batch once, every sequence once and whole."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.store import TapeWriter, create_tape, seal, token_digest
from rolltape.store.errors import DamagedShardError, UsageError
from rolltape.store.follow import Arrival, Follower
from rolltape.store.shards import LIVE
from tests.builders import random_samples, write_tape

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
    with pytest.raises(UsageError, match="is not a tape"):
        Follower(tmp_path / "nothing")


# the rest is `TapeDataset(follow=True)`


class Job:
    """Writes sequences in steps, as an engine does."""

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        self.path = path
        self.writer = TapeWriter(path)
        self.samples = random_samples(8, response=[5, 9, 24, 3, 7, 8, 10, 11], seed=seed)
        self.writer.append(
            "engines",
            {
                "engine": ENGINE,
                "writer": self.writer.id,
                "role": "rollout",
                "adapter": "double",
                "moe_layers": [[1, 2, 3]],
            },
        )

    def row(self, i: int) -> dict[str, Any]:
        sample = self.samples[i]
        return {
            "engine": ENGINE,
            "request": sample.request,
            "sample": sample.sample,
            "pass": 0,
        }

    def opens(self, i: int, *, group: bool = True) -> None:
        sample = self.samples[i]
        self.writer.append(
            "sequences",
            {
                **self.row(i),
                "group": sample.group if group else None,
                "prompt_len": sample.prompt_len,
                "finish": "open",
                "opened_ns": i,
            },
        )
        self.writer.flush()

    def tokens(self, i: int, start: int, stop: int) -> None:
        sample = self.samples[i]
        part = slice(start, stop)
        self.writer.append(
            "tokens",
            {
                **self.row(i),
                "start": start,
                "n": stop - start,
                "ids": [sample.ids[part]],
                "loss_mask": [sample.loss_mask[part]],
                "processed": [sample.processed[part]],
                "semantics": [sample.semantics],
            },
        )
        self.writer.flush()

    def routes(self, i: int) -> None:
        from tests.builders import _route_columns

        sample = self.samples[i]
        where = {**self.row(i), "start": 0, "n": sample.length, "role": "used"}
        columns = _route_columns(sample.used, slice(0, sample.length))
        self.writer.append("routes", {**where, **columns})
        self.writer.flush()

    def closes(self, i: int, *, group: bool = True, finish: str = "stop") -> None:
        sample = self.samples[i]
        self.writer.append(
            "sequences",
            {
                **self.row(i),
                "group": sample.group if group else None,
                "prompt_len": sample.prompt_len,
                "length": sample.length,
                "digest": token_digest(sample.prompt_len, sample.ids),
                "finish": finish,
                "closed_ns": i,
            },
        )
        self.writer.flush()

    def whole(self, i: int, **options: Any) -> None:
        """All of a sequence at once."""
        group = options.get("group", True)
        self.opens(i, group=group)
        self.tokens(i, 0, self.samples[i].length)
        self.closes(i, **options)

    def rewards(self, i: int) -> None:
        row = {**self.row(i), "name": "reward", "number": float(i), "t_ns": 1}
        self.writer.append("annotations", row)
        self.writer.flush()

    def ends(self) -> None:
        self.writer.close()
        seal(self.path)


@pytest.fixture
def job(tape: Path) -> Iterator[Job]:
    pytest.importorskip("torch", reason="torch is not installed")
    job = Job(tape)
    yield job
    job.writer.close()


def dataset(path: Path, **options: Any) -> Any:
    from rolltape.store.loader import TapeDataset

    defaults = {"batch_size": 2, "follow": True, "follow_timeout": 0.0, "poll_interval": 0.0}
    return TapeDataset(path, **{**defaults, **options})


def numbers(batches: Any) -> list[list[int]]:
    """Which sequences each batch holds, as 2 * group + sample."""
    return [
        [2 * int(r.partition("-")[2]) + int(s) for _, r, s in (i.split(".") for i in b.ids)]
        for b in batches
    ]


def test_a_sequence_is_given_when_it_is_closed_and_whole(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1)
    job.opens(0)
    job.opens(1)
    job.tokens(0, 0, 8)
    job.tokens(1, 0, 15)
    job.closes(0)  # its last tokens come from somewhere slower
    job.closes(1)
    assert numbers(data) == [[1]]
    data.load_state_dict(json.loads(json.dumps(data.state_dict())))
    job.tokens(0, 8, 11)
    (batch,) = data
    assert (batch.input_ids[0].numpy() == job.samples[0].ids).all()
    known = job.samples[0].processed.valid
    assert (batch.logprobs[0].numpy()[known] == job.samples[0].processed.values[known]).all()


def test_routes_are_waited_for(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1, columns=("routes",))
    job.whole(0)
    assert list(data) == []
    job.routes(0)
    (batch,) = data
    assert (batch.routes[0].numpy()[:-1] == job.samples[0].used.ids[:-1]).all()
    job.whole(1)
    assert numbers(data) == [[0]]  # a new pass begins at the start
    job.ends()
    assert numbers(data) == [[0], [1]]  # nothing more can come


def test_a_whole_group_is_waited_for(job: Job, tape: Path) -> None:
    data = dataset(tape, group_size=2)
    for i in (2, 0, 4):
        job.whole(i)
    assert list(data) == []
    job.whole(1)
    assert numbers(data) == [[0, 1]]
    job.whole(5)
    assert numbers(data) == [[0, 1], [4, 5]]
    job.ends()
    assert numbers(data) == [[0, 1], [4, 5]]  # half a group is dropped
    assert numbers(dataset(tape, group_size=2, partial_groups="pull")) == [[0, 1], [4, 5], [2]]


def test_groups_of_unknown_size_are_refused(job: Job, tape: Path) -> None:
    job.whole(0, group=False)
    job.whole(1, group=False)
    assert numbers(dataset(tape)) == [[0, 1]]
    job.whole(2)
    with pytest.raises(UsageError, match="group_size=N"):
        list(dataset(tape))


def test_rewards_are_waited_for(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1, columns=("annotations",), wait_for=["reward"])
    job.whole(0)
    job.whole(1)
    job.rewards(1)
    (batch,) = data
    assert numbers([batch]) == [[1]] and batch.annotation("reward").tolist() == [1.0]


def test_filters_hold_while_following(job: Job, tape: Path) -> None:
    job.whole(0, finish="abort")
    for i in (1, 2, 3):
        job.whole(i)
    assert numbers(dataset(tape, group_size=1, batch_size=1)) == [[1], [2], [3]]
    assert numbers(dataset(tape, group_size=2)) == [[2, 3]]
    assert numbers(dataset(tape, group_size=2, partial_groups="pull")) == [[0, 1], [2, 3]]
    assert numbers(dataset(tape, group_size=1, batch_size=1, max_length=10)) == [[3]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_group_goes_to_one_rank(job: Job, tape: Path, world: int) -> None:
    for i in range(8):
        job.whole(i)
    job.ends()
    found = [
        numbers(dataset(tape, group_size=2, rank=r, world_size=world, follow_timeout=None))
        for r in range(world)
    ]
    assert sorted(i for rank in found for batch in rank for i in batch) == list(range(8))
    assert all(batch[0] % 2 == 0 and batch[1] == batch[0] + 1 for r in found for batch in r)


@pytest.mark.parametrize("stop", range(5))
def test_resuming_gives_the_rest_and_reads_little(job: Job, tape: Path, stop: int) -> None:
    job.opens(6)
    job.tokens(6, 0, 3)  # stays open for long
    for i in range(6):
        job.whole(i, group=False)
    data = dataset(tape, batch_size=1)
    iterator = iter(data)
    head = numbers(next(iterator) for _ in range(stop))
    state = json.loads(json.dumps(data.state_dict()))
    job.tokens(6, 3, job.samples[6].length)
    job.closes(6, group=False)
    job.ends()
    again = dataset(tape, batch_size=1)
    again.load_state_dict(state)
    rest = numbers(again)
    assert sorted(i for b in head + rest for i in b) == list(range(7))
    assert len(head) + len(rest) == 7


def test_a_state_forgets_what_no_later_one_needs(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1)
    for i in range(4):
        job.whole(i, group=False)
    assert len(list(data)) == 4
    assert data.state_dict()["given"] == []
    job.opens(4)  # from here on
    job.whole(5, group=False)
    data.load_state_dict(data.state_dict())
    assert numbers(data) == [[5]]
    state = data.state_dict()
    assert len(state["given"]) == 1 and len(json.dumps(state)) < 1000


def test_a_followed_state_fits_only_the_same_readers(job: Job, tape: Path) -> None:
    state = dataset(tape).state_dict()
    with pytest.raises(UsageError, match="part 0 of 1, this is part 1 of 2"):
        dataset(tape, rank=1, world_size=2).load_state_dict(state)
    with pytest.raises(UsageError, match="not a state of a followed tape"):
        dataset(tape).load_state_dict({"kind": "rolltape.loader/1"})
    with pytest.raises(UsageError, match="cannot be shuffled"):
        dataset(tape, shuffle=True)
    with pytest.raises(TypeError, match="no length"):
        len(dataset(tape))


def test_following_ends_when_a_live_writer_does(job: Job, tape: Path) -> None:
    found: list[Any] = []

    def read() -> None:
        data = dataset(tape, batch_size=1, follow_timeout=None, poll_interval=0.001)
        found.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(8):
        job.whole(i, group=False)
    job.ends()
    reader.join(30)
    assert not reader.is_alive()
    assert numbers(found) == [[i] for i in range(8)]
    for i, batch in enumerate(found):
        assert (batch.input_ids[0].numpy() == job.samples[i].ids).all()


def test_a_sealed_tape_can_be_followed_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    samples = random_samples(6)
    write_tape(tmp_path / "b", samples)
    columns = ("logprobs", "routes", "supports", "weight_version")
    found = list(dataset(tmp_path / "b", group_size=2, columns=columns))
    assert numbers(found) == [[0, 1], [2, 3], [4, 5]]
    assert [b.group_index.tolist() for b in found] == [[0, 0], [1, 1], [2, 2]]
    for batch, first in zip(found, (0, 2, 4), strict=True):
        for row in range(2):
            sample = samples[first + row]
            assert (batch.routes[row].numpy()[:-1] == sample.used.ids[:-1]).all()
            assert batch.weight_version_valid[row].sum() == 24
    kept = [ids for s in samples[:2] for ids in s.kept[6:]]
    assert (found[0].supports.ids.numpy() == np.concatenate(kept)).all()


def test_workers_share_a_followed_tape(job: Job, tape: Path) -> None:
    from torch.utils.data import DataLoader

    for i in range(8):
        job.whole(i)
    job.ends()
    data = dataset(tape, group_size=2, follow_timeout=None)
    found = numbers(DataLoader(data, batch_size=None, num_workers=2))
    assert sorted(found) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_data_loader_goes_on_following(job: Job, tape: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        data = dataset(tape, group_size=2, follow_timeout=None)
        return torchdata.StatefulDataLoader(data, batch_size=None, num_workers=2)

    for i in range(8):
        job.whole(i)
    job.ends()
    loader = make()
    iterator = iter(loader)
    head = numbers([next(iterator), next(iterator)])
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    again = make()
    again.load_state_dict(state)
    assert sorted(head + numbers(again)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


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
