"""Versions of a worker's weights.

An update is several calls: each loads a part, and the last one makes it count. Loading makes the
weights dirty, whoever calls it; the end of the control action, or the reset of the prefix cache
that every known path ends with, completes a version. A reset of clean weights is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rolltape.recorder.digest import GroupDigest, weights_digest
from rolltape.recorder.session import Session
from rolltape.recorder.weights import Versions

#: Modules of the engine join, repack and shard what a checkpoint holds.
NOT_COMPARABLE = "as the engine holds it: joined, repacked and sharded; shows whether weights move"


class Weights:
    """The weights of one worker; what is there when this is made is version 0.

    Args:
        session: that records.
        engine: uuid.
        group: "" for a whole model, else what part of it this rank holds.
        model: gives the module to digest; None once it is gone.
    """

    def __init__(self, session: Session, engine: str, group: str, model: Callable[[], Any]) -> None:
        self.session = session
        self._engine, self._group, self._model = engine, group, model
        self._versions = Versions(session, engine)
        self._loads = 0
        self._loading: set[str] = set()  # by the load that runs
        self._loaded: set[str] = set()  # since the last version, or since a load failed
        self._mixed: set[str] = set()  # what failed updates left behind
        self._accepted: set[str] = set()  # by any load: these exist
        self._versions.complete(digests=self._digests())

    @property
    def version(self) -> int:
        """Number of the last version that was complete."""
        return self._versions.current

    @property
    def dirty(self) -> bool:
        """Whether something was loaded since that is not in force, or never will be."""
        return self._versions.is_dirty

    def loading(self, names: Iterable[str]) -> None:
        """A part of an update is about to be loaded.

        Args:
            names: of its tensors.
        """
        self._loads += 1
        self._loading = set(names)
        self._versions.dirty("reload")

    def loaded(self) -> None:
        """It was."""
        self._loaded |= self._loading
        self._accepted |= self._loading
        self._loading = set()

    def failed(self, error: BaseException) -> None:
        """Loading raised: the weights are a mixture until what was touched is loaded again."""
        self._mixed |= self._loaded | self._loading
        self._loaded, self._loading = set(), set()
        text = f"a weight update failed, the weights are mixed: {type(error).__name__}: {error}"
        detail = {"code": "weights-mixed", "version": self.version, "text": text}
        self.session.event("finding", engine=self._engine, detail=detail)

    def in_parts(self) -> bool:
        """Whether an update in several calls has not had its last one."""
        return hasattr(self._model(), "first_pre_reload_weights")

    def complete(self, *, reset: bool, in_flight: int = 0) -> None:
        """What was loaded is in force, if anything was.

        After a failure only if all that was touched is among it. Names that no load ever took are
        passed over: they may not exist, which may be why it failed.

        Args:
            reset: whether the prefix cache was emptied.
            in_flight: requests that go on with keys and values made by older weights.
        """
        if not self._loaded or (self._mixed & self._accepted) - self._loaded:
            return
        loads, self._loads = self._loads, 0
        self._loaded, self._mixed = set(), set()
        self._versions.complete(
            digests=self._digests(), loads=loads, prefix_cache_reset=reset, in_flight=in_flight
        )

    def _digests(self) -> list[GroupDigest] | None:
        model = self._model()
        if model is None:
            return None
        found = self.session.safely("tensorrt_llm.digest", weights_digest, model)
        if found is None:
            return None
        return [
            GroupDigest(
                group=self._group,
                value=found.value,
                tensors=found.tensors,
                elements=found.elements,
                reason=NOT_COMPARABLE,
            )
        ]
