"""The core of a vLLM engine: names of weight versions, sleep and wake."""

from __future__ import annotations

from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording
from rolltape.recorder.vllm.identity import engine_of

_patches = Patches()


def bind() -> bool:
    """Patch the engine core; called once its module has been imported."""
    if _patches:
        return False
    from vllm.v1.engine.core import EngineCore

    for name, around in (
        ("set_weight_version", _around_version),
        ("sleep", _around_sleep),
        ("wake_up", _around_wake),
    ):
        _patches.around(EngineCore, name, around)
    return True


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


def _tell(core: Any, kind: str, detail: dict[str, Any]) -> None:
    session = recording()
    if session is not None:
        engine = session.safely("vllm.core", lambda: engine_of(core.vllm_config))
        session.event(kind, engine=engine, detail=detail)


def _around_version(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    label = args[0] if args else kwargs.get("weight_version")
    _tell(core, "update", {"requested": str(label)})
    return result


def _around_sleep(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    level = args[0] if args else kwargs.get("level", 1)
    result = wrapped(*args, **kwargs)
    _tell(core, "sleep", {"level": level})
    return result


def _around_wake(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tags = args[0] if args else kwargs.get("tags")
    _tell(core, "wake", {"tags": list(tags) if tags else None})
    return result
