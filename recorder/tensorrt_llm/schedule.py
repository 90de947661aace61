"""From a batch of the executor loop to rows with absolute positions.

Decode positions come from an own counter: under the overlap scheduler a request does not know yet
of the token that this forward takes as input, so what it says of itself is one short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rolltape.recorder.serving.batch import Life, Roster, Rows

#: Attribute of a child request: its index among the samples of its request.
SAMPLE = "py_rolltape_sample"


class UnsupportedBatch(Exception):
    """The batch has rows whose positions cannot be known."""


@dataclass(eq=False)
class Known:
    """A request of the loop: its life, and the position that its next decode row has."""

    life: Life
    next: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one forward runs.

    Args:
        lives: of each row, dummies left out.
        rows: the same as arrays.
        tokens: of the whole batch, dummies included.
        kept: int64 rows of the flat batch that are not of dummies; None if those are all of the
            first ones.
    """

    lives: list[Life]
    rows: Rows
    tokens: int
    kept: np.ndarray | None


@dataclass(eq=False)
class Schedule:
    """The requests of one executor.

    Args:
        roster: where lives get their numbers.
        requests: by py_request_id.
    """

    roster: Roster
    requests: dict[int, Known] = field(default_factory=dict)

    def plan(self, batch: Any) -> Plan:
        """The rows of a `ScheduledRequests`, in the order of the flat batch.

        Must be called before the forward: afterwards the loop moves chunks on.

        Raises:
            UnsupportedBatch: drafted tokens or several beams.
        """
        lives, starts, sizes, spans, at = [], [], [], [], 0
        for request, start, n in _inputs(batch):
            if not is_dummy(request):
                known = self._known(request)
                start = known.next if start is None else start
                known.next = start + n
                lives.append(known.life)
                starts.append(start)
                sizes.append(n)
                spans.append((at, n))
            at += n
        packed = all(a + n == b for (a, n), (b, _) in pairwise(spans))
        first = not spans or spans[0][0] == 0
        kept = None
        if not (packed and first):
            kept = np.concatenate([np.arange(a, a + n) for a, n in spans])
        rows = self.roster.place(lives, np.array(starts, np.int64), np.array(sizes, np.int64))
        return Plan(lives=lives, rows=rows, tokens=at, kept=kept)

    def end(self, request: Any) -> Life | None:
        """A request has left the loop."""
        known = self.requests.pop(request_id(request), None)
        return None if known is None else known.life

    def _known(self, request: Any) -> Known:
        name = request_id(request)
        known = self.requests.get(name)
        if known is None:
            size = prompt_len(request)
            client = getattr(request, "py_client_id", None)
            life = Life(
                request=str(name if client is None else client),
                sample=int(getattr(request, SAMPLE, 0)),
                prompt=np.empty(size, np.uint32),  # the front end writes the ids
            )
            known = self.requests[name] = Known(self.roster.add(life), size)
        return known


def request_id(request: Any) -> int:
    """The loop's own id of a request."""
    return int(getattr(request, "py_request_id", None) or request.request_id)


def prompt_len(request: Any) -> int:
    """Prompt tokens; not those that the loop adds to the prompt when it pauses a request."""
    known = getattr(request, "py_orig_prompt_len", None)
    return int(request.py_prompt_len if known is None else known)


def is_dummy(request: Any) -> bool:
    """Whether a request only pads the batch."""
    flags = ("is_dummy", "is_attention_dp_dummy", "is_cuda_graph_dummy", "is_dummy_request")
    return any(getattr(request, flag, False) is True for flag in flags)


def _inputs(batch: Any) -> Iterator[tuple[Any, int | None, int]]:
    """(request, first position or None for a decode row, positions) of every row."""
    for request in batch.context_requests:
        _check(request)
        yield request, int(request.context_current_position), int(request.context_chunk_size)
    for request in batch.generation_requests:
        _check(request)
        if getattr(request, "py_draft_tokens", None):
            raise UnsupportedBatch("speculative decoding: positions depend on what was accepted")
        yield request, None, 1


def _check(request: Any) -> None:
    if int(getattr(request, "py_beam_width", None) or 1) > 1:
        raise UnsupportedBatch("beam search: rows change their history")
