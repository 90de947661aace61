"""Runs a recorded vLLM schedule again: the same requests in the same steps, with forced tokens.

The engine is driven in this process, step by step. A request is added right before the step in
which it first ran, and taken away before the first step that it should have been in and was not;
everything else is the engine's own scheduler, so a step that comes out differently is found
and named, not papered over.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.recorder import session as sessions
from rolltape.recorder.digest import GroupDigest, group_digests
from rolltape.recorder.options import Options
from rolltape.recorder.parts_vllm import parts_of_vllm
from rolltape.recorder.patches import Patches
from rolltape.replay.executors.protocol import Changes, Execution, NotRunError
from rolltape.replay.executors.serving import (
    check_prefix_cache,
    hooks,
    name_origins,
    variables,
    weights_of,
)
from rolltape.replay.executors.vllm_forcing import Forcing
from rolltape.replay.serving_steps import Step, recorded_steps
from rolltape.store import ModelMismatchError, Tape, UsageError, create_tape, seal
from rolltape.store import open as open_tape
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
#: The same of its `compilation_config`.
_COMPILED = ("cudagraph_mode", "cudagraph_capture_sizes")
#: Asked for, but not by what is run again.
_NOT_AGAIN = ("model", "speculation", "tensor_parallel_size", "pipeline_parallel_size")
#: Fields of sampling parameters that are set anew.
_NOT_SAMPLING = ("n", "seed", "output_kind", "extra_args", "skip_clone")
#: Steps without tokens that the engine may take before one with some.
_MOST_EMPTY = 16
#: Size of the self-test: rows, prompt tokens, steps.
_TESTED_ROWS, _TESTED_TOKENS, _TESTED_STEPS = 4, 12, 8


#: The engine core stays in this process.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def check_engine(tape: Tape, engine: str) -> None:
    """Whether the steps of an engine can be laid out again.

    Raises:
        NotRunError: something that is needed was not recorded, or cannot be done again.
    """
    effective = tape.engine(engine)["effective"]
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if effective.get(name, 1) != 1:
            reason = f"{name} is {effective[name]}: one process cannot run its steps again"
            raise NotRunError(reason)
    if ".gpu.model_runner" in str(effective.get("runner")):
        raise NotRunError("steps of vLLM's second model runner cannot be laid out again yet")
    if effective.get("speculation"):
        raise NotRunError("the rollout was speculative: its drafts are not recorded")
    lost = sum(e["kind"] == "gap" and e["engine"] in (engine, None) for e in tape.rows("events"))
    if lost:
        raise NotRunError(f"it has {lost} gaps: its steps are not all known")
    for sequence in tape:
        if sequence.key.engine == engine and not sequence.tokens.valid.all():
            raise NotRunError(f"{sequence.id}: some of its tokens are not known")


def engine_arguments(facts: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Arguments of an engine that computes what the recorded one did."""
    effective, requested = facts["effective"], facts["requested"]
    arguments = {k: v for k, v in requested.items() if k not in _NOT_AGAIN and "." not in k}
    arguments |= {k: effective[k] for k in _PINNED if effective.get(k) is not None}
    if effective.get("num_gpu_blocks"):
        arguments["num_gpu_blocks_override"] = effective["num_gpu_blocks"]
    if effective.get("cudagraph_capture_sizes") and not effective.get("enforce_eager"):
        # the sizes that a batch is padded to choose its kernels
        names = {"mode": "compilation_mode", **{n: n for n in _COMPILED}}
        how = {n: effective[at] for n, at in names.items() if effective.get(at) is not None}
        arguments["compilation_config"] = how
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            arguments.pop(name, None)  # what came of them is among the sizes
    arguments["model"] = model or facts["model"]
    arguments["skip_tokenizer_init"] = True  # tokens are forced: nothing needs their text
    return arguments


