"""The smallest part of a tape whose replay still differs: sequences first, then positions.

Every candidate is written as a tape and scored by the model, switches and layout of the replay.
What is kept was seen to differ in just that form. Delta debugging (Zeller and Hildebrandt, 2002)
finds a set from which no sequence can be left out; it need not be the only one.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rolltape.recorder.provenance import provenance
from rolltape.replay.align import select
from rolltape.replay.factory import build, load_factory
from rolltape.replay.models import load_model, model_of
from rolltape.replay.pair import PairTokens, read_pair
from rolltape.replay.ranks import current
from rolltape.replay.report import refuse_existing
from rolltape.replay.schedule import ADAPTER
from rolltape.replay.score import score_tape
from rolltape.replay.shrink_calls import shrink_calls
from rolltape.replay.summary import headline_column
from rolltape.replay.switches import Switches
from rolltape.store import Tape, UsageError
from rolltape.store import open as open_tape
from rolltape.store.excerpt import write_excerpt
from rolltape.store.keys import Key

#: Exit status of each answer.
EXIT_STATUS = {"shrunk": 0, "identical": 3, "not-reproduced": 3, "not-run": 3}

#: Part of the largest |d| that has to remain, where no bound is given.
_PART = 0.5

Lengths = dict[Key, int]


def shrink(
    a: Tape | str | os.PathLike[str],
    b: Tape | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    bound: float | None = None,
    model: nn.Module | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Find the smallest part of `a` that differs from its scoring as much as `b` does.

    Args:
        a: the recording.
        b: what `rolltape replay` made of it. Of a re-execution one call of transformers is kept, or
            a run of vLLM, cut behind the step of the first difference, see
            `rolltape.replay.shrink_calls`.
        out: folder of the new tape, whose parent `a` is.
        bound: what |d| has to reach somewhere, nats; by default half of the largest |d| of the
            two tapes. Not for a re-execution, where any other bit counts.
        model: loaded already; by default the factory or the model that `b` names.
        device: torch device of a model that is loaded here.

    Returns:
        JSON-able: verdict (shrunk, identical, not-reproduced, not-run), reason, tape (None unless
        shrunk), parent, column, bound, largest_before, largest, sequence and position (of the
        largest), model (of the replay, where it is not that of the recording), sequences and tokens
        ([before, after]), kept (id -> positions), scorings,
        switches, layout, tokens_per_batch, on, seconds.

    Raises:
        UsageError: `b` is not a replay of `a` that can be run again, or a bound is not above 0.
        TapeExistsError: there is something at `out`.
        ModelMismatchError: the model is not the one of `a`.
    """
    start = time.perf_counter()
    if bound is not None and not bound > 0:
        raise UsageError(f"--bound {bound}: not above 0")
    if "://" in os.fspath(out):
        raise UsageError(f"-o {out}: it is written to a local folder")
    refuse_existing(Path(out))
    side_a, side_b = (t if isinstance(t, Tape) else open_tape(t) for t in (a, b))
    if side_b.parent != side_a.uuid:
        raise UsageError(
            f"{side_b.place} is not a replay of {side_a.place}", hint="rolltape replay makes one"
        )
    if side_b.header.get("provenance", {}).get("mode") == "re-execute":
        _refuse_serving(side_a, side_b)
        if bound is not None:
            raise UsageError("--bound: in a re-execution any other bit counts", hint="leave it out")
        return shrink_calls(side_a, side_b, Path(out), model=model, device=device)
    asked = _asked(side_b)
    seen = _differences(side_a, side_b, None)
    result: dict[str, Any] = {
        "tape": None,
        "parent": str(side_a.place),
        "column": seen.column,
        "bound": bound,
        "largest_before": seen.largest,
        "switches": asked["switches"],
        "layout": asked["layout"],
        "tokens_per_batch": asked["tokens_per_batch"],
        "on": asked.get("on", "transformers"),
        "model": None,
    }

    def answer(verdict: str, reason: str, **more: Any) -> dict[str, Any]:
        seconds = round(time.perf_counter() - start, 3)
        return {"verdict": verdict, "reason": reason, **result, **more, "seconds": seconds}

    if seen.column is None or not seen.by_key:
        return answer("not-run", "no logprob of the two can be compared")
    if seen.largest == 0:
        return answer("identical", "no value differs: there is nothing to shrink")
    if model is None and result["on"] == "transformers":
        result["model"] = _another_model(side_a, side_b)
    result["bound"] = bound = seen.largest * _PART if bound is None else bound
    if seen.largest < bound:
        return answer("not-run", f"the largest |d| is {seen.largest:.3g}, below the bound")
    trial = _Trial(
        side_a,
        _loaded(side_a, side_b, asked, model, device),
        asked,
        column=seen.column,
        bound=bound,
    )
    lengths = _sequences(trial, seen)
    if lengths is None:
        return answer(
            "not-reproduced",
            f"scored again, no |d| reaches {bound:.3g}: the model is another, or the difference "
            "does not repeat",
            scorings=trial.count,
        )
    lengths = _positions(trial, lengths)
    last = trial.found[frozenset(lengths.items())]
    sequence, position = last.where
    facts = {
        **provenance(sys.argv),
        "shrunk": {"replay": side_b.uuid, "bound": bound, "largest": last.largest, **asked},
    }
    root = write_excerpt(side_a, out, lengths, provenance=facts)
    return answer(
        "shrunk",
        f"|d| still reaches {last.largest:.3g}",
        tape=str(root),
        largest=last.largest,
        sequence=sequence.id,
        position=position,
        sequences=[len(side_a), len(lengths)],
        tokens=[sum(s.length for s in side_a), sum(lengths.values())],
        kept={key.id: n for key, n in lengths.items()},
        scorings=trial.count,
    )


