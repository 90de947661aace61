"""What an epoch gives: `Sequences` by number and `TapeDataset` batch by batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rolltape.store.errors import UsageError
from rolltape.store.index import KEY_COLUMNS
from rolltape.store.keys import Key
from rolltape.store.loader.batches import (
    Batch,
    Layout,
    Sample,
    Side,
    Wanted,
    collate,
    read_sample,
)
from rolltape.store.loader.following import Following, FollowRun
from rolltape.store.loader.sampler import (
    BatchRule,
    Filters,
    Plan,
    Position,
    Selection,
    Uneven,
    digest,
    make_plan,
    position_from,
    select,
    shuffled,
    state_of,
)
from rolltape.store.loader.source import Source, Uri
from rolltape.store.sequences import Tape


class Sequences(Dataset[Sample]):
    """The sequences of a sealed tape by number, the members of a group side by side.

    Args:
        tape: path, URL, or a tape on this machine.
        columns: what to read beside token ids and masks: some of logprobs, routes, supports,
            weight_version, annotations.
        logprob: the logprob column: processed, scaled or raw.
        layers: model layer numbers of the routes wanted, in that order (a pipeline rank's); None
            is all.
        storage_options: see `rolltape.store.open`.
        filters: fields of `rolltape.store.loader.sampler.Filters`: finish, min_length, max_length,
            min_version, max_version, max_staleness, current_version, exclude, partial_groups.

    Attributes:
        selection: what passed the filters; `selection.dropped` counts what did not, by reason.
        keys: of the sequences, by number.
        fingerprint: identity of the content that is read.

    Raises:
        UsageError: the tape is not sealed, or an option does not exist.

    Hand it to a `DataLoader` with `collate_fn=functools.partial(collate, layout=...)`.
    """

    def __init__(
        self,
        tape: Tape | Uri,
        *,
        columns: Iterable[str] = ("logprobs",),
        logprob: str = "processed",
        layers: Iterable[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **filters: Any,
    ) -> None:
        self.wanted = _wanted(columns, logprob, layers)
        self.filters = _filters(filters)
        self._source = Source.of(tape, storage_options)
        opened = self._source.tape
        if opened.seal is None:
            raise UsageError(
                f"{self._source.uri} is still being written, or was never sealed",
                hint="TapeDataset(..., follow=True), or `rolltape fsck --repair` if its job died",
            )
        self.fingerprint = opened.fingerprint
        rollups = opened.rollups()
        keys = [Key(*row) for row in zip(*_columns(rollups, KEY_COLUMNS), strict=True)]
        self.selection: Selection = select(rollups, [(k.id, k.text) for k in keys], self.filters)
        self.keys = [keys[row] for row in self.selection.rows]
        prompts = rollups.column("prompt_len").to_pylist()
        self._prompts = [prompts[row] for row in self.selection.rows]
        self._groups = self.selection.group_of

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample:
        tape = self._source.tape
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        return read_sample(
            tape.sequence(self.keys[index]),
            self.wanted,
            index=index,
            group=int(self._groups[index]),
            prompt_len=self._prompts[index],
        )

    def __getitems__(self, indexes: Sequence[int]) -> list[Sample]:
        """Several at once; a DataLoader asks for its batches so."""
        return [self[index] for index in indexes]


class TapeDataset(IterableDataset[Batch]):
    """Batches of a tape, the same global sequence of them for any number of ranks and workers.

    A group is never split, neither over batches nor over ranks. Use it in a `DataLoader` (or
    torchdata's `StatefulDataLoader`) with `batch_size=None`.

    Args:
        tape: path, URL, or a tape on this machine.
        batch_size: sequences a batch, at most.
        max_tokens: or tokens a batch, at most; padding counts.
        layout: `padded`, or `packed` into one row.
        padding_side: right or left.
        pad_token: id that stands on padding.
        shuffle: groups in an order that is a pure function of (fingerprint, seed, epoch).
        seed: of that order.
        rank: of this process among those that get different data (the data-parallel rank); by
            default that of torch.distributed, or of the variables RANK and WORLD_SIZE.
        world_size: how many there are.
        uneven: if the batches do not divide by `world_size`: `drop` the last ones, or `pad` with
            batches whose loss mask is zero (`batch.padding`). Every rank gets the same number.
        follow: read a tape that is still being written; see below.
        follow_timeout: seconds without anything new after which following ends; None is never.
        group_size: following only: members after which a group is whole. Without it only
            sequences without a group, or of groups of one (`group_size=1`), can be followed.
        wait_for: following only: annotations (`reward`) that a sequence is held back for.
        poll_interval: following only: seconds between looks at the tape.
        columns, logprob, layers, storage_options, filters: as for `Sequences`.

    Following gives sequences in the order in which they were closed, once all their fragments are
    there, as far as it was asked for, without shuffling, and ends when the tape is sealed and
    everything was given. What never became whole is then named in a warning. Groups are
    dealt to ranks and workers by a hash, so the numbers of batches differ between ranks. Its state
    holds offsets into what each writer wrote, and fits only the same number of ranks and workers.

    Attributes:
        incomplete: following only: ids of sequences that have begun to arrive and are not whole, as
            far as they are this rank's; with workers, each worker knows its own.

    Raises:
        UsageError: options that do not go together, or a group that does not fit a batch.
    """

    def __init__(
        self,
        tape: Tape | Uri,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        layout: Layout = "padded",
        padding_side: Side = "right",
        pad_token: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "drop",
        follow: bool = False,
        follow_timeout: float | None = None,
        group_size: int | None = None,
        wait_for: Iterable[str] = (),
        poll_interval: float = 0.2,
        columns: Iterable[str] = ("logprobs",),
        logprob: str = "processed",
        layers: Iterable[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **filters: Any,
    ) -> None:
        if layout not in ("padded", "packed") or padding_side not in ("left", "right"):
            raise UsageError(
                f"layout {layout!r}, padding_side {padding_side!r}",
                hint="padded | packed; left | right",
            )
        if uneven not in ("drop", "pad"):
            raise UsageError(f"uneven is {uneven!r}", hint="drop | pad")
        self.rule = BatchRule(batch_size, max_tokens, layout == "padded")
        self.rank, self.world_size = _ranks(rank, world_size)
        self.uneven: Uneven = uneven
        self._layout: dict[str, Any] = {
            "layout": layout,
            "padding_side": padding_side,
            "pad_token": pad_token,
        }
        self._seed = seed if shuffle else None
        # in shared memory, so that set_epoch reaches workers that live on
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._position: Position | None = None
        self._loaded: Position | None = None
        self._plans: tuple[int, Plan] | None = None
        self.sequences: Sequences | None = None
        self._follow: Following | None = None
        if not follow:
            if group_size is not None or follow_timeout is not None or tuple(wait_for):
                raise UsageError("group_size, follow_timeout and wait_for are for follow=True")
            self.sequences = Sequences(
                tape,
                columns=columns,
                logprob=logprob,
                layers=layers,
                storage_options=storage_options,
                **filters,
            )
            edges = self.sequences.selection.bounds
            for first, last in itertools.pairwise(edges):
                lengths = self.sequences.selection.lengths[first:last]
                self.rule.check(self.sequences.keys[first].id, lengths)
            return
        if shuffle:
            raise UsageError("a tape that is followed cannot be shuffled", hint="shuffle=False")
        self._follow = Following(
            Source.of(tape, storage_options),
            _wanted(columns, logprob, layers),
            _filters(filters),
            self.rule,
            group_size=group_size,
            wait_for=tuple(wait_for),
            timeout=follow_timeout,
            interval=poll_interval,
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return int(self._epoch)

    @property
    def incomplete(self) -> tuple[str, ...]:
        """See the class."""
        return self._follow.incomplete if self._follow is not None else ()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch: another order, from the start. The one of a loaded state goes on."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        if self.sequences is None:
            raise TypeError("a tape that is followed has no length")
        position = Position(self.epoch, rank=self.rank, world_size=self.world_size)
        return len(position.numbers(len(self._plan()), self.uneven))

    def __iter__(self) -> Iterator[Batch]:
        # not a generator itself: a loaded state belongs to this call, not to the first `next`
        if self._follow is not None:
            return self._followed(self._follow.start(self._shard()))
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded.epoch != self.epoch:
            loaded = Position(self.epoch, world_size=self.world_size)
        self._position = loaded.of(**self._here())
        return self._batches(self._position)

    def _batches(self, position: Position) -> Iterator[Batch]:
        assert self.sequences is not None
        plan = self._plan()
        for step in position.numbers(len(plan), self.uneven):
            number = position.start + step * self.world_size + self.rank
            padding = number >= len(plan)
            samples = self.sequences.__getitems__(plan.batch(0 if padding else number))
            batch = collate(samples, **self._layout, padding=padding)
            # before it goes out: a state that is taken then is one behind it
            self._position = replace(position, step=step + position.workers)
            yield batch

    def _followed(self, run: FollowRun) -> Iterator[Batch]:
        for samples in run:
            yield collate(samples, **self._layout)

    def _plan(self) -> Plan:
        assert self.sequences is not None
        epoch = self.epoch
        if self._plans is None or self._plans[0] != epoch:
            selection = self.sequences.selection
            count = len(selection.bounds) - 1
            order = torch.arange(count).numpy()
            if self._seed is not None:
                order = shuffled(
                    count, fingerprint=self.sequences.fingerprint, seed=self._seed, epoch=epoch
                )
            self._plans = epoch, make_plan(selection, order, self.rule)
        return self._plans[1]

    def _here(self) -> dict[str, int]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "worker": number,
            "workers": workers,
        }

    def _shard(self) -> tuple[int, int]:
        here = self._here()
        workers = here["workers"]
        return self.rank * workers + here["worker"], self.world_size * workers

    def _identity(self) -> dict[str, Any]:
        assert self.sequences is not None
        chosen = self.sequences
        rule = digest([asdict(chosen.filters), asdict(self.rule), len(chosen)])
        return {"fingerprint": chosen.fingerprint, "plan": rule, "seed": self._seed}

    def state_dict(self) -> dict[str, Any]:
        """A small JSON-able state behind the last batch that was given.

        In the main process of a `DataLoader` with workers it does not move: take the loader's own
        (`StatefulDataLoader.state_dict`), which asks every worker for this one.
        """
        if self._follow is not None:
            return self._follow.state(self._shard())
        position = self._position or self._loaded
        if position is None or position.epoch != self.epoch:
            position = Position(self.epoch, world_size=self.world_size)
        return state_of(position.of(**self._here()), identity=self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, or from `merge_state_dicts` on any number of ranks.

        A state of one rank without workers stands for all ranks, as they step together.

        Raises:
            UsageError: the state is of other content, filters, batch size, seed, or of a worker.
        """
        if self._follow is not None:
            self._follow.load(state, self._shard())
            return
        position = position_from(state, identity=self._identity())
        self._loaded = position.of(**self._here())
        self._position = None
        self.set_epoch(position.epoch)


def _columns(table: Any, names: Iterable[str]) -> list[list[Any]]:
    return [table.column(name).to_pylist() for name in names]


def _wanted(columns: Iterable[str], logprob: str, layers: Iterable[int] | None) -> Wanted:
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    return Wanted(names, logprob, None if layers is None else tuple(layers))


def _filters(given: Mapping[str, Any]) -> Filters:
    unknown = [name for name in given if name not in Filters.__dataclass_fields__]
    if unknown:
        known = ", ".join(Filters.__dataclass_fields__)
        raise UsageError(f"no option or filter {unknown[0]!r}", hint=f"filters are {known}")
    return Filters(**given)


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        environment = os.environ
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            f"rank is {rank}, world_size is {world_size}", hint="give both, 0 <= rank < world_size"
        )
    return rank, world_size
