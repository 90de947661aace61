"""The hooks of a worker; called by the import hook, undone by `unbind`.

What this version does not have is left out; `rolltape doctor` says what. Errors of the recorder
stay in the session; those of the engine pass through.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import Session, recording
from rolltape.recorder.tactics.bind import observe_all
from rolltape.recorder.tactics.rows import capturing
from rolltape.recorder.tensorrt_llm import frontend

# `loop` is imported when a model is loaded: it needs torch, which the engine has by then

_patches = Patches()


def bind_loop() -> bool:
    """Patch the loop that runs the batches.

    Returns:
        Whether it was not patched before.
    """
    from tensorrt_llm._torch.pyexecutor import py_executor

    loop = py_executor.PyExecutor
    if not _patches.around(loop, "_forward_step", _around_forward):
        return False
    _patches.around(loop, "control_action", _around_control)
    _patches.around(loop, "reset_prefix_cache", _around_reset)
    _patches.around(loop, "_terminate_request", _around_terminate)
    _patches.around(loop, "shutdown", _around_shutdown)
    return True


def bind_graphs() -> bool:
    """Patch what pads, captures and replays; versions before it existed say nothing of graphs."""
    from tensorrt_llm._torch.pyexecutor import cuda_graph_runner

    runner = getattr(cuda_graph_runner, "CUDAGraphRunner", None)
    if runner is None or not _patches.around(runner, "replay", _around_replay):
        return False
    _patches.around(runner, "pad_batch", _around_pad)
    _patches.around(runner, "capture", _around_capture)
    return True


def bind_loader() -> bool:
    """Patch what every way of loading weights goes through."""
    from tensorrt_llm._torch.pyexecutor import model_loader

    if not _patches.around(model_loader.ModelLoader, "load", _around_load):
        return False
    _patches.around(model_loader.ModelLoader, "reload", _around_reload)
    return True


def bind_request() -> bool:
    """Patch what makes several samples of one request."""
    from tensorrt_llm._torch.pyexecutor import llm_request

    return _patches.around(llm_request.LlmRequest, "create_child_request", _around_child)


def unbind() -> None:
    """Undo all of them."""
    _patches.undo()


# -- steps --------------------------------------------------------------------------------


class _Running:
    """The executor whose forward runs: there is one loop a process, in one thread."""

    recorder: Any = None


def _warming_up(executor: Any) -> bool:
    engine = getattr(executor, "model_engine", None)
    return bool(getattr(executor, "is_warmup", False) or getattr(engine, "is_warmup", False))


def _around_forward(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None or _warming_up(executor):
        return wrapped(*args, **kwargs)
    batch = args[0] if args else kwargs.get("scheduled_requests")
    launched = session.safely("tensorrt_llm.launch", _launch, session, executor, batch)
    if launched is None:
        session.safely("tensorrt_llm.missed", _missed, session, executor)
        return wrapped(*args, **kwargs)
    recorder, plan = launched
    t_ns = time.time_ns()
    outputs = None
    _Running.recorder = recorder
    try:
        outputs = wrapped(*args, **kwargs)
        return outputs
    finally:
        _Running.recorder = None
        if plan is not None:
            # the loop catches what the model raises; a stage of a pipeline may have no outputs
            failed = outputs is None and recorder.last_stage
            session.safely("tensorrt_llm.step", _ran, recorder, plan, t_ns, failed)


def _launch(session: Session, executor: Any, batch: Any) -> tuple[Any, Any]:
    from rolltape.recorder.tensorrt_llm.loop import recorder_of

    recorder = recorder_of(session, executor)
    recorder.paused(batch)
    return recorder, recorder.launch(batch)


def _missed(session: Session, executor: Any) -> None:
    recorder = _known(session, executor)
    if recorder is not None:
        recorder.missed("a hook failed: this step is not recorded")


def _ran(recorder: Any, plan: Any, t_ns: int, failed: bool) -> None:
    if failed:
        recorder.lost(plan, "the forward failed")
        return
    try:
        recorder.ran(plan, t_ns)
    except Exception:
        recorder.lost(plan, "the step could not be recorded")
        raise


def _known(session: Session, executor: Any) -> Any:
    from rolltape.recorder.tensorrt_llm.loop import known_recorder

    return known_recorder(session, executor)


def _around_replay(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    recorder = _Running.recorder
    if recorder is not None:
        key = args[0] if args else kwargs.get("key")
        if not recorder.session.safely("tensorrt_llm.graph", recorder.replayed, key):
            recorder.graph = "unknown"  # null would say that it ran eagerly
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


def _around_capture(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    if recording() is None:
        return wrapped(*args, **kwargs)
    with capturing(str(args[0] if args else kwargs.get("key"))):
        return wrapped(*args, **kwargs)


# -- requests -----------------------------------------------------------------------------


def _around_terminate(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    request = args[0] if args else kwargs.get("request")
    if session is not None and request is not None:
        session.safely("tensorrt_llm.end", _ended, session, executor, request)
    return wrapped(*args, **kwargs)


def _ended(session: Session, executor: Any, request: Any) -> None:
    recorder = _known(session, executor)
    if recorder is not None and _is_over(request):
        recorder.ended(request)


def _is_over(request: Any) -> bool:
    """A paused request is terminated as well, to free what it holds, and comes back."""
    finished = getattr(request, "is_finished", None)
    if finished is None:
        state = getattr(request, "state", None)
        return getattr(state, "name", None) in (None, "GENERATION_COMPLETE")
    return bool(finished)


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


def _around_shutdown(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.shutdown", _close, session, executor)
    return result


def _close(session: Session, executor: Any) -> None:
    recorder = _known(session, executor)
    if recorder is not None:
        recorder.close()


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
    if found.layers:
        layers = tuple(layer.layer for layer in found.layers)
        experts = max(layer.num_experts for layer in found.layers)
        frontend.layers_of[found.engine] = layers, experts
    observe_all(found.engine)  # before the warm-up tunes anything


def _around_reload(wrapped: Any, loader: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None:
        return wrapped(*args, **kwargs)
    model = args[0] if args else kwargs.get("model")
    tensors = args[1] if len(args) > 1 else kwargs.get("weights")
    weights = session.safely("tensorrt_llm.weights", _loading, session, model, tensors)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        if weights is not None:
            session.safely("tensorrt_llm.weights", weights.failed, error)
        raise
    if weights is not None:
        session.safely("tensorrt_llm.weights", weights.loaded)
    return result


def _loading(session: Session, model: Any, tensors: Any) -> Any:
    weights = _weights(session, model)
    if weights is not None:
        # names of a mapping, or of (name, tensor) pairs that may only be walked once
        weights.loading(tensors.keys() if hasattr(tensors, "keys") else [""])
    return weights


def _weights(session: Session, model: Any) -> Any:
    from rolltape.recorder.tensorrt_llm.loop import loaded_of

    found = loaded_of(session, model)
    return None if found is None else found.weights


def _around_reset(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("tensorrt_llm.reset", _complete, session, executor, True)
    return result


def _complete(session: Session, executor: Any, reset: bool) -> None:
    weights = _weights(session, executor.model_engine.model)
    if weights is not None and (reset or not weights.in_parts()):
        recorder = _known(session, executor)
        in_flight = 0 if recorder is None else recorder.in_flight()
        weights.complete(reset=reset, in_flight=in_flight)


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
            call, session = _complete, self._session
            session.safely("tensorrt_llm.control", call, session, self._executor, False)
        return self._inner.__exit__(*error)
