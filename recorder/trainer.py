"""What a trainer computed, recorded from its loss: logprobs, live routes, weights.

    with trainer.live_routes(model) as routes:
        logits = model(input_ids, attention_mask=mask).logits
    logprobs = ...                                    # [B, S - 1], of the tokens 1..S-1
    trainer.record_logprobs(
        model, input_ids, logprobs, attention_mask=mask, loss_mask=loss_mask,
        scoring="current", optimizer_step=step, micro_batch=i, routes=routes,
    )

Without a recording both do nothing. Every scoring of a sequence is a *pass* of its own; what it was
for (old, current, reference), the optimiser step and the micro-batch stand in its annotations.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.recorder.session import Session, recording
from rolltape.store import Masked, TapeWriter, codecs, new_uuid, token_digest
from rolltape.store.keys import Key

if TYPE_CHECKING:
    import torch
    from torch import nn

_ROLES = ("trainer", "reference")


@dataclass
class LiveRoutes:
    """Expert choices of a batch, per MoE layer.

    Args:
        num_experts: experts a layer.
        layers: layer -> (ids, weights) of each forward, [its rows * columns, k].
    """

    num_experts: int = 0
    layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Tokens, padding included, that all layers have seen; None if they differ, or none."""
        seen = {sum(len(ids) for ids, _ in pairs) for pairs in self.layers.values()}
        return seen.pop() if len(seen) == 1 else None


