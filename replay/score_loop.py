"""The forwards of a scoring, one batch after the other, and what each is turned into.

Everything that one forward found goes to host memory. A thread writes it while the model runs the
next one; what is read of the recording is read by the thread that runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
import xxhash

from rolltape.recorder.facts import dtype_name
from rolltape.recorder.moe import find_moe_blocks
from rolltape.replay.batches import Batch
from rolltape.replay.forcing import BlockChoice, RouteForcing
from rolltape.replay.logprobs import sampling_spans, score, unrecorded_supports
from rolltape.replay.models import facts_of
from rolltape.replay.plan import Run
from rolltape.replay.tapes import (
    BatchRoutes,
    LayerTap,
    ScoredBatch,
    ScoredSequence,
    ScoreWriter,
    SiteTap,
    step_row,
    tap_of,
)
from rolltape.store import Routes, Supports, TapeWriter
from rolltape.store import Sequence as TapeSequence

#: What was scored so long ago is on disk, whatever happens to this process. A commit costs some
#: milliseconds, which small batches would feel.
_COMMIT_SECONDS = 1.0


def score_batches(run: Run, batches: list[Batch], writer: TapeWriter, top: int) -> None:
    """Run all forwards and write what they find.

    Args:
        run: what is asked for.
        batches: all forwards.
        writer: of the new tape.
        top: keep so many of the most probable tokens of every position.
    """
    facts = facts_of(run.model, run.name)
    settings = {f"switch.{key}": value for key, value in run.options.switches.as_dict().items()}
    facts["effective"] = {**facts["effective"], **settings, "layout": run.options.layout}
    output = ScoreWriter(writer, run.engines, facts, run.options.switches)
    weights = {engine: (m.digests, m.version) for engine, m in run.matches.items()}
    output.engines(run.options.as_dict(), weights)
    output.opened(run.sequences)
    writer.flush()
    choices: list[BlockChoice] = []
    committed = time.monotonic()

    def write(found: ScoredBatch) -> None:
        nonlocal committed
        output.write(found)
        if time.monotonic() - committed >= _COMMIT_SECONDS:
            writer.flush()
            committed = time.monotonic()

    with ExitStack() as stack:
        forcing = None
        if find_moe_blocks(run.model):
            tap = RouteForcing(run.model, run.options.mode or "ids", capture=_keeper(choices))
            forcing = stack.enter_context(tap)
        layer_tap: LayerTap | SiteTap | None = None
        if run.layer_keys:  # a model that nobody looks at runs without hooks
            layer_tap = tap_of(run.model, run.options.sites)
            stack.enter_context(layer_tap)
        behind = stack.enter_context(ThreadPoolExecutor(1, "rolltape-score"))
        written: Future[None] | None = None
        for number, batch in enumerate(batches):
            found = _score_batch(run, number, batch, forcing, choices, layer_tap, top)
            if written is not None:
                written.result()  # raises what went wrong there
            written = behind.submit(write, found)
        if written is not None:
            written.result()
        if layer_tap is not None and layer_tap.unseen():
            run.warn(f"sites that never passed by: {', '.join(layer_tap.unseen())}")
    output.closed([s for s in run.sequences if not s.length])
    _compare_ranks(run)


def _compare_ranks(run: Run) -> None:
    first, *others = run.ranks.gather(run.values)
    for rank, other in enumerate(others, 1):
        differ = sum(value != other.get(key) for key, value in first.items())
        if differ:
            run.warn(
                f"rank {rank} computed other values than rank 0 for {differ} of {len(first)} "
                "sequences: kernels that are not deterministic, or another state of the model; "
                "the tape holds those of rank 0"
            )


def _keeper(choices: list[BlockChoice]) -> Callable[[BlockChoice], None]:
    def keep(choice: BlockChoice) -> None:
        # where the model runs: copying to the host would make every layer wait for the one before
        live = choice.live_ids.to(torch.int32, copy=True)
        forced = choice.used_ids is not choice.live_ids
        choices.append(
            BlockChoice(
                layer=choice.layer,
                live_ids=live,
                used_ids=choice.used_ids.to(torch.int32, copy=True) if forced else live,
                used_weights=choice.used_weights.to(torch.float32, copy=True),
                margin=choice.margin,
            )
        )

    return keep


def _stacked(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """[R, ...] of every layer as [R, L, ...] on the host; layers may lie on several devices."""
    device = parts[0].device
    whole: np.ndarray = torch.stack([part.to(device) for part in parts], 1).cpu().numpy()
    return whole


def _batch_routes(choices: Sequence[BlockChoice], *, forced: bool) -> BatchRoutes:
    margins = [c.margin for c in choices if c.margin is not None]
    return BatchRoutes(
        layers=[c.layer for c in choices],
        used=_stacked([c.used_ids for c in choices]),
        weights=_stacked([c.used_weights for c in choices]),
        live=_stacked([c.live_ids for c in choices]) if forced else None,
        margin=_stacked(margins) if len(margins) == len(choices) else None,
    )


def _score_batch(
    run: Run,
    number: int,
    batch: Batch,
    forcing: RouteForcing | None,
    choices: list[BlockChoice],
    layer_tap: LayerTap | SiteTap | None,
    top: int,
) -> ScoredBatch:
    choices.clear()
    if layer_tap is not None:
        watched = [p for p in batch.placed if p.sequence.key.text in run.layer_keys]
        layer_tap.watch(watched, columns=batch.columns)
    inputs = batch.inputs(run.device)
    t_ns = time.time_ns()
    routes = [_routes(run, p.sequence) for p in batch.placed]
    forced = any(r is not None for r in routes)
    with ExitStack() as stack:
        if forcing is not None and forced:
            laid_out = batch.routes(routes)
            run.count(
                forced=int(laid_out.valid.sum()), decisions=batch.tokens * len(laid_out.layers)
            )
            stack.enter_context(forcing.routes(laid_out))
        logits = run.model(**inputs).logits
    seen = forcing is not None and len(choices) == len(forcing.layers)
    if forcing is not None and not seen:
        run.warn(f"{len(choices)} of {len(forcing.layers)} MoE layers could be seen: no routes")
    scored = [_score_sequence(run, p.sequence, logits[p.span], top) for p in batch.placed]
    run.count(forward_tokens=batch.tokens)
    taken = [] if layer_tap is None else layer_tap.taken()
    return ScoredBatch(
        batch=batch,
        step=step_row(number, batch, run.model, t_ns=t_ns),
        routes=_batch_routes(choices, forced=forced) if seen else None,
        sequences=scored,
        activations=[(s, site, dtype_name(x.dtype), x.float().numpy()) for s, site, x in taken],
    )


def _score_sequence(
    run: Run, sequence: TapeSequence, logits: torch.Tensor, top: int
) -> ScoredSequence:
    switches = run.options.switches
    spans = sampling_spans(sequence, switches)
    supports = _supports(run, sequence) if switches.support == "recorded" else None
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    found = score(logits, sequence, spans, supports, dtype=dtype, top=top)
    run.count(tokens=int(found.raw.valid.sum()), outside=found.outside)
    if run.ranks.size > 1:
        columns = (found.raw, found.scaled, found.processed)
        bits = b"".join(column.values.tobytes() for column in columns)
        run.values[sequence.key.text] = xxhash.xxh3_64_intdigest(bits)
    refused = {edit for s in spans if s.sampling for edit in s.sampling.not_applied}
    if refused:
        run.warn(f"edits that cannot be applied again, left out: {', '.join(sorted(refused))}")
    return ScoredSequence(
        sequence=sequence,
        mask=sequence.loss_mask,
        spans=spans,
        logprobs=found,
        supports=supports,
    )


def _supports(run: Run, sequence: TapeSequence) -> Supports:
    supports = sequence.supports()
    if supports is None:
        # nothing is known about the kept sets, which is not the same as nothing was cut
        run.count(without_support=1)
        return unrecorded_supports(sequence.length)
    return supports


def _routes(run: Run, sequence: TapeSequence) -> Routes | None:
    if run.options.mode is None:
        return None
    routes = sequence.routes()
    if routes is None:
        run.count(without_routes=1)
        return None
    transform = run.options.transform_routes
    return routes if transform is None else transform(sequence, routes)