def changed_arguments(effective: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Arguments of an engine that the switches `chunk` and `prefix_cache` change.

    Args:
        effective: settings in force when it was recorded.
        changes: made on purpose.

    Raises:
        UsageError: the engine could not do it.
    """
    changed: dict[str, Any] = {}
    if changes.chunk is not None:
        most = effective.get("max_num_seqs") or 0
        if changes.chunk < most:
            raise UsageError(
                f"switch chunk={changes.chunk}: a step of vLLM takes a token of each of up to "
                f"max_num_seqs={most} sequences",
                hint=f"chunk={most} or more",
            )
        changed |= {"max_num_batched_tokens": changes.chunk, "enable_chunked_prefill": True}
    if not changes.prefix_cache:
        changed["enable_prefix_caching"] = False
    return changed


def run(
    source: Tape,
    out: Path,
    *,
    changes: Changes,
    model: Any = None,
    device: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    checkpoints: Mapping[int, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Execution:
    """Run the schedule of a tape again and write what was recorded as a new tape.

    Args:
        source: the recording.
        out: folder of the new tape.
        changes: made on purpose.
        model: path of the model; by default as the tape names it.
        device: where vLLM runs is what was installed: must be None.
        provenance: for the header of the new tape.
        checkpoints: paths of weight versions.
        arguments: of the engine, instead of the recorded ones.

    Raises:
        NotRunError: the schedule cannot be laid out again; nothing is written.
        ModelMismatchError: a checkpoint is not the version that it was said to be; nothing is left.
        UsageError: no vLLM rollout, a switch that it cannot do, vLLM is not installed here or does
            not take the arguments.
    """
    if device is not None:
        raise UsageError(f"device {device}: vLLM runs on the device that it is built for")
    if model is not None and not isinstance(model, str):
        raise UsageError("--on vllm takes the path of a model")
    engines = [e for e in source.engines if source.engine(e)["adapter"] == "vllm"]
    if not engines:
        raise UsageError(f"{source.place} has no rollout of vLLM", hint="--on its engine")
    wanted, others = {}, {}
    for engine in engines:
        check_engine(source, engine)
        wanted[engine] = weights_of(source, engine, changes, checkpoints or {}, model)
        others[engine] = changed_arguments(source.engine(engine)["effective"], changes)
    in_force = [source.engine(e)["effective"].get("enable_prefix_caching") for e in engines]
    check_prefix_cache(changes, in_force)
    if sessions.active() is not None:
        raise UsageError("this process records already", hint="one recording at a time")
    if importlib.util.find_spec("vllm") is None:  # before anything is written
        raise UsageError("--on vllm needs vllm", hint="run it where vLLM is")
    level = "routing" if source.table("routes").num_rows else "tokens"
    options = Options(level=level, on_full="block")
    create_tape(out, role="rollout", parent=source.uuid, provenance=dict(provenance or {}))
    started, forwards, tested = time.time_ns(), 0, dict[str, Any]()
    warnings: list[str] = []
    try:
        with variables(IN_PROCESS), hooks():
            for engine in engines:
                weights, facts = wanted[engine], source.engine(engine)
                chosen = engine_arguments(facts, weights.path) | others[engine]
                chosen |= dict(arguments or {})
                driver = None
                session = sessions.start(out, options)
                try:
                    driver = _Driver(_start(chosen), source)
                    loaded = driver.weights()
                    warnings += weights.check(source, engine, loaded, str(chosen["model"]))
                    driver.run(engine, recorded_steps(source, engine), changes)
                    forwards += driver.steps
                    warnings += [driver.left_off] if driver.left_off else []
                    sessions.stop()
                    if session.dropped or session.faults:
                        text = f"it could not be recorded: {session.faults or 'dropped'}"
                        raise UsageError(text)
                    ended = time.time_ns()
                    tested = tested or _self_test(driver, source, engine, options)
                finally:
                    sessions.stop()
                    if driver is not None:
                        driver.close()
    except ModelMismatchError:
        shutil.rmtree(out)
        raise
    except BaseException as error:
        seal(out, status={"replay": "error", "error": f"{type(error).__name__}: {error}"})
        raise
    name_origins(source, out, _origins(source, out, engines))
    seal(out, status={"replay": "ok"})
    return Execution(
        model=str(chosen["model"]),
        forwards=forwards,
        started_ns=started,
        ended_ns=ended,
        self_test=tested,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _self_test(driver: _Driver, source: Tape, engine: str, options: Options) -> dict[str, Any]:
    """Forcing a run's own tokens changes no bit, a changed prompt does.

    After the schedule, so that no cache of the engine knows of it; on a tape that is thrown away.
    """
    prompts = [
        s.tokens.values[: min(s.prompt_len, _TESTED_TOKENS)].tolist()
        for s in source
        if s.key.engine == engine and s.prompt_len
    ][:_TESTED_ROWS]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tape"
        create_tape(root, role="rollout")
        sessions.start(root, options)
        try:
            own = driver.generate(prompts, None)
            again = driver.generate(prompts, own)
            other = [[(prompt[0] + 1) % 7 + 1, *prompt[1:]] for prompt in prompts]
            control = driver.generate(other, own)
        finally:
            sessions.stop()
    tokens = [[t for t, _ in row] for row in own]
    if [[t for t, _ in row] for row in again] != tokens:
        return {"neutral": False, "control": None, "reason": "the tokens could not be forced"}
    neutral, changes = again == own, control != own
    reason = "forcing is not neutral" if not neutral else "a changed prompt changed nothing"
    said = {} if neutral and changes else {"reason": reason}
    return {"neutral": neutral, "control": changes, **said}


def _start(arguments: dict[str, Any]) -> Any:
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
        return LLMEngine.from_engine_args(args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"this vLLM does not take the recorded arguments: {error}") from error


class _Driver:
    """One engine in this process, and what it does.

    Args:
        engine: `LLMEngine` with its core in this process.
        tape: the recording.
    """

    def __init__(self, engine: Any, tape: Tape) -> None:
        self._engine = engine
        self._sequences = {s.key: s for s in tape}
        try:
            core = engine.engine_core.engine_core
            self._scheduler = core.scheduler
            self._runner = core.model_executor.driver_worker.worker.model_runner
        except AttributeError as error:
            engine.engine_core.shutdown()
            raise UsageError("the worker of this vLLM is not in this process") from error
        self._forcing = Forcing(self._runner)
        self._tokens = self._forcing.tokens
        self._inside: dict[Key, str] = {}
        self._keys: dict[str, Key] = {}
        self._seen: list[dict[str, tuple[int, int]]] = []
        self.left_off: str | None = None
        self._patches = Patches()
        # a scheduler may inherit what it does not change, as the asynchronous one does
        if not self._patches.around(type(self._scheduler), "schedule", self._watch, inherited=True):
            self.close()
            raise UsageError("the scheduler of this vLLM has no `schedule` to look at")

    def close(self) -> None:
        """Undo the patches and stop the engine."""
        self._patches.undo()
        self._forcing.close()
        self._engine.engine_core.shutdown()

    @property
    def steps(self) -> int:
        """Steps that ran something."""
        return len(self._seen)

    def weights(self) -> list[GroupDigest]:
        """Digests of the weights that were loaded, as the recorder makes them."""
        return group_digests(parts_of_vllm(self._runner.get_model(), tp_rank=0, tp_size=1))

    def run(self, engine: str, steps: Sequence[Step], changes: Changes) -> None:
        """Run the sequences of an engine: in the recorded steps, or composed anew."""
        if changes.rows is not None:
            mine = [key for key in self._sequences if key.engine == engine]
            self._run_freely(mine, changes.rows)
        elif changes.composition:
            self._run_as_they_came(steps)
        else:
            self._run_steps(steps)

    def _run_steps(self, steps: Sequence[Step]) -> None:
        """Lay the steps out one after another, up to the first that the engine takes otherwise.

        What is then missing, and where it began, is found when the two tapes are compared.
        """
        last = {part.key: step.number for step in steps for part in step.parts}
        for step in steps:
            self._leave(step.number, last)
            for part in step.parts:
                if part.key not in self._inside:
                    self._add(part.key)
            wanted = {part.key: (part.start, part.n) for part in step.parts}
            if (taken := self._step()) != wanted:
                self.left_off = _parted(step.number, wanted, taken)
                break
        self._leave(None, last)
        self._settle()

    def _run_freely(self, keys: Sequence[Key], rows: int) -> None:
        for first in range(0, len(keys), rows):
            lot = [key for key in keys[first : first + rows] if self._sequences[key].length]
            for key in lot:
                self._add(key)
            self._run_out()

    def _run_as_they_came(self, steps: Sequence[Step]) -> None:
        """Add each request at the step in which it first ran; which tokens a step has is free."""
        for step in steps:
            for part in step.parts:
                if part.key not in self._inside and self._sequences[part.key].length:
                    self._add(part.key)
            self._step_freely()
        self._run_out()

    def _run_out(self) -> None:
        while self._engine.has_unfinished_requests():
            self._step_freely()

    def _step_freely(self) -> None:
        """A step, and an end for what has all of its recorded tokens."""
        self._engine.step()
        requests = self._scheduler.requests
        # where the recorded one was aborted, the engine would go on with its own tokens
        full = [n for n, r in requests.items() if r.num_tokens >= len(self._tokens[n])]
        if full:
            self._engine.abort_request(full, internal=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], forced: list[list[tuple[int, float]]] | None
    ) -> list[list[tuple[int, float]]]:
        """(token, logprob) of a few tokens after each prompt, sampled or forced."""
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=1.0, max_tokens=_TESTED_STEPS, ignore_eos=True, logprobs=0, detokenize=False
        )
        found: dict[str, list[tuple[int, float]]] = {}
        for i, ids in enumerate(prompts):
            outer = f"self-test-{len(self._seen)}-{i}"
            inner = self._engine.add_request(outer, {"prompt_token_ids": list(ids)}, how)
            if forced is not None:
                tokens = [*ids, *(token for token, _ in forced[i])]
                self._tokens[inner if isinstance(inner, str) else outer] = np.array(tokens)
            found[outer] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                drawn = output.outputs[0]
                found[output.request_id] = [
                    (token, by_id[token].logprob)
                    for token, by_id in zip(drawn.token_ids, drawn.logprobs, strict=True)
                ]
        return list(found.values())

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
            if name in running
            and (number is None or last[key] < number)
            and not self._ends_itself(name)
        ]
        if gone:
            self._engine.abort_request(gone, internal=True)

    def _ends_itself(self, name: str) -> bool:
        """Whether a request has run to its last recorded token, and the engine ends it there.

        With asynchronous scheduling the answer of its last step comes after the next is laid out.
        """
        request, tokens = self._scheduler.requests[name], self._tokens[name]
        if request.num_computed_tokens < len(tokens) - 1:
            return False
        how, last = request.sampling_params, int(tokens[-1])
        stops = last == how.eos_token_id or last in (how.stop_token_ids or ())
        made = len(tokens) - request.num_prompt_tokens
        full = made >= request.max_tokens or len(tokens) >= self._scheduler.max_model_len
        return made > 0 and (stops or full)

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


def _parted(
    number: int, wanted: Mapping[Key, tuple[int, int]], taken: Mapping[Key, tuple[int, int]]
) -> str:
    """Where the engine took another step than the recorded one: nothing was laid out after it."""
    names = dict.fromkeys((*wanted, *taken))
    key = next(name for name in names if wanted.get(name) != taken.get(name))

    def said(part: tuple[int, int] | None) -> str:
        return "nothing" if part is None else f"{part[1]} tokens from position {part[0]}"

    return (
        f"step {number}: the engine scheduled {said(taken.get(key))} of {key.id}, recorded is "
        f"{said(wanted.get(key))}; the steps behind it were not laid out"
    )


def _origins(tape: Tape, root: Path, engines: Collection[str]) -> dict[Key, Key]:
    """Key in the new tape -> key in the old one, which is the external id of the new."""
    known = {s.key.text: s.key for s in tape if s.key.engine in engines}
    return {s.key: known[ext] for s in open_tape(root) if (ext := s.info["external"]) in known}
