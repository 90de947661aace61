"""What an epoch gives: which sequences, in which batches, to whom. Numbers only, no torch.

An epoch is one global list of batches that depends on nothing but (selection, seed, epoch, batch
size). Of the batches from `start` on, step t of rank r is number `start + t * world_size + r`. So a
count of batches is the whole state, and any other number of ranks can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from rolltape.store.errors import UsageError

STATE = "rolltape.loader/1"

Uneven = Literal["drop", "pad"]
Partial = Literal["drop", "pull"]


@dataclass(frozen=True)
class Filters:
    """Which sequences to give. One that was left open is never given.

    Args:
        finish: finish reasons to keep.
        min_length: of prompt and response together.
        max_length: of prompt and response together.
        min_version: least weight version of any of its tokens.
        max_version: greatest weight version of any of its tokens.
        max_staleness: how far its oldest version may be behind `current_version`.
        current_version: that staleness is counted from; None is the newest version on the tape.
        exclude: ids or whole keys of sequences to leave out.
        partial_groups: what to do with a group of which only a part passes: `drop` the group, or
            `pull` in the members that did not pass. One with an open member is dropped always.
    """

    finish: tuple[str, ...] = ("stop", "length", "scored")
    min_length: int | None = None
    max_length: int | None = None
    min_version: int | None = None
    max_version: int | None = None
    max_staleness: int | None = None
    current_version: int | None = None
    exclude: tuple[str, ...] = ()
    partial_groups: Partial = "drop"

    def __post_init__(self) -> None:
        if self.partial_groups not in ("drop", "pull"):
            raise UsageError(f"partial_groups is {self.partial_groups!r}", hint="drop | pull")
        for name in ("finish", "exclude"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    @property
    def by_version(self) -> bool:
        """Whether weight versions matter."""
        limits = (self.min_version, self.max_version, self.max_staleness)
        return any(limit is not None for limit in limits)

    def reason(self, row: Mapping[str, Any], *, latest: int | None) -> str | None:
        """Why a sequence is left out; None if it is not.

        Args:
            row: `finish`, `length`, `version_min`, `version_max`, `names` (its id and its key).
            latest: newest weight version.
        """
        if row["finish"] == "open":
            return "open"
        if row["finish"] not in self.finish:
            return "finish"
        if any(name in self.exclude for name in row["names"]):
            return "excluded"
        if self.min_length is not None and row["length"] < self.min_length:
            return "length"
        if self.max_length is not None and row["length"] > self.max_length:
            return "length"
        return self._version_reason(row["version_min"], row["version_max"], latest)

    def _version_reason(self, low: int | None, high: int | None, latest: int | None) -> str | None:
        if not self.by_version:
            return None
        if low is None or high is None:
            return "version unknown"  # it cannot be shown to pass
        if self.min_version is not None and low < self.min_version:
            return "version"
        if self.max_version is not None and high > self.max_version:
            return "version"
        newest = latest if self.current_version is None else self.current_version
        if self.max_staleness is not None and (newest is None or newest - low > self.max_staleness):
            return "stale"
        return None

    def passing(self, reasons: Sequence[str | None]) -> bool:
        """Whether a group is given, by the `reason` of each member."""
        if "open" in reasons:
            return False
        passed = [reason is None for reason in reasons]
        return any(passed) if self.partial_groups == "pull" else all(passed)


@dataclass(frozen=True)
class Selection:
    """Sequences to give, the members of a group side by side.

    Args:
        rows: int64 [n], number of each sequence in the order of `tape.keys()`.
        lengths: int64 [n], tokens.
        bounds: int64 [groups + 1]; group g is rows[bounds[g]:bounds[g + 1]].
        dropped: sequences left out, by reason; `group` are those that passed themselves.
    """

    rows: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group_of(self) -> np.ndarray:
        """int64 [n], group number of each sequence."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


def select(rollups: pa.Table, ids: Sequence[tuple[str, str]], filters: Filters) -> Selection:
    """Apply filters, group by group, in the order in which groups first appear.

    Args:
        rollups: of the tape, one row a sequence in the order of `tape.keys()`.
        ids: id and key text of each.
        filters: what to keep. A sequence without a group is a group of its own.
    """
    names = ("finish", "length", "version_min", "version_max", "group")
    columns = [rollups.column(name).to_pylist() for name in names]
    versions = [v for v in columns[3] if v is not None]
    latest = max(versions, default=None)
    reasons = []
    members: dict[object, list[int]] = {}
    for row, (*values, group) in enumerate(zip(*columns, strict=True)):
        known = dict(zip(names, values, strict=False), names=ids[row])
        reasons.append(filters.reason(known, latest=latest))
        members.setdefault(row if group is None else group, []).append(row)
    rows: list[int] = []
    bounds = [0]
    dropped: dict[str, int] = {}
    for group_rows in members.values():
        found = [reasons[row] for row in group_rows]
        if filters.passing(found):
            rows += group_rows
            bounds.append(len(rows))
            continue
        for reason in found:
            dropped[reason or "group"] = dropped.get(reason or "group", 0) + 1
    chosen = np.asarray(rows, np.int64)
    lengths = np.asarray(columns[1], np.int64)[chosen]
    return Selection(chosen, lengths, np.asarray(bounds, np.int64), dropped)


