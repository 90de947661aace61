"""Records one `PyExecutor`: its schedule, the routes of each forward, and when requests leave."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from rolltape.recorder.gating import LeftOut, in_steps, wants_prompt
from rolltape.recorder.rows import engine_job
from rolltape.recorder.serving.batch import Life, Roster, Step
from rolltape.recorder.serving.blocks import Blocks
from rolltape.recorder.serving.device import Outlet
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.session import Session
from rolltape.recorder.tensorrt_llm.identity import current_engine
from rolltape.recorder.tensorrt_llm.routes import MoeLayer, RouteTap, find_moe_layers
from rolltape.recorder.tensorrt_llm.schedule import (
    Plan,
    Schedule,
    UnsupportedBatch,
    prompt_ids,
    request_id,
)
from rolltape.recorder.tensorrt_llm.settings import (
    asked_environment,
    findings,
    mapping_of,
    named,
    ranks_of,
    worker_facts,
)
from rolltape.recorder.tensorrt_llm.weights import Weights

#: Attention data parallelism: a rank's steps are numbered from its rank times this.
RANK_STEPS = 1 << 40
#: Requests that left unseen are looked for every so many steps.
_PRUNE_STEPS = 64

_ATTRIBUTE = "_rolltape"


class Loaded:
    """What is known of a model once it is loaded: before warm-up, before any graph.

    It stands on the model, so that it goes when the model does.

    Args:
        weights: its versions.
        engine: uuid.
        group: what part of the model this rank holds, see `Weights`.
        tap: sees the routes; None if nothing can or need be tapped.
        layers: its MoE layers.
        reason: why there is no tap; None for a dense model or when there is one.
    """

    def __init__(
        self,
        weights: Weights,
        engine: str,
        group: str,
        tap: RouteTap | None = None,
        layers: list[MoeLayer] | None = None,
        reason: str | None = None,
    ) -> None:
        self.weights, self.engine, self.group = weights, engine, group
        self.tap, self.layers, self.reason = tap, layers or [], reason


def loaded_of(session: Session, model: Any) -> Loaded | None:
    """What `load_model` left on a model; its weights are those of the session that asks."""
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, Loaded):
        return None
    if found.weights.session is not session:  # a later recording of the same process
        found.weights = Weights(session, found.engine, found.group, weakref.ref(model))
    return found


def load_model(session: Session, model: Any, args: Any, mapping: Any, tokens: int) -> Loaded:
    """A model has been loaded and nothing has run yet.

    Args:
        session: where to record.
        model: the module.
        args: `LlmArgs`; None if unknown.
        mapping: ranks.
        tokens: most tokens of a forward; 0 if unknown.
    """
    layers, reason = find_moe_layers(model)
    place, tap = ranks_of(mapping), None
    if layers and session.options.routes and _speaks(place):
        if getattr(args, "enable_return_routed_experts", False):
            reason = "from the engine's own capture: only of requests that ask for them"
        elif not tokens:
            reason = "the size of the largest forward is unknown"
        elif reason is None:
            tap = RouteTap(model, layers, tokens)
    return _loaded(session, model, place, tap, layers, reason)


def _loaded(
    session: Session,
    model: Any,
    place: dict[str, list[int]],
    tap: RouteTap | None,
    layers: list[MoeLayer],
    reason: str | None,
) -> Loaded:
    engine, group = current_engine(), _group(place)
    weights = Weights(session, engine, group, weakref.ref(model))
    found = Loaded(weights, engine, group, tap, layers, reason)
    object.__setattr__(model, _ATTRIBUTE, found)  # a module may not take what is no parameter
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
    """Records one executor. Only its loop calls it.

    Args:
        session: where to.
        executor: `PyExecutor`, its model loaded.
    """

    def __init__(self, session: Session, executor: Any) -> None:
        model = executor.model_engine.model
        place = ranks_of(mapping_of(executor))
        found = loaded_of(session, model)
        if found is None:
            reason = "the model was loaded before it could be tapped"
            found = _loaded(session, model, place, None, [], reason)
        self.session, self.engine, self.weights = session, found.engine, found.weights
        self._executor = weakref.ref(executor)
        tp, pp = place["tp"], place["pp"]
        self.wanted = _speaks(place)
        self.last_stage = pp[0] == pp[1] - 1
        self.padded: int | None = None
        self.graph: str | None = None
        self._tap = found.tap if self.wanted else None
        if self._tap is not None:
            self._tap.clear()  # of the warm-up
        self._columns: dict[str, Any] = {}
        self._first = self._next = tp[0] * RANK_STEPS if "dp" in place else 0
        self._said: set[str] = set()
        self._was_dirty = self._blind = False
        self._left_out = LeftOut(session, self.engine)
        self._roster = Roster()
        self.schedule = Schedule(self._roster, self._wants)
        self._outlet = Outlet(next(model.parameters()).device)
        self.blocks: Blocks | None = None
        if self.wanted:
            scribe = Scribe(
                engine=self.engine,
                layers=tuple(layer.layer for layer in found.layers) if self._tap else (),
                k=self._tap.k if self._tap else 0,
                num_experts=self._tap.num_experts if self._tap else 0,
                tokens=self.last_stage,
                prompts=False,
            )
            self.blocks = Blocks(session, self._roster, scribe, self)
        self._tell(executor, found)

    def _tell(self, executor: Any, found: Loaded) -> None:
        facts = worker_facts(executor, found.layers)
        chosen = facts["effective"]
        self._columns = {"attention": chosen.get("attention"), "experts": chosen.get("experts")}
        asked = named(asked_environment())
        job = engine_job(self.engine, "rollout", "tensorrt_llm", facts, asked)
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

    def _wants(self, request: Any) -> bool:
        """Whether a request is recorded: the front end decides by the same rule."""
        options = self.session.options
        if options.sample_rate >= 1:
            return True
        ids = prompt_ids(request)
        if ids is None:
            self.notice("the loop does not tell prompts: the schedule of all requests is recorded")
        return ids is None or wants_prompt(ids, options)

    # -- one step -------------------------------------------------------------------------

    def launch(self, batch: Any) -> Plan | None:
        """A batch is about to run; None if its rows are not recorded."""
        self.padded = self.graph = None
        if not self.wanted:
            return None
        if self.weights.dirty and not self._was_dirty:
            text = "forwards ran while an update was being loaded: their weights are mixed"
            detail = {"code": "weights-dirty", "version": self.weights.version, "text": text}
            self.session.event("finding", engine=self.engine, detail={**detail, "step": self._next})
        self._was_dirty = self.weights.dirty
        try:
            plan = self.schedule.plan(batch)
        except UnsupportedBatch as error:
            reason = f"steps and routes are not recorded: {error}"
            self.missed(reason)
            if reason not in self._said:
                self._said.add(reason)
                detail = {"code": "unsupported-batch", "text": reason}
                self.session.event("finding", engine=self.engine, detail=detail)
            return None
        if self._blind and self._tap is not None:
            self._tap.clear()
        self._blind = False
        for life, reason in plan.unknown:
            key = {"request": life.request, "sample": life.sample}
            self.session.event("gap", engine=self.engine, detail={"reason": reason}, **key)
        return plan

    def missed(self, reason: str) -> None:
        """A forward runs that was not planned; said once for several in a row."""
        if not self._blind and self.wanted:
            detail = {"reason": reason, "step": self._next}
            self.session.event("gap", engine=self.engine, detail=detail)
        self._blind = True
        self._next += 1
        self.schedule.lose()

    def padded_batch(self, batch: Any) -> None:
        """The batch has its padding now."""
        context = sum(int(r.context_chunk_size) for r in batch.context_requests)
        self.padded = context + len(batch.generation_requests)

    def replayed(self, key: Any) -> bool:
        """A CUDA graph runs.

        Returns:
            True: it is known which.
        """
        size = getattr(key, "batch_size", None)
        self.graph = str(key)
        if self.padded is None:
            self.padded = int(key[0] if size is None and isinstance(key, tuple) else size or 0)
        return True

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
        number, self._next = self._next, self._next + 1
        if number % _PRUNE_STEPS == 0:
            self._prune()
        if self.blocks is None:
            return
        if not in_steps(number - self._first, self.session.options):
            self._left_out.add("steps")
            return
        host, ready, held = self._outlet.send(values)
        self.blocks.add(
            Step(
                number=number,
                t_ns=t_ns,
                rows=plan.rows,
                version=self.weights.version,
                values=host,
                padded=self.padded,
                graph=self.graph,
                columns=self._columns,
                ready=ready,
                held=held,
            )
        )

    def lost(self, plan: Plan, reason: str) -> None:
        """The batch failed, or could not be recorded: its positions are missing."""
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
        self._over(self.schedule.end(request))

    def _over(self, life: Life | None) -> None:
        if life is not None and self.blocks is not None:
            self.blocks.end(life)

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
            self._over(self.schedule.forget(name))

    def close(self) -> None:
        """The executor is shut down."""
        if self.blocks is not None:
            self.blocks.close()
        self.session.commit()


def _speaks(place: dict[str, list[int]]) -> bool:
    """Whether a rank is recorded: of those that run the same requests one is."""
    return "dp" in place or place["tp"][0] == 0


def _group(place: dict[str, list[int]]) -> str:
    """What part of the model a rank holds: "" for all of it."""
    sizes = [size for _, size in place.values()]
    return "" if max(sizes) == 1 else "rank " + ", ".join(f"{n} {r[0]}" for n, r in place.items())
