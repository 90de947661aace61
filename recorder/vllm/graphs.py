"""Choices of kernels while a vLLM worker captures CUDA graphs: which graph each went into.

The key is the one that `steps.graph` has for a step that replays the graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rolltape.recorder.session import recording
from rolltape.recorder.tactics import capturing


def key_of(mode: Any, tokens: Any) -> str | None:
    """`full:64`, `piecewise:512`; None for an eager step."""
    name = getattr(mode, "name", None)
    return None if name in (None, "NONE") else f"{name.lower()}:{tokens}"


def around_dummy(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    """The first runner captures by a dummy step of each size."""
    mode = args[1] if len(args) > 1 else kwargs.get("cudagraph_runtime_mode")
    tokens = args[0] if args else kwargs.get("num_tokens")
    with _capturing(key_of(mode, tokens)):
        return wrapped(*args, **kwargs)


def around_capture(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> Any:
    """The second runner asks for a forward of each kind of batch, and captures what it gets."""
    if not args or not callable(args[0]) or recording() is None:
        return wrapped(*args, **kwargs)
    create, *rest = args

    def keyed(desc: Any, *more: Any, **how: Any) -> Any:
        forward = create(desc, *more, **how)
        key = key_of(getattr(desc, "cg_mode", None), getattr(desc, "num_tokens", None))

        def run(*given: Any, **named: Any) -> Any:
            with _capturing(key):
                return forward(*given, **named)

        return run

    return wrapped(keyed, *rest, **kwargs)


def _capturing(key: str | None) -> AbstractContextManager[None]:
    return nullcontext() if key is None or recording() is None else capturing(key)
