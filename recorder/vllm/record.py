"""The recording of one vLLM worker: lives, steps, blocks of steps; the same for both runners."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolltape.recorder import tactics
from rolltape.recorder.digest import group_digests
from rolltape.recorder.gating import in_steps, wants_prompt
from rolltape.recorder.parts import parts_of_vllm
from rolltape.recorder.rows import engine_job
from rolltape.recorder.serving.batch import Life, Roster, Rows, Step, Table, indices
from rolltape.recorder.serving.blocks import Blocks
from rolltape.recorder.serving.device import Outlet, RouteBuffer
from rolltape.recorder.serving.distribution import (
    device_measure,
    measure_verified,
    table_layout,
)
from rolltape.recorder.serving.drawn import Drawn
from rolltape.recorder.serving.prefix import Prefix
from rolltape.recorder.serving.ranks import Rank
from rolltape.recorder.serving.scribe import Scribe, prompt_job
from rolltape.recorder.serving.steady import Alike, Steady, follow_blocks
from rolltape.recorder.session import MAX_FAULTS, Session
from rolltape.recorder.settings import record_settings
from rolltape.recorder.top import check_top, top_logprobs
from rolltape.recorder.vllm.facts import Moe, find_moe, worker_facts
from rolltape.recorder.vllm.identity import engine_of, request_of
from rolltape.recorder.vllm.sampling import read_sampling, recorded
from rolltape.recorder.weights import Versions

#: Steps of a data-parallel replica are numbered from its rank times this.
REPLICA_STEPS = 1 << 40

_routers: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_binding = threading.Lock()


def writes_routes(router: Any) -> Callable[[Any], None] | None:
    """Our hook of a router, if it has one."""
    return _routers.get(router)


def recorder_of(session: Session, runner: Any) -> Recorder:
    """The recorder of a runner whose model is loaded; made when first asked for."""
    found: Recorder | None = getattr(runner, "_rolltape", None)
    if found is None or found.session is not session:
        with _binding:
            found = Recorder(session, runner)
            runner._rolltape = found
    return found


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is the same in every step with the same requests in the same rows.

    Args:
        lives: of each row.
        index: int64 [rows] their numbers.
        masked: whether truncation or edits leave out ids in any row.
        warm: whether any row divides by a temperature other than 1.
        top_k: most ids of a kept set; 0 if that is not bounded in every row that cuts.
    """

    lives: list[Life]
    index: np.ndarray
    masked: bool
    warm: bool
    top_k: int

    @classmethod
    def of(cls, lives: list[Life]) -> _Batch:
        cutting = [r for r in lives if r.edits or (r.truncation and not r.greedy)]
        bounded = all(r.top_k > 0 and not r.edits for r in cutting)
        return cls(
            lives,
            indices(lives),
            bool(cutting),
            any(not r.greedy and r.temperature != 1.0 for r in lives),
            max((r.top_k for r in cutting), default=0) if bounded else 0,
        )


