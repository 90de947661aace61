"""Taps on every tensor-parallel rank of a vLLM engine, put together forward by forward.

The workers are reached by `collective_rpc`. Functions go to them only if the engine core runs in
this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) or `VLLM_ALLOW_INSECURE_SERIALIZATION=1` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rolltape.replay.sites.shards import Disagreement, Layout, merge_sites
from rolltape.replay.sites.vllm import EngineForward, EngineTaps
from rolltape.store.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RankDisagreement:
    """A rank whose replica of a site has other bits; the first row that has.

    Args:
        site: its name.
        rank: of tensor parallelism.
        against: the rank that it was compared with.
        token: id of the token of that row; None for logits, whose rows are those sampled from.
        position: of that token in its sequence; None for logits.
        row: of the forward.
        rows: how many differ.
        max_abs: largest difference.
    """

    site: str
    rank: int
    against: int
    token: int | None
    position: int | None
    row: int
    rows: int
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class MergedForward(EngineForward):
    """One forward of all ranks.

    Args:
        disagreements: in the order in which sites ran on the first rank.
    """

    disagreements: tuple[RankDisagreement, ...] = field(default=())


class RankTaps:
    """`EngineTaps` on every rank of an eager engine.

    Args:
        collective_rpc: of `LLM` or of the executor: runs a function on every worker.
        sites: patterns as in `rolltape.replay.sites.select_sites`.
        tokens: keep only the rows of this prompt, see `EngineTaps`.

    Raises:
        UsageError: no map for the model in vLLM, no such site, or ranks of more than tensor
            parallelism.
    """

    def __init__(
        self,
        collective_rpc: Callable[..., Any],
        sites: str | Iterable[str] = "*",
        *,
        tokens: Sequence[int] | None = None,
    ) -> None:
        self._rpc = collective_rpc
        wanted = sites if isinstance(sites, str) else list(sites)
        only = None if tokens is None else list(tokens)
        found = collective_rpc(_attach, args=(wanted, only))
        self._order = [rank for rank, _, _ in found]
        if any(size != len(found) for _, size, _ in found):
            self.remove()
            raise UsageError(
                f"{len(found)} ranks, of which tensor parallelism has {found[0][1]}",
                hint="an engine of tensor parallelism alone",
            )
        self.layouts: dict[str, Layout] = found[self._order.index(0)][2]

    def forwards(self) -> list[MergedForward]:
        """The forwards since the last call.

        Raises:
            UsageError: ranks that did not run the same tokens.
        """
        by_rank = dict(zip(self._order, self._rpc(_collect), strict=True))
        ranks = [by_rank[rank] for rank in range(len(by_rank))]
        if len({len(forwards) for forwards in ranks}) > 1:
            raise UsageError(f"the ranks ran {[len(f) for f in ranks]} forwards")
        return [self._merged(forwards) for forwards in zip(*ranks, strict=True)]

    def remove(self) -> None:
        """Take every hook away."""
        self._rpc(_remove)

    def _merged(self, ranks: Sequence[EngineForward]) -> MergedForward:
        first = ranks[0]
        for rank, other in enumerate(ranks):
            same = (torch.equal(getattr(first, n), getattr(other, n)) for n in _ROWS)
            if not all(same):
                raise UsageError(f"rank {rank} ran other tokens or positions than rank 0")
        sites, problems = merge_sites([forward.sites for forward in ranks], self.layouts)
        named = tuple(_named(first, problem) for problem in problems)
        return MergedForward(
            tokens=first.tokens, positions=first.positions, sites=sites, disagreements=named
        )


_ROWS = ("tokens", "positions")


def _named(forward: EngineForward, problem: Disagreement) -> RankDisagreement:
    known = problem.site != "logits"
    return RankDisagreement(
        site=problem.site,
        rank=problem.rank,
        against=problem.against,
        token=int(forward.tokens[problem.row]) if known else None,
        position=int(forward.positions[problem.row]) if known else None,
        row=problem.row,
        rows=problem.rows,
        max_abs=problem.max_abs,
    )


# -- on the workers ---------------------------------------------------------------------------

_TAPS = "_rolltape_rank_taps"


def _attach(
    worker: Any, sites: str | list[str], tokens: list[int] | None
) -> tuple[int, int, dict[str, Layout]]:
    """Rank and size of tensor parallelism, and how sites lie on the ranks."""
    from vllm.distributed import get_tp_group

    _remove(worker)
    runner = worker.model_runner
    taps = EngineTaps(runner.get_model(), sites, tokens=tokens)
    setattr(runner, _TAPS, taps)
    group = get_tp_group()
    layouts = {s: Layout(split=p.split, copies=p.copies) for s, p in taps.places.items()}
    return int(group.rank_in_group), int(group.world_size), layouts


def _collect(worker: Any) -> list[EngineForward]:
    found: list[EngineForward] = getattr(worker.model_runner, _TAPS).forwards()
    return found


def _remove(worker: Any) -> None:
    taps = vars(worker.model_runner).pop(_TAPS, None)
    if taps is not None:
        taps.remove()
