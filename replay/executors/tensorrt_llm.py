"""Runs a recorded schedule of TensorRT-LLM's PyTorch back end again, with forced tokens.

The engine runs in this process. Its loop is shown the requests that were in flight at each step,
its tuner is pinned to the choices of the recording, and drawn tokens are replaced behind the
sampler (`executor_loop`, `tactic_pins`); everything else is the engine's own, so a step that comes
out differently is found and named, not papered over.

Prefixes are taken over from the cache as in the recording: without that, positions would be
forwarded that were not, in chunks of other sizes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.recorder import session as sessions
from rolltape.recorder.digest import GroupDigest, weights_digest
from rolltape.recorder.options import Options
from rolltape.recorder.tensorrt_llm.identity import current_engine, engine_of
from rolltape.recorder.tensorrt_llm.weights import NOT_COMPARABLE
from rolltape.replay.executors.executor_loop import Forced, Loop, Place, Script
from rolltape.replay.executors.protocol import Changes, Execution, NotRunError
from rolltape.replay.executors.serving import (
    check_prefix_cache,
    hooks,
    name_origins,
    variables,
    weights_of,
)
from rolltape.replay.executors.tactic_pins import PinError, Pins
from rolltape.replay.serving_steps import Step, recorded_steps
from rolltape.store import ModelMismatchError, Tape, UsageError, create_tape, seal
from rolltape.store import Sequence as Recorded
from rolltape.store.keys import Key

#: Arguments that decide what a step computes; taken as they were in force.
_PINNED = (
    "attn_backend",
    "sampler_type",
    "disable_overlap_scheduler",
    "enable_chunked_prefill",
    "allreduce_strategy",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
)
#: Asked for, but not by what is run again.
_NOT_AGAIN = ("model", "tokenizer", "skip_tokenizer_init", "enable_autotuner")
#: Recorded with the sampling of a request, but no parameter, or set anew.
_NOT_SAMPLING = ("greedy", "best_of", "use_beam_search")
#: Findings and notices that say that the recording is not whole, or of mixed weights.
_NOT_WHOLE = ("weights-dirty", "weights-mixed", "unsupported-batch")
#: An engine without requests may take so long to answer the last of them.
_MOST_SILENT_S, _POLL_S = 3.0, 0.05
#: Size of the self-test: rows, prompt tokens, steps.
_TESTED_ROWS, _TESTED_TOKENS, _TESTED_STEPS = 8, 12, 6


#: The worker stays in this process.
_IN_PROCESS = {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"}


def check_engine(tape: Tape, engine: str) -> None:
    """Whether the steps of an engine can be laid out again.

    Raises:
        NotRunError: something that is needed was not recorded, or cannot be done again.
    """
    facts = tape.engine(engine)
    for name, (_, size) in (facts["ranks"] or {}).items():
        if size != 1:
            raise NotRunError(f"{name} has {size} ranks: one process cannot run their steps again")
    if facts["effective"].get("speculative_config"):
        raise NotRunError("the rollout was speculative: its drafts are not recorded")
    if facts["effective"].get("enable_return_routed_experts"):
        raise NotRunError("routes come from the engine's own capture, of requests that ask for it")
    for event in tape.rows("events"):
        if event["engine"] not in (engine, None):
            continue
        detail = json.loads(event["detail"] or "{}")
        if event["kind"] == "gap":
            reason = detail.get("reason") or detail.get("table")
            raise NotRunError(f"it has gaps, so that not all of it is known: {reason}")
        if detail.get("left_out") or detail.get("code") in _NOT_WHOLE:
            raise NotRunError(detail.get("text") or f"not recorded: {detail['left_out']}")
    steps = [row["step"] for row in tape.rows("steps") if row["engine"] == engine]
    if sorted(steps) != list(range(len(steps))):
        raise NotRunError("some of its steps are not recorded")
    for sequence in tape:
        if sequence.key.engine == engine:
            _check_sequence(sequence)


def _check_sequence(sequence: Recorded) -> None:
    if not sequence.tokens.valid.all():
        raise NotRunError(f"{sequence.id}: some of its tokens are not known")
    edits = [edit for *_, semantics in sequence.semantics for edit in semantics["edits"]]
    if edits:
        raise NotRunError(f"{sequence.id}: its logits were edited by {edits[0]}")
    how = sequence.info["sampling"] or {}
    if how.get("use_beam_search"):
        raise NotRunError(f"{sequence.id}: it was one of several beams")
    if how.get("stop"):
        raise NotRunError(f"{sequence.id}: it was to end by text, and tokens are all there is")
    if "end_id" not in how and "ignore_eos" not in how and sequence.finish == "stop":
        response = sequence.tokens.values[sequence.prompt_len :].tolist()
        if not response or response[-1] in response[:-1]:
            raise NotRunError(f"{sequence.id}: what ended it is not recorded")


def changed_arguments(arguments: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Those of the arguments of an `LLM` that the switches `chunk` and `prefix_cache` change."""
    changed: dict[str, Any] = {}
    if changes.chunk is not None:
        changed |= {"max_num_tokens": changes.chunk, "enable_chunked_prefill": True}
    if not changes.prefix_cache:
        cache = arguments.get("kv_cache_config") or {}
        changed["kv_cache_config"] = {**cache, "enable_block_reuse": False}
    return changed


