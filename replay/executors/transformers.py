"""Runs the calls of a schedule by `model.generate()` under our own recorder, tokens forced.

Masks, positions, cache and shapes are made by the code that made them in the original. What is
forced is only the choice, behind the last probe, so a difference never cascades into other tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltape.recorder import session, tactics
from rolltape.recorder import transformers as adapter
from rolltape.recorder.force import LIVE, Force
from rolltape.recorder.options import Options
from rolltape.replay.executors.conditions import as_recorded
from rolltape.replay.executors.lots import Lot, plan_weights
from rolltape.replay.executors.protocol import Changes, Execution, NotRunError
from rolltape.replay.reproduction import reproduction
from rolltape.replay.schedule import Call, Refused, read_schedule
from rolltape.store import ForcingError, Tape, UsageError, codecs, create_tape, seal
from rolltape.store import open as open_tape

#: Steps and rows of the tests before a run: enough to see a changed prompt in what follows.
_TESTED_STEPS = 8
#: Settings that decide no bit of a forced call, or that need what is not here (a tokenizer).
_LEFT_OUT = {
    "compile_config",
    "max_time",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
    "sequence_bias",
    "stop_strings",
    "transformers_version",
    "watermarking_config",
}


def run(
    source: Tape,
    out: Path,
    *,
    changes: Changes,
    model: Any = None,
    device: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    checkpoints: Mapping[int, str] | None = None,
) -> Execution:
    """Run the schedule of a tape again and write what was recorded as a new tape.

    Args:
        source: the recording.
        out: folder of the new tape.
        changes: made on purpose.
        model: a loaded transformers model on its device, or a path; by default what the tape names.
        device: torch device; by default of the kind that was recorded.
        checkpoints: paths of weight versions; calls of the others run with `model`.
        provenance: for the header of the new tape.

    Raises:
        NotRunError: no call can be laid out again; nothing is written.
        UsageError: no transformers rollout, no such model or device, a setting that cannot be had.
        ModelMismatchError: the model is not the one of the tape, and `changes` does not say so.
        ForcingError: forcing a run's own tokens changes its values.
    """
    if not changes.prefix_cache:
        raise UsageError("switch prefix_cache=off: generate() of transformers has no prefix cache")
    schedule = read_schedule(source)
    if not schedule.calls:
        why = schedule.refused[0].reason if schedule.refused else "it has no calls"
        raise NotRunError(f"no call can be laid out again: {why}")
    calls = [_with_chunk(call, changes.chunk) for call in schedule.calls]
    plan = plan_weights(
        source,
        calls,
        changes=changes,
        checkpoints=checkpoints or {},
        model=model,
        device=device,
    )
    return _execute(
        source,
        out,
        plan.lots,
        refused=(*schedule.refused, *plan.refused),
        warnings=plan.warnings,
        provenance=provenance,
    )


def _with_chunk(call: Call, chunk: int | None) -> Call:
    """The call with its prompts taken in pieces of so many columns."""
    if chunk is None:
        return call
    return replace(call, settings={**call.settings, "prefill_chunk_size": chunk})


def execute(
    source: Tape,
    out: Path,
    calls: Sequence[Call],
    model: Any,
    name: str,
    *,
    refused: Sequence[Refused] = (),
    warnings: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    tested: Mapping[str, Any] | None = None,
) -> Execution:
    """Run calls with a model that is loaded; see `run`.

    Args:
        source: the recording, for the settings of its engines.
        out: folder of the new tape.
        calls: in the order in which they are run.
        model: a transformers causal language model, on its device.
        name: of the model.
        refused: calls that are not run, for the result.
        warnings: for the result.
        provenance: for the header of the new tape.
        tested: what `self_test` found of this model, where that is known.
    """
    return _execute(
        source,
        out,
        [Lot(calls=tuple(calls), load=lambda: (model, name))],
        refused=refused,
        warnings=warnings,
        provenance=provenance,
        tested=tested,
    )


def _execute(
    source: Tape,
    out: Path,
    lots: Sequence[Lot],
    *,
    refused: Sequence[Refused] = (),
    warnings: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    tested: Mapping[str, Any] | None = None,
) -> Execution:
    model, _ = lots[0].load()
    if tested is None:
        calls = lots[0].calls
        tested = self_test(source, calls[0], model, _options(source, calls))
    del model  # another lot loads another one
    create_tape(out, role="rollout", parent=source.uuid, provenance=provenance)
    started, forwards, names = time.time_ns(), 0, list[str]()
    try:
        for lot in lots:
            model, name = lot.load()
            names.append(name)
            forwards += _run_all(source, out, lot.calls, model, _options(source, lot.calls))
            del model
    except BaseException as error:
        seal(out, status={"replay": "error", "error": f"{type(error).__name__}: {error}"})
        raise
    ended = time.time_ns()
    seal(out, status={"replay": "ok", "forwards": forwards, "self_test": dict(tested)})
    return Execution(
        model=", ".join(dict.fromkeys(names)),
        forwards=forwards,
        started_ns=started,
        ended_ns=ended,
        self_test=tested,
        refused=tuple(refused),
        warnings=tuple(warnings),
    )


def self_test(source: Tape, call: Call, model: Any, options: Options) -> dict[str, Any]:
    """Prove on the first steps of a call that forcing is neutral and that the model is run.

    The call is run freely for a few steps and recorded. Run again with its own tokens forced, it
    must have the same bits. Run again with another prompt in one row, it must not.

    Returns:
        `neutral` and `control`: True, False or None (not known); `steps` and `rows`; `reason`
        where one is not True.

    Raises:
        ForcingError: forcing changes bits though two free runs have the same.
    """
    steps = min(_TESTED_STEPS, call.steps)
    short = replace(call, rows=tuple(replace(r, response=r.response[:steps]) for r in call.rows))
    facts: dict[str, Any] = {"steps": steps, "rows": len(call.rows)}
    small = replace(options, layers=0, sketches=0)
    with tempfile.TemporaryDirectory(prefix="rolltape-") as folder:

        def record(name: str, what: Call, *, free: bool = False, parent: str | None = None) -> Tape:
            root = create_tape(Path(folder, name), role="rollout", parent=parent)
            start = time.time_ns()
            count = _run_all(source, root, [what], model, small, free=free)
            seal(root)
            seen[name] = Execution(
                model="",
                forwards=count,
                started_ns=start,
                ended_ns=time.time_ns(),
                self_test=_ASSUMED,
            )
            return open_tape(root)

        seen: dict[str, Execution] = {}
        own = record("own", short, free=True)
        (again,) = read_schedule(own).calls
        forced = record("forced", again, parent=own.uuid)
        found = reproduction(own, forced, execution=seen["forced"])
        if found["verdict"] != "identical":
            repeated = record("repeated", short, free=True)
            if _same_values(own, repeated):
                raise ForcingError(
                    f"self-test: forcing a run's own tokens: {found['verdict']}: "
                    f"{found['reason']}; {found['first'] or ''}",
                    hint="this model cannot be forced faithfully",
                )
            reason = "two free runs of the same call differ: the engine is not reproducible here"
            return {**facts, "neutral": None, "control": None, "reason": reason}
        control = record("control", _other_prompt(again, int(model.config.vocab_size)))
        changed = _row_differs(own, control, again)
    if not changed:
        return {
            **facts,
            "neutral": True,
            "control": False,
            "reason": "a changed prompt had no effect",
        }
    return {**facts, "neutral": True, "control": True}


#: Inside of the self-test it is the comparison that is asked for, not its own test.
_ASSUMED = {"neutral": True, "control": True}


def _same_values(a: Tape, b: Tape) -> bool:
    """Whether two tapes of the same rows hold the same tokens and logprobs, row by row."""
    return all(
        np.array_equal(x.tokens.values, y.tokens.values)
        and np.array_equal(
            x.logprob("raw").values.view(np.uint32), y.logprob("raw").values.view(np.uint32)
        )
        for x, y in zip(a, b, strict=True)
    )


def _other_prompt(call: Call, vocabulary: int) -> Call:
    """The call with another last prompt token in the rows of its first prompt."""
    rows = list(call.rows)
    for index in range(call.samples):
        prompt = rows[index].prompt.copy()
        prompt[-1] = (prompt[-1] + 1) % vocabulary
        rows[index] = replace(rows[index], prompt=prompt)
    return replace(call, rows=tuple(rows))


def _row_differs(a: Tape, b: Tape, call: Call) -> bool:
    key = call.rows[0].key
    other = next(s for s in b if s.origin == key)
    raw, found = a.sequence(key).logprob("raw"), other.logprob("raw")
    return bool((raw.values.view(np.uint32) != found.values.view(np.uint32))[raw.valid].any())


def _options(source: Tape, calls: Iterable[Call]) -> Options:
    """Record what the recording recorded, and drop nothing."""
    keys = [row.key for call in calls for row in call.rows]
    routes, activations = (_keys_with(source, name) for name in ("routes", "activations"))
    best = source.table("distributions").column("k").to_pylist()

    def last(held: Mapping[Any, Any], *, sketched: bool) -> int:
        # the recorder keeps them of the first rows that it sees
        found = [i for i, key in enumerate(keys, 1) if sketched in held.get(key, ())]
        return max(found, default=0)

    return Options(
        level="routing" if any(key in routes for key in keys) else "tokens",
        layers=last(activations, sketched=False),
        sketches=last(activations, sketched=True),
        top_logprobs=max(best, default=0),
        on_full="block",
        strict=True,
    )


def _keys_with(source: Tape, table: str) -> dict[tuple[Any, ...], set[bool]]:
    """The sequences with rows in a table, and whether rows of each are sketches."""
    rows = source.table(table)
    names = ("engine", "request", "sample", "pass", "encoding")
    found: dict[tuple[Any, ...], set[bool]] = {}
    for *key, encoding in zip(*(rows.column(name).to_pylist() for name in names), strict=True):
        found.setdefault(tuple(key), set()).add(encoding == codecs.SKETCH)
    return found


@contextmanager
def _recording(root: Path, options: Options) -> Iterator[None]:
    if session.active() is not None:
        raise UsageError("this process records already", hint="re-execute in a process of its own")
    session.start(root, options)
    bound = False
    try:
        bound = adapter.bind()
        yield
    finally:
        session.stop()
        if bound:
            adapter.unbind()
            tactics.unbind()


def _run_all(
    source: Tape,
    root: Path,
    calls: Sequence[Call],
    model: Any,
    options: Options,
    *,
    free: bool = False,
) -> int:
    """Run calls into a tape; returns how often the model ran."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.register_forward_pre_hook(count)
    devices = [d for d in [model.device.index or 0] if model.device.type == "cuda"]
    try:
        with _recording(root, options), torch.random.fork_rng(devices=devices):
            for call in calls:
                torch.manual_seed(0)
                effective = source.engine(call.engine).get("effective", {})
                wanted = {**effective, **_of_call(call)}
                with as_recorded(model, wanted):
                    _run(call, model, free=free)
    finally:
        handle.remove()
    return forwards


