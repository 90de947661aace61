"""The front end: requests as they are handed in, their tokens, and how they end.

A result object is copied by its dict when the API turns it into a `RequestOutput`, so what is
known of it stands in an attribute, which both then share.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.recorder.gating import LeftOut, wants_prompt
from rolltape.recorder.rows import engine_job
from rolltape.recorder.session import Session
from rolltape.recorder.tensorrt_llm.identity import arrived, current_engine, engine_of, is_worker
from rolltape.recorder.tensorrt_llm.output import (
    additional_names,
    finish_of,
    prompt_logprobs,
    route_rows,
    routes_of,
    token_logprobs,
)
from rolltape.recorder.tensorrt_llm.sampling import Resolved, resolve
from rolltape.recorder.tensorrt_llm.settings import environment, named, requested
from rolltape.store import TapeWriter, codecs, token_digest
from rolltape.store.columns import Masked, ragged
from rolltape.store.keys import Key
from rolltape.store.schema import SEMANTICS, SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

_ATTRIBUTE = "_rolltape"
#: Cancelled sequences that a later request may continue.
_MOST_CUT = 4096

_cut: OrderedDict[tuple[str, str], str] = OrderedDict()
#: Engines that have the row of their front end.
_told: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()
_left_out: weakref.WeakKeyDictionary[Session, dict[str, LeftOut]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Sample:
    """One output of a request, as far as it is recorded.

    Args:
        tokens: of its response so far.
        written: how many of them are on the tape.
        seen: whether any response of it was.
        reason: name of the engine's reason for its end; of several samples only the last one to end
            has it in its output.
        closed: whether it is over.
    """

    tokens: list[int] = field(default_factory=list)
    written: int = 0
    seen: bool = False
    reason: str | None = None
    closed: bool = False


@dataclass(eq=False)
class Request:
    """A request that the front end waits for."""

    session: Session
    engine: str
    name: str
    prompt: np.ndarray
    how: Resolved
    group: str
    derived: bool
    continues: str | None
    samples: dict[int, Sample] = field(default_factory=dict)
    #: samples of which tokens were missed, so that what follows has no place
    broken: set[int] = field(default_factory=set)
    depth: int = 0

    def key(self, sample: int) -> dict[str, Any]:
        """Columns of the key of one of its sequences."""
        return {"engine": self.engine, "request": self.name, "sample": sample, "pass": 0}


def engine_started(session: Session, llm: Any) -> None:
    """An `LLM` is ready: the `engines` row of the front end."""
    engine = engine_of(getattr(llm, "_executor", None)) or current_engine()
    _tell(session, engine, getattr(llm, "args", None))


def _tell(session: Session, engine: str, args: Any) -> None:
    _told.setdefault(session, set()).add(engine)
    model = getattr(args, "model", None)
    facts = {
        "process": "frontend",
        "model": None if model is None else str(model),
        "effective": named(environment()),
    }
    job = engine_job(engine, "rollout", "tensorrt_llm", facts, requested(args))
    session.put(job, nbytes=8192, gap={"engine": engine, "detail": {"table": "engines"}})


def opened(session: Session, result: Any, executor: Any) -> None:
    """A `GenerationResult` was made.

    A worker makes one too for what a front end elsewhere sent it; that one is not recorded.
    """
    queues = ("result_queue", "frontend_result_queues", "postproc_queues")
    answers = any(getattr(executor, name, None) is not None for name in queues)
    if is_worker(executor) and (answers or arrived()):  # a front end has such queues as well
        return
    params = result.sampling_params
    engine = engine_of(executor) or current_engine()
    if engine not in _told.get(session, ()) and not is_worker(executor):
        _tell(session, engine, None)
        reason = "its settings are not known: it was made before the recording, or a hook failed"
        session.event("notice", engine=engine, detail={"reason": reason})
    prompt = np.asarray(result.prompt_token_ids, np.uint32)
    name = str(result.id)
    if getattr(params, "use_beam_search", False):
        reason = "beam search is not recorded: beams change their history"
        session.event("gap", engine=engine, request=name, detail={"reason": reason})
        return
    many = int(getattr(params, "best_of", None) or getattr(params, "n", 1) or 1)
    if not wants_prompt(prompt, session.options):
        of_engine = _left_out.setdefault(session, {})
        of_engine.setdefault(engine, LeftOut(session, engine)).add("sequences", many)
        return
    group = f"{engine[:8]}.{name}" if many > 1 else "p" + token_digest(len(prompt), prompt)[:16]
    request = Request(
        session=session,
        engine=engine,
        name=name,
        prompt=prompt,
        how=resolve(params),
        group=group,
        derived=many == 1,
        continues=_cut.pop((engine, _whole(prompt)), None),
    )
    request.samples = {index: Sample() for index in range(many)}
    setattr(result, _ATTRIBUTE, request)
    rows = {
        "engine": engine,
        "request": name,
        "sample": list(range(many)),
        "pass": 0,
        "group": group,
        "group_derived": request.derived,
        "continues": request.continues,
        "external": name,
        "prompt_len": len(prompt),
        "finish": "open",
        "sampling": json.dumps(request.how.settings, default=str),
        "opened_ns": time.time_ns(),
    }
    tokens = {
        **request.key(0),
        "sample": list(range(many)),
        "start": 0,
        "n": len(prompt),
        "ids": [prompt] * many,
        "loss_mask": [np.zeros(len(prompt), bool)] * many,
    }

    def job(writer: TapeWriter) -> None:
        writer.append("sequences", rows)
        writer.append("tokens", tokens)

    gap = {"engine": engine, "request": name, "detail": {"table": "sequences"}}
    session.put(job, nbytes=prompt.nbytes * many + 512, gap=gap)


def request_of(result: Any) -> Request | None:
    """What is known of a result object; None if it is not recorded."""
    found = getattr(result, _ATTRIBUTE, None)
    return found if isinstance(found, Request) else None


def received(request: Request, reasons: Any, response: Any, sample: int) -> bool:
    """Tokens of one response, before the front end cuts stop words off.

    Args:
        request: that it answers.
        reasons: why it ends, one for each beam.
        response: has `output_token_ids`, one list for each beam.
        sample: index among the samples of the request.

    Returns:
        True: what is seen of the sample is whole.
    """
    known = request.samples.get(sample)
    if known is not None and not known.closed:
        reason = getattr(reasons[0], "name", None) if reasons else None
        known.tokens.extend([int(token) for token in response.output_token_ids[0]])
        known.reason, known.seen = reason, True
    return True


def handled(request: Request, result: Any, *, failed: bool) -> None:
    """A response was handled: write what is new, and close what is over."""
    done = failed or bool(getattr(result, "_done", False))
    for index, output in enumerate(result._outputs):
        sample = request.samples.get(index)
        if sample is None or sample.closed:
            continue
        cancelled = str(getattr(output, "finish_reason", None)) == "cancelled"
        if done and not failed and not sample.seen:  # a postprocess worker has read its tokens
            request.broken.add(index)
        _write_tokens(request, index, sample, output)
        if done or cancelled:
            reason = getattr(output, "finish_reason", None) or sample.reason
            # of one that was not seen to its end the reason is not known, if it has none here
            finish = finish_of(reason, done=index not in request.broken, failed=failed)
            _close(request, index, sample, result, finish)


def _write_tokens(request: Request, index: int, sample: Sample, output: Any) -> None:
    fresh = sample.tokens[sample.written :]
    if not fresh or index in request.broken:
        return
    start = len(request.prompt) + sample.written
    entries = list(getattr(output, "logprobs", None) or ())[sample.written :]
    values, there = token_logprobs(entries, fresh)
    ids = np.array(fresh, np.uint32)
    sizes = np.array([len(fresh)])
    how = request.how
    meaning = {
        "temperature": how.temperature,
        "edits": list(how.edits),
        "truncation": list(how.truncation),
        "vocab_size": None,
        "dtype": "float32",
        "source": "engine",
    }
    row = {
        **request.key(index),
        "start": start,
        "n": len(fresh),
        "ids": ragged(ids, sizes, pa.uint32()),
        "loss_mask": ragged(np.ones(len(fresh), bool), sizes, pa.bool_()),
    }
    if there.any():
        row["processed" if how.processed else "raw"] = [Masked(values, there)]
        row["semantics"] = pa.array([meaning], type=SEMANTICS)
    supports = _supports(request, index, start, ids)

    def job(writer: TapeWriter) -> None:
        writer.append("tokens", row)
        writer.append("supports", supports)

    gap = {"start": start, "n": len(fresh), "detail": {"table": "tokens"}}
    key = {k: v for k, v in request.key(index).items() if k != "pass"}
    request.session.put(job, nbytes=16 * len(fresh) + 512, gap={**key, **gap})
    sample.written = len(sample.tokens)


def _supports(request: Request, index: int, start: int, ids: np.ndarray) -> dict[str, Any]:
    """Greedy keeps one id, a request without truncation all; of others the engine tells nothing."""
    how = request.how
    if how.greedy:
        state, counts, kept = SUPPORT_EXPLICIT, np.ones(len(ids), np.int32), ids
    else:
        cuts = how.truncation or how.edits
        state = SUPPORT_UNRECORDED if cuts else SUPPORT_FULL
        counts, kept = np.zeros(len(ids), np.int32), np.zeros(0, np.uint32)
    return {
        **request.key(index),
        "start": start,
        "n": len(ids),
        "derived": False,
        "state": [np.full(len(ids), state, np.uint8)],
        "counts": [counts],
        "ids": [kept],
    }


def _close(request: Request, index: int, sample: Sample, result: Any, finish: str) -> None:
    sample.closed = True
    output = result._outputs[index]
    session, prompt = request.session, request.prompt
    key: dict[str, Any] = {k: v for k, v in request.key(index).items() if k != "pass"}
    whole = index not in request.broken
    ids = np.concatenate([prompt, np.array(sample.tokens, np.uint32)])
    if not whole:
        start = len(prompt) + sample.written
        missing = {"table": "tokens", "reason": "tokens were not seen from here on"}
        session.event("gap", **key, start=start, detail=missing)
    row = {
        **request.key(index),
        "group": request.group,
        "group_derived": request.derived,
        "continues": request.continues,
        "external": request.name,
        "prompt_len": len(prompt),
        "length": len(ids) if whole else None,
        "digest": token_digest(len(prompt), ids) if whole else None,
        "finish": finish,
        "sampling": json.dumps(request.how.settings, default=str),
        "closed_ns": time.time_ns(),
    }
    extra = None
    if whole:
        extra = session.safely("tensorrt_llm.extra", _extra, request, index, result, len(ids))
    extra = extra or []

    def job(writer: TapeWriter) -> None:
        for table, columns in extra:
            writer.append(table, columns)
        writer.append("sequences", row)

    gap = {**key, "detail": {"table": "sequences"}}
    nbytes = 1024 + sum(len(c.get("ids", b"")) for _, c in extra)
    session.put(job, nbytes=nbytes, gap=gap)
    if finish == "abort":
        detail = {"tokens": len(sample.tokens), "reason": str(output.finish_reason)}
        session.event("abort", **key, detail=detail)
    if finish == "abort" and whole:
        _cut[(request.engine, _whole(ids))] = Key(request.engine, request.name, index).text
        while len(_cut) > _MOST_CUT:
            _cut.popitem(last=False)


def _extra(request: Request, index: int, result: Any, length: int) -> list[tuple[str, Any]]:
    """Routes and prompt logprobs, where the engine gave them."""
    session, rows, output = request.session, [], result._outputs[index]
    key = {k: v for k, v in request.key(index).items() if k != "pass"}
    scores = getattr(output, "prompt_logprobs", None)
    cached = int(getattr(result, "cached_tokens", 0) or 0)
    placed = prompt_logprobs(scores, request.prompt.tolist(), cached) if scores else None
    if placed is not None:
        rows.append(("tokens", _scored_prompt(request, index, *placed)))
    elif scores:
        reason = f"{len(scores)} prompt logprobs for {len(request.prompt)} tokens: not placed"
        session.event("gap", **key, detail={"reason": reason})
    ids = routes_of(output)
    if ids is not None:
        found, problem = route_rows(ids, length)
        if problem is not None:
            detail = {"code": "routes-incomplete", "text": problem}
            session.event("finding", **key, detail=detail)
        if len(found):
            rows.append(("routes", _engine_routes(request, index, found)))
    names = additional_names(output)
    if names:
        session.event("notice", **key, detail={"additional_outputs": names})
    return rows


def _scored_prompt(
    request: Request, index: int, values: np.ndarray, there: np.ndarray
) -> dict[str, Any]:
    ids = request.prompt[1:]
    sizes = np.array([len(ids)])
    meaning = {
        "temperature": 1.0,
        "edits": [],
        "truncation": [],
        "vocab_size": None,
        "dtype": "float32",
        "source": "engine",
    }
    return {
        **request.key(index),
        "start": 1,
        "n": len(ids),
        "ids": ragged(ids, sizes, pa.uint32()),
        "loss_mask": ragged(np.zeros(len(ids), bool), sizes, pa.bool_()),
        "raw": [Masked(values, there)],
        "semantics": pa.array([meaning], type=SEMANTICS),
    }


#: Engine -> (numbers of its MoE layers, experts), where a worker of this process knows them.
layers_of: dict[str, tuple[tuple[int, ...], int]] = {}


def _engine_routes(request: Request, index: int, ids: np.ndarray) -> dict[str, Any]:
    n, count, k = ids.shape
    layers, experts = layers_of.get(request.engine, ((), 0))
    if len(layers) != count:
        # the engine counts MoE layers only; which ones they are is known in the worker
        layers = tuple(range(count))
        detail = {"code": "layers-unknown", "text": "layer numbers count MoE layers only"}
        key = {x: v for x, v in request.key(index).items() if x != "pass"}
        request.session.event("finding", **key, detail=detail)
    experts = max(experts, int(ids.max()) + 1)
    valid: np.ndarray = np.asarray((ids >= 0).all(-1))
    missing = [[int(at), 1, None, "dropped"] for at in np.flatnonzero(~valid.any(1))]
    return {
        **request.key(index),
        "start": 0,
        "n": n,
        "role": "used",
        "layers": [np.array(layers)],
        "k": k,
        "num_experts": experts,
        "encoding": "plain",
        "ids": codecs.encode_plain(np.where(valid[..., None], ids, 0), experts),
        "valid": None if valid.all() else codecs.encode_bits(valid),
        "missing": json.dumps(missing) if missing else None,
    }


def _whole(ids: np.ndarray) -> str:
    """Digest of the ids alone: a continued request has all of them as its prompt."""
    return token_digest(0, ids)
