"""Versions of the weights of one engine: asked for, half in place, in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from rolltape.recorder.digest import GroupDigest
from rolltape.recorder.rows import weights_job
from rolltape.recorder.session import Session
from rolltape.recorder.settings import Finding


class Versions:
    """What is known of an engine's weights in this process.

    A request for an update is an event; a row of the table `weights` is written when something is
    true of the weights in place: they are `dirty` from the first byte that an update writes, and
    `complete` once it is finished. Version numbers are the recorder's own, from 0; `label` is what
    the job calls a version.

    Args:
        session: that records.
        engine: its uuid.

    Attributes:
        current: number of the last version that was complete; -1 before the first.
        label: the job's name of it.
        is_dirty: whether an update has begun since.
        session: that records.
    """

    def __init__(self, session: Session, engine: str) -> None:
        self.current = -1
        self.label: str | None = None
        self.is_dirty = False
        self.session = session
        self._engine = engine
        self._lock = threading.Lock()
        self._seen: dict[tuple[tuple[str, int | None], ...], int] = {}

    def requested(self, label: str | None, **detail: Any) -> None:
        """Somebody asked for an update. Nothing is known yet to have come of it."""
        self.session.event("update", engine=self._engine, detail={"requested": label, **detail})

    def dirty(self, reason: str, label: str | None = None) -> None:
        """The weights are being written: they are no longer version `current`, nor another one.

        May be called for every bucket of an update; the first one is recorded.

        Args:
            reason: what writes them.
            label: of the version that they are to become, if it is known.
        """
        with self._lock:
            if self.is_dirty:
                return
            self.is_dirty = True
            self._put(max(self.current, 0), (), state="dirty", label=label, reason=reason)

    def complete(
        self,
        label: str | None = None,
        digests: Sequence[GroupDigest] | None = None,
        reason: str | None = None,
        **detail: Any,
    ) -> int:
        """A version is in place.

        Args:
            label: the job's name of it.
            digests: of all groups, as `rolltape.recorder.digest.group_digests` gives them.
            reason: why there are none.
            detail: more for the event.

        Returns:
            Its number.
        """
        with self._lock:
            self.current += 1
            self.label, self.is_dirty = label, False
            number = self.current
            self._put(number, digests or (), state="complete", label=label, reason=reason)
            known = tuple((row.group, row.value) for row in digests or ())
            same = self._seen.get(known)
            if known and all(value is not None for _, value in known):
                self._seen[known] = number
        if number:
            whole = digests[-1].value if digests else None
            detail |= {
                "version": number,
                "label": label,
                "applied": True,
                "digest": None if whole is None else f"{whole:016x}",
            }
            self.session.event("update", engine=self._engine, detail=detail)
        if same is not None:
            self.session.event(
                "finding", engine=self._engine, detail=_not_new(number, same).as_detail()
            )
        return number

    def _put(
        self,
        version: int,
        digests: Sequence[GroupDigest],
        *,
        state: str,
        label: str | None,
        reason: str | None,
    ) -> None:
        job = weights_job(
            self._engine,
            version,
            digests or [GroupDigest(group="", value=None, tensors=0, elements=0, reason=reason)],
            state=state,
            label=label,
            t_ns=time.time_ns(),
        )
        gap = {"engine": self._engine, "detail": {"table": "weights", "version": version}}
        self.session.put(job, nbytes=1024 + 128 * len(digests), gap=gap)


def _not_new(version: int, same: int) -> Finding:
    detail = {"version": version, "same_as": same}
    if same == version - 1:
        return Finding(
            code="RT405",
            message=f"the update to version {version} changed no weight",
            remedy="look whether the trainer's step reaches what is sent, an adapter for example",
            detail=detail,
        )
    return Finding(
        code="RT406",
        message=f"version {version} has the weights of version {same} again",
        remedy="look whether a resume pushed old weights",
        detail=detail,
    )
