"""The processes of one replay: a model that is sharded over ranks is run by all, written by one.

Every rank runs every batch in the same order, because a sharded layer is gathered by all of them
together. What they say to each other here are small messages in a group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rolltape.recorder.digest import GroupDigest, sum_shards
from rolltape.store.errors import ModelMismatchError, UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The place of this process among those that run the model together.

    Args:
        rank: of this process; rank 0 writes the tape.
        size: how many there are.
        group: process group for messages in host memory; None for one process.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def writes(self) -> bool:
        """Whether this process writes the tape."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank. All ranks have to call it."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, what: Mapping[str, Any]) -> None:
        """Make sure that all ranks mean the same.

        Raises:
            UsageError: on every rank; naming the first difference from rank 0 and both values.
        """
        first, *others = self.gather(dict(what))
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise UsageError(
                        f"ranks disagree: {name} is {value} on rank 0, but {other[name]} on "
                        f"rank {rank}",
                        hint="start every rank with the same command, tape and settings",
                    )

    def whole_model(self, rows: Sequence[GroupDigest], *, sharded: bool) -> list[GroupDigest]:
        """Digests of the whole model from those of what each rank holds of it.

        Args:
            rows: of this rank.
            sharded: whether this rank holds a part of some weight only.

        Raises:
            ModelMismatchError: no rank holds a part only, and their weights are not the same.
        """
        found = self.gather((sharded, list(rows)))
        if any(part for part, _ in found):
            return sum_shards(part for _, part in found)
        for rank, (_, other) in enumerate(found):
            for mine, its in zip(found[0][1], other, strict=False):
                if replace(mine, reason=None) != replace(its, reason=None):
                    raise ModelMismatchError(
                        f"ranks disagree: the weights of group {mine.group or '(all)'} are others "
                        f"on rank {rank} than on rank 0",
                        hint="load the same checkpoint on every rank, or broadcast it",
                    )
        return list(rows)


#: One process, which is all there is.
ALONE = Ranks()


def started() -> bool:
    """Whether torch.distributed runs in this process."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def current() -> Ranks:
    """The ranks of torch.distributed, if it was started. All of them have to call it.

    Raises:
        UsageError: a launcher started several processes that do not know of each other.
    """
    if not started():
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise UsageError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the factory did not start "
                "torch.distributed: every process would write the tape",
                hint="init_process_group() in the factory, or start one process",
            )
        return ALONE
    from torch import distributed

    if distributed.get_world_size() == 1:
        return ALONE
    group = distributed.new_group(backend="gloo")
    return Ranks(rank=distributed.get_rank(), size=distributed.get_world_size(), group=group)


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """What FSDP2's mixed precision casts the weights to before they are used.

    None without mixed precision, or where several dtypes are used.
    """
    found = set()
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)  # no public way leads to the policy
        if state is not None:
            found.add(getattr(getattr(state(), "_mp_policy", None), "param_dtype", None))
    return found.pop() if len(found) == 1 else None


def is_sharded(model: nn.Module) -> bool:
    """Whether weights are DTensors, as those of `fully_shard` and of tensor parallelism are."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())
