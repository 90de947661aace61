"""The hooks of the front end; called by the import hook, undone by `unbind`.

What this version does not have is left out; `rolltape doctor` says what. Errors of the recorder
stay in the session; those of the engine pass through.
"""

from __future__ import annotations

from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording
from rolltape.recorder.tensorrt_llm import frontend, identity
from rolltape.recorder.tensorrt_llm.settings import leave_environment

_patches = Patches()


def bind_executor() -> bool:
    """Patch the base of all executors: of a front end, and of a worker.

    Returns:
        Whether it was not patched before.
    """
    from tensorrt_llm.executor import executor

    return _patches.around(executor.GenerationExecutor, "__init__", _around_executor)


def bind_result() -> bool:
    """Patch what a front end makes of the answers of its workers."""
    from tensorrt_llm.executor import result

    base = result.GenerationResultBase
    if not _patches.around(result.GenerationResult, "__init__", _around_result):
        return False
    _patches.around(base, "_handle_sequence", _around_sequence)
    _patches.around(base, "_handle_response", _around_response)
    _patches.around(result.DetokenizedGenerationResultBase, "_handle_response", _around_response)
    return True


def bind_llm() -> bool:
    """Patch the one class that users make an engine with, or its base."""
    from tensorrt_llm.llmapi import llm

    return _patches.around(getattr(llm, "BaseLLM", llm.LLM), "__init__", _around_llm)


def unbind() -> None:
    """Undo all of them."""
    _patches.undo()


def _around_executor(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.engine", identity.start_engine, executor)
    return wrapped(*args, **kwargs)


def _around_llm(wrapped: Any, llm: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.engine", _announce)
    result = wrapped(*args, **kwargs)
    if session is not None:
        session.safely("tensorrt_llm.llm", frontend.engine_started, session, llm)
    return result


def _announce() -> None:
    identity.announce()
    leave_environment()


def _around_result(wrapped: Any, result: Any, args: Any, kwargs: Any) -> Any:
    made = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        executor = kwargs.get("executor", args[2] if len(args) > 2 else None)
        session.safely("tensorrt_llm.open", frontend.opened, session, result, executor)
    return made


def _around_sequence(wrapped: Any, result: Any, args: Any, kwargs: Any) -> Any:
    request = frontend.request_of(result)
    if request is not None:
        reasons = kwargs.get("finish_reasons", args[0] if args else None)
        response = kwargs.get("response_tensors", args[1] if len(args) > 1 else None)
        sample = kwargs.get("sequence_index", args[2] if len(args) > 2 else 0)
        session = request.session
        if not session.safely(
            "tensorrt_llm.tokens", frontend.received, request, reasons, response, sample
        ):  # a fault, or disabled after some: what follows has no place
            request.broken.add(sample)
    return wrapped(*args, **kwargs)


def _around_response(wrapped: Any, result: Any, args: Any, kwargs: Any) -> Any:
    request = frontend.request_of(result)
    if request is None or request.depth:  # the outermost one knows of stop strings
        return wrapped(*args, **kwargs)
    request.depth += 1
    failed = True
    try:
        answer = wrapped(*args, **kwargs)
        failed = False
        return answer
    finally:
        request.depth -= 1
        request.session.safely("tensorrt_llm.close", _handled, request, result, failed)


def _handled(request: frontend.Request, result: Any, failed: bool) -> None:
    frontend.handled(request, result, failed=failed)
