"""Runs a recorded vLLM schedule again: the same requests in the same steps, with forced tokens.

The engine is driven in this process, step by step. A request is added right before the step in
which it first ran, and taken away before the first step that it should have been in and was not;
everything else is the engine's own scheduler, so a step that comes out differently is found
and named, not papered over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltape.recorder import session as sessions
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import Options
from rolltape.recorder.patches import Patches
from rolltape.store import Tape, TapeWriter, UsageError
from rolltape.store.keys import Key

#: Arguments of an engine that decide what a step computes; taken from the settings in force.
_PINNED = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "async_scheduling",
    "block_size",
    "kv_cache_dtype",
    "enforce_eager",
    "seed",
    "logprobs_mode",
    "quantization",
)
#: Asked for, but not by what is run again.
_NOT_AGAIN = ("model", "speculation", "tensor_parallel_size", "pipeline_parallel_size")
#: Fields of sampling parameters that are set anew.
_NOT_SAMPLING = ("n", "seed", "output_kind", "extra_args", "skip_clone")
#: Steps without tokens that the engine may take before one with some.
_MOST_EMPTY = 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one sequence had in one step: positions [start, start + n)."""

    key: Key
    start: int
    n: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One recorded step: its number and its parts in row order."""

    number: int
    parts: tuple[Part, ...]


@dataclass
class Outcome:
    """How far a re-execution came.

    Args:
        steps: that ran with the recorded composition.
        differs: the first step that could not be laid out as recorded, with both compositions;
            None if there is none.
        notes: what was not as in the recording.
    """

    steps: int = 0
    differs: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def recorded_steps(tape: Tape, engine: str) -> list[Step]:
    """The steps of one engine in the order in which they ran; a cached prefix is no part."""
    table = tape.table("forwards")
    names = ("engine", "step", "row", "request", "sample", "pass", "start", "n", "kind")
    columns = {name: table.column(name).to_pylist() for name in names}
    found: dict[int, list[tuple[int, Part]]] = {}
    for row in range(table.num_rows):
        if columns["engine"][row] != engine or columns["kind"][row] == "cached":
            continue
        key = Key(engine, *(columns[name][row] for name in ("request", "sample", "pass")))
        part = Part(
            key=key,
            start=columns["start"][row],
            n=columns["n"][row],
            kind=columns["kind"][row],
        )
        found.setdefault(columns["step"][row], []).append((columns["row"][row], part))
    return [
        Step(number=number, parts=tuple(part for _, part in sorted(rows, key=lambda r: r[0])))
        for number, rows in sorted(found.items())
    ]


def check_tape(tape: Tape, engine: str) -> dict[str, Any]:
    """What is known of an engine whose steps can be laid out again.

    Returns:
        Its merged row of `engines`.

    Raises:
        UsageError: something that is needed was not recorded, or cannot be done again.
    """
    facts = tape.engines[engine]
    effective = facts["effective"]
    if facts["adapter"] != "vllm":
        raise UsageError(
            f"{tape.place} was recorded by {facts['adapter']}",
            hint=f"--on {facts['adapter']}, or --mode score",
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if effective.get(name, 1) != 1:
            raise UsageError(f"{name} is {effective[name]}: one process cannot run its steps again")
    if ".gpu.model_runner" in str(effective.get("runner")):
        raise UsageError("steps of vLLM's second model runner cannot be laid out again yet")
    if effective.get("speculation"):
        raise UsageError("the rollout was speculative: its drafts are not recorded")
    lost = [e for e in tape.rows("events") if e["kind"] == "gap"]
    if lost:
        raise UsageError(
            f"{tape.place} has {len(lost)} gaps: the steps are not all known",
            hint="record with --on-full block",
        )
    for sequence in tape:
        if sequence.key.engine == engine and not sequence.tokens.valid.all():
            raise UsageError(f"{sequence.id}: some of its tokens are not known")
    return facts


def engine_arguments(facts: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Arguments of an engine that computes what the recorded one did."""
    effective, requested = facts["effective"], facts["requested"]
    arguments = {k: v for k, v in requested.items() if k not in _NOT_AGAIN and "." not in k}
    arguments |= {k: effective[k] for k in _PINNED if effective.get(k) is not None}
    if effective.get("num_gpu_blocks"):
        arguments["num_gpu_blocks_override"] = effective["num_gpu_blocks"]
    arguments["model"] = model or facts["model"]
    arguments["skip_tokenizer_init"] = True  # tokens are forced: nothing needs their text
    return arguments


