"""Laws of the order: nothing lost, nothing twice, and resuming anywhere changes nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from rolltape.store.errors import UsageError  # noqa: E402
from rolltape.store.loader import TapeDataset, merge_state_dicts  # noqa: E402
from rolltape.store.loader.sampler import (  # noqa: E402
    BatchRule,
    Plan,
    Position,
    Selection,
    make_plan,
    position_from,
    shuffled,
    state_of,
)
from tests.builders import random_samples, write_tape  # noqa: E402

# torchdata 0.11 calls it, torch 2.14 says not to
quiet = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

IDENTITY = {"fingerprint": "f", "plan": "p", "seed": 1}


def plan_of(sizes: list[int], batch_size: int, epoch: int = 0) -> Plan:
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    lengths = np.arange(bounds[-1]) % 7 + 1
    selection = Selection(np.arange(bounds[-1]), lengths, bounds, {})
    order = shuffled(len(sizes), fingerprint="f", seed=1, epoch=epoch)
    return make_plan(selection, order, BatchRule(batch_size=batch_size))


class Worker:
    """One worker of one rank, as `TapeDataset` walks the plan."""

    def __init__(self, batches: int, position: Position, uneven: Any = "drop") -> None:
        self.position = position
        self.steps = list(position.numbers(batches, uneven))

    def take(self) -> int | None:
        """Global number of its next batch."""
        if not self.steps:
            return None
        step = self.steps.pop(0)
        p = self.position
        self.position = Position(**{**vars(p), "step": step + p.workers})
        return p.start + step * p.world_size + p.rank

    @property
    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(state_of(self.position, identity=IDENTITY)))


def job(batches: int, state: Any, world: int, workers: int, uneven: Any = "drop") -> Any:
    """Workers by rank, all started from one state."""
    start = Position(0) if state is None else position_from(state, identity=IDENTITY)
    return [
        [
            Worker(batches, start.of(rank=r, world_size=world, worker=w, workers=workers), uneven)
            for w in range(workers)
        ]
        for r in range(world)
    ]


def run(ranks: Any, steps: int | None) -> list[list[int]]:
    """What each rank gets in `steps` steps, its workers in turn as a DataLoader asks them."""
    found: list[list[int]] = [[] for _ in ranks]
    for rank, workers in enumerate(ranks):
        turn = 0
        while steps is None or turn < steps:
            number = workers[turn % len(workers)].take()
            if number is None:
                break
            found[rank].append(number)
            turn += 1
    return found


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    batch_size=st.integers(4, 9),
    world=st.integers(1, 5),
    workers=st.integers(1, 4),
)
def test_no_loss_and_no_duplicate_for_any_ranks_and_workers(
    sizes: list[int], batch_size: int, world: int, workers: int
) -> None:
    plan = plan_of(sizes, batch_size)
    sequences = [plan.batch(b) for b in range(len(plan))]
    assert sorted(i for batch in sequences for i in batch) == list(range(sum(sizes)))
    assert all(len(batch) <= batch_size for batch in sequences)
    where = {i: b for b, batch in enumerate(sequences) for i in batch}
    edges = plan.selection.bounds
    for first, last in itertools.pairwise(edges):
        assert len({where[i] for i in range(first, last)}) == 1
    for uneven in ("drop", "pad"):
        found = run(job(len(plan), None, world, workers, uneven), None)
        assert len({len(rank) for rank in found}) == 1
        real = sorted(b for rank in found for b in rank if b < len(plan))
        kept = len(plan) if uneven == "pad" else len(plan) // world * world
        assert real == list(range(kept))
        # in turn over the ranks it is the global order
        assert [b for step in zip(*found, strict=True) for b in step][:kept] == list(range(kept))


@settings(max_examples=80, deadline=None)
@given(
    batches=st.integers(0, 60),
    stops=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4
    ),
    last=st.tuples(st.integers(1, 5), st.integers(1, 4)),
)
def test_resuming_on_other_ranks_and_workers_goes_on_in_the_same_order(
    batches: int, stops: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    state = None
    seen: list[int] = []
    for world, workers, steps in stops:
        ranks = job(batches, state, world, workers)
        found = run(ranks, steps)
        seen += [b for step in zip(*found, strict=True) for b in step]
        state = merge_state_dicts([w.state for rank in ranks for w in rank])
        assert state["start"] == len(seen) and seen == list(range(len(seen)))
    world, workers = last
    found = run(job(batches, state, world, workers, "pad"), None)
    seen += [b for step in zip(*found, strict=True) for b in step]
    assert seen[:batches] == list(range(batches))


@given(count=st.integers(0, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_the_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, fingerprint="x", seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert (order == shuffled(count, fingerprint="x", seed=seed, epoch=epoch)).all()


def test_the_shuffle_is_sorting_by_a_mix_of_key_and_number() -> None:
    """A state saved by an older version has to mean the same order."""
    key = xxhash.xxh3_64_intdigest(b"0123456789abcdef/7/2")

    def mixed(number: int) -> int:
        x = (number * 0x9E3779B97F4A7C15 + key) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    order = shuffled(50, fingerprint="0123456789abcdef", seed=7, epoch=2)
    assert order.tolist() == sorted(range(50), key=mixed)


def test_the_shuffle_moves_first_places_evenly() -> None:
    first = [int(shuffled(8, fingerprint="x", seed=s, epoch=0)[0]) for s in range(4000)]
    counts = np.bincount(first, minlength=8)
    assert abs(counts - 500).max() < 5 * np.sqrt(500)


def test_merging_wants_every_rank_and_worker_at_one_step() -> None:
    ranks = job(12, None, 2, 2)
    run(ranks, 3)
    states = [w.state for rank in ranks for w in rank]
    assert merge_state_dicts(states)["start"] == 6
    with pytest.raises(UsageError, match=r"ranks \[1\] are missing"):
        merge_state_dicts(states[:2])
    with pytest.raises(UsageError, match="some workers of rank 0"):
        merge_state_dicts(states[1:])
    with pytest.raises(UsageError, match="none of these"):
        merge_state_dicts([{}])
    with pytest.raises(UsageError, match="have epoch"):
        merge_state_dicts([states[0], {**states[1], "epoch": 3}])
    ranks[0][1].take()
    with pytest.raises(UsageError, match="are at steps"):
        merge_state_dicts([w.state for rank in ranks for w in rank])


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("resume") / "a"
    write_tape(path, random_samples(26, response=list(range(3, 29))))
    return path


def dataset(path: Path, **options: Any) -> TapeDataset:
    return TapeDataset(path, **{"batch_size": 4, "shuffle": True, "seed": 5, **options})


def ids(batches: Any) -> list[tuple[str, ...]]:
    return [batch.ids for batch in batches]


@pytest.mark.parametrize("stop", range(8))
def test_resuming_equals_no_interruption(path: Path, stop: int) -> None:
    whole = ids(dataset(path))
    data = dataset(path)
    iterator = iter(data)
    head = [next(iterator).ids for _ in range(min(stop, len(whole)))]
    again = dataset(path)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert head + ids(again) == whole
    assert ids(again) == whole  # the next pass is a whole one


def test_the_epoch_is_part_of_the_state(path: Path) -> None:
    data = dataset(path)
    data.set_epoch(3)
    iterator = iter(data)
    head = [next(iterator).ids for _ in range(2)]
    again = dataset(path)
    again.load_state_dict(data.state_dict())
    assert again.epoch == 3
    again.set_epoch(3)  # what a training loop does before it goes on
    assert head + ids(again) == ids(data)
    again.load_state_dict(data.state_dict())
    again.set_epoch(4)
    assert len(ids(again)) == 7


def test_a_state_of_other_data_or_options_is_refused(tmp_path: Path, path: Path) -> None:
    state = dataset(path).state_dict()
    write_tape(tmp_path / "b", random_samples(26, seed=1))
    for other, name in (
        (dataset(tmp_path / "b"), "fingerprint"),
        (dataset(path, batch_size=6), "plan"),
        (dataset(path, max_length=20), "plan"),
        (dataset(path, seed=6), "seed"),
        (dataset(path, shuffle=False), "seed"),
    ):
        with pytest.raises(UsageError, match=f"state has {name}"):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="not a loader state"):
        dataset(path).load_state_dict({"step": 1})


def test_going_on_with_other_numbers_of_ranks(path: Path) -> None:
    whole = ids(dataset(path))
    two = [dataset(path, rank=r, world_size=2) for r in range(2)]
    iterators = [iter(d) for d in two]
    seen = [next(it).ids for _ in range(2) for it in iterators]
    three = [dataset(path, rank=r, world_size=3) for r in range(3)]
    for data in three:
        data.load_state_dict(merge_state_dicts([d.state_dict() for d in two]))
    rest = [ids(d) for d in three]
    assert seen + [b for step in zip(*rest, strict=True) for b in step] == whole


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_the_same_batches_in_the_same_order(path: Path, context: str) -> None:
    data = dataset(path, columns=("logprobs", "routes"))
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
    alone = list(data)
    found = list(loader)
    assert ids(found) == ids(alone) and len(loader) == len(found)
    assert all(torch.equal(a.routes, b.routes) for a, b in zip(found, alone, strict=True))


def test_set_epoch_reaches_workers_that_live_on(path: Path) -> None:
    data = dataset(path, columns=())
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        assert ids(loader) == ids(data)
    assert ids(loader) != ids(dataset(path))


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader_resumes_exactly(path: Path, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            dataset(path, columns=()), batch_size=None, num_workers=workers
        )

    whole = ids(dataset(path))
    loader = make()
    head, states = [], [loader.state_dict()]
    for batch in loader:
        head.append(batch.ids)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert head == whole
    for stop in (0, 1, 3, len(whole)):
        again = make()
        again.load_state_dict(states[stop])
        rest = ids(again)
        assert head[:stop] + rest == whole
    # the state of a finished pass begins a new one
    again = make()
    again.load_state_dict(loader.state_dict())
    assert ids(again) == whole


@quiet
def test_states_of_stateful_data_loaders_merge(path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    whole = ids(dataset(path))
    loaders = [
        torchdata.StatefulDataLoader(
            dataset(path, columns=(), rank=r, world_size=2), batch_size=None, num_workers=2 - r
        )
        for r in range(2)
    ]
    iterators = [iter(loader) for loader in loaders]
    seen = [next(it).ids for _ in range(2) for it in iterators]
    state = merge_state_dicts([loader.state_dict() for loader in loaders])
    alone = dataset(path)
    alone.load_state_dict(state)
    assert seen + ids(alone) == whole
