"""Versions of a worker's weights.

An update is several calls: each loads a part, and the last one makes it count. Loading makes the
weights dirty, whoever calls it; the end of the control action, or the reset of the prefix cache
that every known path ends with, completes a version. A reset of clean weights is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolltape.recorder.digest import Digest, weights_digest
from rolltape.recorder.session import Session
from rolltape.store import TapeWriter

#: Modules of the engine join, repack and shard what a checkpoint holds.
NOT_COMPARABLE = "as the engine holds it: joined, repacked and sharded; shows whether weights move"


@dataclass(eq=False)
class Weights:
    """The version in force in one worker.

    Args:
        engine: uuid.
        group: "" for a whole model, else what part of it this rank holds.
        model: gives the module to digest.
    """

    engine: str
    group: str
    model: Callable[[], Any]
    version: int = 0
    dirty: bool = False
    loads: int = 0
    reset: bool = False
    broken: bool = False

    def start(self, session: Session) -> None:
        """Record the weights that the engine starts with."""
        self._row(session, "complete")

    def loading(self, session: Session) -> None:
        """A part of an update is about to be loaded."""
        self.loads += 1
        if not self.dirty:
            self.dirty, self.reset = True, False
            self._row(session, "dirty")

    def prefix_reset(self, session: Session, *, in_flight: int = 0) -> None:
        """The prefix cache was emptied; what was loaded before counts from now on."""
        if self.dirty:
            self.reset = True
            self.complete(session, in_flight=in_flight)

    @property
    def in_parts(self) -> bool:
        """Whether an update in several calls has not had its last one."""
        return hasattr(self.model(), "first_pre_reload_weights")

    def complete(self, session: Session, *, in_flight: int = 0) -> None:
        """What was loaded is in place.

        Args:
            in_flight: requests that go on with keys and values made by older weights.
        """
        if not self.dirty:
            return
        if self.broken:  # a part could not be loaded: only another update helps
            self.broken = False
            return
        self.version += 1
        self.dirty, loads, self.loads = False, self.loads, 0
        digest = self._row(session, "complete")
        detail = {
            "version": self.version,
            "digest": f"{digest.value:016x}" if digest and digest.value is not None else None,
            "loads": loads,
            "prefix_cache_reset": self.reset,
            "in_flight": in_flight,
        }
        session.event("update", engine=self.engine, detail=detail)

    def failed(self, session: Session, error: BaseException) -> None:
        """Loading raised: the weights are a mixture until the next update completes."""
        self.broken = True
        text = f"a weight update failed, the weights are mixed: {type(error).__name__}: {error}"
        detail = {"code": "weights-mixed", "version": self.version, "text": text}
        session.event("finding", engine=self.engine, detail=detail)

    def _row(self, session: Session, state: str) -> Digest | None:
        version = self.version + (state == "dirty")
        digest, t_ns = None, time.time_ns()
        if state == "complete":
            model = self.model()
            if model is not None:
                digest = session.safely("tensorrt_llm.digest", weights_digest, model)
        row = {
            "engine": self.engine,
            "version": version,
            "state": state,
            "t_ns": t_ns,
            "group": self.group,
            "digest": digest.value if digest else None,
            "tensors": digest.tensors if digest else None,
            "elements": digest.elements if digest else None,
            "reason": NOT_COMPARABLE if digest else None,
        }

        def job(writer: TapeWriter) -> None:
            writer.append("weights", row)

        gap = {"engine": self.engine, "detail": {"table": "weights", "version": version}}
        session.put(job, nbytes=1024, gap=gap)
        return digest