def _refuse_serving(a: Tape, b: Tape) -> None:
    """Calls of transformers can be run again in part, and a run of vLLM up to a step."""
    rollouts = [row for row in a.engines.values() if row["role"] == "rollout"]
    adapters = sorted({str(row["adapter"]) for row in rollouts})
    if adapters not in ([ADAPTER], ["vllm"]):
        score = ["rolltape", "replay", str(a.place), "-o", f"{a.place}.score"]
        words = shlex.join([*score, "--on", "transformers", "--mode", "score"])
        raise UsageError(
            f"{b.place} re-executes {' and '.join(adapters)}: shrink takes a scoring of any "
            "recording, and a re-execution of transformers or vLLM",
            hint=f"`rolltape diff` names the first difference; to shrink a scoring: {words}",
        )


def _another_model(a: Tape, b: Tape) -> str | None:
    """The model of `b` if a replay of `a` would not find it by itself."""
    found = model_of(b)
    try:
        return None if model_of(a) == found else found
    except UsageError:
        return found


@dataclass(frozen=True, kw_only=True)
class _Differences:
    """|d| of every sequence of a, float64 [T], NaN where nothing is compared."""

    column: str | None
    by_key: dict[Key, np.ndarray] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        return max((self.of(key) for key in self.by_key), default=0.0)

    @property
    def where(self) -> tuple[Key, int]:
        key = max(self.by_key, key=self.of)
        return key, int(np.nanargmax(self.by_key[key]))

    def of(self, key: Key) -> float:
        return float(np.nanmax(self.by_key[key]))


def _differences(a: Tape, b: Tape, column: str | None) -> _Differences:
    pairs: list[PairTokens] = [
        read_pair(pair, a.sequence(pair.a), b.sequence(pair.b)) for pair in select(a, b).pairs
    ]
    column = column or headline_column(pairs)
    if column is None:
        return _Differences(column=None)
    found = {}
    for pair in pairs:
        where = pair.compared(column)
        if where.any():
            x, y = (side.columns[column].values for side in (pair.scored_a, pair.scored_b))
            d = np.full(pair.n, np.nan)
            d[where] = np.abs(y[where].astype(np.float64) - x[where])
            found[pair.a.key] = d
    return _Differences(column=column, by_key=found)


