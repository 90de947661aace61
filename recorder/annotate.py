"""Late facts about a sequence that only the RL framework knows: group, reward, advantage.

`annotate` takes the request id that the caller gave the engine. transformers' `generate()` has no
such id; there `last_requests()` names what the last call of this thread generated, row by row.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolltape.store import TapeWriter
    from rolltape.store.keys import Key


class _Last(threading.local):
    keys: tuple[Key, ...] = ()


_last = _Last()


def remember(keys: Sequence[Key]) -> None:
    """Note what a call of this thread generated; for adapters whose requests have no id."""
    _last.keys = tuple(keys)


def last_requests() -> list[Key]:
    """Keys of the rows of the last recorded `generate()` call of this thread, in batch order.

    Empty where nothing was recorded.
    """
    return list(_last.keys)


def annotate(
    request: str | Key,
    *,
    sample: int | None = None,
    group: str | None = None,
    turn: int | None = None,
    reward: float | None = None,
    advantage: float | None = None,
    **facts: float | str,
) -> bool:
    """Record facts about a sequence, from any process of a recorded job.

    The reader finds the sequence: the one whose `external` is the id. Where none or several have
    it, the facts stay in the tape and are counted, and belong to nothing.

    Args:
        request: the id that the caller gave the engine, or a key from `last_requests`.
        sample: index among the samples of the request; may be left out if there is only one. A
            group or turn without it holds for all samples.
        group: which samples are compared with each other; replaces the derived group.
        turn: number of the turn in a conversation.
        reward: of the whole sequence.
        advantage: of the whole sequence.
        facts: anything else, numbers or texts.

    Returns:
        Whether it was recorded; False without a recording, at no cost.

    Example:
        >>> rolltape.annotate("chat-7", sample=2, reward=1.0)  # doctest: +SKIP
    """
    if not os.environ.get("ROLLTAPE_TAPE") and "rolltape.recorder.session" not in sys.modules:
        return False
    from rolltape.recorder.session import recording
    from rolltape.store.keys import Key
    from rolltape.store.late import ANY_SAMPLE

    session = recording()
    known = {"group": group, "turn": turn, "reward": reward, "advantage": advantage, **facts}
    said = {name: value for name, value in known.items() if value is not None}
    if session is None or not said:
        return False
    if isinstance(request, Key):
        engine, name, scoring = request.engine, request.request, request.scoring
        which = request.sample if sample is None else sample
    else:
        engine, name, scoring = "", str(request), 0
        which = ANY_SAMPLE if sample is None else sample
    texts = [str(value) if isinstance(value, str) else None for value in said.values()]
    # float() takes a tensor or numpy scalar, and says so at once if it cannot
    numbers = [None if isinstance(value, str) else float(value) for value in said.values()]
    t_ns = time.time_ns()

    def job(writer: TapeWriter) -> None:
        writer.append(
            "annotations",
            {
                "engine": engine,
                "request": name,
                "sample": which,
                "pass": scoring,
                "name": list(said),
                "number": numbers,
                "text": texts,
                "t_ns": t_ns,
            },
        )

    gap = {"detail": {"table": "annotations", "request": name}}
    return session.put(job, nbytes=512 + 64 * len(said), gap=gap)
