"""Where one forward of tensor-parallel ranks parts from that of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rolltape.replay.sites import sites_of
from rolltape.replay.sites.shards import Disagreement, Layout, merge_sites
from rolltape.replay.taps import attached
from rolltape.replay.verify.first_site import digests
from rolltape.replay.verify.teacher import Rows

#: Site -> rows of one sequence [n, width] on the host, the first one at position `first`.
SiteRows = dict[str, torch.Tensor]


@contextmanager
def watching(model: nn.Module, rows: Rows, row: int) -> Iterator[SiteRows]:
    """Copy every site of one row of a forward, as far as this rank has it.

    `logits` are left out: only those of the response are computed.

    Args:
        model: a causal language model of transformers.
        rows: what is going to be run by `teacher_forced`.
        row: index into them.

    Raises:
        UsageError: no map of sites for this model.
    """
    found: SiteRows = {}
    columns, padding = rows.ids.shape[1] - 1, int(rows.pad_left[row])
    places = {site: place for site, place in sites_of(model).items() if site != "logits"}

    def look(site: str, values: torch.Tensor) -> None:
        own = values[row * columns + padding : (row + 1) * columns]
        found.setdefault(site, own.detach().to("cpu", copy=True))

    with attached(model, places, look):
        yield found


def merge_ranks(
    model: nn.Module, ranks: Sequence[SiteRows]
) -> tuple[SiteRows, list[dict[str, Any]]]:
    """The rows of all ranks of a model of transformers, and replicas that disagree.

    Args:
        model: on any of the ranks: its map says how sites lie.
        ranks: rows by rank.
    """
    layouts = {s: Layout(split=p.split, copies=p.copies) for s, p in sites_of(model).items()}
    merged, problems = merge_sites(ranks, layouts)
    return merged, [replica_of(problem, problem.row) for problem in problems]


def replica_of(problem: Disagreement, position: int) -> dict[str, Any]:
    """A replica that disagrees, as a report has it."""
    return {
        "site": problem.site,
        "position": position,
        "rank": problem.rank,
        "against": problem.against,
    }


def part_at(
    one: Mapping[str, torch.Tensor],
    two: Mapping[str, torch.Tensor],
    replicas: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The first site, in the order in which they ran on one rank, that has other bits on several.

    Args:
        one: rows of a sequence on one rank, from position 0.
        two: the same of several, merged.
        replicas: those that disagree between the ranks.

    Returns:
        JSON-able: `site` and `position`, or `reason`; `replicas` says in words what disagrees
        between the ranks, None if nothing does.
    """
    common = [site for site in one if site in two]
    words = None
    if replicas:
        first = replicas[0]
        words = (
            f"rank {first['rank']} has not the bits of rank {first['against']} at {first['site']} "
            f"position {first['position']}"
        )
    for site in common:
        left, right = one[site], two[site]
        if left.shape != right.shape:
            shapes = f"{list(left.shape)} on one rank, {list(right.shape)} on several"
            return {"reason": f"not looked for: {site} is {shapes}", "replicas": words}
        pairs = zip(digests(left), digests(right), strict=True)
        for position, (a, b) in enumerate(pairs):
            if a != b:
                return {"site": site, "position": position, "replicas": words}
    text = f"not found: {len(common)} sites of one forward agreed"
    return {"reason": text, "replicas": words}
