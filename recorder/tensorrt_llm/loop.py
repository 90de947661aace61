"""Records one `PyExecutor`: its schedule, the routes of each forward, and when requests leave."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from rolltape.recorder.rows import engine_job
from rolltape.recorder.serving.batch import Life, Roster, Step
from rolltape.recorder.serving.device import Outlet
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.session import Session
from rolltape.recorder.tensorrt_llm.identity import current_engine
from rolltape.recorder.tensorrt_llm.routes import MoeLayer, RouteTap, find_moe_layers
from rolltape.recorder.tensorrt_llm.schedule import Plan, Schedule, UnsupportedBatch, request_id
from rolltape.recorder.tensorrt_llm.settings import (
    findings,
    mapping_of,
    ranks_of,
    worker_facts,
)
from rolltape.recorder.tensorrt_llm.weights import Weights

#: A block is handed over after this long, this many steps or this many bytes.
BLOCK_SECONDS = 1.0
BLOCK_STEPS = 128
BLOCK_BYTES = 32 << 20
#: Attention data parallelism: a rank's steps are numbered from its rank times this.
RANK_STEPS = 1 << 40


_ATTRIBUTE = "_rolltape"


class Loaded:
    """What is known of a model once it is loaded: before warm-up, before any graph.

    It stands on the model, so that it goes when the model does.

    Args:
        weights: its versions.
        tap: sees the routes; None if nothing can or need be tapped.
        layers: its MoE layers.
        reason: why there is no tap; None for a dense model or when there is one.
    """

    def __init__(
        self,
        weights: Weights,
        tap: RouteTap | None = None,
        layers: list[MoeLayer] | None = None,
        reason: str | None = None,
    ) -> None:
        self.weights, self.tap, self.layers, self.reason = weights, tap, layers or [], reason


def loaded_of(model: Any) -> Loaded | None:
    """What `load_model` left on a model."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Loaded) else None


def load_model(session: Session, model: Any, args: Any, mapping: Any, tokens: int) -> Loaded:
    """A model has been loaded and nothing has run yet.

    Args:
        session: where to record.
        model: the module.
        args: `LlmArgs`; None if unknown.
        mapping: ranks.
        tokens: most tokens of a forward; 0 if unknown.
    """
    engine = current_engine()
    place = ranks_of(mapping)
    weights = Weights(engine, _group(place), weakref.ref(model))
    layers, reason = find_moe_layers(model)
    if not layers or not session.options.routes:
        tap = None
    elif getattr(args, "enable_return_routed_experts", False):
        tap, reason = None, "from the engine's own capture: only of requests that ask for them"
    elif not tokens:
        tap, reason = None, "the size of the largest forward is unknown"
    elif reason is None:
        tap = RouteTap(model, layers, tokens)
    else:
        tap = None
    found = Loaded(weights, tap, layers, reason if tap is None else None)
    object.__setattr__(model, _ATTRIBUTE, found)
    weights.start(session)
    return found


def recorder_of(session: Session, executor: Any) -> Recorder:
    """The recorder of an executor, made when it first runs something that is no warm-up."""
    found = known_recorder(session, executor)
    if found is None:
        found = Recorder(session, executor)
        setattr(executor, _ATTRIBUTE, found)
    return found


def known_recorder(session: Session, executor: Any) -> Recorder | None:
    """The recorder of an executor, if it has one."""
    found = getattr(executor, _ATTRIBUTE, None)
    return found if isinstance(found, Recorder) and found.session is session else None


