"""Whether a re-execution made the same bits as the recording; there is no tolerance here.

`identical` is said only when every value that the recording holds was compared, every one has the
same bits, and there is evidence that the second tape was executed and not copied. Else the answer
names the first difference in execution order, or what could not be compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rolltape.replay.bitwise import Findings, PairComparison, Place
from rolltape.replay.composition import compare_steps
from rolltape.replay.executors.protocol import Execution
from rolltape.replay.schedule import ADAPTER, steps_of_calls
from rolltape.replay.serving_steps import compare_serving_steps
from rolltape.store import Sequence, Tape
from rolltape.store.keys import Key

#: Exit status of each verdict.
EXIT_STATUS = {
    "identical": 0,
    "divergent": 1,
    "not-reproduced": 1,
    "inconclusive": 3,
    "not-run": 3,
}
#: What the logits went through before each column; where it is not the same, nor is the column.
_DEPENDS = {
    "raw": ("vocab_size",),
    "scaled": ("vocab_size", "temperature", "edits"),
    "processed": ("vocab_size", "temperature", "edits", "truncation"),
    "supports": ("vocab_size", "temperature", "edits", "truncation"),
}


def reproduction(
    a: Tape,
    b: Tape,
    *,
    execution: Execution | None = None,
    composition: bool = True,
    changed: bool = False,
) -> dict[str, Any]:
    """Compare a recording with its re-execution.

    Args:
        a: the recording.
        b: the tape of the re-execution; its sequences name those of `a` as their origin.
        execution: what the executor saw. Without it nobody vouches that `b` was executed, and the
            verdict is never `identical`.
        composition: compare the steps too; not where the batches were composed anew on purpose.
        changed: something was changed on purpose: a difference is then `divergent`.

    Returns:
        JSON-able: verdict, reason, first, compared and differ (counts by name), sequences,
        sequences_differ, not_compared, executed (problems, empty if none).
    """
    findings = Findings()
    missing: Counter[tuple[str, str]] = Counter()
    pairs = _pairs(a, b)
    places = _places(a)
    engines = {engine: number for number, engine in enumerate(a.engines)}
    if composition:
        compare_steps(a, b, pairs, engines, findings)
        compare_serving_steps(a, b, pairs, engines, findings)
    refused = () if execution is None else execution.refused
    reasons = {key: f"call {call.number}: {call.reason}" for call in refused for key in call.keys}
    compared = 0
    for sequence in a:
        engine = a.engine(sequence.key.engine)
        if engine.get("role", a.role) != "rollout":
            continue  # what a trainer scored is no value of the engine
        if sequence.key not in pairs:
            if engine.get("adapter") != ADAPTER:
                why = f"recorded from {engine.get('adapter', 'an unknown engine')}"
            else:
                why = reasons.get(sequence.key, "it was not run again")
            missing["sequences", why] += 1
            continue
        other = b.sequence(pairs[sequence.key])
        skip = _not_alike(sequence, other)
        for column, why in skip.items():
            missing[column, why] += 1
        row, first_step = places.get(sequence.key, (0, 0))
        place = Place(engine=engines[sequence.key.engine], row=row, first_step=first_step)
        PairComparison(sequence, other, place=place, findings=findings, skip=skip).run()
        compared += 1
    problems = _not_executed(a, b, execution)
    verdict, reason = _verdict(findings, missing, problems, execution, changed=changed)
    return {
        "verdict": verdict,
        "reason": reason,
        "first": None if findings.first is None else findings.first.as_dict(),
        "compared": dict(findings.compared),
        "differ": dict(findings.differ),
        "sequences": compared,
        "sequences_differ": len(findings.sequences),
        "not_compared": [
            {"what": what, "reason": why, "sequences": n} for (what, why), n in missing.items()
        ],
        "executed": problems,
    }


def _pairs(a: Tape, b: Tape) -> dict[Key, Key]:
    """Sequence of `a` -> the one of `b` that says it replays it; the first one if several do."""
    found: dict[Key, Key] = {}
    for sequence in b:
        origin = sequence.origin
        if origin is not None and origin in a.sequence_rows:
            found.setdefault(origin, sequence.key)
    return found


def _places(a: Tape) -> dict[Key, tuple[int, int]]:
    """Row and first step of every sequence."""
    return {
        key: (row, found.steps[0]["step"])
        for found in steps_of_calls(a).values()
        for key, row in found.first_rows().items()
    }


def _not_alike(a: Sequence, b: Sequence) -> dict[str, str]:
    """Columns whose values mean different things on both sides, and why."""
    skip: dict[str, str] = {}
    for column, names in _DEPENDS.items():
        left, right = ({_part(s, names) for _, _, s in side.semantics} for side in (a, b))
        if left and right and left != right:
            other = next(iter(left - right or left))
            skip[column] = f"recorded with {other}, which could not be set up again"
    return skip


def _part(semantics: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return json.dumps({name: semantics[name] for name in names})


def _not_executed(a: Tape, b: Tape, execution: Execution | None) -> list[str]:
    """What speaks against `b` having been executed; nothing if it was."""
    problems = []
    if b.parent != a.uuid:
        problems.append("its parent is not the recording")
    for name, mine, other in (
        ("uuid", {a.uuid}, {b.uuid}),
        ("engine", set(a.engines), set(b.engines)),
        ("writer", _writers(a), _writers(b)),
    ):
        if mine & other:
            problems.append(f"it has the {name} of the recording")
    times = b.table("steps").column("t_ns").to_pylist()
    if not times:
        problems.append("it has no steps")
    if any(time is None for time in times):
        problems.append("a step of it has no time")
    if execution is None:
        return [*problems, "nobody vouches for its execution"]
    inside = [t for t in times if t is not None]
    if any(not execution.started_ns <= t <= execution.ended_ns for t in inside):
        problems.append("a step of it did not run while it was executed")
    if execution.forwards != len(times):
        problems.append(f"the model ran {execution.forwards} times, it has {len(times)} steps")
    if execution.self_test.get("control") is False:
        problems.append("a changed prompt changed nothing: the values do not come from the model")
    return problems


def _writers(tape: Tape) -> set[str]:
    return {str(row["writer"]) for row in tape.processes}


def _verdict(
    findings: Findings,
    missing: Mapping[tuple[str, str], int],
    problems: list[str],
    execution: Execution | None,
    *,
    changed: bool,
) -> tuple[str, str]:
    values = sum(findings.compared.values())
    if problems:
        return "not-run", f"there is no evidence of an execution: {problems[0]}"
    if not any(findings.compared[column] for column in ("raw", "scaled", "processed")):
        why = next(iter(missing))[1] if missing else "the recording has no logprobs"
        return "not-run", f"no logprob could be compared: {why}"
    if findings.first is not None:
        wrong = sum(findings.differ.values())
        return (
            "divergent" if changed else "not-reproduced",
            f"{wrong:,} of {values:,} values have other bits",
        )
    if missing:
        what, why = next(iter(missing))
        return "inconclusive", f"the same bits as far as compared, but not compared: {what}: {why}"
    tested = execution.self_test if execution is not None else {}
    if tested.get("neutral") is not True or tested.get("control") is not True:
        return "inconclusive", f"the same bits, but {tested.get('reason', 'nothing was tested')}"
    return "identical", f"all {values:,} recorded values have the same bits"
