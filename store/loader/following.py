"""Batches of a tape that is still being written: whole groups, as they come."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from rolltape.store.errors import UsageError
from rolltape.store.keys import Key
from rolltape.store.loader.batches import Sample, Wanted, read_sample
from rolltape.store.loader.inbox import STATE, Inbox, Pending
from rolltape.store.loader.sampler import BatchRule, Filters
from rolltape.store.loader.source import Source


class Following:
    """What it takes to follow a tape; picklable. `start` begins a run in this process."""

    def __init__(
        self,
        source: Source,
        wanted: Wanted,
        filters: Filters,
        rule: BatchRule,
        *,
        group_size: int | None,
        wait_for: tuple[str, ...],
        timeout: float | None,
        interval: float,
    ) -> None:
        self.source, self.wanted, self.filters, self.rule = source, wanted, filters, rule
        self.group_size, self.wait_for = group_size, wait_for
        self.timeout, self.interval = timeout, interval
        self._loaded: dict[str, Any] | None = None
        self._run: FollowRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}

    def start(self, shard: tuple[int, int]) -> FollowRun:
        """A run from the loaded state, or else from the beginning."""
        self._run = FollowRun(self, shard, self._loaded)
        self._loaded = None
        return self._run

    def state(self, shard: tuple[int, int]) -> dict[str, Any]:
        """Of the run, or of the one that would start."""
        run = self._run or FollowRun(self, shard, self._loaded)
        return {**run.inbox.state, "shard": list(shard), "numbers": list(run.numbers)}

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Of the run, see `FollowRun.incomplete`."""
        return self._run.incomplete if self._run is not None else ()

    def load(self, state: Mapping[str, Any], shard: tuple[int, int]) -> None:
        """Check a state and keep it for the next run."""
        if state.get("kind") != STATE:
            raise UsageError(f"not a state of a followed tape: kind is {state.get('kind')!r}")
        if list(state["shard"]) != list(shard):
            raise UsageError(
                f"the state is of part {state['shard'][0]} of {state['shard'][1]}, this is part "
                f"{shard[0]} of {shard[1]}",
                hint="a followed tape goes on with the same number of ranks and workers",
            )
        self._loaded, self._run = dict(state), None
        FollowRun(self, shard, self._loaded)  # raises if it is of another tape


class FollowRun:
    """One pass over a followed tape; iterating gives the samples of a batch at a time."""

    def __init__(
        self, what: Following, shard: tuple[int, int], state: Mapping[str, Any] | None
    ) -> None:
        tables = [c for c in ("routes", "supports", "annotations") if c in what.wanted]
        if what.filters.by_version or "weight_version" in what.wanted:
            tables.append("forwards")
        self.inbox = Inbox(
            what.source.uri,
            tables=tables,
            wait_for=what.wait_for,
            state=state,
            storage_options=what.source.storage_options,
        )
        self._what, self._shard = what, shard
        self._groups: dict[str, list[Pending]] = {}
        self._latest: int | None = None
        self.numbers = list((state or {}).get("numbers", (0, 0)))  # samples and groups so far

    def __iter__(self) -> Iterator[list[Sample]]:
        rule = self._what.rule
        batch: list[list[Pending]] = []
        for group in self._units():
            lengths = [int(p.closing["length"]) for p in group if p.closing]
            rule.check(group[0].key.id, np.array(lengths))
            held = [int(p.closing["length"]) for g in batch for p in g if p.closing]
            both = held + lengths
            if batch and not rule.fits(len(both), sum(both), max(both)):
                yield self._give(batch)
                batch = []
            batch.append(group)
            if rule.batch_size is not None and len(both) == rule.batch_size:
                yield self._give(batch)
                batch = []
        if batch:
            yield self._give(batch)

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Ids of sequences of this part that have begun to arrive and are not whole."""
        return tuple(
            key.id for key in self.inbox.incomplete if self._is_mine(self.inbox.group(key), key)
        )

    def _is_mine(self, group: str | None, key: Key) -> bool:
        together = group and self._what.group_size != 1
        part = xxhash.xxh3_64_intdigest((group if group and together else key.text).encode())
        return part % self._shard[1] == self._shard[0]

    def _give(self, batch: list[list[Pending]]) -> list[Sample]:
        samples = []
        for group in batch:
            for pending in group:
                assert pending.closing is not None
                index, number = self.numbers
                samples.append(
                    read_sample(
                        self.inbox.sequence(pending),
                        self._what.wanted,
                        index=index,
                        group=number,
                        prompt_len=int(pending.closing["prompt_len"]),
                    )
                )
                self.numbers[0] += 1
            self.numbers[1] += 1
        self.inbox.give([p.key for group in batch for p in group])
        return samples

    def _units(self) -> Iterator[list[Pending]]:
        """Whole groups that are this part's and pass the filters, as they come."""
        idle = time.monotonic()
        while True:
            news, ready = self.inbox.poll()
            for pending in ready:
                yield from self._grouped(pending)
            if self.inbox.ended:
                break
            if news:
                idle = time.monotonic()
            elif self._what.timeout is not None and time.monotonic() - idle > self._what.timeout:
                return
            else:
                time.sleep(self._what.interval)
        for group in list(self._groups.values()):  # never filled
            yield from self._passed(group, whole=False)
        self._groups.clear()
        left = self.incomplete
        if left:
            warnings.warn(
                f"{self.inbox.place}: {len(left)} sequences never became whole and are not given, "
                f"the first is {left[0]}: left open, or without some tokens or an annotation that "
                "was waited for",
                RuntimeWarning,
                stacklevel=2,
            )

    def _grouped(self, pending: Pending) -> Iterator[list[Pending]]:
        assert pending.closing is not None
        name = pending.closing["group"]
        size = self._what.group_size
        if not self._is_mine(name, pending.key):
            self.inbox.give([pending.key])
            return
        if name is None or size == 1:
            yield from self._passed([pending], whole=True)
            return
        if size is None:
            raise UsageError(
                f"{pending.key.id} is of group {name!r}: while the tape is written nobody knows "
                "when a group is whole",
                hint="group_size=N, or group_size=1 for sequences one by one",
            )
        group = self._groups.setdefault(name, [])
        group.append(pending)
        if len(group) >= size:
            yield from self._passed(self._groups.pop(name), whole=True)

    def _passed(self, group: list[Pending], *, whole: bool) -> Iterator[list[Pending]]:
        filters = self._what.filters
        reasons = [self._reason(pending) for pending in group]
        if (whole or filters.partial_groups == "pull") and filters.passing(reasons):
            yield group
        else:
            self.inbox.give([pending.key for pending in group])

    def _reason(self, pending: Pending) -> str | None:
        assert pending.closing is not None
        row = {**pending.closing, "names": (pending.key.id, pending.key.text)}
        row["version_min"] = row["version_max"] = None
        if self._what.filters.by_version:
            versions = self.inbox.sequence(pending).weight_version
            known = versions.values[versions.valid]
            if len(known):
                row["version_min"], row["version_max"] = int(known.min()), int(known.max())
                self._latest = max(self._latest or 0, row["version_max"])
        return self._what.filters.reason(row, latest=self._latest)