def _asked(b: Tape) -> Mapping[str, Any]:
    """Switches, layout, batch size and executor of a scoring."""
    for row in b.engines.values():
        asked = row["requested"]
        if isinstance(asked, dict) and "switches" in asked and "tokens_per_batch" in asked:
            return asked
    raise UsageError(
        f"{b.place} was not made by `rolltape replay`", hint="rolltape replay TAPE -o TAPE2"
    )


def _loaded(
    a: Tape, b: Tape, asked: Mapping[str, Any], model: nn.Module | None, device: str | None
) -> nn.Module:
    if model is not None:
        return model
    on = asked.get("on", "transformers")
    if ":" in on:
        built = build(load_factory(on), a, on=on, device=device)
        if current().size > 1:
            raise UsageError(
                "shrink runs in one process", hint="start it without torchrun, or give it a model"
            )
        return built
    # in the dtype of what is scored; a switch that changes it is applied to each scoring
    return load_model(a, model=model_of(b), device=device)[0]


class _Trial:
    """Scores parts of a tape, each once."""

    def __init__(
        self, tape: Tape, model: nn.Module, asked: Mapping[str, Any], *, column: str, bound: float
    ) -> None:
        self.tape, self.bound, self.count = tape, bound, 0
        self.found: dict[frozenset[tuple[Key, int]], _Differences] = {}
        self._model, self._asked, self._column = model, asked, column

    def shows(self, lengths: Lengths) -> bool:
        """Whether |d| reaches the bound in this part."""
        name = frozenset(lengths.items())
        if name not in self.found:
            self.found[name] = self._score(lengths)
        found = self.found[name]
        return bool(found.by_key) and found.largest >= self.bound

    def _score(self, lengths: Lengths) -> _Differences:
        self.count += 1
        with tempfile.TemporaryDirectory(prefix="rolltape-") as folder:
            part = open_tape(write_excerpt(self.tape, Path(folder, "a"), lengths))
            score_tape(
                part,
                Path(folder, "b"),
                self._model,
                switches=Switches(**self._asked["switches"]),
                tokens_per_batch=self._asked["tokens_per_batch"],
                layout=self._asked["layout"],
                on=self._asked.get("on", "transformers"),
            )
            return _differences(part, open_tape(Path(folder, "b")), self._column)


def _sequences(trial: _Trial, seen: _Differences) -> Lengths | None:
    """The fewest sequences; None if not even all of them show it."""
    whole = {s.key: s.length for s in trial.tape if s.tokens.valid.all()}
    worst = seen.where[0]
    if trial.shows({worst: whole[worst]}):  # nearly always, and then it is one scoring
        return {worst: whole[worst]}
    if not trial.shows(whole):
        return None
    kept = minimal(list(whole), lambda keys: trial.shows({key: whole[key] for key in keys}))
    return {key: whole[key] for key in kept}


def minimal(items: Sequence[Key], shows: Callable[[Sequence[Key]], bool]) -> list[Key]:
    """A part of `items` that shows, from which no single one can be left out.

    Args:
        items: that show, all together.
        shows: asked of parts, in the order of `items`.
    """
    current, parts = list(items), 2
    while len(current) > 1:
        size = -(-len(current) // parts)
        chunks = [current[i : i + size] for i in range(0, len(current), size)]
        rests = [[k for k in current if k not in chunk] for chunk in chunks]
        smaller = next((c for c in chunks if shows(c)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        rest = next((r for r in rests if len(chunks) > 2 and shows(r)), None)
        if rest is not None:
            current, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(current), parts * 2)
    return current


def _positions(trial: _Trial, lengths: Lengths) -> Lengths:
    """Each sequence cut as short as it goes: behind its first difference, or to its prompt."""
    for key, length in lengths.items():
        found = trial.found[frozenset(lengths.items())].by_key
        d = found.get(key, np.full(length, np.nan))
        reach = np.flatnonzero(np.nan_to_num(d) >= trial.bound)
        prompt = trial.tape.sequence(key).prompt_len
        first = int(reach[0]) + 1 if len(reach) else max(prompt, 1)
        for stop in (first, (first + length) // 2):
            if first <= stop < length and trial.shows({**lengths, key: stop}):
                lengths = {**lengths, key: stop}
                break
    return lengths
