"""`TapeDataset(follow=True)`: every sequence of a growing tape once, when it is whole."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter, create_tape, seal, token_digest
from rolltape.store.errors import SchemaError, UsageError
from tests.builders import random_samples, write_tape

ENGINE = "a1" * 16


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    return create_tape(tmp_path / "a", role="rollout")


class Job:
    """Writes sequences in steps, as an engine does."""

    def __init__(
        self, path: Path, *, seed: int = 0, moe_layers: tuple[int, ...] | list[int] = (1, 2, 3)
    ) -> None:
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
                "moe_layers": [list(moe_layers)],
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

    def routes(self, i: int, start: int = 0, **changes: Any) -> None:
        from tests.builders import _route_columns

        sample = self.samples[i]
        where = {**self.row(i), "start": start, "n": sample.length - start, "role": "used"}
        columns = _route_columns(sample.used, slice(start, sample.length))
        self.writer.append("routes", {**where, **columns, **changes})
        self.writer.flush()

    def supports(self, i: int, start: int, stop: int) -> None:
        n = stop - start
        sets = {"state": [np.ones(n, np.uint8)], "counts": [np.ones(n, np.int32)]}
        ids = self.samples[i].ids[start:stop]
        row = {**self.row(i), "start": start, "n": n, "derived": False, **sets, "ids": [ids]}
        self.writer.append("supports", row)
        self.writer.flush()

    def forwards(self, i: int, start: int, stop: int, version: int | None) -> None:
        for at in range(start, stop):
            row = {**self.row(i), "step": at, "row": 0, "start": at, "n": 1, "kind": "decode"}
            self.writer.append("forwards", {**row, "weight_version": version})
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


def test_routes_of_a_reused_prefix_are_not_waited_for(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1, columns=("routes",))
    for i in (0, 1, 2):
        job.whole(i)
    last = [job.samples[0].length - 1, 1, None, "last"]
    job.routes(0, 4, missing=json.dumps([[0, 4, None, "cached"], last]))
    job.routes(1, 4, missing=json.dumps([[0, 3, None, "cached"]]))  # of position 3 they may come
    job.routes(2, 4, missing=json.dumps([[0, 4, 2, "dropped"]]))  # those of one layer alone
    (batch,) = data
    assert numbers([batch]) == [[0]]
    assert not batch.routes_valid[0][:4].any() and batch.routes_valid[0][4:-1].all()
    job.ends()
    assert numbers(data) == [[0], [1], [2]]


def test_the_live_choice_is_not_taken_for_the_routes_used(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1, columns=("routes",))
    job.whole(0)
    job.routes(0, role="live")
    assert list(data) == []
    job.routes(0)
    assert numbers(data) == [[0]]


@pytest.mark.parametrize(
    "text", ["{", "3", "[[0, 4]]", '[["a", 4, null, "cached"]]', "[[0, Infinity, null, 1]]"]
)
def test_a_missing_that_is_none_is_refused_by_name(job: Job, tape: Path, text: str) -> None:
    job.whole(0)
    job.routes(0, 4, missing=text)
    with pytest.raises(SchemaError, match=r"routes\.missing of a1a1a1a1\.0-0\.0: not a list"):
        list(dataset(tape, group_size=1, columns=("routes",)))


def test_kept_sets_are_waited_for(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, group_size=1, columns=("supports",))
    job.samples[0].loss_mask.values[8] = False  # of a tool: nothing was drawn there
    job.whole(0)
    assert list(data) == []
    assert numbers(dataset(tape, group_size=1, columns=())) == [[0]]  # who does not ask for them
    job.supports(0, 6, 8)
    assert list(data) == []
    job.supports(0, 9, 11)
    (batch,) = data
    assert batch.supports.ids.tolist() == job.samples[0].ids[[6, 7, 9, 10]].tolist()


@pytest.mark.parametrize("options", [{"columns": ("weight_version",)}, {"min_version": 3}])
def test_forwards_are_waited_for(job: Job, tape: Path, options: Any) -> None:
    data = dataset(tape, **{"batch_size": 1, "group_size": 1, "columns": (), **options})
    job.whole(0)
    job.forwards(0, 5, 9, 3)
    assert list(data) == []
    job.forwards(0, 9, 10, 3)  # the input before the last gave the last logprob
    assert numbers(data) == [[0]]
    job.whole(1)
    job.forwards(1, 5, job.samples[1].length, None)  # there, of unknown version
    wanted = [[0], [1]] if "columns" in options else [[0]]
    assert numbers(data) == wanted and data.incomplete == ()


def test_a_dense_model_is_still_dense_after_resuming(tape: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    job = Job(tape, moe_layers=[])
    data = dataset(tape, batch_size=1, group_size=1, columns=("routes",))
    job.whole(0)
    assert numbers(data) == [[0]]
    data.load_state_dict(json.loads(json.dumps(data.state_dict())))
    job.whole(1)
    assert numbers(data) == [[1]]
    job.writer.close()


def test_what_never_became_whole_is_reported_at_the_end(job: Job, tape: Path) -> None:
    job.whole(0)
    job.opens(1)
    job.tokens(1, 0, 4)
    job.opens(4)
    job.closes(4)  # its tokens were lost
    data = dataset(tape, batch_size=1, group_size=2, partial_groups="pull")
    assert list(data) == []  # not at the end yet: no warning
    job.ends()
    with pytest.warns(
        RuntimeWarning, match=r"a: 2 sequences .*first is a1a1a1a1\.0-0\.1: "
    ) as said:
        assert numbers(data) == [[0]]
    assert len(said) == 1
    assert data.incomplete == ("a1a1a1a1.0-0.1", "a1a1a1a1.0-2.0")


def test_a_rank_reports_its_own_part(job: Job, tape: Path) -> None:
    for i in range(8):
        job.opens(i)
    job.ends()
    parts = []
    for rank in range(3):
        data = dataset(tape, group_size=2, rank=rank, world_size=3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert list(data) == []
        assert len(said) == bool(data.incomplete)  # a part without any has nothing to say
        parts.append(data.incomplete)
    assert sum(map(bool, parts)) > 1
    assert sorted(i for part in parts for i in part) == sorted(
        f"a1a1a1a1.{s.request}.{s.sample}" for s in job.samples
    )


def test_late_rows_of_what_was_given_are_not_incomplete(job: Job, tape: Path) -> None:
    data = dataset(tape, batch_size=1, columns=("annotations",))
    job.whole(0, group=False)
    assert numbers(data) == [[0]]
    data.load_state_dict(json.loads(json.dumps(data.state_dict())))
    job.rewards(0)
    job.ends()
    assert list(data) == [] and data.incomplete == ()


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
