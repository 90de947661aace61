"""Puts the adapter into TensorRT-LLM: called by the import hook, undone by `unbind`.

What this version does not have is left out; `rolltape doctor` says what. Errors of the recorder
stay in the session; those of the engine pass through.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import wrapt

from rolltape.recorder.session import Session, recording
from rolltape.recorder.tensorrt_llm import frontend, identity
from rolltape.recorder.tensorrt_llm.settings import leave_environment

_patches: list[tuple[Any, str, Any]] = []
_undo: list[Any] = []


def _patch(owner: Any, name: str, around: Any) -> None:
    original = vars(owner).get(name) if isinstance(owner, type) else None
    if original is None or isinstance(original, wrapt.FunctionWrapper):
        return
    _patches.append((owner, name, original))
    setattr(owner, name, wrapt.FunctionWrapper(original, around))


def unbind() -> None:
    """Undo everything."""
    while _patches:
        owner, name, original = _patches.pop()
        setattr(owner, name, original)
    while _undo:
        _undo.pop()()


def bind_executor() -> None:
    """`tensorrt_llm.executor.executor` was imported."""
    identity.adopt()
    from tensorrt_llm.executor import executor

    _patch(executor.GenerationExecutor, "__init__", _around_executor)


def bind_result() -> None:
    """`tensorrt_llm.executor.result` was imported."""
    from tensorrt_llm.executor import result

    _patch(result.GenerationResult, "__init__", _around_result)
    _patch(result.GenerationResultBase, "_handle_sequence", _around_sequence)
    _patch(result.GenerationResultBase, "_handle_response", _around_response)
    _patch(result.DetokenizedGenerationResultBase, "_handle_response", _around_response)


def bind_llm() -> None:
    """`tensorrt_llm.llmapi.llm` was imported."""
    from tensorrt_llm.llmapi import llm

    _patch(getattr(llm, "BaseLLM", llm.LLM), "__init__", _around_llm)


def bind_loop() -> None:
    """`tensorrt_llm._torch.pyexecutor.py_executor` was imported."""
    identity.adopt()
    from tensorrt_llm._torch.pyexecutor import py_executor

    loop = py_executor.PyExecutor
    _patch(loop, "_forward_step", _around_forward)
    _patch(loop, "control_action", _around_control)
    _patch(loop, "reset_prefix_cache", _around_reset)
    _patch(loop, "_terminate_request", _around_terminate)
    _patch(loop, "shutdown", _around_shutdown)


def bind_graphs() -> None:
    """`tensorrt_llm._torch.pyexecutor.cuda_graph_runner` was imported."""
    from tensorrt_llm._torch.pyexecutor import cuda_graph_runner

    runner = getattr(cuda_graph_runner, "CUDAGraphRunner", None)
    if runner is not None:
        _patch(runner, "replay", _around_replay)
        _patch(runner, "pad_batch", _around_pad)


def bind_loader() -> None:
    """`tensorrt_llm._torch.pyexecutor.model_loader` was imported."""
    from tensorrt_llm._torch.pyexecutor import model_loader

    _patch(model_loader.ModelLoader, "load", _around_load)
    _patch(model_loader.ModelLoader, "reload", _around_reload)


def bind_request() -> None:
    """`tensorrt_llm._torch.pyexecutor.llm_request` was imported."""
    from tensorrt_llm._torch.pyexecutor import llm_request

    _patch(llm_request.LlmRequest, "create_child_request", _around_child)


# -- the front end ------------------------------------------------------------------------


def _around_executor(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.engine", _start_engine, executor)
    return wrapped(*args, **kwargs)


def _start_engine(executor: Any) -> None:
    before = identity.arrived()
    identity.start_engine(executor)
    if not before:  # a worker keeps what its front end left
        leave_environment()


def _around_llm(wrapped: Any, llm: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.llm", frontend.engine_started, session, llm)
    return result


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
        response = kwargs.get("response_tensors", args[1] if len(args) > 1 else None)
        sample = kwargs.get("sequence_index", args[2] if len(args) > 2 else 0)
        session = request.session
        session.safely("tensorrt_llm.tokens", frontend.received, request, response, sample)
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
        session = request.session
        session.safely("tensorrt_llm.close", _handled, request, result, failed)


def _handled(request: frontend.Request, result: Any, failed: bool) -> None:
    frontend.handled(request, result, failed=failed)


# -- the worker ---------------------------------------------------------------------------


def _warming_up(executor: Any) -> bool:
    engine = getattr(executor, "model_engine", None)
    return bool(getattr(executor, "is_warmup", False) or getattr(engine, "is_warmup", False))


def _around_forward(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None or _warming_up(executor):
        return wrapped(*args, **kwargs)
    batch = args[0] if args else kwargs.get("scheduled_requests")
    launched = session.safely("tensorrt_llm.launch", _launch, session, executor, batch)
    t_ns = time.time_ns()
    _Running.recorder = None if launched is None else launched[0]
    try:
        outputs = wrapped(*args, **kwargs)
    finally:
        _Running.recorder = None
    if launched is not None:
        failed = outputs is None  # the loop catches what the model raises
        session.safely("tensorrt_llm.step", _ran, *launched, batch, t_ns, failed)
    return outputs


class _Running:
    """The executor whose forward runs: there is one loop a process, in one thread."""

    recorder: Any = None


def _launch(session: Session, executor: Any, batch: Any) -> tuple[Any, Any]:
    from rolltape.recorder.tensorrt_llm.loop import recorder_of

    recorder = recorder_of(session, executor)
    recorder.paused(batch)
    return recorder, recorder.launch(batch)


def _ran(recorder: Any, plan: Any, batch: Any, t_ns: int, failed: bool) -> None:
    if plan is not None and not failed:
        try:
            recorder.ran(plan, t_ns)
        except Exception:
            recorder.lost(plan, "the step could not be recorded")
            raise
    elif plan is not None:
        recorder.lost(plan, "the forward failed")


def _around_terminate(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    request = args[0] if args else kwargs.get("request")
    if session is not None and request is not None:
        session.safely("tensorrt_llm.end", _ended, session, executor, request)
    return wrapped(*args, **kwargs)


def _ended(session: Session, executor: Any, request: Any) -> None:
    from rolltape.recorder.tensorrt_llm.loop import known_recorder

    recorder = known_recorder(session, executor)
    if recorder is not None and _is_over(request):
        recorder.ended(request)


def _is_over(request: Any) -> bool:
    """A paused request is terminated as well, to free what it holds, and comes back."""
    finished = getattr(request, "is_finished", None)
    if finished is None:
        state = getattr(request, "state", None)
        return getattr(state, "name", None) in (None, "GENERATION_COMPLETE")
    return bool(finished)


def _around_shutdown(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.shutdown", _flush, session, executor)
    return result


def _flush(session: Session, executor: Any) -> None:
    from rolltape.recorder.tensorrt_llm.loop import known_recorder

    recorder = known_recorder(session, executor)
    if recorder is not None:
        recorder.flush()


def _around_child(wrapped: Any, request: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.child", _number_child, request)
    return result


def _number_child(request: Any) -> None:
    from rolltape.recorder.tensorrt_llm.schedule import SAMPLE

    # the loop has not seen the child yet: its number stands on the request until then
    children = request.child_requests
    setattr(children[-1], SAMPLE, len(children))


def _around_replay(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    recorder = _Running.recorder
    if recorder is not None:
        key = args[0] if args else kwargs.get("key")
        recorder.session.safely("tensorrt_llm.graph", recorder.replayed, key)
    return wrapped(*args, **kwargs)


def _around_pad(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    padding = wrapped(*args, **kwargs)
    recorder = _Running.recorder
    return padding if recorder is None else _Padded(padding, recorder)


class _Padded:
    """The engine's context manager, which also shows the batch with its padding."""

    def __init__(self, inner: AbstractContextManager[Any], recorder: Any) -> None:
        self._inner, self._recorder = inner, recorder

    def __enter__(self) -> Any:
        batch = self._inner.__enter__()
        recorder = self._recorder
        recorder.session.safely("tensorrt_llm.padding", recorder.padded_batch, batch)
        return batch

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)


