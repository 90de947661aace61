"""Records `generate()` of transformers causal language models.

`GenerationMixin._sample` is patched, what it calls before the model runs, and the decoding modes
that only leave a gap; without an active session none of it does anything. For the length of one
call the recorder stands at four places, none of which changes a
value: three logits processors that pass their scores through (before all others, before the first
that truncates, after all), the stopping criteria (first to see the sampled token), a forward
pre-hook on the model (what was run) and one on every `experts` module (what was chosen).

Tensors are kept by reference on their device and handed over in blocks of steps; the rows are made
by `rolltape.recorder.generation` in the writer thread.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rolltape.recorder.annotate import remember
from rolltape.recorder.blocks import Call, Forward, StepData, stack_block, to_host
from rolltape.recorder.digest import GroupDigest, weights_stamp
from rolltape.recorder.facts import experts_implementation, model_facts, sdpa_backends
from rolltape.recorder.force import Force, ForcedChoice
from rolltape.recorder.gating import LeftOut, in_steps, prompt_key, wants
from rolltape.recorder.generation import block_job, opening_job
from rolltape.recorder.layout import call_layout
from rolltape.recorder.moe import MoeBlock, decoder_layers, find_moe_blocks
from rolltape.recorder.options import Options
from rolltape.recorder.parts import digests_of_transformers
from rolltape.recorder.patches import Patches
from rolltape.recorder.ray import in_worker
from rolltape.recorder.rows import engine_job
from rolltape.recorder.sampling import Sampling, read_sampling
from rolltape.recorder.session import Session, recording
from rolltape.recorder.settings import record_settings
from rolltape.recorder.tactics.bind import observe_all
from rolltape.recorder.tactics.kernels import KernelProfiler
from rolltape.recorder.top import check_top, top_logprobs
from rolltape.recorder.weights import Versions
from rolltape.store import ForcingError, new_uuid

if TYPE_CHECKING:
    from torch import nn

#: A block is handed over after this long, this many steps or this many bytes; what a kill loses.
BLOCK_SECONDS = 1.0
BLOCK_STEPS = 256
BLOCK_BYTES = 32 << 20

_UNRECORDED_MODES = ("_beam_search", "_assisted_decoding", "generate_batch")
#: What `_sample` calls before the model runs, and nobody else; between these and the first logits
#: processor a forward is its own, anything else comes from a streamer or a stopping criterion.
_BEFORE_FORWARDS = ("_prefill", "_has_unfinished_sequences")
_patches = Patches()


class _Running(threading.local):
    """The innermost `generate()` call of a thread that is being recorded."""

    recording: _Recording | None = None
    drafting: bool = False  # inside of a mode that is not recorded: its `_sample` calls are drafts
    force: Force | None = None  # of the next call that is recorded


_running = _Running()
#: A worker that may be killed after a call waits so long for what it recorded to be written.
_DRAIN_SECONDS = 5.0

_lock = threading.Lock()
_gated = False  # whether this version has what `_BEFORE_FORWARDS` names


def _after_fork() -> None:
    # another thread of the parent may have held it, and nobody is left to let go
    global _lock
    _lock = threading.Lock()
    _running.recording, _running.drafting, _running.force = None, False, None


os.register_at_fork(after_in_child=_after_fork)


def bind() -> bool:
    """Patch transformers' generation; called once it has been imported.

    Returns:
        Whether it was not patched before.
    """
    if _patches:
        return False
    from transformers.generation.utils import GenerationMixin

    _patches.around(GenerationMixin, "_sample", _around_sample, inherited=True)
    global _gated
    _gated = all(hasattr(GenerationMixin, name) for name in _BEFORE_FORWARDS)
    for name in _BEFORE_FORWARDS if _gated else ():
        _patches.around(GenerationMixin, name, _before_forwards, inherited=True)
    for mode in _UNRECORDED_MODES:
        _patches.around(GenerationMixin, mode, _around_unrecorded, inherited=True)
    return bool(_patches)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


@contextmanager
def forced(force: Force) -> Iterator[None]:
    """Force the tokens of the `generate()` call of this thread inside of the block.

    Raises:
        ForcingError: at the end of the block, if no call was recorded under the force.
    """
    _running.force = force
    try:
        yield
    finally:
        _running.force = None
    if not force.taken:
        raise ForcingError(
            "no generate() call was recorded while its tokens were to be forced",
            hint="the decoding mode is one that is not recorded",
        )


def _around_unrecorded(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is not None:
        detail = {"reason": f"decoding mode {wrapped.__name__} is not recorded"}
        session.event("gap", detail=detail)
    outer, _running.drafting = _running.drafting, True
    try:
        return wrapped(*args, **kwargs)
    finally:
        _running.drafting = outer


def _before_forwards(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
    recording = _running.recording
    if recording is not None and recording.model is model:
        recording.expecting = True
    return wrapped(*args, **kwargs)


def _around_sample(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None or _running.drafting:
        return wrapped(*args, **kwargs)
    call = session.safely("generate.begin", _begin, session, model, args, kwargs)
    if call is None:
        reason = "generate.begin failed or is disabled: a call is not recorded"
        session.event("gap", detail={"reason": reason})
    if isinstance(call, _Engine):  # nothing of it is wanted: only its steps are counted
        count = model.register_forward_pre_hook(call.count_step)
        try:
            return wrapped(*args, **kwargs)
        finally:
            count.remove()
    if not isinstance(call, _Recording):
        return wrapped(*args, **kwargs)
    outer, _running.recording = _running.recording, call
    try:
        result = wrapped(*args, **call.kwargs)
    except BaseException as error:
        call.finish("error" if isinstance(error, Exception) else "abort")
        raise
    else:
        call.finish(None)
        session.safely("generate.requests", remember, call.call.all_keys())
        return result
    finally:
        _running.recording = outer
        call.detach()
        if _may_be_killed():
            session.commit(_DRAIN_SECONDS)


def _may_be_killed() -> bool:
    """Whether this is a worker of a `multiprocessing.Pool`, which is terminated, or of Ray."""
    module = sys.modules.get("multiprocessing.process")
    return bool(module is not None and module.current_process().daemon) or in_worker()


class _Engine:
    """What is known of one model in this process: its engine id, its blocks, its weights."""

    def __init__(self, session: Session, model: Any) -> None:
        self.id = new_uuid()
        self.session = weakref.ref(session)
        self.blocks: list[MoeBlock] = find_moe_blocks(model)
        wants_layers = session.options.layers or session.options.sketches
        self.layers = decoder_layers(model) if wants_layers else {}
        self.layers_left = session.options.layers
        self.sketches_left = session.options.sketches
        self.kernels = KernelProfiler(session.options.profile_kernels)
        session.safely("tactics.bind", observe_all, self.id)
        self.calls = itertools.count()
        self._steps = itertools.count()
        self.ran = 0  # steps so far
        self.versions = Versions(session, self.id)
        self.left_out = LeftOut(session, self.id)
        self.stamp: int | None = None
        self.digests: list[GroupDigest] | None = None
        facts, wanted = model_facts(model), session.options.top_logprobs
        # too many: said and recorded at once, and the rest of the recording goes on without
        self.top = wanted and session.safely(
            "generate.top_logprobs", check_top, wanted, facts["vocab_size"]
        )
        requested, facts["effective"] = record_settings(session, self.id, {}, facts["effective"])
        session.put(
            engine_job(self.id, "rollout", "transformers", facts, requested),
            nbytes=4096,
            gap={"engine": self.id, "detail": {"table": "engines"}},
        )

    def next_step(self) -> int:
        """Number of the step that begins."""
        step = next(self._steps)
        self.ran = step + 1
        return step

    def count_step(self, *_: Any) -> None:
        """A forward runs that is not recorded."""
        self.next_step()

    def check_weights(self, model: nn.Module) -> None:
        """New version if the weights are not what they were at the last call."""
        stamp = weights_stamp(model)
        if stamp == self.stamp:
            return
        try:
            digests = digests_of_transformers(model)
        except Exception as error:  # out of memory, say: the version is new, what it is unknown
            self.stamp, self.digests = stamp, None
            self.versions.complete(reason=f"{type(error).__name__}: {error}")
            self.versions.session.fault("generate.digest", error)
            return
        self.stamp = stamp
        if digests == self.digests and all(row.value is not None for row in digests):
            return  # moved, or written with what was there
        self.digests = digests
        self.versions.complete(digests=digests)


_engines: weakref.WeakKeyDictionary[Any, _Engine] = weakref.WeakKeyDictionary()


def _engine_of(session: Session, model: Any) -> _Engine:
    with _lock:
        engine = _engines.get(model)
        if engine is None or engine.session() is not session:
            engine = _engines[model] = _Engine(session, model)
        return engine


def _begin(session: Session, model: Any, args: Any, kwargs: Any) -> _Recording | _Engine | str:
    """The recording of a call; its engine if nothing of it is wanted; why there can be none."""
    problem = _unsupported(model, args, kwargs)
    if problem:
        session.event("gap", detail={"reason": problem})
        return problem
    engine = _engine_of(session, model)
    ids, mask = args[0], kwargs.get("attention_mask")
    prompts = ids.detach().to("cpu", copy=True).numpy()
    pad_left = _pad_left(ids, mask)
    wanted = _wanted(engine, session.options, prompts, pad_left)
    if wanted is not None and not wanted.any():
        engine.left_out.add("calls")
        return engine
    engine.check_weights(model)
    return _Recording(session, engine, model, (prompts, pad_left, wanted), kwargs)


def _wanted(
    engine: _Engine, options: Options, prompts: np.ndarray, pad_left: np.ndarray
) -> np.ndarray | None:
    """Whether each row of a call is recorded; None: all are. Steps are taken by whole calls."""
    if options.sample_rate >= 1 and not options.steps:
        return None
    wanted = np.zeros(len(prompts), bool)
    if in_steps(engine.ran, options):
        keys = [prompt_key(row[pad:]) for row, pad in zip(prompts, pad_left, strict=True)]
        wanted[:] = [wants(key, options) for key in keys]
    if not wanted.all():
        engine.left_out.add("sequences", int((~wanted).sum()))
    return wanted


def _unsupported(model: Any, args: Any, kwargs: Any) -> str | None:
    if len(args) != 1 or not {"stopping_criteria", "generation_config"} <= kwargs.keys():
        return "`_sample` was called in an unknown way"
    input_ids, mask = args[0], kwargs.get("attention_mask")
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not recorded"
    if input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
        return "generation from inputs_embeds is not recorded: the prompt ids are unknown"
    if mask is not None and mask.ndim != 2:
        return f"attention masks with {mask.ndim} dimensions are not recorded"
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        return "the attention mask is not left padding: positions would be ambiguous"
    return None


class _Probe:
    """A logits processor that looks and passes the scores on."""

    def __init__(self, look: Any) -> None:
        self._look = look

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._look(scores)
        return scores


def _watched(criteria: Any, look: Any) -> Any:
    """The same stopping criteria, which also show their answer."""

    class Watched(type(criteria)):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            done = super().__call__(input_ids, scores, **kwargs)
            look(input_ids, done)
            return done

    return Watched(criteria)


class _Recording:
    """One `generate()` call being recorded."""

    def __init__(
        self,
        session: Session,
        engine: _Engine,
        model: Any,
        rows: tuple[np.ndarray, np.ndarray, np.ndarray | None],
        kwargs: Any,
    ) -> None:
        prompts, pad_left, wanted = rows
        config = kwargs["generation_config"]
        self.session, self.engine, self.model = session, engine, model
        self.sampling: Sampling = read_sampling(config, kwargs.get("logits_processor"))
        keep = min(engine.layers_left, len(prompts))
        engine.layers_left -= keep
        sketched = min(engine.sketches_left, len(prompts))
        engine.sketches_left -= sketched
        compiled = _compiled(model, kwargs, config)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.force, _running.force = _running.force, None
        self.call = Call(
            engine=engine.id,
            number=next(engine.calls),
            prompts=prompts,
            pad_left=pad_left,
            wanted=wanted,
            samples=max(1, config.num_return_sequences or 1),
            sampling=self.sampling,
            layers=tuple(b.layer for b in engine.blocks) if session.options.routes else (),
            k=engine.blocks[0].k if engine.blocks else 0,
            num_experts=engine.blocks[0].num_experts if engine.blocks else 0,
            weight_version=engine.versions.current,
            kept_rows=keep,
            sketched_rows=sketched,
            cached=int(getattr(cache, "get_seq_length", lambda: 0)()),
            route_gap="compiled" if compiled else "not-captured",
            cache=None if cache is None else type(cache).__name__,
            threads=torch.get_num_threads(),
            attention=getattr(model.config, "_attn_implementation", None),
            sdpa=sdpa_backends(),
            layout=call_layout(kwargs, pad_left),
            origins=None if self.force is None else self.force.origins,
        )
        self.vocab = 0
        self._steps: list[StepData] = []
        self._nbytes = 0
        self._first = 0
        self._since = time.monotonic()
        self.expecting = not _gated
        self._broken = False
        self._forwards: list[Forward] = []
        self._raw: torch.Tensor | None = None
        self._scaled: torch.Tensor | None = None
        self._processed: torch.Tensor | None = None
        self._support: torch.Tensor | None = None
        self._top: dict[str, torch.Tensor] = {}
        self._alive: torch.Tensor | None = None
        self._handles: list[Any] = []
        opening = {"engine": engine.id, "detail": {"call": self.call.number, "table": "sequences"}}
        session.put(opening_job(self.call), nbytes=self.call.prompts.nbytes, gap=opening)
        on_token = self._isolated("generate.token", self._on_token)
        self.kwargs = {
            **kwargs,
            "logits_processor": self._probed(kwargs.get("logits_processor")),
            "stopping_criteria": _watched(kwargs["stopping_criteria"], on_token),
        }
        if not compiled:
            try:
                self._attach()
            except Exception:
                self.detach()
                raise

    # -- places to stand ------------------------------------------------------------------

    def _attach(self) -> None:
        add, session = self._handles.append, self.session
        hook = self._guarded("generate.forward", self._on_forward)
        add(self.model.register_forward_pre_hook(hook, with_kwargs=True))
        for index, block in enumerate(self.engine.blocks if session.options.routes else ()):
            look = self._guarded("generate.routes", self._on_experts, index)
            add(block.experts.register_forward_pre_hook(look, with_kwargs=True))
        if self.engine.kernels.left:
            wanted = lambda: self.expecting and _running.recording is self  # noqa: E731
            self._handles += self.engine.kernels.attach(self.model, session, wanted)
        if self.call.kept_rows or self.call.sketched_rows:
            for number, layer in self.engine.layers.items():
                look = self._guarded("generate.layers", self._on_layer, f"layers.{number}.out")
                add(layer.register_forward_hook(look))

    def _isolated(self, name: str, look: Any) -> Any:
        """`look`, whose errors end the recording of this call but never the call.

        Going on after one would put later tokens and routes at wrong positions.
        """

        def isolated(*args: Any) -> None:
            if not self._broken and self.session.safely(name, _done, look, *args) is None:
                self._give_up(name)

        return isolated

    def _guarded(self, name: str, look: Any, *first: Any) -> Any:
        isolated = self._isolated(name, look)

        def hook(module: Any, *args: Any) -> None:
            # the model may run for another thread too, or for a call inside of this one
            if self.expecting and _running.recording is self:
                isolated(*first, *args)

        return hook

    def _give_up(self, name: str) -> None:
        self._broken = True
        detail = {
            "reason": f"{name} failed or is disabled: the rest of this call is not recorded",
            "call": self.call.number,
            "first_step": self._first + len(self._steps),
        }
        self.session.event("gap", engine=self.engine.id, detail=detail)

    def detach(self) -> None:
        """Take every hook away."""
        while self._handles:
            self._handles.pop().remove()

    def _probed(self, processors: Any) -> Any:
        from transformers.generation.logits_process import LogitsProcessorList

        items = list(processors or ())
        split = self.sampling.first_truncation
        raw, scaled, last = (
            _Probe(self._isolated(f"generate.{name}", look))
            for name, look in (
                ("raw", self._on_raw),
                ("scaled", self._on_scaled),
                ("processed", self._on_processed),
            )
        )
        force = [] if self.force is None else [self._forced(self.force)]
        return LogitsProcessorList([raw, *items[:split], scaled, *items[split:], last, *force])

    def _forced(self, force: Force) -> ForcedChoice:
        force.taken = True
        return ForcedChoice(force, self.call.width)

    # -- what they see --------------------------------------------------------------------

    def _on_forward(self, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            ids = kwargs["inputs_embeds"]
        experts = experts_implementation(self.model) if self.engine.blocks else None
        self._forwards.append(
            Forward(
                step=self.engine.next_step(),
                t_ns=time.time_ns(),
                columns=int(ids.shape[1]),
                experts=experts,
                routes={},
                layers={},
            )
        )

    def _on_experts(self, index: int, args: Any, kwargs: Any) -> None:
        ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
        weights = args[2] if len(args) > 2 else kwargs["top_k_weights"]
        self._forwards[-1].routes[index] = (ids, weights)

    def _on_layer(self, site: str, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        rows = max(self.call.kept_rows, self.call.sketched_rows)
        kept = hidden.detach()[:rows].clone()
        self._nbytes += kept.nbytes
        self._forwards[-1].layers[site] = kept

    def _on_raw(self, scores: torch.Tensor) -> None:
        self.expecting = False
        self.vocab = int(scores.shape[-1])
        self._raw = torch.log_softmax(scores, -1)
        if self.engine.top:
            ids, logprobs, tail = top_logprobs(self._raw, self.engine.top)
            self._top = {"top_ids": ids, "top_logprobs": logprobs, "tail": tail}
            self._nbytes += ids.nbytes + logprobs.nbytes + tail.nbytes

    def _on_scaled(self, scores: torch.Tensor) -> None:
        same = not self.sampling.edits and self.sampling.temperature == 1.0
        self._scaled = self._raw if same else torch.log_softmax(scores, -1)

    def _on_processed(self, scores: torch.Tensor) -> None:
        if self.sampling.greedy:
            return
        self._processed = self._scaled
        if self.sampling.truncation:
            self._processed = torch.log_softmax(scores, -1)
        if self.sampling.cuts:
            self._support = _pack(scores)
            self._nbytes += self._support.nbytes

    def _on_token(self, input_ids: torch.Tensor, done: torch.Tensor) -> None:
        token = input_ids[:, -1:].clone()  # a view would keep all of input_ids alive
        raw, scaled, processed = (
            None if lp is None else lp.gather(-1, token).squeeze(-1)
            for lp in (self._raw, self._scaled, self._processed)
        )
        if self._alive is None:
            self._alive = torch.ones_like(done)
        step = StepData(
            forwards=self._forwards,
            token=token.squeeze(-1),
            raw=raw,
            scaled=scaled,
            processed=processed,
            support=self._support,
            alive=self._alive,
            done=done,
            **self._top,
        )
        self._alive = self._alive & ~done
        self._forwards, self._support, self._top = [], None, {}
        self.expecting = not _gated
        self._raw = self._scaled = self._processed = None
        self._steps.append(step)
        self._nbytes += 32 * token.nbytes + self._route_bytes(step.forwards)
        late = time.monotonic() - self._since > BLOCK_SECONDS
        if late or len(self._steps) >= BLOCK_STEPS or self._nbytes >= BLOCK_BYTES:
            self._hand_over(None, closing=False)

    def _route_bytes(self, forwards: list[Forward]) -> int:
        # all blocks of a model are alike: looking at one of them is enough for a bound
        total = 0
        for forward in forwards:
            for ids, weights in list(forward.routes.values())[:1]:
                total += (ids.nbytes + weights.nbytes) * len(forward.routes)
        return total

    # -- handing over ---------------------------------------------------------------------

    def finish(self, finish: str | None) -> None:
        """`end`, whose errors stay here; what could not be handed over is a gap."""
        first, steps = self._first, len(self._steps)
        failed = self.session.safely("generate.end", _done, self.end, finish) is None
        if failed and self._first == first:  # else `_hand_over` said it
            for gap in self._gaps(first, steps):
                self.session.event("gap", **gap)

    def end(self, finish: str | None) -> None:
        """Hand over what is left; `finish` names the end of rows that had not ended.

        A call whose recording was given up is left open: how long it became is not known.
        """
        self._hand_over(finish, closing=not self._broken)

    def _hand_over(self, finish: str | None, *, closing: bool) -> None:
        first, steps, nbytes = self._first, self._steps, self._nbytes
        self._first, self._steps, self._nbytes = first + len(steps), [], 0
        self._since = time.monotonic()
        try:
            block = stack_block(
                self.call,
                first,
                steps,
                alive=self._alive,
                vocab=self.vocab,
                finish=finish,
                closing=closing,
            )
            job = block_job(self.call, to_host(block))
        except Exception:
            for gap in self._gaps(first, len(steps)):
                self.session.event("gap", **gap)
            raise
        self.session.put(job, nbytes=nbytes, gap=self._gaps(first, len(steps)))

    def _gaps(self, first: int, steps: int) -> list[dict[str, Any]]:
        """What is missing if a block is lost: the same positions of every row."""
        call = self.call
        detail = {"call": call.number, "first_step": first, "steps": steps}
        return [
            {
                "engine": call.engine,
                "request": call.request(row),
                "sample": row % call.samples,
                "start": call.prompt_len(row) + first,
                "n": steps,
                "detail": detail,
            }
            for row in call.recorded
        ]


def _done(look: Any, *args: Any) -> bool:
    look(*args)
    return True


def _pack(scores: torch.Tensor) -> torch.Tensor:
    """Bitmap [rows, ceil(V / 8)] of scores that are not -inf; bit i of byte j is 8 j + i."""
    if scores.device.type == "cpu":
        kept = scores.float().numpy() != -np.inf
        return torch.from_numpy(np.packbits(kept, axis=-1, bitorder="little"))
    kept_bytes = torch.nn.functional.pad(scores != -torch.inf, (0, -scores.shape[-1] % 8))
    # eight bytes of 0 or 1 as one integer; the product moves bit 8 i to bit 56 + i, and no two
    # of its terms meet. Nothing here makes the host wait for the device.
    return (kept_bytes.view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8)


def _pad_left(ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
    if mask is None:
        return np.zeros(ids.shape[0], np.int64)
    width = ids.shape[1]
    return (mask[:, :width] == 0).sum(-1).cpu().numpy().astype(np.int64)


def _compiled(model: Any, kwargs: Any, config: Any) -> bool:
    criteria = getattr(model, "_valid_auto_compile_criteria", None)
    return bool(criteria(kwargs, config)) if criteria else False