@contextmanager
def live_routes(model: nn.Module) -> Iterator[LiveRoutes]:
    """Keep the expert choices of the forwards inside of the block.

    Several are taken for the rows of one batch in pieces, one after another.

    Args:
        model: a transformers causal language model; for a dense one nothing is kept.
    """
    from rolltape.recorder.moe import find_moe_blocks

    session, found = recording(), LiveRoutes()
    handles: list[Any] = []
    for block in find_moe_blocks(model) if session is not None and session.options.routes else ():
        found.num_experts = block.num_experts

        def look(_: Any, args: Any, kwargs: Any, layer: int = block.layer) -> None:
            if session is not None:
                session.safely("trainer.routes", _keep, found, layer, args, kwargs)

        handles.append(block.experts.register_forward_pre_hook(look, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep(found: LiveRoutes, layer: int, args: Any, kwargs: Any) -> bool:
    ids, weights = (*args, *kwargs.values())[1:3]
    found.layers.setdefault(layer, []).append((ids.detach(), weights.detach()))
    return True


def record_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    prompt_lens: Sequence[int] | None = None,
    origins: Sequence[Key | str | None] | None = None,
    role: str = "trainer",
    scoring: str = "current",
    temperature: float = 1.0,
    optimizer_step: int | None = None,
    micro_batch: int | None = None,
    routes: LiveRoutes | None = None,
    facts: Mapping[str, str | float] | None = None,
) -> bool:
    """Record logprobs that a trainer computed over full vocabulary.

    Args:
        model: that computed them; its weights are digested once per optimizer step.
        input_ids: integers [B, S], padded; or [1, S] packed, with `cu_seqlens`.
        logprobs: natural logs [B, S] by position of the *token* (the first column means nothing),
            or [B, S - 1] of the tokens 1..S-1. Their dtype is recorded as that of the log-softmax.
        loss_mask: [B, S] or [B, S - 1] in the same way; true where the loss counts. Positions
            where it is not are recorded without a logprob.
        attention_mask: [B, S], true on tokens; by default all are.
        cu_seqlens: packed: sequence i is columns cu[i] : cu[i + 1].
        prompt_lens: prompt tokens of each sequence; by default up to the first in the loss.
        origins: of each sequence the key of the rollout's, so that a diff pairs by key.
        role: trainer or reference.
        scoring: what it is for: old, current, reference, or a word of your own.
        temperature: that the logits were divided by.
        optimizer_step: number of optimizer steps taken so far.
        micro_batch: number within the step.
        routes: from `live_routes`, of the same forward.
        facts: whatever else is true of this scoring; annotations of the pass, as the three above.

    Returns:
        Whether it was recorded; False without a recording. Its own faults are recorded as events
        and do not reach the caller.
    """
    session = recording()
    if session is None:
        return False
    done = session.safely(
        "trainer.logprobs",
        _record,
        session,
        model,
        _Batch(input_ids, logprobs, loss_mask, attention_mask, cu_seqlens, prompt_lens, origins),
        role,
        {
            **(facts or {}),
            "scoring": scoring,
            "optimizer_step": optimizer_step,
            "micro_batch": micro_batch,
        },
        float(temperature),
        routes,
    )
    return bool(done)


@dataclass(frozen=True)
class _Batch:
    ids: torch.Tensor
    logprobs: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    cu_seqlens: Sequence[int] | torch.Tensor | None
    prompt_lens: Sequence[int] | None
    origins: Sequence[Key | str | None] | None

    def places(self) -> list[tuple[int, int, int]]:
        """(row, first column, one behind the last) of each sequence."""
        rows, columns = self.ids.shape
        if self.cu_seqlens is not None:
            cuts = [int(c) for c in self.cu_seqlens]
            if rows != 1 or cuts[-1] > columns:
                raise ValueError(f"cu_seqlens ends at {cuts[-1]}, input_ids is {[rows, columns]}")
            return [(0, a, b) for a, b in itertools.pairwise(cuts)]
        if self.attention_mask is None:
            return [(row, 0, columns) for row in range(rows)]
        found = []
        for row, mask in enumerate(_host(self.attention_mask) != 0):
            at = np.flatnonzero(mask)
            if len(at) and at[-1] - at[0] + 1 != len(at):
                raise ValueError(f"attention_mask of row {row} has holes")
            found.append((row, int(at[0]), int(at[-1]) + 1) if len(at) else (row, 0, 0))
        return found


@dataclass(frozen=True)
class _Scored:
    key: Key
    ids: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    logprobs: np.ndarray
    origin: str | None
    rows: slice  # of the flattened batch


class _Engine:
    """One model in one role in this process, and how often it has scored each sequence."""

    def __init__(self, session: Session, model: nn.Module, role: str) -> None:
        from rolltape.recorder.facts import model_facts
        from rolltape.recorder.rows import engine_job
        from rolltape.recorder.weights import Versions

        self.id = new_uuid()
        self.session = weakref.ref(session)
        self.facts = model_facts(model)
        self.versions = Versions(session, self.id)
        self.digested: tuple[int | None, int] | None = None
        self.steps = 0
        self.scored: dict[str, tuple[str, int]] = {}
        session.put(
            engine_job(self.id, role, "trainer", self.facts),
            nbytes=4096,
            gap={"engine": self.id, "detail": {"table": "engines"}},
        )

    def check_weights(self, model: nn.Module, optimizer_step: int | None) -> None:
        """A new version if the weights are not what they were.

        Without its adapters a model is a reference that does not move: `weights_stamp` knows.
        """
        from rolltape.recorder.digest import weights_stamp
        from rolltape.recorder.parts import digests_of_transformers

        if self.digested and optimizer_step is not None and self.digested[0] == optimizer_step:
            return
        stamp = weights_stamp(model)
        before, self.digested = self.digested, (optimizer_step, stamp)
        if before is None or before[1] != stamp:
            label = None if optimizer_step is None else f"step {optimizer_step}"
            self.versions.complete(label, digests=digests_of_transformers(model))

    def next_pass(self, identity: str) -> tuple[str, int]:
        """Request id of a sequence and the number of this scoring of it."""
        request, count = self.scored.get(identity, (str(len(self.scored)), 0))
        self.scored[identity] = request, count + 1
        return request, count


_engines: weakref.WeakKeyDictionary[Any, dict[str, _Engine]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _engine_of(session: Session, model: nn.Module, role: str) -> _Engine:
    if role not in _ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(_ROLES)}")
    with _lock:
        mine = _engines.setdefault(model, {})
        engine = mine.get(role)
        if engine is None or engine.session() is not session:
            engine = mine[role] = _Engine(session, model, role)
        return engine


def _host(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def _by_token(tensor: torch.Tensor, columns: int) -> np.ndarray:
    """[B, S] by position of the token, from that or from [B, S - 1]."""
    values = tensor.detach()
    values = values.float() if values.is_floating_point() else values
    found = _host(values)
    if found.shape[1] == columns - 1:
        found = np.concatenate([np.zeros_like(found[:, :1]), found], axis=1)
    if found.ndim != 2 or found.shape[1] != columns:
        raise ValueError(f"shape {list(found.shape)} does not fit input_ids of {columns} columns")
    return found


def _record(
    session: Session,
    model: nn.Module,
    batch: _Batch,
    role: str,
    facts: dict[str, str | float | None],
    temperature: float,
    routes: LiveRoutes | None,
) -> bool:
    from rolltape.recorder.facts import dtype_name

    engine = _engine_of(session, model, role)
    step = facts["optimizer_step"]
    engine.check_weights(model, step if isinstance(step, int) else None)
    columns = int(batch.ids.shape[1])
    ids = _host(batch.ids)
    logprobs, mask = (_by_token(t, columns) for t in (batch.logprobs, batch.loss_mask))
    scored = []
    for i, (row, begin, end) in enumerate(batch.places()):
        mine, counts = ids[row, begin:end].astype(np.uint32), mask[row, begin:end] != 0
        counts = counts & (np.arange(len(mine)) > 0)  # nothing predicts the first token
        first = int(np.argmax(counts)) if counts.any() else len(mine)
        prompt = first if batch.prompt_lens is None else int(batch.prompt_lens[i])
        origin = None if batch.origins is None else batch.origins[i]
        text = origin.text if isinstance(origin, Key) else origin
        request, again = engine.next_pass(text or token_digest(prompt, mine))
        scored.append(
            _Scored(
                key=Key(engine.id, request, 0, again),
                ids=mine,
                prompt_len=prompt,
                loss_mask=counts,
                logprobs=logprobs[row, begin:end].astype(np.float32),
                origin=text,
                rows=slice(row * columns + begin, row * columns + end),
            )
        )
    number, engine.steps = engine.steps, engine.steps + 1
    chosen: tuple[list[int], np.ndarray, np.ndarray] | None = None
    if routes is not None and routes.layers:
        if routes.tokens != ids.size:
            raise ValueError(f"routes of {routes.tokens} tokens, input_ids has {ids.size}")
        layers = sorted(routes.layers)
        chosen = layers, _stacked(routes, layers, 0), _stacked(routes, layers, 1)
    job = _Rows(
        engine=engine.id,
        step=number,
        shape=ids.shape,
        version=engine.versions.current,
        facts={k: v for k, v in facts.items() if v is not None},
        temperature=temperature,
        vocab=engine.facts["vocab_size"],
        dtype=dtype_name(batch.logprobs.dtype),
        scored=scored,
        routes=chosen,
        num_experts=0 if routes is None else routes.num_experts,
        t_ns=time.time_ns(),
    )
    size = ids.nbytes + logprobs.nbytes + (0 if chosen is None else chosen[1].nbytes)
    gap = {"engine": engine.id, "detail": {"step": number, "sequences": len(scored)}}
    return session.put(job, nbytes=size, gap=gap)


def _stacked(routes: LiveRoutes, layers: list[int], half: int) -> np.ndarray:
    """Ids or weights of all layers, [tokens, layers, k]."""
    columns = []
    for layer in layers:
        parts = [pair[half] for pair in routes.layers[layer]]
        columns.append(np.concatenate([_host(p.float() if half else p) for p in parts]))
    return np.stack(columns, 1)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One scoring of a batch, to be written; runs in the writer thread."""

    engine: str
    step: int
    shape: tuple[int, ...]
    version: int
    facts: dict[str, str | float]
    temperature: float
    vocab: int
    dtype: str
    scored: list[_Scored]
    routes: tuple[list[int], np.ndarray, np.ndarray] | None
    num_experts: int
    t_ns: int

    def __call__(self, writer: TapeWriter) -> None:
        whole = sum(len(s.ids) for s in self.scored)
        writer.append(
            "steps",
            {
                "engine": self.engine,
                "step": [self.step],
                "call": self.step,
                "kind": "score",
                "t_ns": self.t_ns,
                "rows": self.shape[0],
                "columns": self.shape[1],
                "tokens": whole,
                "padded_tokens": self.shape[0] * self.shape[1] - whole,
            },
        )
        for row, sequence in enumerate(self.scored):
            self._sequence(writer, row, sequence)

    def _sequence(self, writer: TapeWriter, row: int, one: _Scored) -> None:
        n = len(one.ids)
        key = dict(zip(("engine", "request", "sample", "pass"), one.key, strict=True))
        span = {**key, "start": 0, "n": n}
        column = "raw" if self.temperature == 1.0 else "scaled"
        writer.append(
            "tokens",
            {
                **span,
                "ids": [one.ids],
                "loss_mask": [one.loss_mask],
                column: [Masked(one.logprobs, one.loss_mask)],
                "semantics": [
                    {
                        "temperature": self.temperature,
                        "edits": [],
                        "truncation": [],
                        "vocab_size": self.vocab,
                        "dtype": self.dtype,
                        "source": "engine",
                    }
                ],
            },
        )
        writer.append(
            "forwards",
            {
                **span,
                "step": self.step,
                "row": row,
                "kind": "score",
                "weight_version": self.version,
                "kv_source": "own",
            },
        )
        if self.routes is not None:
            layers, ids, weights = self.routes
            writer.append(
                "routes",
                {
                    **span,
                    "role": "used",
                    "step": self.step,
                    "weight_version": self.version,
                    "layers": [layers],
                    "k": ids.shape[2],
                    "num_experts": self.num_experts,
                    "encoding": "plain",
                    "ids": [codecs.encode_plain(ids[one.rows], self.num_experts)],
                    "weights": [codecs.encode_floats(weights[one.rows])],
                },
            )
        writer.append(
            "annotations",
            {
                **key,
                "name": list(self.facts),
                "number": [None if isinstance(v, str) else float(v) for v in self.facts.values()],
                "text": [v if isinstance(v, str) else None for v in self.facts.values()],
                "t_ns": self.t_ns,
            },
        )
        writer.append(
            "sequences",
            {
                **key,
                "origin": one.origin,
                "prompt_len": one.prompt_len,
                "length": n,
                "digest": token_digest(one.prompt_len, one.ids),
                "finish": "scored",
                "opened_ns": self.t_ns,
                "closed_ns": self.t_ns,
            },
        )