def execute(
    tape: Tape,
    root: str | os.PathLike[str],
    *,
    engine: str,
    model: str | None = None,
    batch: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run the steps of one engine of a tape again and record them.

    Args:
        tape: the recording.
        root: a new tape, already created.
        engine: uuid of the engine in `tape`.
        model: path of the model; by default as the tape names it.
        batch: None for the recorded composition; else so many sequences at a time, in the order in
            which they were opened, each lot when the one before has ended.
        arguments: of the engine, instead of the recorded ones; for example another
            `max_num_batched_tokens`.

    Raises:
        UsageError: as `check_tape`; or vLLM is not installed here, or does not take the arguments.
    """
    facts = check_tape(tape, engine)
    steps = recorded_steps(tape, engine)
    if sessions.active() is not None:
        raise UsageError("this process records already", hint="one recording at a time")
    level = "routing" if tape.table("routes").num_rows else "tokens"
    with _in_process():
        session = sessions.start(root, Options(level=level, on_full="block"))
        _rolltape_hook.watch(_rolltape_hook.HOOKS)
        try:
            chosen = {**engine_arguments(facts, model), **(arguments or {})}
            outcome = _run(tape, engine, steps, chosen, batch)
        finally:
            sessions.stop()
    if session.dropped or session.faults:
        raise UsageError(f"the re-execution could not be recorded: {session.faults or 'dropped'}")
    _name_origins(tape, root, engine)
    return outcome


@contextmanager
def _in_process() -> Iterator[None]:
    """The engine core stays in this process; variables are put back."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _run(
    tape: Tape, engine: str, steps: Sequence[Step], arguments: dict[str, Any], batch: int | None
) -> Outcome:
    try:
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ModuleNotFoundError as error:
        raise UsageError(f"--on vllm needs {error.name}", hint="run it where vLLM is") from error
    if not torch.cuda.is_available() and hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    try:
        args = EngineArgs(**arguments)
    except TypeError as error:
        raise UsageError(f"this vLLM does not take the recorded arguments: {error}") from error
    driver = _Driver(LLMEngine.from_engine_args(args), tape)
    try:
        if batch is None:
            return driver.run(steps)
        return driver.run_freely([s.key for s in tape if s.key.engine == engine], batch)
    finally:
        driver.close()


