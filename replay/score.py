"""Mode `score`: a teacher-forced forward over recorded sequences, as a trainer does it.

The result is a tape of its own. It is written batch by batch: what was scored before a failure
can be read, and the sequences that were not reached stay `open`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import nn

from rolltape.recorder.facts import model_facts
from rolltape.recorder.moe import find_moe_blocks
from rolltape.recorder.provenance import provenance
from rolltape.recorder.top import check_top
from rolltape.replay.batches import Batch
from rolltape.replay.conditions import applied
from rolltape.replay.factory import build, check_output, load_factory
from rolltape.replay.forcing import BlockChoice, RouteForcing
from rolltape.replay.logprobs import Logprobs, Span, sampling_spans, score, unrecorded_supports
from rolltape.replay.models import facts_of, load_model
from rolltape.replay.plan import (
    Options,
    RouteTransform,
    Run,
    as_layout,
    check_request,
    prepare,
    prove,
)
from rolltape.replay.ranks import ALONE, Ranks, current, started
from rolltape.replay.switches import Switches
from rolltape.replay.tapes import LayerTap, ScoreWriter, SiteTap, tap_of
from rolltape.replay.versions import as_version, checkpoint_of, parse_checkpoints
from rolltape.store import Routes, Supports, Tape, TapeWriter, UsageError, create_tape, seal
from rolltape.store import Sequence as TapeSequence
from rolltape.store import open as open_tape
from rolltape.store.distributions import distribution_columns, raw_semantics


def replay(
    tape: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    on: str = "transformers",
    switches: Sequence[str] = (),
    model: str | None = None,
    checkpoints: Sequence[str] = (),
    device: str | None = None,
    tokens_per_batch: int = 8192,
    layout: str = "padded",
    layers: int = 0,
    sequences: Sequence[str] | None = None,
    sites: str | None = None,
    top_logprobs: int = 0,
) -> dict[str, Any]:
    """Score a tape with the model that it names, and write the result as a new tape.

    Args:
        tape: the recording.
        out: folder of the new tape.
        on: `transformers`, or `package.module:factory`, see `rolltape.replay.factory`.
        switches: `KEY=VALUE`, see `rolltape.replay.switches.CHOICES`.
        model: path of the model; by default as the tape names it. Not with a factory.
        checkpoints: `VERSION=PATH`, for the switch `weights=VERSION`.
        device: torch device; by default CUDA if there is one.
        tokens_per_batch: tokens of one forward, padding included.
        layout: `padded` or `packed`.
        layers: keep the outputs of all decoder layers for so many sequences.
        sequences: ids of the sequences to keep layer outputs for, instead of the first ones.
        sites: keep the tensors of these sites instead of layer outputs: `layers.*.out,logits`, see
            `rolltape.replay.sites`.
        top_logprobs: keep the so many most probable tokens of every position that is scored, with
            the mass of all others; of the raw distribution, in the table `distributions`.

    Returns:
        The summary of `score_tape`.

    Raises:
        UsageError: a request, switch or layout that tape or model cannot do, or a factory that
            does not return such a model.
        ModelMismatchError: the model is not the one of the tape.
        ForcingError: the routes cannot be forced faithfully.
        TapeError: `tape` cannot be read, or `out` is there already.
        In all these cases nothing is written.
    """
    wanted = Switches.parse(switches)
    as_layout(layout)
    factory = load_factory(on) if ":" in on else None
    if factory is None and on != "transformers":
        raise UsageError(f"--on {on}: no such executor", hint="transformers | package.module:name")
    path = _path(wanted, checkpoints, model, from_factory=factory is not None)
    source = open_tape(tape)
    check_request(source, _local(out), wanted)  # before a long load
    for row in source.engines.values():
        check_top(top_logprobs, row["vocab_size"] or top_logprobs)
    before, ranks = started(), ALONE
    if factory is None:
        loaded, name = load_model(source, model=path, device=device)
    else:
        loaded, name = build(factory, source, on=on, device=device), None
        ranks = current()
    summary = score_tape(
        source,
        out,
        loaded,
        switches=wanted,
        model_name=name,
        tokens_per_batch=tokens_per_batch,
        layout=layout,
        layers=layers,
        sequences=sequences,
        sites=sites,
        top_logprobs=top_logprobs,
        on=on,
        ranks=ranks,
    )
    if started() and not before:
        torch.distributed.destroy_process_group()  # its factory started it for this replay
    return summary


def score_tape(
    tape: Tape | str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: nn.Module,
    *,
    switches: Switches | None = None,
    model_name: str | None = None,
    tokens_per_batch: int = 8192,
    layout: str = "padded",
    layers: int = 0,
    sequences: Sequence[str] | None = None,
    sites: str | None = None,
    top_logprobs: int = 0,
    transform_routes: RouteTransform | None = None,
    on: str = "transformers",
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Score a tape with a model that is loaded already, in the dtype of the tape.

    The model is put back as it was. Arguments and errors are those of `replay`, and:

    Args:
        tape: a path, or a tape that is open.
        out: folder of the new tape.
        model: a transformers causal language model.
        switches: parsed.
        model_name: for the tape; by default what the model remembers.
        tokens_per_batch: as in `replay`.
        layout: as in `replay`.
        layers: as in `replay`.
        sequences: as in `replay`.
        sites: as in `replay`.
        top_logprobs: as in `replay`.
        transform_routes: changes the routes of each sequence before they are forced.
        on: where the model comes from, as in `replay`.
        ranks: that run the model together, see `rolltape.replay.ranks.current`. All of them have
            to call this with the same arguments; rank 0 writes the tape.

    Returns:
        JSON-able: tape, parent, model, sequences, tokens (scored), forward_tokens, switches,
        layout, seconds, tokens_per_s (of forward_tokens), self_test (or "not-run"), forced
        (decisions forced and left live, or None), weight_versions by engine, on, rank, ranks,
        warnings.
    """
    source = tape if isinstance(tape, Tape) else open_tape(tape)
    options = Options(
        switches=switches or Switches(),
        layout=as_layout(layout),
        tokens_per_batch=tokens_per_batch,
        layers=layers,
        sequences=sequences,
        sites=sites,
        transform_routes=transform_routes,
        on=on,
    )
    root = _local(out)
    check_request(source, root, options.switches)
    ranks.agree(_request(source, model, options, top_logprobs))
    run = prepare(source, model, options, name=model_name, ranks=ranks)
    check_top(top_logprobs, int(model_facts(model)["vocab_size"]))
    start = time.perf_counter()
    with torch.no_grad(), applied(model, options.switches):
        batches = run.batches()
        if on != "transformers" and batches:
            shortest = min(batches, key=lambda batch: batch.tokens)
            check_output(model, shortest, run.device, on=on)
        tested = prove(run, batches)
        facts = {**provenance(sys.argv), **options.as_dict(), "top_logprobs": top_logprobs}
        if ranks.writes:
            create_tape(root, role="trainer", parent=source.uuid, provenance=facts)
            with _sealed(root), TapeWriter(root) as writer:
                _score_all(run, batches, writer, top_logprobs)
        else:
            _score_all(run, batches, cast(TapeWriter, _Nowhere()), top_logprobs)
    return _summary(run, root, tested, time.perf_counter() - start)


