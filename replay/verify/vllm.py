"""The determinism suite on vLLM: requests of one rollout again, in one engine in this process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import rolltape
from rolltape.recorder import session as sessions
from rolltape.replay.executors.serving import variables
from rolltape.replay.executors.vllm import IN_PROCESS
from rolltape.replay.verify.cases import CONTROL, Comparison, NotApplicableError
from rolltape.replay.verify.compare import Values, compare
from rolltape.replay.verify.first_site import Trace, first_site
from rolltape.replay.verify.prompts import LONGEST, Workload
from rolltape.replay.verify.rank_sites import part_at
from rolltape.replay.verify.vllm_force import Inside, check_eager
from rolltape.replay.verify.vllm_second import NAME, kept_sites, second_engine, sites_of_second
from rolltape.store import Sequence as TapeSequence
from rolltape.store import Tape, UsageError
from rolltape.store.columns import Masked

#: Executions of the control.
_REPEATS = 2
_COMMIT_SECONDS = 60.0
#: Of the case `tp`.
_RANKS = 2
#: Times that the site of a difference is looked for.
_LOOKS = 3


def bench(
    model: Any,
    work: Workload,
    *,
    dtype: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Bench:
    """Start an engine and record the base rollout."""
    if not isinstance(model, str):
        raise UsageError("--engine vllm takes the path of a checkpoint")
    if device is not None and device != (here := _device()):
        raise UsageError(f"--device {device}: this vLLM runs on {here}")
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise UsageError(f"model {model}: no such folder", hint="the path of a checkpoint")
    return Bench(model, work, _arguments(work, dtype, arguments or {}))


class Bench:
    """One engine, and all of its executions on one tape.

    Args:
        model: path of the checkpoint.
        work: how much is run.
        arguments: of the engine.
    """

    def __init__(self, model: str, work: Workload, arguments: Mapping[str, Any]) -> None:
        self._stack = ExitStack()
        try:
            self._start(model, work, arguments)
        except BaseException:
            self.close()
            raise

    def _start(self, model: str, work: Workload, arguments: Mapping[str, Any]) -> None:
        self.name, self.work, self._arguments = model, work, arguments
        self._stack.enter_context(variables(IN_PROCESS))
        self._folder = Path(tempfile.mkdtemp(prefix="rolltape-verify-"))
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._root = self._folder / "tape"
        self._stack.enter_context(rolltape.record(self._root, level="routing", on_full="block"))
        self._engine = start_engine(model, arguments)
        self._stack.callback(self._engine.engine_core.shutdown)
        self._inside = Inside(self._engine)
        self._stack.callback(self._inside.close)
        self._prompts = _prompts(work, self._engine.model_config)
        self._responses: list[np.ndarray] = []
        self._count = 0
        self._watched: dict[str, str] = {}  # sequences that are traced, by the id inside
        self._again: dict[str, Callable[[], str]] = {}  # variant -> run it, and its name
        self._lots: dict[str, Sequence[Sequence[int]]] = {}  # variant -> rows that ran together
        base, self._responses = self._run(self._whole)
        other = [p.copy() for p in self._prompts]
        other[0][-1] = next(t for t in other[1].tolist() if t != other[0][-1])
        control, _ = self._run(self._whole, prompts=other)
        tape = self._tape()
        self._base = [
            replace(Values.of(self._found(tape, base, row)), id=f"prompt-{row}")
            for row in range(work.prompts)
        ]
        changed = Values.of(self._found(tape, control, 0))
        self._vacuous = not compare([(self._base[0], changed)], "").differ.get("raw")
        self._facts = _facts(tape, self._base)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was run."""
        return {
            "model": self.name,
            **self._facts,
            "prompts": self.work.prompts,
            "tokens": self.work.tokens,
            "seed": self.work.seed,
            "lengths": [len(prompt) for prompt in self._prompts],
            "self_test": {"control": not self._vacuous},
        }

    def close(self) -> None:
        """Stop the engine and remove the tape."""
        self._stack.close()

    def run(self, case: str) -> Sequence[Comparison]:
        """Run a case; see `rolltape.replay.verify.cases.Bench`."""
        whole = self._whole
        if case == CONTROL:
            return [self._compared(f"repeat {n + 1}", whole) for n in range(_REPEATS)]
        if case == "batch":
            return [self._compared(f"batch of {n}", _lots(whole[0], n)) for n in self.work.sizes()]
        if case == "slot":
            return [self._compared("reverse order", [whole[0][::-1]])]
        if case == "prefill-decode":
            return [self._prefill()]
        if case == "chunked":
            return [self._chunked()]
        if case == "prefix-cache":
            return [self._warm()]
        if case == "graphs":
            return [self._eager()]
        if case == "tp":
            return [self._two_ranks()]
        raise NotApplicableError("vLLM takes no routes: they are forced on transformers")

    def again(self, case: str, variant: str) -> Comparison | None:
        """Run one variant of a case once more."""
        if variant not in self._again:
            return None
        found, problem = self._executed(variant, self._again[variant])
        if case == "prefill-decode":
            pairs = zip(found, self._base, strict=True)
            values = [_as_prompt(sequence, base) for sequence, base in pairs]
        else:
            values = [Values.of(sequence) for sequence in found]
        return self._against(variant, values, problem)

    def site(self, case: str, comparison: Comparison) -> Mapping[str, Any]:
        """Run both sides again with taps and name the first site at which they part."""
        if case == "graphs":
            return {"reason": "not looked for: the other side ran in another process"}
        if case == "tp":
            return self._rank_site(comparison)
        mine = _row(str(comparison.shown["sequence"]))
        if not self._facts["effective"].get("enforce_eager") and comparison.variant in self._lots:
            return self._graph_site(comparison.variant, mine)
        rows = range(self.work.prompts) if case == CONTROL else [mine]
        try:
            check_eager(self._facts["effective"])
            for _ in range(_LOOKS):
                a = self._traced(lambda: self._run(self._whole)[0], rows)
                b = self._traced(self._again[comparison.variant], rows)
                found = first_site(a, b)
                if found is not None:
                    steps = self._base[_row(str(found["sequence"]))].step
                    step = int(steps.values[steps.valid].min()) + int(found.pop("forward"))
                    return {**found, "step": step}
        except UsageError as error:
            return {"reason": f"not looked for: {error}"}
        return {"reason": f"not found: with taps, {_LOOKS} pairs of runs agreed"}

    def _graph_site(self, variant: str, row: int) -> Mapping[str, Any]:
        """The first site at which a row parts, on an engine that captures but does not compile."""
        from rolltape.replay.verify.vllm_graphs import site_in_graphs

        self._count += 1
        folder = self._folder / f"graphs-{self._count}"
        how = self.name, self._arguments, self._prompts, self._responses
        try:
            lots = self._whole, self._lots[variant]
            found = site_in_graphs(folder, *how, lots=lots, rows=[row])
        except (UsageError, NotApplicableError) as error:
            return {"reason": f"not looked for: {error}"}
        if found is None:
            return {"reason": "not found: without compiled code the two agree"}
        steps = self._base[row].step
        step = int(steps.values[steps.valid].min()) + int(found.pop("forward"))
        return {**found, "sequence": f"prompt-{row}", "step": step, "compiled": False}

    def _rank_site(self, comparison: Comparison) -> Mapping[str, Any]:
        """The first site at which two ranks part from one, in one prefill of the same prompts."""
        from rolltape.replay.sites.vllm_ranks import RankTaps

        name = str(comparison.shown["sequence"])
        row = _row(name)
        tokens = np.concatenate([self._prompts[row], self._responses[row]]).tolist()
        try:
            check_eager(self._facts["effective"])
            taps = RankTaps(self._engine.collective_rpc, tokens=tokens)
            try:
                self._scored()
                one, _ = kept_sites(taps.forwards())
            finally:
                taps.remove()
            changes = {"tensor_parallel_size": _RANKS}
            self._second(changes, decode=False, sites=tokens)
            two, replicas = sites_of_second(self._folder / f"second-{self._count}")
        except (UsageError, NotApplicableError) as error:
            return {"reason": f"not looked for: {error}"}
        steps = self._base[row].step
        step = int(steps.values[steps.valid].min())
        return {**part_at(one, two, replicas), "sequence": name, "step": step}

    def _traced(self, run: Callable[[], str], rows: Iterable[int]) -> Trace:
        """The trace of what `run` ran last."""
        self._watched.clear()
        with self._inside.tracing(self._watched) as trace:
            name = run()
        wanted = {f"{name}/{row}": f"prompt-{row}" for row in rows}
        return {
            (wanted[key], position, site): found
            for (key, position, site), found in trace.items()
            if key in wanted
        }

    # -- executions -----------------------------------------------------------------------

    @property
    def _whole(self) -> list[list[int]]:
        return [list(range(self.work.prompts))]

    def _run(
        self,
        lots: Sequence[Sequence[int]],
        *,
        prompts: Sequence[np.ndarray] | None = None,
        cold: bool = True,
        free: bool = False,
        **how: Any,
    ) -> tuple[str, list[np.ndarray]]:
        """Run lots of rows one after another, with the tokens of the base unless they are free.

        Returns:
            The name of the execution: NAME/ROW is the caller's id of a request; and the tokens that
            were sampled, by row.
        """
        from vllm import SamplingParams

        self._count += 1
        name = f"run-{self._count}"
        engine, tokens = self._engine, [np.zeros(0, np.int64)] * self.work.prompts
        if cold and not engine.reset_prefix_cache():
            raise UsageError("this engine did not empty its prefix cache")
        usual = {"temperature": 1.0, "max_tokens": self.work.tokens, "logprobs": 0}
        params = {**usual, "ignore_eos": True, "detokenize": False, **how}
        for lot in lots:
            for row in lot:
                prompt = (prompts or self._prompts)[row]
                ids = {"prompt_token_ids": prompt.tolist()}
                request = f"{name}/{row}"
                inside = engine.add_request(request, ids, SamplingParams(**params)) or request
                self._watched[inside] = request
                if self._responses and not free:
                    forced = np.concatenate([prompt, self._responses[row]])
                    self._inside.tokens[inside] = forced
            while engine.has_unfinished_requests():
                for done in engine.step():
                    tokens[_row(done.request_id, "/")] = np.array(
                        done.outputs[0].token_ids, np.int64
                    )
            self._inside.tokens.clear()
        return name, tokens

    def _tape(self) -> Tape:
        session = sessions.active()
        if session is None or not session.commit(_COMMIT_SECONDS):
            raise UsageError("the recording could not be written")
        if session.dropped or session.faults:
            raise UsageError(f"the recording has faults: {session.faults or 'dropped'}")
        return rolltape.open(self._root)

    def _found(self, tape: Tape, name: str, row: int) -> TapeSequence:
        keys = tape.externals.get(f"{name}/{row}", [])
        if len(keys) != 1:
            raise UsageError(f"{name}/{row} was recorded {len(keys)} times")
        return tape.sequence(keys[0])

    def _executed(
        self, variant: str, run: Callable[[], str]
    ) -> tuple[list[TapeSequence], str | None]:
        """Run a variant; its sequences, and what speaks against it."""
        self._again[variant] = run
        name, tape = run(), self._tape()
        found = [self._found(tape, name, row) for row in range(self.work.prompts)]
        ran = max(int(v.step.values[v.step.valid].max()) for v in self._base)
        steps = [s.step.values[s.step.valid] for s in found]
        if any(not len(own) or int(own.min()) <= ran for own in steps):
            return found, "it has no steps of its own: it was not executed"
        if self._vacuous:
            return found, "a changed prompt changed nothing: the values do not come from the model"
        return found, None

    def _compared(self, variant: str, lots: Sequence[Sequence[int]]) -> Comparison:
        self._lots[variant] = lots
        found, problem = self._executed(variant, lambda: self._run(lots)[0])
        return self._against(variant, [Values.of(s) for s in found], problem)

    def _against(self, variant: str, found: Sequence[Values], problem: str | None) -> Comparison:
        pairs = [(a.where_computed(b), b) for a, b in zip(self._base, found, strict=True)]
        return compare(pairs, variant, problem=problem)

    def _prefill(self) -> Comparison:
        values, problem = self._scored()
        return self._against("one prefill", values, problem)

    def _scored(self) -> tuple[list[Values], str | None]:
        """The whole sequences as prompts, with the logprobs of the prompt."""
        parts = zip(self._prompts, self._responses, strict=True)
        whole = [np.concatenate(part) for part in parts]
        how: dict[str, Any] = {"prompts": whole, "prompt_logprobs": 0, "max_tokens": 1}
        found, problem = self._executed(
            "one prefill", lambda: self._run(self._whole, free=True, **how)[0]
        )
        pairs = zip(found, self._base, strict=True)
        return [_as_prompt(sequence, base) for sequence, base in pairs], problem

    def _chunked(self) -> Comparison:
        scheduler = self._engine.engine_core.engine_core.scheduler
        before = getattr(scheduler, "max_num_scheduled_tokens", None)
        if before is None:
            raise NotApplicableError("this scheduler has no max_num_scheduled_tokens")
        size = max(self.work.prompts, max(map(len, self._prompts)) // 2)

        def run() -> str:
            scheduler.max_num_scheduled_tokens = size
            try:
                return self._run(self._whole)[0]
            finally:
                scheduler.max_num_scheduled_tokens = before

        variant = f"{size} tokens a step"
        found, problem = self._executed(variant, run)
        pairs = zip(found, map(len, self._prompts), strict=True)
        if not any(start + n < whole for s, whole in pairs for start, n in _spans(s, "prefill")):
            raise NotApplicableError("the scheduler cut no prompt into chunks")
        return self._against(variant, [Values.of(s) for s in found], problem)

    def _warm(self) -> Comparison:
        def run() -> str:
            self._run(self._whole)
            return self._run(self._whole, cold=False)[0]

        found, problem = self._executed("warm cache", run)
        if not any(n for s in found for _, n in _spans(s, "cached")):
            longest = max(map(len, self._prompts))
            raise NotApplicableError(
                f"no token came from the cache: the longest prompt has {longest} tokens"
            )
        return self._against("warm cache", [Values.of(s) for s in found], problem)

    # -- a second engine ------------------------------------------------------------------

    def _eager(self) -> Comparison:
        """The same batch on an eager engine, against the graphs of this one."""
        import torch

        if not torch.cuda.is_available():
            raise NotApplicableError("there are no CUDA graphs on this device")
        if self._facts["effective"].get("enforce_eager"):
            raise NotApplicableError("this engine runs eager: it has no graphs")
        found, problem = self._second({"enforce_eager": True}, decode=True)
        return self._against("eager", [Values.of(s) for s in found], problem)

    def _two_ranks(self) -> Comparison:
        """The whole sequences as prompts on two ranks, against those on one."""
        import torch

        if torch.cuda.is_available() and torch.cuda.device_count() < _RANKS:
            raise NotApplicableError(f"{_RANKS} ranks need {_RANKS} GPUs, here is one")
        one, problem = self._scored()
        found, other = self._second({"tensor_parallel_size": _RANKS}, decode=False)
        two = [_as_prompt(s, base) for s, base in zip(found, self._base, strict=True)]
        return compare(zip(one, two, strict=True), "two ranks", problem=problem or other)

    def _second(
        self, changes: Mapping[str, Any], *, decode: bool, sites: Sequence[int] | None = None
    ) -> tuple[list[TapeSequence], str | None]:
        self._count += 1
        tape = second_engine(
            self._folder / f"second-{self._count}",
            self.name,
            {**self._arguments, **changes},
            self._prompts,
            self._responses,
            decode=decode,
            sites=sites,
        )
        found = [self._found(tape, NAME, row) for row in range(self.work.prompts)]
        (row, *_) = [r for r in tape.engines.values() if r["adapter"] == "vllm"]
        for key, value in changes.items():
            if row["effective"].get(key) != value:
                return found, f"{key} of the second engine is {row['effective'].get(key)}"
        return found, None


def _row(name: str, mark: str = "-") -> int:
    return int(name.rpartition(mark)[2])


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _lots(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _spans(sequence: TapeSequence, kind: str) -> Iterator[tuple[int, int]]:
    for row in sequence.forwards.select(["start", "n", "kind"]).to_pylist():
        if row["kind"] == kind:
            yield int(row["start"]), int(row["n"])


def _as_prompt(sequence: TapeSequence, base: Values) -> Values:
    """The values of a sequence that was a prompt, for the tokens that the base sampled."""
    raw = sequence.logprob("raw").resized(base.length)
    chosen = sequence.routes()
    if chosen is not None:
        inputs = np.arange(base.length)[:, None] < base.length - 1
        names = ("ids", "valid", "weights", "weighted")
        cut = {n: getattr(chosen, n) for n in names}
        cut = {n: None if v is None else v[: base.length] for n, v in cut.items()}
        chosen = replace(
            chosen,
            ids=cut["ids"],
            weights=cut["weights"],
            valid=cut["valid"] & inputs,
            weighted=cut["weighted"] & inputs,
            margin=None,
        )
    valid = raw.valid & base.raw.valid
    return replace(base, raw=Masked(raw.values, valid), chosen=chosen)


def _arguments(work: Workload, dtype: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available()
    longest = (work.length or LONGEST) + work.tokens
    return {
        "dtype": dtype or "auto",
        "enforce_eager": not gpu,
        # the whole batch of prompts fits into one step
        "max_model_len": longest + 1,
        "max_num_seqs": work.prompts,
        "max_num_batched_tokens": work.prompts * (longest + 1),
        "enable_prefix_caching": True,
        "seed": work.seed,
        # two cases need a second engine beside this one
        **({"gpu_memory_utilization": 0.45} if gpu else {}),
        **given,
    }


def start_engine(model: str, arguments: Mapping[str, Any]) -> Any:
    """An engine in this process.

    Args:
        model: path of the checkpoint.
        arguments: of the engine.

    Raises:
        UsageError: vLLM does not take them.
    """
    import torch
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if not torch.cuda.is_available() and hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # else a first batch of a few rows kills the process
    try:
        args = EngineArgs(model=model, skip_tokenizer_init=True, **arguments)
        return LLMEngine.from_engine_args(args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"vLLM: {str(error).splitlines()[0]}") from error


def _prompts(work: Workload, config: Any) -> list[np.ndarray]:
    text = config.hf_text_config
    special = {
        int(token)
        for name in ("bos", "eos", "pad")
        for token in np.atleast_1d(getattr(text, f"{name}_token_id", None) or 0)
    }
    return work.ids(int(text.vocab_size), int(config.max_model_len), special)


def _facts(tape: Tape, base: Sequence[Values]) -> dict[str, Any]:
    rows = [row for row in tape.engines.values() if row["adapter"] == "vllm"]
    import torch
    import vllm

    effective = rows[0]["effective"] if rows else {}
    return {
        "dtype": rows[0]["dtype"] if rows else None,
        "device": rows[0]["device"] if rows else None,
        "routes": any(values.chosen is not None for values in base),
        "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
        "effective": {k: effective.get(k) for k in ("enforce_eager", "block_size", "runner")},
    }