class _Driver:
    """One engine in this process, and what it does.

    Args:
        engine: `LLMEngine` with its core in this process.
        tape: the recording.
    """

    def __init__(self, engine: Any, tape: Tape) -> None:
        self._engine = engine
        self._sequences = {s.key: s for s in tape}
        core = engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._tokens: dict[str, np.ndarray] = {}  # by the id that the engine uses inside
        self._inside: dict[Key, str] = {}
        self._keys: dict[str, Key] = {}
        self._seen: list[dict[str, tuple[int, int]]] = []
        self._patches = Patches()
        from vllm.v1.sample.sampler import Sampler

        self._patches.around(Sampler, "sample", self._force)
        self._patches.around(type(self._scheduler), "schedule", self._watch)

    def close(self) -> None:
        """Undo the patches and stop the engine."""
        self._patches.undo()
        self._engine.engine_core.shutdown()

    def run(self, steps: Sequence[Step]) -> Outcome:
        """Lay the steps out one after another; stops at the first that differs."""
        outcome = Outcome()
        last = {part.key: step.number for step in steps for part in step.parts}
        for step in steps:
            self._leave(step.number, last)
            for part in step.parts:
                if part.key not in self._inside:
                    self._add(part.key)
            got = self._step()
            want = {part.key: (part.start, part.n) for part in step.parts}
            if got != want:
                outcome.differs = {
                    "step": step.number,
                    "recorded": _readable(want),
                    "re-executed": _readable(got),
                }
                return outcome
            outcome.steps += 1
        self._leave(None, last)
        self._settle()
        return outcome

    def run_freely(self, keys: Sequence[Key], batch: int) -> Outcome:
        """Run so many sequences at a time, as the scheduler likes."""
        outcome = Outcome()
        for first in range(0, len(keys), batch):
            lot = [key for key in keys[first : first + batch] if self._sequences[key].length]
            for key in lot:
                self._add(key)
            while self._engine.has_unfinished_requests():
                before = len(self._seen)
                self._engine.step()
                outcome.steps += len(self._seen) - before
                requests = self._scheduler.requests
                # where the recorded one was aborted, the engine would go on with its own tokens
                full = [n for n, r in requests.items() if r.num_tokens >= len(self._tokens[n])]
                if full:
                    self._engine.abort_request(full, internal=True)
        return outcome

    def _add(self, key: Key) -> None:
        from vllm import SamplingParams

        sequence = self._sequences[key]
        tokens = sequence.tokens.values
        given = dict(sequence.info["sampling"] or {})
        known = getattr(SamplingParams, "__struct_fields__", None) or vars(SamplingParams())
        how = {k: v for k, v in given.items() if k in known and k not in _NOT_SAMPLING}
        how["detokenize"], how["stop"] = False, []  # where it ends is forced, too
        prompt = {"prompt_token_ids": tokens[: sequence.prompt_len].tolist()}
        name = self._engine.add_request(key.text, prompt, SamplingParams(**how))
        name = name if isinstance(name, str) else key.text
        self._inside[key], self._keys[name] = name, key
        self._tokens[name] = tokens.astype(np.int64)

    def _leave(self, number: int | None, last: Mapping[Key, int]) -> None:
        """Take away what ran for the last time before step `number` and has not ended itself."""
        running = {*self._scheduler.requests}
        gone = [
            name
            for key, name in self._inside.items()
            if name in running and (number is None or last[key] < number)
        ]
        if gone:
            self._engine.abort_request(gone, internal=True)

    def _step(self) -> dict[Key, tuple[int, int]]:
        """Have the engine take one step that runs something; what was in it."""
        before = len(self._seen)
        for _ in range(_MOST_EMPTY):
            if not self._engine.has_unfinished_requests():
                return {}
            self._engine.step()
            if len(self._seen) > before:
                return {self._keys[n]: part for n, part in self._seen[-1].items()}
        return {}

    def _settle(self) -> None:
        """Let the engine see that everything has ended: the last answers may still come."""
        for _ in range(_MOST_EMPTY):
            if not self._engine.has_unfinished_requests():
                return
            self._engine.step()

    def _watch(self, wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        output = wrapped(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            parts = output.num_scheduled_tokens
            self._seen.append({name: (int(computed[name]), int(n)) for name, n in parts.items()})
        return output

    def _force(self, wrapped: Any, sampler: Any, args: Any, kwargs: Any) -> Any:
        """What was drawn becomes what was recorded; all that is measured follows from it."""
        sampled, *rest = wrapped(*args, **kwargs)
        recorder: Any = getattr(self._runner, "_rolltape", None)
        rows = getattr(recorder, "rows", None)
        if rows is None or len(rows) != len(sampled):
            return (sampled, *rest)
        import torch

        drawn_at = (rows.start + rows.n).tolist()
        forced = np.full(len(rows), -1, np.int64)
        for i, (life, position) in enumerate(zip(recorder.lives, drawn_at, strict=True)):
            tokens = self._tokens.get(life.request)
            if tokens is not None and position < len(tokens):
                forced[i] = tokens[position]
        values = torch.from_numpy(forced).to(sampled.device, sampled.dtype)
        values = values.reshape(sampled.shape)
        return (torch.where(values >= 0, values, sampled), *rest)


def _readable(parts: Mapping[Key, tuple[int, int]]) -> dict[str, list[int]]:
    return {key.text: [start, n] for key, (start, n) in parts.items()}


def _name_origins(tape: Tape, root: str | os.PathLike[str], engine: str) -> None:
    """Say which sequence each of the new tape runs again: its external id is the old key."""
    from rolltape.store import open as open_tape

    new = open_tape(root)
    known = {s.key.text: s for s in tape if s.key.engine == engine}
    rows = [(s, known[ext]) for s in new if (ext := s.info["external"]) in known]
    if not rows:
        return
    with TapeWriter(root) as writer:
        writer.append(
            "sequences",
            {
                "engine": [s.key.engine for s, _ in rows],
                "request": [s.key.request for s, _ in rows],
                "sample": [s.key.sample for s, _ in rows],
                "pass": [s.key.scoring for s, _ in rows],
                "origin": [old.key.text for _, old in rows],
                "group": [old.info["group"] for _, old in rows],
                "prompt_len": [s.prompt_len for s, _ in rows],
                "finish": "open",
                "opened_ns": [s.info["opened_ns"] or time.time_ns() for s, _ in rows],
            },
        )