def _path(
    switches: Switches, items: Sequence[str], model: str | None, *, from_factory: bool
) -> str | None:
    """The checkpoint to load; None is what the tape names, or the factory chooses."""
    version, checkpoints = as_version(switches.weights), parse_checkpoints(items)
    path: str | None = checkpoint_of(switches.weights, checkpoints, model)
    if from_factory and path is not None:
        raise UsageError(f"model {path}: the factory chooses the model", hint="leave it out")
    if checkpoints and version is None:
        raise UsageError(
            "--checkpoint without --switch weights=VERSION: mode score runs one version",
            hint="--switch weights=VERSION",
        )
    return path


def _local(out: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(out):
        raise UsageError(f"-o {out}: a replay is written to a local folder")
    return Path(out)


@contextmanager
def _sealed(root: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        seal(root, status={"replay": "error", "error": reason})
        raise
    seal(root, status={"replay": "ok"})


class _Nowhere:
    """The writer of the ranks that write no tape."""

    id = ""

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass


def _request(tape: Tape, model: nn.Module, options: Options, top: int) -> dict[str, Any]:
    """What has to be the same on every rank, so that they run the same batches."""
    keys = xxhash.xxh3_64("".join(f"{s.key.text}:{s.length};" for s in tape).encode())
    return {
        "tape": tape.uuid,
        "sequences": f"{len(tape)} ({keys.hexdigest()})",
        "model": type(model).__name__,
        **{f"switch {key}": value for key, value in options.switches.as_dict().items()},
        "layout": options.layout,
        "tokens_per_batch": options.tokens_per_batch,
        "layers": options.layers,
        "layer outputs of": list(options.sequences or ()),
        "sites": options.sites,
        "top_logprobs": top,
    }


def _score_all(run: Run, batches: list[Batch], writer: TapeWriter, top: int) -> None:
    facts = facts_of(run.model, run.name)
    settings = {f"switch.{key}": value for key, value in run.options.switches.as_dict().items()}
    facts["effective"] = {**facts["effective"], **settings, "layout": run.options.layout}
    output = ScoreWriter(writer, run.engines, facts)
    weights = {engine: (m.digests, m.version) for engine, m in run.matches.items()}
    output.engines(run.options.as_dict(), weights)
    output.opened(run.sequences)
    best = _TopWriter(writer, run.engines, top)
    choices: list[BlockChoice] = []
    with ExitStack() as stack:
        forcing = None
        if find_moe_blocks(run.model):
            tap = RouteForcing(run.model, run.options.mode or "ids", capture=_keeper(choices))
            forcing = stack.enter_context(tap)
        layer_tap: LayerTap | SiteTap | None = None
        if run.layer_keys:  # a model that nobody looks at runs without hooks
            layer_tap = tap_of(run.model, run.options.sites)
            stack.enter_context(layer_tap)
        for number, batch in enumerate(batches):
            choices.clear()
            if layer_tap is not None:
                watched = [p for p in batch.placed if p.sequence.key.text in run.layer_keys]
                layer_tap.watch(watched, columns=batch.columns)
            _score_batch(run, number, batch, forcing, choices, output, best)
            if layer_tap is not None:
                output.activations(layer_tap.taken())
            output.closed([p.sequence for p in batch.placed])
            writer.flush()
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
        # to the host at once: the device holds the choice of one layer at a time
        live = choice.live_ids.to("cpu", copy=True)
        forced = choice.used_ids is not choice.live_ids
        choices.append(
            BlockChoice(
                layer=choice.layer,
                live_ids=live,
                used_ids=choice.used_ids.to("cpu", copy=True) if forced else live,
                used_weights=choice.used_weights.float().to("cpu", copy=True),
                margin=None if choice.margin is None else choice.margin.cpu(),
            )
        )

    return keep


def _score_batch(
    run: Run,
    number: int,
    batch: Batch,
    forcing: RouteForcing | None,
    choices: list[BlockChoice],
    output: ScoreWriter,
    best: _TopWriter,
) -> None:
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
    output.step(number, batch, run.model, t_ns=t_ns)
    if forcing is not None and len(choices) < len(forcing.layers):
        run.warn(f"{len(choices)} of {len(forcing.layers)} MoE layers could be seen: no routes")
    else:
        output.routes(number, batch, choices, forced=forced)
    for p in batch.placed:
        _score_sequence(run, p.sequence, logits[p.span], output, best)
    run.count(forward_tokens=batch.tokens)


def _score_sequence(
    run: Run,
    sequence: TapeSequence,
    logits: torch.Tensor,
    output: ScoreWriter,
    best: _TopWriter,
) -> None:
    switches = run.options.switches
    spans = sampling_spans(sequence, switches)
    supports = _supports(run, sequence) if switches.support == "recorded" else None
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    found = score(logits, sequence, spans, supports, dtype=dtype, top=best.k)
    run.count(tokens=int(found.raw.valid.sum()), outside=found.outside)
    if run.ranks.size > 1:
        columns = (found.raw, found.scaled, found.processed)
        bits = b"".join(column.values.tobytes() for column in columns)
        run.values[sequence.key.text] = xxhash.xxh3_64_intdigest(bits)
    output.tokens(sequence, spans, found, switches)
    best.write(sequence, spans, found)
    if supports is not None:
        output.supports(sequence, supports)
    refused = {edit for s in spans if s.sampling for edit in s.sampling.not_applied}
    if refused:
        run.warn(f"edits that cannot be applied again, left out: {', '.join(sorted(refused))}")


class _TopWriter:
    """Writes the k most probable tokens of the positions that were scored; nothing when k is 0."""

    def __init__(self, writer: TapeWriter, engines: Mapping[str, str], k: int) -> None:
        self.k = k
        self._writer, self._engines = writer, engines

    def write(self, sequence: TapeSequence, spans: list[Span], found: Logprobs) -> None:
        scored = [span for span in spans if span.sampling is not None]
        if found.top is None or not scored:
            return
        # the spans differ in their sampling, which is no part of a raw distribution
        start, n = scored[0].start, sum(span.n for span in scored)
        where = slice(start, start + n)
        best, key = found.top, sequence.key
        semantics = raw_semantics(vocab_size=found.width, dtype=found.dtype, source="recomputed")
        self._writer.append(
            "distributions",
            {
                "engine": [self._engines[key.engine]],
                "request": [key.request],
                "sample": [key.sample],
                "pass": [key.scoring],
                "start": [start],
                "n": [n],
                **distribution_columns(
                    best.ids[where], best.logprobs[where], best.tail[where], np.array([n])
                ),
                "semantics": [semantics],
            },
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


def _summary(run: Run, root: Path, tested: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    counts = run.counts
    for name, text in (
        ("without_routes", "sequences without routes ran live"),
        ("without_support", "sequences have no supports"),
        ("outside", "tokens are not in their own kept set: processed is -inf there"),
    ):
        if counts.get(name):
            run.warn(f"{counts[name]} {text}")
    forced = counts.get("forced", 0)
    decisions = {"decisions": forced, "live": counts.get("decisions", 0) - forced}
    forward_tokens = counts.get("forward_tokens", 0)
    return {
        "tape": str(root),
        "parent": str(run.tape.path),
        "model": run.name,
        "sequences": len(run.sequences),
        "tokens": counts.get("tokens", 0),
        "forward_tokens": forward_tokens,
        "switches": run.options.switches.as_dict(),
        "layout": run.options.layout,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(forward_tokens / seconds, 1),
        "self_test": tested or "not-run",
        "forced": decisions if run.options.mode else None,
        "weight_versions": {
            engine[:8]: {"scored": m.version, "recorded": list(m.versions)}
            for engine, m in run.matches.items()
        },
        "on": run.options.on,
        "rank": run.ranks.rank,
        "ranks": run.ranks.size,
        "warnings": run.warnings,
    }
