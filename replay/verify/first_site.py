"""The first site at which two executions of the same tokens part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from rolltape.replay.schedule import Call
from rolltape.replay.sites import sites_of
from rolltape.replay.taps import attached

#: (sequence, position, site) -> (hash of the row, number of the forward), in execution order.
Trace = dict[tuple[str, int, str], tuple[int, int]]


def digests(rows: torch.Tensor) -> list[int]:
    """A hash of the bits of each row [R, width]."""
    host = rows.detach().cpu()
    if host.dtype == torch.float64:
        host = host.to(torch.float32)  # as what is recorded: finer bits decide nothing
    return [xxhash.xxh3_64_intdigest(row.contiguous().view(torch.uint8).numpy()) for row in host]


@contextmanager
def tracing(model: nn.Module, calls: Sequence[Call], watched: set[str] | None) -> Iterator[Trace]:
    """Hash the rows of every site while the model runs calls one after another.

    A call is over when all of its tokens but the last have been inputs.

    Args:
        model: a causal language model of transformers.
        calls: what is going to be run, in this order.
        watched: keys (`Key.text`) of the sequences to look at; None for all.

    Raises:
        UsageError: no map of sites for this model.
    """
    trace: Trace = {}
    at = _Walk(calls)

    def before(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        at.begin(ids.shape[1])

    def look(site: str, rows: torch.Tensor) -> None:
        call = calls[at.call]
        per = len(rows) // len(call.rows)  # logits may be of the last columns only
        for index, row in enumerate(call.rows):
            key = row.key.text
            if watched is not None and key not in watched:
                continue
            skip = at.columns - per
            first = max(0, row.pad_left - at.start - skip)
            begin = at.start + skip + first - row.pad_left
            for n, digest in enumerate(digests(rows[index * per + first : (index + 1) * per])):
                trace.setdefault((key, begin + n, site), (digest, at.forward))

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with attached(model, sites_of(model), look):
            yield trace
    finally:
        handle.remove()


class _Walk:
    """Where in a list of calls the model is."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self.call, self.start, self.columns, self.forward = 0, 0, 0, -1

    def begin(self, columns: int) -> None:
        """A forward of so many columns begins."""
        self.start += self.columns
        call = self._calls[self.call]
        if self.start >= call.width + call.steps - 1:
            self.call, self.start = self.call + 1, 0
        self.columns = columns
        self.forward += 1


def first_site(a: Trace, b: Trace) -> dict[str, Any] | None:
    """The first row of `a`, in execution order, that has other bits in `b`; None if none has.

    Returns:
        JSON-able: site, sequence, position, forward (of `a`).
    """
    for place, (digest, forward) in a.items():
        other = b.get(place)
        if other is not None and other[0] != digest:
            key, position, site = place
            return {"site": site, "sequence": key, "position": position, "forward": forward}
    return None


def find(
    model: nn.Module,
    a: tuple[Sequence[Call], Callable[[], object]],
    b: tuple[Sequence[Call], Callable[[], object]],
    watched: set[str] | None,
) -> Mapping[str, Any] | None:
    """Run two executions with taps and name the first site at which they part.

    Args:
        model: a causal language model of transformers.
        a: calls, and what runs them.
        b: the same of the other side.
        watched: keys of sequences, see `tracing`.
    """
    traces = []
    for calls, run in (a, b):
        with tracing(model, calls, watched) as trace:
            run()
        traces.append(trace)
    return first_site(*traces)
