"""From a batch of the executor loop to rows with absolute positions.

Decode positions come from an own counter: under the overlap scheduler a request does not know yet
of the token that this forward takes as input, so what it says of itself is one short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rolltape.recorder.serving.batch import Life, Roster, Rows

#: Attribute of a child request: its index among the samples of its request.
SAMPLE = "py_rolltape_sample"

_UNSEEN = "a forward of this request was not seen: nor are its later positions"
_UNNUMBERED = "one of several samples, and it is not known which: it is not recorded"


class UnsupportedBatch(Exception):
    """The batch has rows whose positions cannot be known."""


@dataclass(eq=False)
class Known:
    """A request of the loop.

    Args:
        life: of it.
        next: position that its next decode row has; None if a forward of it was not seen.
    """

    life: Life
    next: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one forward runs.

    Args:
        lives: of each row that is recorded.
        rows: the same as arrays.
        tokens: of the whole batch, with dummies and what is not recorded.
        kept: int64 rows of the flat batch that are recorded; None if those are all of the first
            ones.
        unknown: requests that cannot be recorded from here on, with a reason; told once.
    """

    lives: list[Life]
    rows: Rows
    tokens: int
    kept: np.ndarray | None
    unknown: list[tuple[Life, str]]


@dataclass(frozen=True)
class _Steady:
    """The last batch, if it had decode rows only: most batches are the same one step further."""

    requests: list[Any]
    known: list[Known]
    plan: Plan


@dataclass(eq=False)
class Schedule:
    """The requests of one executor.

    Args:
        roster: where lives get their numbers.
        wants: whether a request is recorded at all, asked once.
        requests: by py_request_id.
    """

    roster: Roster
    wants: Callable[[Any], bool] = lambda request: True
    requests: dict[int, Known] = field(default_factory=dict)
    _unknown: list[tuple[Life, str]] = field(default_factory=list)
    _steady: _Steady | None = None

    def plan(self, batch: Any) -> Plan:
        """The rows of a `ScheduledRequests`, in the order of the flat batch.

        Must be called before the forward: afterwards the loop moves chunks on.

        Raises:
            UnsupportedBatch: drafted tokens or several beams.
        """
        generation = batch.generation_requests
        steady, self._steady = self._steady, None
        if steady is not None and not batch.context_requests and steady.requests == generation:
            plan, moving = self._further(steady), steady.known
        else:
            plan, moving = self._planned(batch)
        if not batch.context_requests:
            self._steady = _Steady(list(generation), moving, plan)
        return plan

    def _further(self, steady: _Steady) -> Plan:
        for request in steady.requests:
            _check_drafts(request)
        for known in steady.known:
            assert known.next is not None
            known.next += 1
        last = steady.plan
        rows = self.roster.place(last.lives, last.rows.start + 1, last.rows.n)
        return replace(last, rows=rows, unknown=[])

    def _planned(self, batch: Any) -> tuple[Plan, list[Known]]:
        inputs = list(_inputs(batch))  # all of it is supported, or nothing has changed
        moving: list[Known] = []
        starts, sizes, spans, at = [], [], [], 0
        for request, start, n in inputs:
            if not is_dummy(request):
                known = self._known(request, decodes=start is None)
                start = known.next if start is None else start
                if start is not None:
                    known.next = start + n
                    moving.append(known)
                    starts.append(start)
                    sizes.append(n)
                    spans.append((at, n))
            at += n
        packed = all(a + n == b for (a, n), (b, _) in pairwise(spans))
        first = not spans or spans[0][0] == 0
        kept = None
        if not (packed and first):
            kept = np.concatenate([np.arange(a, a + n) for a, n in spans])
        lives = [known.life for known in moving]
        rows = self.roster.place(lives, np.array(starts, np.int64), np.array(sizes, np.int64))
        unknown, self._unknown = self._unknown, []
        plan = Plan(lives=lives, rows=rows, tokens=at, kept=kept, unknown=unknown)
        return plan, moving

    def lose(self) -> None:
        """A forward was not seen: of the requests that are there, no later position is known."""
        self._steady = None
        for known in self.requests.values():
            if known.next is not None:
                known.next = None
                if known.life.wanted:
                    self._unknown.append((known.life, _UNSEEN))

    def end(self, request: Any) -> Life | None:
        """A request has left the loop."""
        return self.forget(request_id(request))

    def forget(self, name: int) -> Life | None:
        """No later batch has it."""
        known = self.requests.pop(name, None)
        return None if known is None else known.life

    def _known(self, request: Any, *, decodes: bool) -> Known:
        name = request_id(request)
        known = self.requests.get(name)
        if known is None:
            size = prompt_len(request)
            client = getattr(request, "py_client_id", None)
            sample = getattr(request, SAMPLE, None)
            # the hook that numbers them failed, or was not there
            orphan = sample is None and getattr(request, "is_child", False) is True
            life = Life(
                request=str(name if client is None else client),
                sample=int(sample or 0),
                prompt=np.zeros(size, np.uint32),  # the front end writes the ids
                wanted=not orphan and self.wants(request),
            )
            # a decode row first: another server ran its prompt, or its first forwards were missed
            missed = decodes and _tokens_of(request) not in (None, size, size + 1)
            known = Known(self.roster.add(life), None if missed else size)
            self.requests[name] = known
            if orphan or (missed and life.wanted):
                self._unknown.append((life, _UNNUMBERED if orphan else _UNSEEN))
        return known


def request_id(request: Any) -> int:
    """The loop's own id of a request."""
    return int(getattr(request, "py_request_id", None) or request.request_id)


def prompt_len(request: Any) -> int:
    """Prompt tokens; not those that the loop adds to the prompt when it pauses a request."""
    known = getattr(request, "py_orig_prompt_len", None)
    return int(request.py_prompt_len if known is None else known)


def prompt_ids(request: Any) -> list[int] | None:
    """Ids of the prompt; None if this version does not tell."""
    tokens = getattr(request, "get_tokens", None)
    return None if tokens is None else list(tokens(0))[: prompt_len(request)]


def _tokens_of(request: Any) -> int | None:
    count = getattr(request, "get_num_tokens", None)
    return None if count is None else int(count(0))


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
        _check_drafts(request)
        yield request, None, 1


def _check_drafts(request: Any) -> None:
    if getattr(request, "py_draft_tokens", None):
        raise UnsupportedBatch("speculative decoding: positions depend on what was accepted")


def _check(request: Any) -> None:
    if int(getattr(request, "py_beam_width", None) or 1) > 1:
        raise UnsupportedBatch("beam search: rows change their history")
