"""Compiled models of a recording are not those of other runs.

A hook that writes routes becomes a part of the compiled model, and vLLM's key for what it has
compiled before knows nothing of it: code from a run without a recording would write no routes, and
code from a recording would write them into a buffer that is not there.
"""

from __future__ import annotations

from typing import Any

import xxhash

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording

#: Changes when what the hooks add to a compiled model does.
_MARK = "rolltape routes 1"

_patches = Patches()


def bind() -> bool:
    """Patch the key; called once the module of the configuration has been imported."""
    from vllm.config.vllm import VllmConfig

    return _patches.around(VllmConfig, "compute_hash", _around_hash)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


def _around_hash(wrapped: Any, config: Any, args: Any, kwargs: Any) -> Any:
    known = wrapped(*args, **kwargs)
    session = recording()
    # without the version it is the key of what tuners found, which stays what it is
    versioned = args[0] if args else kwargs.get("include_version", True)
    if session is None or not session.options.routes or not versioned or not known:
        return known
    return xxhash.xxh3_128_hexdigest(f"{_MARK} {known}".encode())[: len(known)]
