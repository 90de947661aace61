"""Mode `score`: a teacher-forced forward over recorded sequences, as a trainer does it.

The result is a tape of its own. It is written batch by batch: what was scored before a failure
can be read, and the sequences that were not reached stay `open`. See `rolltape.replay.score_loop`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import nn

from rolltape.recorder.facts import model_facts
from rolltape.recorder.provenance import provenance
from rolltape.recorder.top import check_top
from rolltape.replay.conditions import applied
from rolltape.replay.factory import build, check_output, load_factory
from rolltape.replay.models import load_model
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
from rolltape.replay.score_loop import score_batches
from rolltape.replay.switches import Switches
from rolltape.replay.versions import as_version, checkpoint_of, parse_checkpoints
from rolltape.store import Tape, TapeWriter, UsageError, create_tape, seal
from rolltape.store import open as open_tape


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
                score_batches(run, batches, writer, top_logprobs)
        else:
            score_batches(run, batches, cast(TapeWriter, _Nowhere()), top_logprobs)
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
