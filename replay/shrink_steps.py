"""The parts of a serving engine's run that may show a difference again, smallest first.

Steps cannot be taken out of a run: what is cached and who is scheduled follows from what came
before. A run can be ended behind a step, and begun where nothing was under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltape.replay.serving_steps import recorded_steps, serving_engines
from rolltape.store import Tape
from rolltape.store.keys import Key


def parts_of_run(tape: Tape, first: Mapping[str, Any]) -> list[dict[Key, int]]:
    """How many positions to keep of which sequences: candidates, none if there are no steps.

    * what ran since the engine was last without work, cut behind the step of the difference;
    * all that ran before, cut in the same way: a prefix may have come from its cache;
    * the whole run of the engine.

    A sequence whose prompt was not yet through keeps all of it, as no shorter one can be asked.

    Args:
        tape: the recording.
        first: difference, as `rolltape.replay.reproduction.reproduction` names it.
    """
    engine = _engine_of(tape, first)
    steps = [] if engine is None else recorded_steps(tape, engine)
    begun: dict[Key, int] = {}
    ended: dict[Key, int] = {}
    reached: dict[Key, int] = {}
    for step in steps:
        for part in step.parts:
            begun.setdefault(part.key, step.number)
            ended[part.key] = step.number
            if step.number <= first["step"]:
                reached[part.key] = max(reached.get(part.key, 0), part.start + part.n)
    if not reached:
        return []
    cut = {key: _length(tape, key, computed) for key, computed in reached.items()}
    start = min(begun.values())
    latest = start
    for key in sorted(reached, key=lambda key: begun[key]):
        if begun[key] > latest:  # all that came before has ended
            start = begun[key]
        latest = max(latest, ended[key])
    recent = {key: n for key, n in cut.items() if begun[key] >= start}
    whole = {s.key: s.length for s in tape if s.key in begun}
    found: list[dict[Key, int]] = []
    for candidate in (recent, cut, whole):
        if candidate not in found:
            found.append(candidate)
    return found


def _engine_of(tape: Tape, first: Mapping[str, Any]) -> str | None:
    for sequence in tape:
        if sequence.id == first["sequence"]:
            return sequence.key.engine
    engines = serving_engines(tape)
    return engines[0] if len(engines) == 1 else None


def _length(tape: Tape, key: Key, computed: int) -> int:
    """Positions with a token once so many inputs have run: they and the one that was drawn."""
    sequence = tape.sequence(key)
    return min(sequence.length, max(computed + 1, sequence.prompt_len))
