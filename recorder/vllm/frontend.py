"""The front end of a vLLM engine: requests, samples, groups, and how sequences end.

`LLM`, `AsyncLLM` and the OpenAI server all go through `OutputProcessor`. Only it knows the ids that
callers use, which samples belong together, and where a stop string cut the response.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rolltape.recorder.gating import wants_prompt
from rolltape.recorder.patches import Patches
from rolltape.recorder.rows import engine_job
from rolltape.recorder.session import Session, recording
from rolltape.recorder.vllm.identity import engine_of, request_of
from rolltape.recorder.vllm.sampling import recorded, settings
from rolltape.store import TapeWriter, token_digest

_FRONT = "_rolltape"
_patches = Patches()


class _Front:
    """What is known of one output processor.

    Args:
        session: where it is recorded.
        engine: uuid of the engine that it serves.

    Rows of sequences that were opened wait for the next step: hundreds of requests may come at
    once, and a row of its own for each takes the interpreter from the engine.
    """

    def __init__(self, session: Session, engine: str) -> None:
        self.session, self.engine = session, engine
        self.opened: list[dict[str, Any]] = []
        self._params: tuple[Any, str] | None = None
        session.flushers.append(self.flush)

    def sampling(self, params: Any) -> str:
        """Settings as JSON; those of the last request are known."""
        if self._params is None or self._params[0] != params:
            self._params = copy.deepcopy(params), json.dumps(settings(params))
        return self._params[1]

    def flush(self) -> None:
        rows, self.opened = self.opened, []
        _put(self.session, rows)


def _front(session: Session | None, processor: Any) -> _Front | None:
    front = getattr(processor, _FRONT, None)
    if session is None or not isinstance(front, _Front):
        return None
    if front.session is not session:  # another recording of an engine that lives on
        front = _Front(session, front.engine)
        setattr(processor, _FRONT, front)
    return front


def bind() -> bool:
    """Patch the output processor; called once its module has been imported."""
    from vllm.v1.engine.output_processor import OutputProcessor

    if not _patches.around(OutputProcessor, "add_request", _around_add):
        return False
    _patches.around(OutputProcessor, "process_outputs", _around_outputs)
    _patches.around(OutputProcessor, "abort_requests", _around_abort)
    return True


def bind_engine() -> bool:
    """Patch the two front ends, which know the engine that an output processor serves."""
    import sys

    bound = False
    for module, name in (
        ("vllm.v1.engine.llm_engine", "LLMEngine"),
        ("vllm.v1.engine.async_llm", "AsyncLLM"),
    ):
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            bound |= _patches.around(owner, "__init__", _around_engine)
            _patches.around(owner, "add_request", _around_request)
    return bound


def unbind() -> None:
    """Undo `bind` and `bind_engine`."""
    _patches.undo()


def _around_engine(wrapped: Any, front: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("vllm.frontend", _name_engine, session, front)
    return result


def _around_request(wrapped: Any, front: Any, args: Any, kwargs: Any) -> Any:
    """An engine that was made before the recording is known from its first request on."""
    session = recording()
    if session is not None and _front(session, front.output_processor) is None:
        session.safely("vllm.frontend", _name_engine, session, front)
    return wrapped(*args, **kwargs)


def _name_engine(session: Session, front: Any) -> None:
    config = front.vllm_config
    engine = engine_of(config)
    setattr(front.output_processor, _FRONT, _Front(session, engine))
    facts = {"process": "frontend", "model": str(config.model_config.model)}
    job = engine_job(engine, "rollout", "vllm", facts)
    session.put(job, nbytes=4096, gap={"engine": engine, "detail": {"table": "engines"}})


def _around_add(wrapped: Any, processor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    front = _front(session, processor)
    if session is None or front is None:
        return wrapped(*args, **kwargs)
    request = args[0] if args else kwargs.get("request")
    name = getattr(request, "request_id", None)
    known = name in processor.request_states  # a streaming input adds to a request
    result = wrapped(*args, **kwargs)
    state = processor.request_states.get(name)
    if state is not None and not known:
        session.safely("vllm.open", _open, front, state, request)
    return result


def _around_outputs(wrapped: Any, processor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    front = _front(session, processor)
    if session is None or front is None:
        return wrapped(*args, **kwargs)
    if front.opened:
        session.safely("vllm.open", front.flush)
    outputs = args[0] if args else kwargs.get("engine_core_outputs", ())
    states = processor.request_states
    before = dict(states)  # a finished request is gone afterwards
    result = wrapped(*args, **kwargs)
    if len(states) != len(before):
        ended = [
            (output, before[name])
            for output in outputs
            if (name := output.request_id) in before and name not in states
        ]
        session.safely("vllm.close", _close_all, session, front.engine, ended)
    return result


def _around_abort(wrapped: Any, processor: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    front = _front(session, processor)
    if session is None or front is None:
        return wrapped(*args, **kwargs)
    if front.opened:
        session.safely("vllm.open", front.flush)
    before = dict(processor.request_states)
    result = wrapped(*args, **kwargs)
    gone = [state for name, state in before.items() if name not in processor.request_states]
    if gone:
        session.safely("vllm.close", _abort_all, session, front.engine, gone)
    return result


def _sequence(engine: str, state: Any) -> dict[str, Any]:
    request, sample = request_of(state.request_id)
    prompt = np.array(state.prompt_token_ids or [], np.uint32)
    parent = state.parent_req
    group = f"{engine[:8]}.{request}" if parent else "p" + token_digest(len(prompt), prompt)[:16]
    return {
        "engine": engine,
        "request": request,
        "sample": sample,
        "pass": 0,
        "group": group,
        "group_derived": parent is None,
        "external": parent.external_req_id if parent else state.external_req_id,
        "prompt_len": len(prompt),
    }


def _wanted(session: Session, state: Any, params: Any) -> bool:
    if params is None or not state.prompt_token_ids or not recorded(params):
        return False
    return wants_prompt(state.prompt_token_ids, session.options)


def _open(front: _Front, state: Any, request: Any) -> None:
    params = getattr(request, "sampling_params", None)
    if not _wanted(front.session, state, params):
        return
    row = _sequence(front.engine, state)
    row["sampling"] = front.sampling(params)
    state._rolltape = row
    front.opened.append({**row, "finish": "open", "opened_ns": time.time_ns()})


def _close_all(session: Session, engine: str, ended: list[tuple[Any, Any]]) -> None:
    rows = []
    for output, state in ended:
        if (row := getattr(state, "_rolltape", None)) is None:
            continue
        reason = getattr(output, "finish_reason", None)
        # none: the detokenizer found a stop string that the engine core knows nothing of
        finish = "stop" if reason is None else str(reason)
        rows.append(_closing(state, row, finish))
    _put(session, rows)


def _abort_all(session: Session, engine: str, gone: list[Any]) -> None:
    rows = []
    for state in gone:
        if (row := getattr(state, "_rolltape", None)) is not None:
            rows.append(_closing(state, row, "abort"))
    _put(session, rows)
    for row in rows:
        detail = {"tokens": row["length"] - row["prompt_len"]}
        session.event(
            "abort", engine=engine, request=row["request"], sample=row["sample"], detail=detail
        )


def _closing(state: Any, row: dict[str, Any], finish: str) -> dict[str, Any]:
    prompt = np.array(state.prompt_token_ids, np.uint32)
    response = np.array(state.detokenizer.output_token_ids, np.uint32)
    return {
        **row,
        "prompt_len": len(prompt),  # a streaming input makes it longer
        "finish": finish if finish in ("stop", "length", "abort") else "error",
        "length": len(prompt) + len(response),
        "digest": token_digest(len(prompt), np.concatenate([prompt, response])),
        "closed_ns": time.time_ns(),
    }


def _put(session: Session, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return

    def job(writer: TapeWriter) -> None:
        writer.append("sequences", {name: [row[name] for row in rows] for name in rows[0]})

    session.put(job, nbytes=512 * len(rows), gap=list(_gaps(rows)))


def _gaps(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        key = {name: row[name] for name in ("engine", "request", "sample")}
        yield {**key, "detail": {"table": "sequences"}}
