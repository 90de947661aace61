"""Which groups of samples and which steps are recorded, where not all are wanted.

The choice follows from what it is made about alone, so every process of a job, and every run of
the same job, makes the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from rolltape.recorder.options import Options
from rolltape.recorder.session import Session


def prompt_key(ids: Sequence[int] | np.ndarray) -> str:
    """Key of the group that all samples of a prompt belong to.

    Args:
        ids: token ids of the prompt, without padding.
    """
    return xxhash.xxh3_128_hexdigest(np.asarray(ids, dtype="<u4").tobytes())


def wants(group_key: str, options: Options) -> bool:
    """Whether a group is recorded: with `sample_rate` r, a share r of all keys.

    A group is kept or left out as a whole, and one that is kept at a rate is kept at every higher
    rate.

    Args:
        group_key: what the job calls the group, or `prompt_key`.
        options: of the recording.
    """
    if options.sample_rate >= 1.0:
        return True
    return xxhash.xxh3_64_intdigest(group_key.encode()) < options.sample_rate * 2.0**64


def wants_prompt(ids: Sequence[int] | np.ndarray, options: Options) -> bool:
    """`wants` of a prompt; where all are wanted, as mostly, no key is made.

    Args:
        ids: token ids of the prompt, without padding.
        options: of the recording.
    """
    return options.sample_rate >= 1.0 or wants(prompt_key(ids), options)


def in_steps(step: int, options: Options) -> bool:
    """Whether the engine step `step` (from 0) is in the range that is recorded."""
    first, end = options.step_range
    return first <= step and (end is None or step < end)


class LeftOut:
    """Counts what one engine did not record on purpose, and says it once: in a `notice` at the end.

    What was not asked for is no gap.

    Args:
        session: that records.
        engine: uuid of the engine.
    """

    def __init__(self, session: Session, engine: str) -> None:
        self._session = session
        self._engine = engine
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, what: str, n: int = 1) -> None:
        """Count what was left out: `sequences`, `steps`, `calls`."""
        with self._lock:
            if not self._counts:
                self._session.before_close.append(self._say)
            self._counts[what] = self._counts.get(what, 0) + n

    def _say(self) -> None:
        options = self._session.options
        detail = {
            "reason": "left out as the options say",
            "left_out": self._counts,
            "sample_rate": options.sample_rate,
            "steps": options.steps,
        }
        self._session.event("notice", engine=self._engine, detail=detail)
