"""Steps of an engine wait here for company, then go to the process that writes them together."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rolltape.recorder.serving.batch import Life, Roster, Step
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.serving.scribe_process import ScribeProcess
from rolltape.recorder.session import Session
from rolltape.store import TapeWriter

#: A block is handed over after this long, this many steps or this many bytes.
BLOCK_SECONDS = 1.0
BLOCK_STEPS = 128
BLOCK_BYTES = 32 << 20


class Blocks:
    """Collects the steps of one engine process.

    Args:
        session: where they are recorded.
        roster: the lives that they speak of.
        scribe: how they are written; the process that writes them goes on with a copy.
        owner: adds the steps. When it is gone, what is left is written.
    """

    def __init__(self, session: Session, roster: Roster, scribe: Scribe, owner: object) -> None:
        self._session, self._roster = session, roster
        self._engine, self._rank = scribe.engine, scribe.rank
        self._process = ScribeProcess(session.tape, session.options, scribe)
        self._lock = threading.Lock()
        self._steps: list[Step] = []
        self._new: list[Life] = []
        self._ended: list[Life] = []
        self._bytes, self._since = 0, 0.0
        self._over = threading.Event()
        session.flushers.append(self.flush)
        session.committers.append(self._commit)
        session.before_close.append(self.close)
        # an engine that has nothing to do adds no step
        watch = threading.Thread(target=self._watch, args=(weakref.ref(owner),), daemon=True)
        watch.start()

    def add(self, step: Step) -> None:
        """One more step, in the order in which they ran."""
        now = time.monotonic()
        with self._lock:
            if not self._steps:
                self._since = now
            self._steps.append(step)
            self._bytes += step.nbytes
            full = len(self._steps) >= BLOCK_STEPS or self._bytes >= BLOCK_BYTES
        if full or now - self._since >= BLOCK_SECONDS:
            self.flush()

    def end(self, life: Life) -> None:
        """No later step speaks of it."""
        with self._lock:
            self._ended.append(life)

    def flush(self) -> None:
        """Hand over the steps so far."""
        with self._lock:
            steps, self._steps = self._steps, []
            size, self._bytes = self._bytes, 0
            ended, self._ended = self._ended, []
            new = self._new + self._roster.take_new()
            if not steps and not ended:
                self._new = new
                return

            def job(writer: TapeWriter) -> None:
                for step in steps:
                    if step.ready is not None:
                        step.ready.synchronize()
                self._process.write(steps, new, ended)

            kept = self._session.put(job, nbytes=size, gap=self._gaps(steps))
            self._new = [] if kept else new  # the process has not heard of them
            for life in ended:
                self._roster.forget(life)

    def close(self) -> None:
        """There will be no more steps."""
        self._over.set()
        with suppress(ValueError):  # closed before
            self._session.flushers.remove(self.flush)
            self._session.committers.remove(self._commit)
            self._session.before_close.remove(self.close)
        self.flush()
        self._session.put(lambda writer: self._process.close(), nbytes=0, gap=[])

    def _commit(self, writer: TapeWriter) -> None:
        self._process.commit()

    def _watch(self, owner: weakref.ref[object]) -> None:
        while owner() is not None:
            if self._over.wait(BLOCK_SECONDS / 2):
                return
            if self._steps and time.monotonic() - self._since >= BLOCK_SECONDS:
                self._session.safely("flush", self.flush)
        self._session.safely("flush", self.close)

    def _gaps(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        """What is missing if a block is dropped: a row a life for the `events` table."""
        if not steps:
            return []
        detail: dict[str, Any] = {"steps": [steps[0].number, steps[-1].number]}
        if self._rank is not None and self._rank.rank:  # another rank records these requests
            return [{"engine": self._engine, "detail": {**detail, "rank": self._rank.rank}}]
        # asked for every block, dropped or not, by the engine's own thread
        life = np.concatenate([s.rows.life for s in steps])
        order = np.argsort(life, kind="stable")
        start = np.concatenate([s.rows.start for s in steps])[order]
        end = np.concatenate([s.rows.start + s.rows.n + s.rows.samples for s in steps])[order]
        some, first = np.unique(life[order], return_index=True)
        low = np.minimum.reduceat(start, first) if len(some) else start
        high = np.maximum.reduceat(end, first) if len(some) else end
        return [
            {
                "engine": self._engine,
                "request": lived.request,
                "sample": lived.sample,
                "start": a,
                "n": b - a,
                "detail": detail,
            }
            for one, a, b in zip(some.tolist(), low.tolist(), high.tolist(), strict=True)
            if (lived := self._roster.lives.get(one)) is not None
        ]
