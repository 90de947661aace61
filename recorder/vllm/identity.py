"""Who is who: one id for all processes of an engine, and keys for its requests."""

from __future__ import annotations

import os
import re
from typing import Any

import xxhash

from rolltape.recorder.options import TAPE_VARIABLE
from rolltape.recorder.patches import Patches
from rolltape.store import new_uuid

_ATTRIBUTE = "_rolltape_engine"
_CHILD = re.compile(r"(\d+)_(.+)", re.DOTALL)

_patches = Patches()


def bind() -> bool:
    """Give every engine configuration an id when it is made; it is pickled to the processes.

    Returns:
        Whether it was not patched before.
    """
    from vllm.config.vllm import VllmConfig

    return _patches.around(VllmConfig, "__post_init__", _around_init)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


def _around_init(wrapped: Any, config: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if not hasattr(config, _ATTRIBUTE):
        object.__setattr__(config, _ATTRIBUTE, new_uuid())
    return result


def engine_of(config: Any) -> str:
    """The id of the engine that a `VllmConfig` belongs to: 32 hex digits."""
    known = getattr(config, _ATTRIBUTE, None)
    if isinstance(known, str):
        return known
    # a copy that lost the attribute: its instance id is all there is
    text = f"{config.instance_id}/{os.environ.get(TAPE_VARIABLE, '')}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def request_of(internal: str) -> tuple[str, int]:
    """(request, sample) of an id that the engine uses inside.

    Samples of one request are called `<number>_<id of the request>`. A caller's own id of that
    form is read the same way; ids of different requests differ in their random end.
    """
    match = _CHILD.fullmatch(internal)
    return (match[2], int(match[1])) if match else (internal, 0)
