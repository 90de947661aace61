"""Steps of an engine wait here for company, then go to the process that writes them together."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from rolltape.recorder.serving.batch import Life, Roster, Step
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.serving.scribe_process import ScribeProcess, can_start
from rolltape.recorder.serving.steady import Steady
from rolltape.recorder.serving.wire import Block, pack, travelling
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
        steady: steps that are still on the device.
    """

    def __init__(
        self,
        session: Session,
        roster: Roster,
        scribe: Scribe,
        owner: object,
        *,
        steady: Steady | None = None,
    ) -> None:
        self._session, self._roster = session, roster
        self._engine, self._rank = scribe.engine, scribe.rank
        self._process = ScribeProcess(session, scribe) if can_start() else None
        self._scribe = scribe  # writes here where there is no process
        # `_hand` keeps the order of blocks and is held while there is no room for one; `_lock`
        # guards the lists, and the writer thread needs it to make room
        self._lock, self._hand, self._steady = threading.Lock(), threading.Lock(), steady
        self._steps: list[Step] = []
        self._ended: list[Life] = []
        self._bytes, self._since = 0, 0.0
        # what the process has to be told with the next block that reaches it
        self._number = 0
        self._unmet: list[Life] = []
        self._left: list[tuple[int, int]] = []  # (number of the block, index of a life)
        self._lost = False
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

    def lose(self) -> None:
        """A step ran that is not added."""
        self.flush()
        with self._lock:
            self._lost = True

    def collect(self) -> None:
        """Take the steps that are still on the device, before anything that comes behind them."""
        if self._steady is None:
            return
        with self._steady.lock:
            steps, error = self._steady.drain()
            if error is not None:
                for gap in self._gaps(steps):
                    self._session.event("gap", **gap)
                with self._lock:
                    self._lost = True
                self._session.fault("steady", error)
            elif steps:
                with self._lock:
                    if not self._steps:
                        self._since = time.monotonic()
                    self._steps += steps
                    self._bytes += sum(step.nbytes for step in steps)

    def flush(self) -> None:
        """Hand over the steps so far."""
        self.collect()
        with self._hand:
            with self._lock:
                steps, self._steps = self._steps, []
                size, self._bytes = self._bytes, 0
                ended, self._ended = self._ended, []
                new = self._roster.take_new()
                if self._session.dead:
                    self._unmet.clear()
                    self._left.clear()
                    return
                self._number = number = self._number + 1
                self._unmet += new
                self._left += [(number, life.index) for life in ended]
                if not steps and not ended:
                    return
                gaps = self._gaps(steps)
                for life in ended:
                    self._roster.forget(life)
            job = partial(self._write, steps=steps, number=number)
            if not self._session.put(job, nbytes=size, gap=gaps):
                with self._lock:
                    self._lost = True

    def _write(self, writer: TapeWriter, *, steps: list[Step], number: int) -> None:
        """Runs in the writer thread."""
        try:
            for step in steps:
                if step.ready is not None:
                    step.ready.synchronize()
            packed = pack(steps) if steps else None
        except Exception:
            with self._lock:
                self._lost = True
            raise
        with self._lock:
            new, self._unmet = self._unmet, []
            ended = [life for block, life in self._left if block <= number]
            self._left = [item for item in self._left if item[0] > number]
            lost, self._lost = self._lost, False
        block = Block(steps=packed, new=travelling(new), ended=ended, lost=lost)
        try:
            if self._process is None:
                block.write(writer, self._scribe)
            else:
                self._process.write(block)
        except Exception:
            with self._lock:
                self._lost = True
            raise

    def close(self) -> None:
        """There will be no more steps."""
        self._over.set()
        with suppress(ValueError):  # closed before
            self._session.flushers.remove(self.flush)
            self._session.committers.remove(self._commit)
            self._session.before_close.remove(self.close)
        self.flush()
        if self._steady is not None:
            self._steady.release()
        if self._process is not None:
            close = self._process.close
            self._session.put(lambda writer: close(), nbytes=0, gap=[])

    def _commit(self, writer: TapeWriter) -> None:
        if self._process is not None:
            self._process.commit()

    def _watch(self, owner: weakref.ref[object]) -> None:
        while owner() is not None:
            if self._over.wait(BLOCK_SECONDS / 2):
                return
            old = self._steps and time.monotonic() - self._since >= BLOCK_SECONDS
            if old or (self._steady is not None and self._steady.waits()):
                self._session.always("flush", self.flush)
        self._session.always("flush", self.close)

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