def engine_arguments(facts: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Arguments of an `LLM` that computes what the recorded one did."""
    effective, requested = facts["effective"], facts["requested"]
    arguments = {k: v for k, v in requested.items() if k not in _NOT_AGAIN and "." not in k}
    arguments |= {k: effective[k] for k in _PINNED if effective.get(k) is not None}
    reuse = (effective.get("kv_cache_config") or {}).get("enable_block_reuse")
    if reuse is not None:  # other settings than the user's may have turned it off
        cache = arguments.get("kv_cache_config") or {}
        arguments["kv_cache_config"] = {**cache, "enable_block_reuse": reuse}
    arguments["model"] = model or facts["model"]
    arguments["skip_tokenizer_init"] = True  # tokens are forced: nothing needs their text
    arguments["enable_autotuner"] = False
    return arguments


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
    foreign_pins: bool = False,
) -> Execution:
    """Run the schedule of a tape again and write what was recorded as a new tape.

    Args:
        source: the recording.
        out: folder of the new tape.
        changes: made on purpose.
        model: path of the model; by default as the tape names it.
        device: where TensorRT-LLM runs is what was installed: must be None.
        provenance: for the header of the new tape.
        checkpoints: paths of weight versions.
        arguments: of the `LLM`, instead of the recorded ones.
        foreign_pins: take the tuner's choices of another device or library, too.

    Raises:
        NotRunError: the schedule cannot be laid out again; nothing is written.
        PinError: a choice of the tuner is not known here, or not for this device and library;
            nothing is left.
        ModelMismatchError: a checkpoint is not the version that it was said to be; nothing is left.
        UsageError: no TensorRT-LLM rollout, it is not installed here or does not take the
            arguments.
    """
    if device is not None:
        raise UsageError(f"device {device}: TensorRT-LLM runs on the device it is built for")
    if model is not None and not isinstance(model, str):
        raise UsageError("--on tensorrt_llm takes the path of a model")
    engines = [e for e in source.engines if source.engine(e)["adapter"] == "tensorrt_llm"]
    if not engines:
        raise UsageError(f"{source.place} has no rollout of TensorRT-LLM", hint="--on its engine")
    wanted, given = {}, {}
    for engine in engines:
        check_engine(source, engine)
        wanted[engine] = weights_of(source, engine, changes, checkpoints or {}, model)
        given[engine] = engine_arguments(source.engine(engine), wanted[engine].path)
        given[engine] |= changed_arguments(given[engine], changes)
    caches = [source.engine(e)["effective"].get("kv_cache_config") or {} for e in engines]
    check_prefix_cache(changes, [cache.get("enable_block_reuse") for cache in caches])
    if sessions.active() is not None:
        raise UsageError("this process records already", hint="one recording at a time")
    _import()
    level = "routing" if source.table("routes").num_rows else "tokens"
    options = Options(level=level, on_full="block")
    create_tape(out, role="rollout", parent=source.uuid, provenance=dict(provenance or {}))
    started, forwards, computed = time.time_ns(), 0, 0
    tested: dict[str, Any] = {}
    origins: dict[Key, Key] = {}
    others: list[str] = []
    warnings: list[str] = []
    try:
        with variables(_IN_PROCESS), hooks():
            for engine in engines:
                chosen = given[engine] | dict(arguments or {})
                pins = Pins(source, engine, foreign=foreign_pins)
                driver = None
                try:
                    pins.install()
                    session = sessions.start(out, options)
                    driver = _Driver(_start(chosen, pins), source, pins)
                    weights, loaded = wanted[engine], driver.weights()
                    warnings += weights.check(source, engine, loaded, str(chosen["model"]))
                    origins |= driver.run(engine, recorded_steps(source, engine), changes)
                    forwards += driver.loop.forwards
                    computed += driver.loop.computed
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
                    pins.remove()
                others += pins.others
                warnings += pins.differences
    except (PinError, ModelMismatchError):
        shutil.rmtree(out)  # nobody should take what ran so far for a replay
        raise
    except BaseException as error:
        seal(out, status={"replay": "error", "error": f"{type(error).__name__}: {error}"})
        raise
    name_origins(source, out, origins)
    seal(out, status={"replay": "ok"})
    return Execution(
        model=str(chosen["model"]),
        forwards=forwards,
        started_ns=started,
        ended_ns=ended,
        self_test=tested,
        warnings=(*dict.fromkeys(warnings), *_warnings(computed, others)),
    )


def _warnings(computed: int, others: Collection[str]) -> Iterator[str]:
    if computed:
        yield (
            f"{computed} logprobs are of tokens that the engine did not draw this time: they were "
            "computed here, from its logits"
        )
    if others:
        names = ", ".join(dict.fromkeys(others))
        yield f"choices of kernels that could not be pinned: {names}"


def _self_test(driver: _Driver, source: Tape, engine: str, options: Options) -> dict[str, Any]:
    """Forcing a run's own tokens changes no bit, a changed prompt does.

    After the schedule, so that no cache of the engine knows of it; on a tape that is thrown away.
    """
    if driver.loop.broken:
        reason = "a step was composed otherwise: nothing was tested"
        return {"neutral": None, "control": None, "reason": reason}
    needed = driver.loop.computed > 0
    mine = [s for s in source if s.key.engine == engine and s.prompt_len]
    kinds = {json.dumps(_drawn_by(s), sort_keys=True): s for s in mine}
    hows = [{"temperature": 1.0}, *(json.loads(kind) for kind in kinds)][:_TESTED_ROWS]
    prompts = [
        s.tokens.values[: min(s.prompt_len, _TESTED_TOKENS)].tolist()
        for s in mine[:1] + list(kinds.values())
    ][:_TESTED_ROWS]
    driver.pins.strict = False  # its batches need not be among the recorded ones
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tape"
        create_tape(root, role="rollout")
        sessions.start(root, options)
        try:
            own = driver.generate(prompts, hows, None)
            before = driver.loop.computed
            again = driver.generate(prompts, hows, own)
            forced = driver.loop.computed > before
            other = [[(prompt[0] + 1) % 7 + 1, *prompt[1:]] for prompt in prompts]
            control = driver.generate(other, hows, own)
        finally:
            sessions.stop()
    tokens = [[t for t, _ in row] for row in own]
    if [[t for t, _ in row] for row in again] != tokens:
        return {"neutral": False, "control": None, "reason": "the tokens could not be forced"}
    reason = "forcing is not neutral" if again != own else "a changed prompt changed nothing"
    neutral: bool | None = again == own
    if neutral and needed and not forced:
        neutral, reason = None, "no token had to be forced in the test, and some had to in the run"
    size = {"steps": _TESTED_STEPS, "rows": len(prompts)}
    return {"neutral": neutral, "control": control != own, "reason": reason, **size}


def _drawn_by(sequence: Recorded) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "greedy", "logprobs_mode")
    how = sequence.info["sampling"] or {}
    return {name: how[name] for name in names if how.get(name) is not None}


def _import() -> None:
    try:
        import tensorrt_llm  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "run it where TensorRT-LLM is"
        raise UsageError(f"--on tensorrt_llm needs {error.name}", hint=hint) from error


def _start(arguments: dict[str, Any], pins: Pins) -> Any:
    from tensorrt_llm import LLM

    try:
        return LLM(**arguments)
    except Exception as error:
        if pins.problem is not None:
            raise pins.problem from error
        if isinstance(error, TypeError | ValueError):
            reason = str(error).splitlines()[0]
            text = f"this TensorRT-LLM does not take the recorded arguments: {reason}"
            raise UsageError(text) from error
        raise


class _Driver:
    """One engine in this process, and what it does.

    Args:
        llm: `LLM` with its worker in this process.
        tape: the recording.
        pins: of its tuner.
    """

    def __init__(self, llm: Any, tape: Tape, pins: Pins) -> None:
        executor = getattr(getattr(llm, "_executor", None), "engine", None)
        if executor is None:
            llm.shutdown()
            raise UsageError("the worker of this TensorRT-LLM is not in this process")
        self._llm, self._tape, self.pins = llm, tape, pins
        self._executor = executor
        self._engine = engine_of(llm._executor) or current_engine()
        self.loop = Loop(executor)

    def close(self) -> None:
        """Undo the patches and stop the engine."""
        self.loop.close()
        self._llm.shutdown()

    def weights(self) -> list[GroupDigest]:
        """Digests of the weights that were loaded, as the recorder makes them."""
        found = weights_digest(self._executor.model_engine.model)
        return [
            GroupDigest(
                group="",
                value=found.value,
                tensors=found.tensors,
                elements=found.elements,
                reason=NOT_COMPARABLE,
            )
        ]

    def run(self, engine: str, steps: Sequence[Step], changes: Changes) -> dict[Key, Key]:
        """Run the sequences of an engine: in the recorded steps, or composed anew.

        Composed anew they are handed in so many at a time, without the switch `batch` all at once.

        Returns:
            Sequence of the new tape -> the one that it runs again.
        """
        self.pins.strict = True
        mine = [s for s in self._tape if s.key.engine == engine]
        if changes.composition:
            found: dict[Key, Key] = {}
            full = [s for s in mine if s.length > s.prompt_len]
            rows = changes.rows or max(len(full), 1)
            for first in range(0, len(full), rows):
                lot = [[s] for s in full[first : first + rows]]
                found |= self._run(lot, steps=None)
            return found
        ran = {part.key for step in steps for part in step.parts}
        requests: dict[str, list[Recorded]] = {}
        for sequence in sorted(mine, key=lambda s: (s.info["opened_ns"] or 0, s.key.sample)):
            requests.setdefault(sequence.key.request, []).append(sequence)
        groups = [group for group in requests.values() if any(s.key in ran for s in group)]
        return self._run(groups, steps=steps)

    def _run(
        self, groups: Sequence[Sequence[Recorded]], steps: Sequence[Step] | None
    ) -> dict[Key, Key]:
        """Each group is the samples of one request."""
        self.loop.hold()
        futures = []
        sequences: dict[Place, Forced | None] = {}
        keys: dict[Place, Key] = {}
        for group in groups:
            first = group[0]
            prompt = first.tokens.values[: first.prompt_len].tolist()
            how = _parameters(first, len(group), to_the_end=steps is None)
            future = self._llm.generate_async(prompt, how)
            futures.append(future)
            for index, sequence in enumerate(group):
                place = (int(future.request_id), index)
                sampling = sequence.info["sampling"] or {}
                sequences[place] = Forced(tokens=sequence.tokens.values, sampling=sampling)
                keys[place] = sequence.key
        aborted = {s.key for group in groups for s in group if s.finish == "abort"}
        script = Script(sequences=sequences, keys=keys, steps=steps, aborted=frozenset(aborted))
        self._finish(script, futures)
        return {
            Key(self._engine, str(client), sample, 0): key for (client, sample), key in keys.items()
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        hows: Sequence[Mapping[str, Any]],
        forced: list[list[tuple[int, float]]] | None,
    ) -> list[list[tuple[int, float]]]:
        """(token, logprob) of a few tokens after each prompt, sampled or forced."""
        reset = getattr(self._executor, "reset_prefix_cache", None)
        if reset is not None:
            reset()
        self.loop.hold()
        futures = []
        sequences: dict[Place, Forced | None] = {}
        for index, (ids, how) in enumerate(zip(prompts, hows, strict=True)):
            given = {**how, "max_tokens": _TESTED_STEPS, "logprobs": 0}
            future = self._llm.generate_async(list(ids), _sampling(given, end=False))
            futures.append(future)
            tokens = None
            if forced is not None:
                tokens = Forced(
                    tokens=np.array([*ids, *(token for token, _ in forced[index])]), sampling=how
                )
            sequences[int(future.request_id), 0] = tokens
        self._finish(Script(sequences=sequences, keys={}), futures)
        found = []
        for future in futures:
            drawn = future.outputs[0]
            pairs = zip(drawn.token_ids, drawn.logprobs, strict=True)
            found.append([(int(t), _value(entry, int(t))) for t, entry in pairs])
        return found

    def _finish(self, script: Script, futures: Sequence[Any]) -> None:
        """Run a script, and wait for its answers as long as there is something that may give one.

        What hands the engine's answers over is a thread of its own, which may have died.
        """
        self.loop.begin(script)
        failed: list[Exception] = []

        def wait() -> None:
            for future in futures:
                try:
                    future.result()
                except Exception as error:
                    failed.append(error)

        waiting = threading.Thread(target=wait, daemon=True, name="rolltape-answers")
        waiting.start()
        silent = 0.0
        while waiting.is_alive() and silent < _MOST_SILENT_S:
            waiting.join(_POLL_S)
            silent = silent + _POLL_S if self.loop.ended else 0.0
        problem = self.pins.problem or self.loop.problem
        if problem is None and not self.loop.broken:
            problem = failed[0] if failed else None
            if waiting.is_alive():
                problem = UsageError("the engine ended its requests and did not answer")
        if problem is not None:
            raise problem


def _value(entry: Any, token: int) -> float:
    return float(entry[token].logprob if isinstance(entry, dict) else entry)


def _parameters(sequence: Recorded, samples: int, *, to_the_end: bool) -> Any:
    """Parameters of a request as recorded; `to_the_end`: it ends where the recording does."""
    given = dict(sequence.info["sampling"] or {})
    if to_the_end:
        given |= {"n": 1, "max_tokens": sequence.length - sequence.prompt_len}
        return _sampling(given, end=False)
    given["n"] = samples
    scored = sequence.logprob("raw").valid[1 : sequence.prompt_len]
    if scored.any():  # it makes the product of the head one of all rows
        given.setdefault("prompt_logprobs", 0)
    if "end_id" not in given and "ignore_eos" not in given:  # of an older recording
        stopped = sequence.finish == "stop"
        given["end_id"] = int(sequence.tokens.values[-1]) if stopped else None
    return _sampling(given, end=True)


def _sampling(given: Mapping[str, Any], *, end: bool) -> Any:
    from tensorrt_llm import SamplingParams

    known = {field.name for field in dataclasses.fields(SamplingParams) if field.init}
    how = {k: v for k, v in given.items() if k in known and k not in _NOT_SAMPLING}
    how["max_tokens"] = given.get("max_tokens")  # unset is not the default
    if not end or how.get("end_id") is None:
        how |= {"end_id": -1, "pad_id": 0}
    if not end:
        how |= {"ignore_eos": True, "stop_token_ids": None}
    if "detokenize" in known:
        how["detokenize"] = False
    return SamplingParams(**how)
