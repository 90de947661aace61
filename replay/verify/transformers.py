"""The determinism suite on transformers: `generate()` of one batch, laid out in other ways."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import rolltape
from rolltape.recorder.facts import model_facts
from rolltape.recorder.moe import find_moe_blocks
from rolltape.recorder.options import Options
from rolltape.replay.executors import transformers as executor
from rolltape.replay.executors.protocol import Execution
from rolltape.replay.reproduction import reproduction
from rolltape.replay.schedule import Call, Row, read_schedule, regrouped
from rolltape.replay.score import score_tape
from rolltape.replay.switches import Switches
from rolltape.replay.verify.cases import CONTROL, Comparison, NotApplicableError
from rolltape.replay.verify.compare import Values, compare
from rolltape.replay.verify.first_site import find
from rolltape.replay.verify.prompts import Workload
from rolltape.replay.verify.rank_sites import part_at, watching
from rolltape.replay.verify.teacher import Rows, teacher_forced, values_of
from rolltape.replay.verify.tensor_parallel import two_ranks, two_ranks_sites
from rolltape.store import ForcingError, Tape, UsageError
from rolltape.store.keys import Key

#: Executions of the control: one more than it takes, for what differs only now and then.
_REPEATS = 2
#: Times that the site of a difference is looked for: what differs now and then may not at once.
_LOOKS = 3


def bench(
    model: Any,
    work: Workload,
    *,
    dtype: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Bench:
    """Load a model if it is a path, and record the base rollout."""
    path = isinstance(model, str)
    name = model if path else type(model).__name__
    if path:
        model = _load(model, dtype, device, arguments or {})
    elif dtype is not None or device is not None or arguments:
        raise UsageError("dtype, device and arguments of a loaded model are its own")
    return Bench(model, name, work, path=path)


def _load(name: str, dtype: str | None, device: str | None, arguments: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    kind = "auto" if dtype is None else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise UsageError(f"--dtype {dtype}: torch has no such dtype", hint="float32 | bfloat16")
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise UsageError(f"model {name}: no such folder", hint="the path of a checkpoint")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=kind, local_files_only=True, **arguments
        )
    except (ImportError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model {name}: {reason}", hint="the path of a checkpoint") from error
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the others have no float64
    try:
        moved: Any = model.eval()
        return moved.to(place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {place}: {reason}", hint="--device cpu") from error


class Bench:
    """A model and its base rollout: one batch, every prompt with as many tokens.

    Args:
        model: a causal language model of transformers, on its device.
        name: what it was loaded from.
        work: how much is run.
        path: whether `name` is the path of its checkpoint.
    """

    def __init__(self, model: Any, name: str, work: Workload, *, path: bool) -> None:
        self.model, self.name, self.work, self._path = model, name, work, path
        self._folder = Path(tempfile.mkdtemp(prefix="rolltape-verify-"))
        self._count = 0
        try:
            self.base = self._record()
            schedule = read_schedule(self.base)
            if len(schedule.calls) != 1 or schedule.refused:
                why = schedule.refused[0].reason if schedule.refused else "it is not one call"
                raise UsageError(f"the base rollout cannot be laid out again: {why}")
            (self.call,) = schedule.calls
            self.tested = self._self_test()
        except BaseException:
            self.close()
            raise
        self._values = [
            replace(Values.of(self.base.sequence(row.key)), id=f"prompt-{index}")
            for index, row in enumerate(self.call.rows)
        ]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was run."""
        facts = model_facts(self.model, self.name)
        return {
            "model": self.name,
            "dtype": facts["dtype"],
            "device": str(self.model.device),
            "prompts": self.work.prompts,
            "tokens": self.work.tokens,
            "seed": self.work.seed,
            "lengths": [len(row.prompt) for row in self.call.rows],
            "attention": self.call.attention,
            "experts": self.call.experts,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "self_test": dict(self.tested),
        }

    def close(self) -> None:
        """Remove the tapes."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, case: str) -> Sequence[Comparison]:
        """Run a case; see `rolltape.replay.verify.cases.Bench`."""
        if case == "prefill-decode":
            return [self._prefill()]
        if case == "routes":
            return [self._routes()]
        if case == "tp":
            return [self._tensor_parallel()]
        return [self._executed(name, calls) for name, calls in self._variants(case)]

    def again(self, case: str, variant: str) -> Comparison | None:
        """Run one variant of a case once more; forwards were run twice already."""
        if case in ("prefill-decode", "routes", "tp"):
            return None
        return self._executed(variant, dict(self._variants(case))[variant])

    # -- the base -------------------------------------------------------------------------

    def _record(self) -> Tape:
        from transformers import GenerationConfig

        model, work = self.model, self.work
        config = model.config.get_text_config()
        special = {
            int(token)
            for name in ("bos", "eos", "pad")
            for token in np.atleast_1d(getattr(config, f"{name}_token_id", None) or 0)
        }
        longest = getattr(config, "max_position_embeddings", None)
        prompts = work.ids(int(config.vocab_size), longest, special)
        width = max(map(len, prompts))
        ids, mask = (np.zeros((len(prompts), width), np.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        # nothing ends a row early, nothing is cut off: every logprob is that of the model
        how = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=work.tokens,
            pad_token_id=0,
        )  # fmt: skip
        before, model.generation_config = model.generation_config, GenerationConfig()
        devices = [model.device.index or 0] if model.device.type == "cuda" else []
        root = self._next("base")
        try:
            with (
                torch.random.fork_rng(devices=devices),
                rolltape.record(root, level="routing", on_full="block", strict=True),
            ):
                torch.manual_seed(work.seed)
                model.generate(
                    torch.from_numpy(ids).to(model.device),
                    attention_mask=torch.from_numpy(mask).to(model.device),
                    generation_config=how,
                )
        finally:
            model.generation_config = before
        return rolltape.open(root)

    def _self_test(self) -> dict[str, Any]:
        """What the executor's own test finds.

        Where it sees a difference between two runs by chance, it may take it for one of forcing.
        """
        options = Options(level="routing", on_full="block", strict=True)
        for attempt in range(_LOOKS):
            try:
                return executor.self_test(self.base, self.call, self.model, options)
            except ForcingError:
                if attempt == _LOOKS - 1:
                    raise
        raise AssertionError

    def _next(self, name: str) -> Path:
        self._count += 1
        return self._folder / f"{self._count}-{name}"

    # -- executions -----------------------------------------------------------------------

    def _variants(self, case: str) -> list[tuple[str, list[Call]]]:
        call = self.call
        if case == CONTROL:
            return [(f"repeat {n + 1}", [call]) for n in range(_REPEATS)]
        if case == "batch":
            return [(f"batch of {n}", regrouped([call], n)) for n in self.work.sizes()]
        if case == "slot":
            return [("reverse order", [replace(call, rows=call.rows[::-1])])]
        if case == "chunked":
            return [(f"chunks of {n}", [self._chunked(n)]) for n in self._chunks()]
        reasons = {
            "prefix-cache": "generate() has no prefix cache",
            "graphs": "generate() runs no graphs of padded sizes unless it is compiled",
        }
        raise NotApplicableError(reasons.get(case, "transformers cannot run it"))

    def _chunks(self) -> list[int]:
        from transformers import GenerationConfig

        if not hasattr(GenerationConfig(), "prefill_chunk_size"):
            raise NotApplicableError("this transformers has no prefill_chunk_size")
        return [max(1, self.call.width // 3)]

    def _chunked(self, size: int) -> Call:
        return replace(self.call, settings={**self.call.settings, "prefill_chunk_size": size})

    def _execute(self, name: str, calls: Sequence[Call]) -> tuple[Tape, Execution]:
        root = self._next(name.replace(" ", "-"))
        seen = executor.execute(self.base, root, calls, self.model, self.name, tested=self.tested)
        return rolltape.open(root), seen

    def _executed(self, name: str, calls: Sequence[Call]) -> Comparison:
        tape, seen = self._execute(name, calls)
        found = reproduction(self.base, tape, execution=seen, composition=False)
        problem = found["reason"] if found["verdict"] in ("not-run", "inconclusive") else None
        return compare(self._pairs(tape), name, problem=problem)

    def _pairs(self, tape: Tape) -> list[tuple[Values, Values]]:
        origins: dict[Key | None, Values] = {s.origin: Values.of(s) for s in tape}
        pairs = zip(self.call.rows, self._values, strict=True)
        return [(mine, origins[row.key]) for row, mine in pairs if row.key in origins]

    # -- forwards -------------------------------------------------------------------------

    def _prefill(self) -> Comparison:
        others, problem = self._forward()
        return compare(zip(self._values, others, strict=True), "one forward", problem=problem)

    def _forward(self) -> tuple[list[Values], str | None]:
        """What one forward computes, and what speaks against a comparison with it."""
        one, two = (
            values_of(self.call, self._values, teacher_forced(self.model, Rows.of(self.call)))
            for _ in range(2)
        )
        again = compare(zip(one, two, strict=True), "the same forward")
        return one, "the same forward twice differs" if again.first is not None else None

    def _routes(self) -> Comparison:
        """Score the rollout with live and with the recorded routes: are they the same choice?"""
        if not find_moe_blocks(self.model):
            raise NotApplicableError("this model has no experts to route to")
        tapes = []
        for switches in (["routing=live"], ["routing=ids"]):
            root = self._next(switches[0])
            score_tape(self.base, root, self.model, switches=Switches.parse(switches))
            tapes.append({s.origin: s for s in rolltape.open(root)})
        live, forced = tapes
        pairs = []
        for row, mine in zip(self.call.rows, self._values, strict=True):
            left, right = Values.of(live[row.key]), Values.of(forced[row.key])
            pairs.append((_like(left, mine), _like(right, mine)))
        return compare(pairs, "recorded routes")

    def _tensor_parallel(self) -> Comparison:
        if not self._path:
            raise NotApplicableError("two ranks need the path of a checkpoint, not a loaded model")
        rows = Rows.of(self.call)
        split = two_ranks(
            self.name, rows, dtype=str(self.model.dtype), device=self.model.device.type,
            folder=self._next("ranks"),
        )  # fmt: skip
        one, problem = self._forward()
        two = values_of(self.call, self._values, split)
        return compare(zip(one, two, strict=True), "two ranks", problem=problem)

    # -- sites ----------------------------------------------------------------------------

    def site(self, case: str, comparison: Comparison) -> Mapping[str, Any]:
        """Run both sides again with taps and name the first site at which they part."""
        if case == "routes":
            return {"reason": "not looked for: what differs is the choice of experts itself"}
        if case == "tp":
            return self._rank_site(comparison)
        key = self._rows[str(comparison.shown["sequence"])]
        watched: set[str] | None = {key.text}
        steps = int(comparison.shown["step"]) - self.call.first_step + 1
        if case == CONTROL:  # what comes and goes may be in any row and step next time
            watched, steps = None, self.call.steps
        mine = [self._short(self.call, steps)]
        other = self._other(case, comparison.variant, key, steps)
        sides = ((mine, lambda: self._execute("taps", mine)), other)
        try:
            for _ in range(_LOOKS):
                found = find(self.model, *sides, watched)
                if found is not None:
                    step = self.call.first_step + int(found["forward"])
                    texts = {key.text: name for name, key in self._rows.items()}
                    return {
                        "site": found["site"],
                        "sequence": texts[str(found["sequence"])],
                        "position": found["position"],
                        "step": step,
                    }
        except UsageError as error:
            return {"reason": f"not looked for: {error}"}
        return {"reason": f"not found: with taps, {_LOOKS} pairs of runs agreed"}

    def _rank_site(self, comparison: Comparison) -> Mapping[str, Any]:
        """The first site at which two ranks part from one, in one forward of the same rows."""
        name = str(comparison.shown["sequence"])
        index = [values.id for values in self._values].index(name)
        rows = Rows.of(self.call)
        try:
            with watching(self.model, rows, index) as one:
                teacher_forced(self.model, rows)
            two, replicas = two_ranks_sites(
                self.name, rows, index, dtype=str(self.model.dtype),
                device=self.model.device.type, folder=self._next("ranks"),
            )  # fmt: skip
        except (UsageError, NotApplicableError) as error:
            return {"reason": f"not looked for: {error}"}
        found = part_at(one, two, replicas)
        # the forward is that of a trainer: it has no steps, but it belongs to the first of the call
        return {**found, "sequence": name, "step": self.call.first_step}

    def _other(
        self, case: str, variant: str, key: Key, steps: int
    ) -> tuple[list[Call], Callable[[], object]]:
        if case == "prefill-decode":
            return [self.call], lambda: teacher_forced(self.model, Rows.of(self.call))
        calls = dict(self._variants(case))[variant]
        with_key = [c for c in calls if any(row.key == key for row in c.rows)]
        cut = [self._short(c, steps) for c in with_key]
        return cut, lambda: self._execute("taps", cut)

    def _short(self, call: Call, steps: int) -> Call:
        rows = tuple(_cut(row, max(1, steps)) for row in call.rows)
        return replace(call, rows=rows)

    @property
    def _rows(self) -> dict[str, Key]:
        names = (values.id for values in self._values)
        return dict(zip(names, (row.key for row in self.call.rows), strict=True))


def _like(values: Values, base: Values) -> Values:
    """Scored values with the steps of the base, which has no forward of the last token."""
    chosen = values.chosen
    if chosen is not None:
        known = np.arange(len(chosen.valid))[:, None] < len(chosen.valid) - 1
        chosen = replace(chosen, valid=chosen.valid & known, weighted=chosen.weighted & known)
    return replace(values, id=base.id, step=base.step, forwards=base.forwards, chosen=chosen)


def _cut(row: Row, steps: int) -> Row:
    return replace(row, response=row.response[:steps])
