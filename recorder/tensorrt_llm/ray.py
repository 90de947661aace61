"""Starts recording in the GPU workers of Ray, as a worker extension.

    LLM(..., orchestrator_type="ray",
        ray_worker_extension_cls="rolltape.recorder.tensorrt_llm.ray.Extension")

The engine imports that path in every GPU worker before it makes the worker; that alone puts the
hooks in. Workers that the import hook reached already need none of this. An extension of the job's
own takes `Recorded` as a base:

    class MyExtension(Recorded, WorkerExtension): ...
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rolltape.recorder.session import recording

if TYPE_CHECKING:
    Extension: type


class Recorded:
    """Base of a worker extension. The engine refuses names that its worker has: ours stand out."""

    def rolltape_tape(self) -> str | None:
        """Where this worker records to; None if it does not. For `collective_rpc`."""
        session = recording()
        return None if session is None else str(session.tape)

    def rolltape_commit(self) -> bool:
        """Write what there is, before the worker may be killed; False if that did not work."""
        session = recording()
        return session is not None and session.commit()


def start() -> None:
    """Take on the options of a recording and put the hooks in; a second call does nothing."""
    from rolltape.recorder.inject import _rolltape_late

    if _rolltape_late.adopt() and "_rolltape_hook" not in sys.modules:
        from rolltape.recorder.inject import _rolltape_hook

        _rolltape_hook.start()


def __getattr__(name: str) -> Any:
    # made when asked for: importing this module needs no engine
    if name != "Extension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    made = type(name, (Recorded, WorkerExtension), {"__module__": __name__})
    globals()[name] = made
    return made


start()