class Recorder:
    """Records one executor. Only its loop calls it, but for `flush`.

    Args:
        session: where to.
        executor: `PyExecutor`, its model loaded.
    """

    def __init__(self, session: Session, executor: Any) -> None:
        self.session, self.engine = session, current_engine()
        self._executor = weakref.ref(executor)
        model = executor.model_engine.model
        found = loaded_of(model)
        place = ranks_of(mapping_of(executor))
        if found is None:
            weights = Weights(self.engine, _group(place), weakref.ref(model))
            found = Loaded(weights, reason="the model was loaded before it could be tapped")
            object.__setattr__(model, _ATTRIBUTE, found)
            weights.start(session)
        tp, pp = place["tp"], place["pp"]
        spread = "dp" in place
        #: of ranks that run the same requests one is recorded
        self.wanted = spread or tp[0] == 0
        self.padded: int | None = None
        self.graph: str | None = None
        self._tap = found.tap if self.wanted else None
        self._columns: dict[str, Any] = {}
        self._next = tp[0] * RANK_STEPS if spread else 0
        self._steps: list[Step] = []
        self._ended: list[Life] = []
        self._bytes, self._since = 0, 0.0
        self._said: set[str] = set()
        self.roster = Roster()
        self.schedule = Schedule(self.roster)
        self._outlet = Outlet(next(model.parameters()).device)
        self.scribe = Scribe(
            engine=self.engine,
            roster=self.roster,
            layers=tuple(layer.layer for layer in found.layers) if self._tap else (),
            k=self._tap.k if self._tap else 0,
            num_experts=self._tap.num_experts if self._tap else 0,
            tokens=pp[0] == pp[1] - 1,
        )
        self.weights = found.weights
        self._tell(executor, found)
        close = weakref.WeakMethod(self.flush)  # a session must not keep an engine alive
        session.before_close.append(lambda: _call(close()))

    def _tell(self, executor: Any, found: Loaded) -> None:
        facts = worker_facts(executor, found.layers)
        chosen = facts["effective"]
        self._columns = {"attention": chosen.get("attention"), "experts": chosen.get("experts")}
        job = engine_job(self.engine, "rollout", "tensorrt_llm", facts)
        gap = {"engine": self.engine, "detail": {"table": "engines"}}
        self.session.put(job, nbytes=8192, gap=gap)
        for detail in findings():
            self.session.event("finding", engine=self.engine, detail=detail)
        if found.reason is not None and self.wanted and self.session.options.routes:
            self.notice(f"routes: {found.reason}")

    def notice(self, reason: str) -> None:
        """Say something once."""
        if reason not in self._said:
            self._said.add(reason)
            self.session.event("notice", engine=self.engine, detail={"reason": reason})

    # -- one step -------------------------------------------------------------------------

    def launch(self, batch: Any) -> Plan | None:
        """A batch is about to run; None if its rows are not recorded."""
        self.padded = self.graph = None
        if not self.wanted:
            return None
        if self.weights.dirty:
            text = "a forward ran while an update was being loaded: its weights are mixed"
            detail = {"code": "weights-dirty", "version": self.weights.version, "text": text}
            self.session.event("finding", engine=self.engine, detail=detail)
        try:
            plan = self.schedule.plan(batch)
        except UnsupportedBatch as error:
            reason = f"steps and routes are not recorded: {error}"
            if reason not in self._said:
                self._said.add(reason)
                detail = {"code": "unsupported-batch", "text": reason}
                self.session.event("finding", engine=self.engine, detail=detail)
            return None
        for life in plan.lives:  # their prompts are written by the front end
            self.scribe._born.add(life.index)
        return plan

    def padded_batch(self, batch: Any) -> None:
        """The batch has its padding now."""
        context = sum(int(r.context_chunk_size) for r in batch.context_requests)
        self.padded = context + len(batch.generation_requests)

    def replayed(self, key: Any) -> None:
        """A CUDA graph runs."""
        size = getattr(key, "batch_size", None)
        self.graph = str(key)
        if self.padded is None:
            self.padded = int(key[0] if size is None and isinstance(key, tuple) else size or 0)

    def ran(self, plan: Plan, t_ns: int) -> None:
        """The batch ran."""
        values: dict[str, torch.Tensor] = {}
        if self._tap is not None:
            tokens = max(plan.tokens, self.padded or 0)
            taken = self._tap.take(tokens, plan.kept)
            values["routes"] = taken[: int(plan.rows.n.sum())]
            if self._tap.overrun:
                self.notice("a forward had more tokens than max_num_tokens: routes are missing")
        if not len(plan.rows):
            return
        host, ready = self._outlet.send(values)
        step = Step(
            number=self._next,
            t_ns=t_ns,
            rows=plan.rows,
            version=self.weights.version,
            values=host,
            padded=self.padded,
            graph=self.graph,
            columns=self._columns,
            ready=ready,
        )
        self._next += 1
        if not self._steps:
            self._since = time.monotonic()
        self._steps.append(step)
        self._bytes += step.nbytes
        full = len(self._steps) >= BLOCK_STEPS or self._bytes >= BLOCK_BYTES
        if full or time.monotonic() - self._since >= BLOCK_SECONDS:
            self.flush()

    def lost(self, plan: Plan | None, reason: str) -> None:
        """The batch failed, or could not be recorded: its positions are missing."""
        if plan is None:
            self.session.event("gap", engine=self.engine, detail={"reason": reason})
            return
        rows = zip(plan.lives, plan.rows.start.tolist(), plan.rows.n.tolist(), strict=True)
        for life, start, n in rows:
            key = {"request": life.request, "sample": life.sample, "start": start, "n": n}
            self.session.event("gap", engine=self.engine, detail={"reason": reason}, **key)

    # -- requests -------------------------------------------------------------------------

    def paused(self, batch: Any) -> None:
        """Requests lost their place; what they had will be forwarded again."""
        names = ("paused_requests", "recompute_paused_requests")
        for request in [r for name in names for r in getattr(batch, name, None) or ()]:
            known = self.schedule.requests.get(request_id(request))
            if known is not None:
                key = {"request": known.life.request, "sample": known.life.sample}
                detail = {"forwarded": known.next}
                self.session.event("preempt", engine=self.engine, detail=detail, **key)

    def ended(self, request: Any) -> None:
        """A request left the loop for good."""
        life = self.schedule.end(request)
        if life is not None:
            self._ended.append(life)
        if not self.schedule.requests:
            self.flush()  # nothing may come for a long time

    def in_flight(self) -> int:
        """Requests that have been forwarded and have not ended."""
        self._prune()
        return len(self.schedule.requests)

    def _prune(self) -> None:
        """Forget requests that left otherwise: a cancelled one is terminated before it is done."""
        executor = self._executor()
        active = getattr(executor, "active_requests", None)
        if active is None:
            return
        there = {request_id(request) for request in active}
        for name in [n for n in self.schedule.requests if n not in there]:
            self._ended.append(self.schedule.requests.pop(name).life)

    # -- blocks ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand the steps so far to the writer thread."""
        self._prune()
        steps, self._steps = self._steps, []
        ended, self._ended = self._ended, []
        size, self._bytes = self._bytes, 0
        if steps or ended:
            job = self.scribe.job(steps, ended)
            self.session.put(job, nbytes=size, gap=self.scribe.gap_rows(steps))


def _call(method: Any) -> None:
    if method is not None:
        method()


def _group(place: dict[str, list[int]]) -> str:
    """What part of the model a rank holds: "" for all of it."""
    sizes = [size for _, size in place.values()]
    return "" if max(sizes) == 1 else "rank " + ", ".join(f"{n} {r[0]}" for n, r in place.items())