# -- weights ------------------------------------------------------------------------------


def _around_load(wrapped: Any, loader: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.load", _loaded, session, loader, result)
    return result


def _loaded(session: Session, loader: Any, result: Any) -> None:
    from rolltape.recorder.tensorrt_llm.loop import load_model

    model = result[0] if isinstance(result, tuple) else result
    tokens = int(getattr(loader, "max_num_tokens", 0) or 0)
    args, mapping = getattr(loader, "llm_args", None), getattr(loader, "mapping", None)
    found = load_model(session, model, args, mapping, tokens)
    engine = identity.current_engine()
    if found.layers:
        layers = tuple(layer.layer for layer in found.layers)
        experts = max(layer.num_experts for layer in found.layers)
        frontend.layers_of[engine] = layers, experts
    session.safely("tensorrt_llm.tactics", _observe_tuners, engine)


def _observe_tuners(engine: str) -> None:
    import sys

    from rolltape.recorder.tactics.autotuner import observe

    if "tensorrt_llm._torch.autotuner" in sys.modules:
        _undo.append(observe("tensorrt_llm._torch.autotuner", engine))


def _around_reload(wrapped: Any, loader: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    model = args[0] if args else kwargs.get("model")
    weights = None if session is None else session.safely("tensorrt_llm.weights", _weights, model)
    if session is None or weights is None:
        return wrapped(*args, **kwargs)
    session.safely("tensorrt_llm.weights", weights.loading, session)
    try:
        return wrapped(*args, **kwargs)
    except BaseException as error:
        session.safely("tensorrt_llm.weights", weights.failed, session, error)
        raise


def _weights(model: Any) -> Any:
    from rolltape.recorder.tensorrt_llm.loop import loaded_of

    found = loaded_of(model)
    return None if found is None else found.weights


def _around_reset(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.reset", _reset, session, executor)
    return result


def _reset(session: Session, executor: Any) -> None:
    weights = _weights(executor.model_engine.model)
    if weights is not None:
        weights.prefix_reset(session, in_flight=_in_flight(session, executor))


def _in_flight(session: Session, executor: Any) -> int:
    from rolltape.recorder.tensorrt_llm.loop import known_recorder

    recorder = known_recorder(session, executor)
    return 0 if recorder is None else int(recorder.in_flight())


def _around_control(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    action = wrapped(*args, **kwargs)
    session = recording()
    return action if session is None else _Control(action, session, executor)


class _Control:
    """The engine's control action; weights that were loaded in it count when it ends well."""

    def __init__(self, inner: AbstractContextManager[Any], session: Session, executor: Any) -> None:
        self._inner, self._session, self._executor = inner, session, executor

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        if error[0] is None:
            self._session.safely("tensorrt_llm.control", self._complete)
        return self._inner.__exit__(*error)

    def _complete(self) -> None:
        weights = _weights(self._executor.model_engine.model)
        if weights is not None and not weights.in_parts:
            in_flight = _in_flight(self._session, self._executor)
            weights.complete(self._session, in_flight=in_flight)