def shuffled(count: int, *, fingerprint: str, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..count-1 that depends on nothing else than the arguments.

    Numbers are sorted by a one-to-one mix of (key, number), so no two tie and no library's random
    generator takes part: the order outlives versions.
    """
    key = xxhash.xxh3_64_intdigest(f"{fingerprint}/{seed}/{epoch}".encode())
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


@dataclass(frozen=True)
class BatchRule:
    """How many sequences make a batch: exactly one of the two limits.

    Args:
        batch_size: at most that many sequences.
        max_tokens: at most that many tokens, padding included.
        padded: rows are padded to the longest; else packed.
    """

    batch_size: int | None = None
    max_tokens: int | None = None
    padded: bool = True

    def __post_init__(self) -> None:
        limits = [x for x in (self.batch_size, self.max_tokens) if x is not None]
        if len(limits) != 1 or limits[0] < 1:
            raise UsageError(
                f"batch_size is {self.batch_size}, max_tokens is {self.max_tokens}",
                hint="give one of them, at least 1",
            )

    def fits(self, count: int, tokens: int, longest: int) -> bool:
        """Whether `count` sequences of `tokens` tokens fit one batch."""
        if self.batch_size is not None:
            return count <= self.batch_size
        return (count * longest if self.padded else tokens) <= (self.max_tokens or 0)

    def check(self, group: str, lengths: np.ndarray) -> None:
        """A group has to fit a batch, since it is never split.

        Raises:
            UsageError: it does not.
        """
        count, tokens, longest = len(lengths), int(lengths.sum()), int(lengths.max(initial=0))
        if self.fits(count, tokens, longest):
            return
        cost = f"{count} sequences"
        if self.batch_size is None:
            cost = f"{count * longest if self.padded else tokens} tokens"
        name, limit = (
            ("max_tokens", self.max_tokens)
            if self.batch_size is None
            else ("batch_size", self.batch_size)
        )
        raise UsageError(
            f"the group of sequence {group} has {cost}, {name} is {limit}",
            hint=f"a group is never split: raise {name}, or leave long ones out by max_length",
        )


@dataclass(frozen=True)
class Plan:
    """The global list of batches of one epoch.

    Args:
        selection: what is given.
        order: int64 [groups], groups in the order they are given.
        bounds: int64 [batches + 1]; batch b is the groups order[bounds[b]:bounds[b + 1]].
    """

    selection: Selection
    order: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, number: int) -> list[int]:
        """Indexes into the selection of the sequences of a batch."""
        groups = self.order[self.bounds[number] : self.bounds[number + 1]]
        edges = self.selection.bounds
        return [i for g in groups for i in range(int(edges[g]), int(edges[g + 1]))]


def make_plan(selection: Selection, order: np.ndarray, rule: BatchRule) -> Plan:
    """Cut the groups, in the given order, into batches: as many as fit, never a part of one."""
    edges = selection.bounds
    counts = np.diff(edges)
    if len(counts):
        tokens = np.add.reduceat(selection.lengths, edges[:-1])
        longest = np.maximum.reduceat(selection.lengths, edges[:-1])
    bounds = [0]
    count = total = most = 0
    for at, group in enumerate(order.tolist()):
        c, t, m = int(counts[group]), int(tokens[group]), int(longest[group])
        if count and not rule.fits(count + c, total + t, max(most, m)):
            bounds.append(at)
            count = total = most = 0
        count, total, most = count + c, total + t, max(most, m)
    if count:
        bounds.append(len(order))
    return Plan(selection, order, np.asarray(bounds, np.int64))


@dataclass(frozen=True)
class Position:
    """How far an epoch is: the batches before `start`, and `step` more of each rank.

    Args:
        epoch: number.
        start: global number of the batch that step 0 of rank 0 is.
        step: the next one of this worker.
        rank: of the data-parallel group.
        world_size: ranks.
        worker: number of the DataLoader worker; 0 without any.
        workers: how many; 1 without any.
    """

    epoch: int
    start: int = 0
    step: int = 0
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def of(self, *, rank: int, world_size: int, worker: int, workers: int) -> Position:
        """Where this worker of this rank goes on.

        Raises:
            UsageError: the position is of one of several workers, and not of this one.
        """
        here = {"rank": rank, "world_size": world_size, "worker": worker, "workers": workers}
        if (self.worker, self.workers, self.world_size) == (worker, workers, world_size):
            return replace(self, **here)
        if self.workers != 1:
            raise UsageError(
                f"the state is of worker {self.worker} of {self.workers} of rank {self.rank} of "
                f"{self.world_size}",
                hint="merge_state_dicts(states of all workers and ranks) fits any number of them",
            )
        if self.world_size == world_size:
            return replace(self, **here, step=self.step + worker)
        start = self.start + self.step * self.world_size
        return replace(self, **here, start=start, step=worker)

    def numbers(self, batches: int, uneven: Uneven) -> range:
        """The steps that are left; the same number on every rank."""
        left = max(0, batches - self.start)
        steps = left // self.world_size if uneven == "drop" else -(-left // self.world_size)
        return range(self.step, steps, self.workers)


def position_from(state: Mapping[str, Any], *, identity: Mapping[str, Any]) -> Position:
    """Read a state.

    Args:
        state: of `TapeDataset.state_dict` or `merge_state_dicts`.
        identity: `fingerprint`, `plan` and `seed` that it has to have.

    Raises:
        UsageError: not such a state, or of other data, filters, batch size or seed.
    """
    if state.get("kind") != STATE:
        raise UsageError(f"not a loader state: kind is {state.get('kind')!r}", hint=f"not {STATE}")
    hints = {
        "fingerprint": "the tape is another one, or its content changed",
        "plan": "filters, batch size or layout are others than when it was saved",
        "seed": "give the same seed and shuffle",
    }
    for name, hint in hints.items():
        if state.get(name) != identity[name]:
            raise UsageError(
                f"the loader state has {name} {state.get(name)}, this dataset {identity[name]}",
                hint=hint,
            )
    names = Position.__dataclass_fields__
    return Position(**{name: int(state[name]) for name in names})


def state_of(position: Position, *, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A small JSON-able state."""
    return {"kind": STATE, **identity, **asdict(position)}


def digest(value: object) -> str:
    """16 hex digits of anything JSON-able."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for any number of ranks and workers, from the states of all of them.

    Args:
        states: of every rank, in any order: `TapeDataset.state_dict()`, or what a `DataLoader` that
            keeps the states of its workers gives (torchdata's `StatefulDataLoader`).

    Returns:
        A state that `TapeDataset.load_state_dict` takes on any rank of any world size.

    Raises:
        UsageError: states of different data or epochs, some missing, or ranks that are at
            different steps.
    """
    found = [s for state in states for s in _inner(state)]
    if not found:
        raise UsageError("none of these is a loader state", hint="see TapeDataset.state_dict")
    first = found[0]
    shared = ("kind", "fingerprint", "plan", "seed", "epoch", "start", "world_size")
    for state in found:
        for name in shared:
            if state[name] != first[name]:
                raise UsageError(f"the states have {name} {first[name]} and {state[name]}")
    steps: dict[int, dict[int, int]] = {}
    for state in found:
        workers = steps.setdefault(state["rank"], {})
        workers[state["worker"]] = state["step"]
        if len(workers) > state["workers"]:
            raise UsageError(f"rank {state['rank']} has states of different numbers of workers")
    expected = {state["rank"]: state["workers"] for state in found}
    missing = set(range(first["world_size"])) - set(steps)
    short = [rank for rank, workers in steps.items() if len(workers) != expected[rank]]
    if missing or short:
        what = f"ranks {sorted(missing)}" if missing else f"some workers of rank {short[0]}"
        raise UsageError(f"the states of {what} are missing", hint="give those of every rank")
    # workers take steps in turns, so the rank is at the least of their next ones
    done = {rank: min(workers.values()) for rank, workers in steps.items()}
    if len(set(done.values())) != 1:
        raise UsageError(
            f"the ranks are at steps {done}", hint="save the states of all ranks after one step"
        )
    start = first["start"] + done[first["rank"]] * first["world_size"]
    position = Position(epoch=first["epoch"], start=start)
    return state_of(position, identity={k: first[k] for k in ("fingerprint", "plan", "seed")})


def _inner(state: Any) -> list[Mapping[str, Any]]:
    """The dataset states inside of a data loader's."""
    if not isinstance(state, Mapping):
        return []
    if state.get("kind") == STATE:
        return [state]
    if state.get("_steps_since_snapshot"):
        raise UsageError(
            "a StatefulDataLoader state that is behind its own position cannot be merged",
            hint="snapshot_every_n_steps=1",
        )
    return [s for value in state.values() for s in _inner(value)]