def _of_call(call: Call) -> dict[str, Any]:
    values = {name: getattr(call, name) for name in ("threads", "attention", "experts", "sdpa")}
    return {name: value for name, value in values.items() if value is not None}


def _run(call: Call, model: Any, *, free: bool) -> None:
    from transformers import GenerationConfig
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    ids = np.stack([np.concatenate([row.padding, row.prompt]) for row in call.rows])
    mask = np.stack([np.arange(call.width) >= row.pad_left for row in call.rows])
    ends = _Ends(call, model.device)
    before = model.generation_config
    # what the checkpoint brings along was part of the recorded settings, where it was used
    model.generation_config = GenerationConfig()
    try:
        with _forcing(call, free=free):
            model.generate(
                torch.from_numpy(ids[:: call.samples].copy()).to(model.device),
                attention_mask=torch.from_numpy(mask[:: call.samples].astype(np.int64)).to(
                    model.device
                ),
                generation_config=GenerationConfig(**_config(call)),
                stopping_criteria=StoppingCriteriaList([ends]),
            )
    finally:
        model.generation_config = before


@contextmanager
def _forcing(call: Call, *, free: bool) -> Iterator[None]:
    if free:
        yield
        return
    tokens = np.full((len(call.rows), call.steps), LIVE, np.int64)
    for index, row in enumerate(call.rows):
        tokens[index, : len(row.response)] = row.response
    with adapter.forced(Force(tokens, tuple(row.key.text for row in call.rows))):
        yield


def _config(call: Call) -> dict[str, Any]:
    config = {name: value for name, value in call.settings.items() if name not in _LEFT_OUT}
    if config.get("max_new_tokens") is not None:
        config.pop("max_length", None)  # it follows from the other
    if call.pad is not None:
        config["pad_token_id"] = call.pad
    return config


class _Ends:
    """A stopping criterion: each row ends where it ended in the recording."""

    def __init__(self, call: Call, device: Any) -> None:
        self._width = call.width
        lengths = [len(row.response) for row in call.rows]
        self._lengths = torch.tensor(lengths, device=device)
        if call.finished == "pad":
            # `generate` pads finished rows if any criterion has this
            self.eos_token_id = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self._lengths <= input_ids.shape[1] - self._width