class Recorder:
    """Records one runner. Only the engine's own thread calls it.

    Args:
        session: where to.
        runner: of either kind, its model loaded.
    """

    def __init__(self, session: Session, runner: Any) -> None:
        config = runner.vllm_config
        parallel = config.parallel_config
        model = runner.get_model()
        self.session, self.engine = session, engine_of(config)
        self.device: torch.device = runner.device
        self.going = False  # between the schedule of a step and its end
        self.padded: int | None = None
        self.scheduled: Any = None
        self._next = self._number = int(parallel.data_parallel_rank) * REPLICA_STEPS
        self._lives: dict[str, Life | None] = {}
        self._rows: Rows | None = None
        self._batch = _Batch.of([])
        self._same: tuple[list[str], _Batch] | None = None
        self._device_values: dict[str, torch.Tensor] = {}
        self._host_routes: torch.Tensor | None = None
        self._table: Table | None = None
        self._raw: torch.Tensor | None = None
        self._source = "recomputed"
        # rows of the step that is running, its tokens, and how many of them are drafts
        self._running = self._tokens = self._drafted = 0
        self._vocab = 0
        # whether every request goes on by one token, from where, and whether that was kept
        self._quiet = self._kept = False
        self._start: np.ndarray | None = None
        self._scale: tuple[_Batch, torch.Tensor] | None = None
        self._graph: str | None = None
        self._t_ns = 0
        self._outlet, self._measure = Outlet(self.device), device_measure(self.device)
        self._rank, ranks = _tensor_ranks()
        moe = find_moe(model, config) if session.options.routes else Moe()
        self._buffer = self._bind_routers(moe, runner)
        cache = config.cache_config
        shares = bool(cache.enable_prefix_caching)
        self._size = int(cache.block_size) if shares else 0
        self._cache: Any = cache  # its size is known later
        self.roster = Roster(self._size)
        facts, requested = worker_facts(runner, model, moe)
        requested, facts["effective"] = record_settings(
            session, self.engine, requested, facts["effective"]
        )
        scribe = Scribe(
            engine=self.engine,
            layers=moe.layers if self._buffer is not None else (),
            k=moe.k,
            num_experts=moe.num_experts,
            gap=moe.reason or "not-captured",
            prefix=Prefix(self._size) if shares and self._buffer is not None else None,
            rank=Rank(rank=self._rank, stage=_stage()) if ranks > 1 else None,
        )
        self._steady = Steady(self.roster, self._outlet, self.device)
        self.blocks = Blocks(session, self.roster, scribe, self, steady=self._steady)
        self._columns = facts.pop("columns")
        job = engine_job(self.engine, "rollout", "vllm", facts, requested)
        session.put(job, nbytes=8192, gap={"engine": self.engine, "detail": {"table": "engines"}})
        if moe.reason and moe.layers:
            session.event("notice", engine=self.engine, detail={"reason": moe.reason})
        every_step = session.options.step_range == (0, None)
        self._may_be_quiet = self._speaks and every_step and not session.options.top_logprobs
        wanted = session.options.top_logprobs
        vocab = int(config.model_config.get_vocab_size())
        self._top = session.safely("vllm.top_logprobs", check_top, wanted, vocab) if wanted else 0
        session.safely("vllm.tactics", tactics.observe_all, self.engine)
        self.versions = Versions(session, self.engine)
        self._model = weakref.ref(model)
        self._stale = True  # what is loaded has not been digested
        self._watch_weights(model, runner)

    def _watch_weights(self, model: Any, runner: Any) -> None:
        """Whatever way an update takes, it ends in `load_weights` of the model."""
        original = model.load_weights
        if hasattr(original, "_rolltape"):  # of an earlier recording: it asks for the recorder
            return
        of = weakref.ref(runner)

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            recorder: Recorder | None = getattr(of(), "_rolltape", None)
            if recorder is not None:
                recorder.change_weights()
            return original(*args, **kwargs)

        load_weights._rolltape = True  # type: ignore[attr-defined]
        model.load_weights = load_weights

    def change_weights(self) -> None:
        """The weights are about to be written to."""
        if self._speaks:
            self.guard("vllm.weights", self.versions.dirty, "load_weights")
        self._stale = True

    def _complete_weights(self) -> None:
        """The first step with weights that are new: they are all in place."""
        self._stale = False
        self._tell_cache()
        # all warm-up is behind us: what tuners chose is in their caches
        self.session.safely("vllm.tactics", tactics.observe_all, self.engine)
        tactics.dump()
        model = self._model()
        digests = None
        if model is None or not self._speaks:
            return
        try:
            from vllm.distributed.parallel_state import get_tp_group

            tp = get_tp_group()
            parts = parts_of_vllm(model, tp_rank=tp.rank_in_group, tp_size=tp.world_size)
            digests = group_digests(parts)
        except Exception as error:  # the version is new all the same, what it is unknown
            self.session.fault("vllm.digest", error)
        self.versions.complete(digests=digests, reason=None if digests else "not digested")

    def _tell_cache(self) -> None:
        """How many KV blocks there are decides who is preempted."""
        cache, self._cache = self._cache, None
        blocks = getattr(cache, "num_gpu_blocks", None)
        if blocks is None or not self._speaks:
            return
        facts = {"process": "worker", "effective": {"num_gpu_blocks": int(blocks)}}
        job = engine_job(self.engine, "rollout", "vllm", facts)
        self.session.put(
            job, nbytes=1024, gap={"engine": self.engine, "detail": {"table": "engines"}}
        )

    def _bind_routers(self, moe: Moe, runner: Any) -> RouteBuffer | None:
        if not moe.layers or moe.reason:
            return None
        kept: RouteBuffer | None = getattr(runner, "_rolltape_routes", None)
        if kept is not None:  # of an earlier recording: graphs and compiled code write to it alone
            kept.clear()
            return kept
        tokens = int(getattr(runner, "max_num_tokens", 0)) + 1024  # graphs are padded
        buffer = RouteBuffer(tokens, len(moe.layers), moe.k, self.device)
        runner._rolltape_routes = buffer
        for index, router in enumerate(moe.routers):
            write = buffer.hook(index)
            theirs = router.capture_fn
            _routers[router] = write
            router.set_capture_fn(theirs)  # ours is put behind it
        return buffer

    def guard(self, name: str, call: Callable[..., None], *args: Any) -> None:
        """Call one of our own; a fault ends the recording of this step, never the step."""
        with self._steady.lock:
            before = self.session.faults.get(name, 0)
            self.session.safely(name, call, *args)
            if self.session.faults.get(name, 0) != before:
                self.session.always("vllm.abandon", functools.partial(self._abandon, name))

    def _abandon(self, name: str) -> None:
        untold = self._quiet and not self._kept
        self.going = False
        self._drop()
        detail: dict[str, Any] = {"reason": f"{name} failed", "step": self._number}
        if self.session.faults.get(name, 0) >= MAX_FAULTS:
            detail["reason"] += " for the last time: this hook is not called again"
        self.session.event("gap", engine=self.engine, detail=detail)
        self.blocks.collect()
        if untold and self._size:  # of a step that is no quiet one this was done when it came
            follow_blocks(self.scheduled.scheduled_cached_reqs, self._lives)
        self.blocks.lose()

    def _drop(self) -> None:
        """Nothing of the step that is running is kept."""
        self._rows, self._device_values, self._raw = None, {}, None
        self._host_routes, self._table = None, None
        self._running, self._quiet, self._kept = 0, False, False

    @property
    def lives(self) -> list[Life]:
        """The requests of the step that is running, in row order."""
        return self._batch.lives

    def spans(self) -> list[tuple[str, int, int]]:
        """(request, first position, tokens) of each row of the step that is running; or none."""
        rows, lives = self._rows, self._batch.lives
        if rows is not None:
            parts = zip(lives, rows.start.tolist(), rows.n.tolist(), strict=True)
            return [(life.request, start, n) for life, start, n in parts]
        if not self._quiet or not self._running or self._start is None:
            return []
        starts = zip(lives, self._start.tolist(), strict=True)
        return [(life.request, start, 1) for life, start in starts]

    @property
    def _speaks(self) -> bool:
        """The ranks of a tensor-parallel group run the same steps: the first speaks for all."""
        return self._rank == 0

    @property
    def wants_masked(self) -> bool:
        """Whether truncation or edits leave out ids in any row of that step."""
        return self._batch.masked and self._speaks

    # -- one step -------------------------------------------------------------------------

    def schedule(self, scheduled: Any) -> None:
        """A step is about to run: `SchedulerOutput`."""
        if self.going:  # the last one was never sampled
            self.finish()
        self.scheduled = scheduled
        # counted before anything can fail: the ranks of a group give a step the same number
        if scheduled.total_num_scheduled_tokens:
            self._number, self._next = self._next, self._next + 1
        self._quiet = self._goes_on(scheduled)
        if self._quiet:
            self.going = True
            return
        self.blocks.collect()
        for name in scheduled.finished_req_ids:
            life = self._lives.pop(name, None)
            if life is not None:
                self.blocks.end(life)
        for new in scheduled.scheduled_new_reqs:
            self._lives[new.req_id] = self._born(new)
        if scheduled.finished_req_ids or scheduled.scheduled_new_reqs:
            self._same = None
        if self._size:
            follow_blocks(scheduled.scheduled_cached_reqs, self._lives)
        for name in (getattr(scheduled, "preempted_req_ids", None) or ()) if self._speaks else ():
            request, sample = request_of(name)
            self.session.event(
                "preempt", engine=self.engine, request=request, sample=sample, detail={}
            )
        self.going = bool(scheduled.total_num_scheduled_tokens)
        if self.going and self._stale:
            self._complete_weights()

    def _goes_on(self, scheduled: Any) -> bool:
        """Whether every request of the last step goes on by one token, and that is all."""
        if not self._may_be_quiet or self._same is None or self._stale:
            return False
        rows, cached = len(self._same[0]), scheduled.scheduled_cached_reqs
        return not (
            scheduled.total_num_scheduled_tokens != rows
            or len(cached.req_ids) != rows
            or scheduled.finished_req_ids
            or scheduled.scheduled_new_reqs
            or scheduled.scheduled_spec_decode_tokens
            or cached.resumed_req_ids
            or getattr(scheduled, "preempted_req_ids", None)
        )

    def _loud(self) -> None:
        """The step that is running is one of its own after all; its rows are not laid out yet."""
        self._quiet = False
        self.blocks.collect()
        if self._size:
            follow_blocks(self.scheduled.scheduled_cached_reqs, self._lives)

    def _loud_late(self) -> None:
        """The same of a step whose rows were laid out as those of a quiet one, and ran."""
        self._loud()
        if self._running and self._start is not None:
            batch, one = self._batch, np.ones(self._running, np.int64)
            self._rows = self.roster.place(batch.lives, self._start, one, index=batch.index)
            self.take_routes()

    def _born(self, new: Any) -> Life | None:
        params, ids = new.sampling_params, new.prompt_token_ids
        if (params is None or ids is None) and not self._speaks:
            return None
        if params is None or ids is None:
            reason = "pooling requests and prompts given as embeddings are not recorded"
            self.session.event("gap", engine=self.engine, detail={"reason": reason})
            return None
        request, sample = request_of(new.req_id)
        how = read_sampling(params)
        options = self.session.options
        # of several cache groups the first may be one of a sliding window
        one_group = len(new.block_ids) == 1
        return self.roster.add(
            Life(
                request=request,
                sample=sample,
                prompt=np.array(ids, np.uint32),
                greedy=how.greedy,
                temperature=how.temperature,
                edits=how.edits,
                truncation=how.truncation,
                top_k=how.top_k,
                wanted=recorded(params) and wants_prompt(ids, options),
                blocks=list(new.block_ids[0]) if one_group else [],
            )
        )

    def launch(
        self, ids: Sequence[str], start: np.ndarray, n: np.ndarray, drafted: np.ndarray | None
    ) -> None:
        """The batch, in row order; called right before the model runs."""
        self._t_ns, self._graph = time.time_ns(), _graph()
        self._tokens = self.scheduled.total_num_scheduled_tokens
        self._running, self._drafted = len(ids), 0
        if self._quiet:
            if drafted is None and self._same is not None and self._same[0] == ids:
                self._start = start
                return
            self._loud()
        if self._same is None or self._same[0] != ids:
            lives = [self._lives.get(name) for name in ids]
            known = [life for life in lives if life is not None]
            if len(known) != len(lives):
                self.going, self._running = False, 0
                self.blocks.lose()
                return
            self._same = (list(ids), _Batch.of(known))
        self._batch = self._same[1]
        same = self._batch
        self._rows = self.roster.place(same.lives, start, n, drafted, index=same.index)
        self._drafted = 0 if drafted is None else int(drafted.sum())

    def take_routes(self) -> None:
        """The model ran: its routes are in the buffer."""
        if self._rows is not None and self._buffer is not None:
            self._host_routes = self._buffer.leave(self._tokens, self._outlet)

    def before_sampling(self, logits: torch.Tensor | None, in_place: bool) -> None:
        """Keep the logits as the model gave them.

        Args:
            logits: [rows, V].
            in_place: whether the sampler may write to them where they are float32.
        """
        self._raw = None
        if logits is None or not self._running or not self._speaks:
            return
        if len(logits) != self._running + self._drafted:
            return
        self._vocab = int(logits.shape[-1])
        # drafts are verified on copies
        keep = in_place and logits.dtype == torch.float32 and not self._drafted
        self._raw = logits.clone() if keep else logits

    def sampled(
        self,
        token: torch.Tensor,
        cut: torch.Tensor | None,
        temperature: torch.Tensor | None,
        own: torch.Tensor | None,
        kind: str | None,
    ) -> None:
        """A token was drawn in every row.

        Args:
            token: integers [rows, 1 or more], -1 behind the accepted ones.
            cut: [rows, V] logits after truncation, or None.
            temperature: float [rows] as the sampler has it; None if all rows are greedy.
            own: float32 [rows] logprobs that the engine returns.
            kind: what they are: `raw` or `processed`.
        """
        raw = self._raw
        if not self._running:
            return
        scale = None
        if raw is not None and self._batch.warm and temperature is not None:
            scale = self._scale_of(temperature)
        if raw is None or len(raw) != self._running:
            if self._quiet:
                self._loud_late()
            self._several(token, scale)
            return
        if cut is not None and (cut.shape != raw.shape or not self.wants_masked):
            cut = None
        drawn = Drawn(
            token=token, raw=raw, cut=cut, scale=scale, own=own if kind is not None else None,
            kind=kind, top_k=self._batch.top_k,
        )  # fmt: skip
        self._source = "recomputed" if drawn.own is None else "engine"
        if self._quiet and drawn.listed:
            self._keep(drawn)
            return
        if self._quiet:
            self._loud_late()
        if self._measure is not None:
            self._table = drawn.table(self._measure)
            self._device_values |= drawn.bitmap()
        else:
            self._device_values |= drawn.values()
        if self._top:
            logprobs = raw.log_softmax(-1, dtype=torch.float32)
            ids, best, tail = top_logprobs(logprobs, self._top)
            more = {"top_ids": ids.to(torch.int32), "top_logprobs": best, "tail": tail}
            self._device_values |= more

    def _scale_of(self, temperature: torch.Tensor) -> torch.Tensor:
        """float32 [rows] what logits are divided by; made once for each batch."""
        if self._scale is None or self._scale[0] is not self._batch:
            scale = torch.where(temperature < 1e-5, 1.0, temperature).float()
            self._scale = self._batch, scale
        return self._scale[1]

    def _several(self, token: torch.Tensor, scale: torch.Tensor | None) -> None:
        """There are no logits, or several rows of them a request: those of its drafts."""
        self._source = "recomputed"
        self._device_values["token"] = token
        if self._raw is not None and self._rows is not None:
            self._device_values |= measure_verified(
                token=token, raw=self._raw, drafted=self._rows.drafted, temperature=scale
            )

    def _keep(self, drawn: Drawn) -> None:
        """Leave all that is wanted of a quiet step on the device."""
        batch, buffer, version = self._batch, self._buffer, self.versions.current
        shape = drawn.shape(None if buffer is None else buffer.per_token)
        key = batch, self._graph, self.padded, version, self._vocab, *shape.values()
        assert self._same is not None and self._start is not None
        if not self._steady.goes_on(key):
            self.blocks.collect()
            words, layout = table_layout(self._running, **shape)
            facts = {
                "version": version, "vocab": self._vocab, "source": self._source,
                "padded": self.padded, "graph": self._graph, "columns": self._columns,
                "cut": self.wants_masked,
            }  # fmt: skip
            names = dict(zip(self._same[0], batch.lives, strict=True))
            alike = Alike(
                lives=batch.lives, index=batch.index, names=names, words=words, layout=layout,
                facts=facts,
            )  # fmt: skip
            self._steady.begin(key, alike)
        drawn.write(self._measure, self._steady.slot, self._steady.layout, buffer)
        cached = self.scheduled.scheduled_cached_reqs if self._size else None
        self._steady.add(self._number, self._t_ns, self._start, cached)
        self._kept = True

    def scored(self, prompts: dict[str, Any]) -> None:
        """Prompts that the engine has scored: name -> LogprobsTensors on the host, or None."""
        for name, scores in prompts.items():
            life = self._lives.get(name)
            if life is not None and life.wanted and scores is not None and self._speaks:
                logprobs = scores.logprobs[:, 0].float().cpu().numpy()
                job = prompt_job(self.engine, life, logprobs, self._vocab)
                gap = {"engine": self.engine, "request": life.request, "sample": life.sample}
                detail = {"reason": "logprobs of its prompt"}
                self.session.put(job, nbytes=logprobs.nbytes, gap={**gap, "detail": detail})

    def finish(self) -> None:
        """The step is over; its tensors start on their way to the host."""
        if self._quiet and self._kept:
            self.going = False
            self._drop()
            if self._steady.waits():
                self.blocks.flush()
            return
        if self._quiet:
            self._loud_late()
        rows, ran, number = self._rows, self.going, self._number
        values, table, routes = self._device_values, self._table, self._host_routes
        self.going = False
        self._drop()
        if rows is None or not in_steps(number % REPLICA_STEPS, self.session.options):
            if ran:
                self.blocks.lose()
            return
        host = {name: self._outlet.copy(tensor) for name, tensor in values.items()}
        if table is not None:
            table = Table(data=self._outlet.copy(table.data), layout=table.layout)
        if routes is not None:
            host["routes"] = routes
        ready, held = self._outlet.done()
        step = Step(
            number=number,
            t_ns=self._t_ns,
            rows=rows,
            version=self.versions.current,
            values=host,
            vocab=self._vocab,
            source=self._source,
            padded=self.padded,
            graph=self._graph,
            columns=self._columns,
            ready=ready,
            held=held,
            table=table,
            cut=self.wants_masked,
        )
        self.blocks.add(step)


def _tensor_ranks() -> tuple[int, int]:
    """(rank, size) of the tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def _stage() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def _graph() -> str | None:
    """Key of the CUDA graph that this step replays; None if it is eager."""
    available, current = _forward_context()
    if not available():
        return None
    context = current()
    mode = getattr(context, "cudagraph_runtime_mode", None)
    name = getattr(mode, "name", None)
    if name in (None, "NONE"):
        return None
    tokens = getattr(getattr(context, "batch_descriptor", None), "num_tokens", None)
    return f"{name.lower()}:{tokens}"


@functools.cache
def _forward_context() -> tuple[Callable[[], bool], Callable[[], Any]]:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available, get_forward_context
