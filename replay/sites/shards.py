"""Sites of the ranks of tensor parallelism put together, and replicas that must agree.

A rank sees its own columns of what is split by heads, and the whole of everything else. What
several ranks hold is compared bit for bit: they computed it from the same numbers in the same way,
or got it from one sum over all of them. A difference is a fault of a rank, however small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rolltape.store.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the rows of a site lie on the ranks.

    Args:
        split: the columns are spread over the ranks, in their order; else every rank has all.
        copies: neighbouring ranks that hold the same columns of what is split.
    """

    split: bool = False
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A rank whose replica of a site has other bits.

    Args:
        site: its name.
        rank: whose rows differ.
        against: the first rank that holds the same columns.
        row: the first that differs.
        rows: how many differ.
        max_abs: largest difference; NaN if one is.
    """

    site: str
    rank: int
    against: int
    row: int
    rows: int
    max_abs: float


def merge_rows(
    site: str, shards: Sequence[torch.Tensor], layout: Layout
) -> tuple[torch.Tensor, list[Disagreement]]:
    """The rows of a site from those of every rank.

    Args:
        site: its name.
        shards: [R, width of a rank], by rank.
        layout: how they lie.

    Returns:
        Rows [R, width] as one rank would have them, and the replicas that disagree with the first.

    Raises:
        UsageError: ranks with another number of rows, replicas of another width, or ranks that
            cannot be told into copies.
    """
    size = layout.copies if layout.split else len(shards)
    if not shards or len(shards) % size:
        raise UsageError(f"{site}: {len(shards)} ranks are no copies of {size}")
    if len({len(rows) for rows in shards}) > 1:
        counts = ", ".join(str(len(rows)) for rows in shards)
        raise UsageError(f"{site} has {counts} rows on its ranks", hint="ranks of one forward")
    parts, found = [], []
    for first in range(0, len(shards), size):
        own = shards[first]
        parts.append(own)
        for rank in range(first + 1, first + size):
            problem = _compared(site, own, shards[rank], first, rank)
            found += [problem] if problem is not None else []
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0], found


def merge_sites(
    ranks: Sequence[Mapping[str, torch.Tensor]], layouts: Mapping[str, Layout]
) -> tuple[dict[str, torch.Tensor], list[Disagreement]]:
    """`merge_rows` for every site of one forward, in the order of the first rank.

    A replicated site that only some ranks have (logits gathered by one) is compared among those.

    Args:
        ranks: site -> rows, by rank.
        layouts: how each site lies on the ranks.

    Raises:
        UsageError: a split site that a rank lacks, or see `merge_rows`.
    """
    merged, problems = {}, []
    for site in dict.fromkeys(site for sites in ranks for site in sites):
        holders = [rank for rank, sites in enumerate(ranks) if site in sites]
        layout = layouts[site]
        if layout.split and len(holders) < len(ranks):
            raise UsageError(f"{site} is split, and only ranks {holders} passed it")
        merged[site], found = merge_rows(site, [ranks[rank][site] for rank in holders], layout)
        for problem in found:
            rank, against = holders[problem.rank], holders[problem.against]
            problems.append(
                Disagreement(
                    site=site,
                    rank=rank,
                    against=against,
                    row=problem.row,
                    rows=problem.rows,
                    max_abs=problem.max_abs,
                )
            )
    return merged, problems


def _compared(
    site: str, own: torch.Tensor, other: torch.Tensor, against: int, rank: int
) -> Disagreement | None:
    if own.shape != other.shape or own.dtype != other.dtype:
        text = " against ".join(f"{list(t.shape)} {t.dtype}" for t in (other, own))
        raise UsageError(f"{site} is {text} on ranks {rank} and {against}, which hold the same")
    bits = (t.contiguous().view(torch.uint8).reshape(len(t), -1) for t in (own, other))
    unequal = torch.ne(*bits).any(1)
    if not unequal.any():
        return None
    return Disagreement(
        site=site,
        rank=rank,
        against=against,
        row=int(unequal.int().argmax()),
        rows=int(unequal.sum()),
        max_abs=float((other.double() - own.double()).abs().max()),
    )
