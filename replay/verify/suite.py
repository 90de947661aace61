"""Runs the cases of the determinism suite on an engine and says what each of them shows."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rolltape.replay.verify.cases import (
    CASES,
    CONTROL,
    Bench,
    CaseResult,
    Comparison,
    NotApplicableError,
    Report,
)
from rolltape.replay.verify.prompts import Workload
from rolltape.store.errors import UsageError

#: Engine -> "module:function" that makes its bench from a model and a workload.
ENGINES = {
    "transformers": "rolltape.replay.verify.transformers:bench",
    "vllm": "rolltape.replay.verify.vllm:bench",
}


def verify(
    engine: str,
    model: Any,
    *,
    cases: Sequence[str] = (),
    prompts: int = 16,
    tokens: int = 32,
    length: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Record a rollout, run it again in other ways, and compare every bit.

    Args:
        engine: `transformers` or `vllm`.
        model: path of a checkpoint; transformers takes a loaded model, too.
        cases: names from `CASES`; by default all. `run-to-run` is always run.
        prompts: sequences of the rollout; its batch size.
        tokens: sampled for each of them.
        length: of every prompt; by default they have different lengths.
        seed: of prompts and sampling.
        dtype: torch dtype name; by default that of the checkpoint.
        device: torch device; by default CUDA if there is one.
        arguments: more of them for `from_pretrained`, or for vLLM's engine.

    Raises:
        UsageError: no such engine, case, model, dtype or device; the engine is not installed; this
            process records already.
        ForcingError: tokens cannot be forced on this model without changing other values.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: no such engine", hint=" | ".join(ENGINES))
    for name in cases:
        if name not in CASES:
            raise UsageError(f"--case {name}: no such case", hint=" | ".join(CASES))
    work = Workload(prompts=prompts, tokens=tokens, length=length, seed=seed)
    module, _, function = ENGINES[engine].partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
        bench: Bench = make(model, work, dtype=dtype, device=device, arguments=arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", "vllm"):
            raise
        raise UsageError(
            f"--engine {engine} needs {error.name}", hint="run it where the engine is"
        ) from error
    try:
        found, facts = run_cases(bench, cases), bench.facts
    finally:
        bench.close()
    return Report(facts={"engine": engine, **facts}, cases=found)


def run_cases(bench: Bench, cases: Sequence[str]) -> list[CaseResult]:
    """Run the control, and then the cases in their order; all of them where none is named."""
    wanted = [name for name in CASES if not cases or name in cases or name == CONTROL]
    results: list[CaseResult] = []
    unsteady: int | None = None  # first step that is not the same run to run
    for name in wanted:
        start = time.perf_counter()
        result = _run(bench, name, unsteady)
        if name == CONTROL:
            steps = [c.step for c in result.comparisons if c.step is not None]
            unsteady = min(steps, default=None)
        seconds = time.perf_counter() - start
        results.append(replace(result, asked=name in cases, seconds=seconds))
    return results


def _run(bench: Bench, name: str, unsteady: int | None) -> CaseResult:
    try:
        found = bench.run(name)
    except NotApplicableError as error:
        return CaseResult(case=name, verdict="not-run", reason=str(error), applies=False)
    except Exception as error:  # what breaks one case says nothing of the others
        words = str(error).splitlines()[0] if str(error) else ""
        return CaseResult(case=name, verdict="not-run", reason=f"{type(error).__name__}: {words}")
    result = judge(name, found, unsteady)
    first = result.first
    if first is None:
        return result
    try:
        if name != CONTROL:
            result = _repeated(bench, name, result, first)
        return replace(result, site=bench.site(name, first))
    except Exception as error:  # the case has failed, whatever becomes of its site
        reason = f"not found: {type(error).__name__}: {error}"
        return replace(result, site={"reason": reason})


def _repeated(bench: Bench, name: str, result: CaseResult, first: Comparison) -> CaseResult:
    """Whether what failed is at least the same each time: the control is of the whole batch."""
    second = bench.again(name, first.variant)
    if second is None:
        return result
    same = first.same_values(second)
    reason = result.reason if same else f"{result.reason}; {first.variant} twice differs, too"
    return replace(result, reason=reason, repeatable=same)


def judge(name: str, found: Sequence[Comparison], unsteady: int | None) -> CaseResult:
    """The verdict on the comparisons of a case.

    Args:
        name: of the case.
        found: its comparisons.
        unsteady: the first step that is not the same run to run, or None. What differs from there
            on does so anyway, and says nothing of the case.
    """
    problem = next((c.problem for c in found if c.problem), None)
    values = sum(sum(c.compared.values()) for c in found)
    differing = [c for c in found if c.step is not None]
    telling = [c for c in differing if unsteady is None or (c.step or 0) < unsteady]
    runs = f"{len(found)} {'run' if len(found) == 1 else 'runs'}"
    if telling:
        wrong = sum(sum(c.differ.values()) for c in found)
        names = ", ".join(c.variant for c in telling)
        reason = f"{names}: {wrong:,} of {values:,} values in {runs} have other bits"
        return CaseResult(
            case=name, verdict="failed", reason=reason, comparisons=found, first=telling[0]
        )
    if differing:
        problem = (
            f"differs from step {min(c.step or 0 for c in differing)} on, but from step "
            f"{unsteady} on the same run twice differs, too"
        )
    elif problem is None and not values:
        problem = "nothing was compared"
    if problem is not None:
        return CaseResult(case=name, verdict="not-run", reason=problem, comparisons=found)
    reason = f"{values:,} values in {runs}, all with the same bits"
    return CaseResult(case=name, verdict="passed", reason=reason, comparisons=found)
