"""Hypotheses about where the difference comes from, each with its evidence and its state.

A state is never guessed: `supported` and `refuted` need a controlled experiment (two replays that
differ in one switch, see `rolltape.viewer.paired`) or a fact that settles it (see
`rolltape.viewer.facts`). What could be tested and was not is `not_tested` and says how; what no
replay can test here is `not_testable` and says why.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltape.viewer.answers import unknown
from rolltape.viewer.facts import AGAINST, FOR, Evidence, facts, flip_contrast
from rolltape.viewer.library import Pair
from rolltape.viewer.paired import (
    FEWEST,
    METHOD,
    Effect,
    Effects,
    _few,
    _percent,
    default,
    replay_of,
)

STATES = ("supported", "inconclusive", "not_tested", "not_testable", "refuted")
#: What a share of the gap is a share of. k3 weighs the large differences more, so that what goes of
#: it is another number; it stands beside and decides nothing.
MEASURE = "sum |\N{GREEK CAPITAL LETTER DELTA}|"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A hypothesis.

    Args:
        id: for links.
        title: short.
        question: what it claims.
        switches: of a replay, that test it.
        tests: (mode, KEY=VALUE or None for no switch) that would test it, in order.
        needs: tables of the tape without which it cannot be tested.
        why_not: why no replay tests it, where there is none.
    """

    id: str
    title: str
    question: str
    switches: tuple[str, ...] = ()
    tests: tuple[tuple[str, str | None], ...] = ()
    needs: tuple[str, ...] = ()
    why_not: str = ""


CAUSES = (
    Cause(
        id="batch",
        title="Batch shape",
        question="The numbers depend on what else runs in the same step, or on how it is cut.",
        switches=("batch", "chunk", "layout", "tokens_per_batch"),
        tests=(("re-execute", None), ("re-execute", "batch=one")),
    ),
    Cause(
        id="routing",
        title="Routing flip",
        question="The two sides send tokens to other experts.",
        switches=("routing",),
        tests=(("score", "routing=ids"),),
        needs=("routes",),
    ),
    Cause(
        id="lm_head",
        title="LM-head precision",
        question="The last matrix product runs in another precision on a side.",
        switches=("lm_head",),
        tests=(("score", "lm_head=float32"),),
    ),
    Cause(
        id="router",
        title="Router precision",
        question="Router scores are computed in another precision on a side.",
        switches=("router",),
        tests=(("score", "router=float32"),),
        needs=("moe",),
    ),
    Cause(
        id="precision",
        title="Precision of the model",
        question="The whole model runs in another dtype, or rounding in its dtype is the gap.",
        switches=("dtype",),
        tests=(("score", "dtype=float32"),),
    ),
    Cause(
        id="attention",
        title="Attention backend or cache",
        question="Attention is computed by another backend, or from a cache that others filled.",
        switches=("attention", "prefix_cache", "kv_cache"),
        tests=(("score", "attention=eager"),),
    ),
    Cause(
        id="kernels",
        title="Kernel choice",
        question="Other kernels or tactics compute the same operation on the two sides.",
        switches=("kernels", "experts", "tactics"),
        why_not="no switch of a replay chooses kernels one by one; the timeline lists the choices",
    ),
    Cause(
        id="support",
        title="Sampling support or mask",
        question="One side normalises over the tokens that sampling kept, the other over all, or "
        "temperature or penalties are applied on one side only.",
        switches=("support", "temperature"),
        tests=(("score", "support=recorded"),),
        needs=("supports",),
    ),
    Cause(
        id="weights",
        title="Weight staleness or sync fault",
        question="The two sides do not hold the same weights.",
        switches=("weights",),
        tests=(("score", "weights=CHECKPOINT"),),
    ),
    Cause(
        id="parallel",
        title="TP or EP reduction order",
        question="Sums over ranks are taken in another order.",
        switches=("tp", "ep"),
        why_not="no switch of a replay changes the number of ranks; `rolltape verify --case tp` "
        "tests it on the engine",
    ),
    Cause(
        id="quant",
        title="Quantised weights or KV cache",
        question="One side computes with quantised weights or keeps a quantised KV cache.",
        switches=("quantization", "kv_cache_dtype"),
        why_not="no switch of a replay quantises; record the engine once more without quantisation "
        "and compare",
    ),
    Cause(
        id="tokenizer",
        title="Tokeniser or template mismatch",
        question="The two sides did not see the same token ids.",
        why_not="token ids are compared by the diff; there is no report yet",
    ),
    Cause(
        id="recording",
        title="Recording gap or fault",
        question="What was recorded is not all, or not what it claims to be.",
        why_not="`rolltape fsck` checks what is on disk",
    ),
)

_WORDS = {
    "supported": "supported",
    "inconclusive": "inconclusive",
    "not_tested": "not tested",
    "not_testable": "not testable here",
    "refuted": "refuted",
}


class Board:
    """The rows of one tape with one report chosen; its other reports are evidence too.

    Everything is read when it is made; afterwards it holds no folder.

    Args:
        pair: the tape with the report that is shown.
        every: the tape with each of its reports, oldest first.
    """

    def __init__(self, pair: Pair, every: Iterable[Pair]) -> None:
        self.facts = list(facts(pair))
        contrast = flip_contrast(pair)
        if contrast is not None:
            self.facts.append(contrast)
        self.effects = Effects([r for r in map(replay_of, every) if r is not None])
        tape, summary = pair.tape, pair.summary
        side = pair.side("a").get("path")
        self._tape = str(tape.path) if tape is not None else str(side or "TAPE_A")
        names = ("column", "tokens_compared", "mean_abs", "k3", "verdict")
        self._around = {
            "report": pair.report.uuid if pair.report is not None else None,
            "gap": {name: summary.get(name) for name in names} if summary else None,
            "method": METHOD,
            "measure": MEASURE,
            "state_words": _WORDS,
            "replays": [r.plain() for r in self.effects.replays],
            "unused": self.effects.unused,
        }
        missing = {cause.id: _missing(pair, cause) for cause in CAUSES}
        self._rows = [self._row(cause, missing[cause.id]) for cause in CAUSES]

    def plain(self) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}/causes`, what changes aside."""
        return {**self._around, "sequence": None, "rows": sorted(self._rows, key=_order)}

    def of_sequence(self, pair: Pair, sequence: str) -> dict[str, Any]:
        """The same for one sequence: states are the run's, numbers and problems its own.

        Args:
            pair: the one that it was made of.
            sequence: id on side A.

        Raises:
            Problem: 404, neither tape nor report has it.
        """
        if pair.find(sequence) is None and sequence not in pair.compared:
            raise unknown("sequence", sequence, "the sequence list has all of them")
        rows = []
        contrast = flip_contrast(pair, sequence)
        for cause, whole in zip(CAUSES, self._rows, strict=True):
            effects = [
                {**e, "here": self.effects.here(effect, sequence), "top": []}
                for e, effect in zip(whole["effects"], self._effects(cause), strict=True)
            ]
            own = [e for e in self.facts if e.cause == cause.id and e.sequence == sequence]
            if contrast is not None and cause.id == "routing":
                own.append(contrast)
            rows.append({**whole, "effects": effects, "here": [e.plain() for e in own]})
        return {**self._around, "sequence": sequence, "rows": sorted(rows, key=_order)}

    def _effects(self, cause: Cause) -> list[Effect]:
        known = {s for c in CAUSES for s in c.switches}
        return [
            e
            for e in self.effects.found
            if e.switch in cause.switches or (cause.id == "kernels" and e.switch not in known)
        ]

    def _row(self, cause: Cause, missing: str) -> dict[str, Any]:
        effects = self._effects(cause)
        evidence = [e for e in self.facts if e.cause == cause.id]
        state, why = _state(cause, effects, evidence, missing)
        testable = not missing and bool(cause.tests)
        open_ = state in ("not_tested", "inconclusive") or (state == "supported" and not effects)
        return {
            "id": cause.id,
            "title": cause.title,
            "question": cause.question,
            "state": state,
            "why": why,
            "effects": [{**e.plain(), "state": e.state, "why": said(e)} for e in effects],
            "evidence": [e.plain() for e in evidence],
            "commands": self.commands(cause) if testable and open_ and not effects else [],
        }

    def commands(self, cause: Cause) -> list[str]:
        """What to run, in order: replays that are not there, their diffs, the viewer."""
        a = self._tape
        base = self.effects.baseline
        lines: list[list[str]] = []
        made: list[str] = []

        def run(mode: str, switches: dict[str, str], name: str) -> None:
            b = f"{a}.{name}"
            replay = ["rolltape", "replay", a, "-o", b, "--mode", mode]
            if mode == "score":
                replay += ["--on", base.around.get("on") or "transformers" if base else _ON]
                for key, option in (("layout", "--layout"), ("tokens_per_batch", _BATCH)):
                    if base is not None and key in base.changed:
                        replay += [option, base.changed[key]]
            for key, value in switches.items():
                if key not in ("layout", "tokens_per_batch"):
                    replay += ["--switch", f"{key}={value}"]
            lines.append(replay)
            lines.append(["rolltape", "diff", a, b, "-o", f"{b}-report"])
            made.extend((b, f"{b}-report"))

        if any(mode == "score" for mode, _ in cause.tests) and base is None:
            run("score", {}, "replay")
        again = [r for r in self.effects.replays if r.mode == "re-execute"]
        for mode, switch in cause.tests:
            key, _, value = (switch or "").partition("=")
            if mode == "re-execute" and not key:
                if not any(not r.changed for r in again):
                    run(mode, {}, "again")
                continue
            before = dict(base.changed) if base is not None and mode == "score" else {}
            if key in before:  # the replay that is there has it: the other one is missing
                value = default(key, mode)
            run(mode, {**before, key: value}, f"{key}-{value.replace('/', '-')}")
        lines.append(["rolltape", "view", *_together([a, *self._open(), *made])])
        return [shlex.join(line) for line in lines]

    def _open(self) -> list[str]:
        """Paths of the reports and tapes that are open already."""
        return list(dict.fromkeys(path for r in self.effects.replays for path in r.paths))


_ON, _BATCH = "transformers", "--tokens-per-batch"


def _missing(pair: Pair, cause: Cause) -> str:
    """Why the tape does not allow the test; empty if it does."""
    tape = pair.tape
    if tape is None:
        return "" if not cause.needs else "the tape is not open"
    layers = [e.get("moe_layers") for e in tape.engines.values()]
    if {"routes", "moe"} & set(cause.needs) and layers and all(x == [] for x in layers):
        return "the model is dense: nothing is routed"
    if "routes" in cause.needs and not tape.files("routes"):
        return "the tape has no routes; record with --level routing"
    if "supports" in cause.needs and not tape.files("supports"):
        return "the tape has no kept sets: nothing was truncated, or it was not recorded"
    return ""


def _together(paths: list[str]) -> list[str]:
    """Their folder, if they lie in one, else all of them."""
    folders = {str(Path(p).parent) for p in paths}
    return [folders.pop()] if len(folders) == 1 else paths


def _state(
    cause: Cause, effects: list[Effect], evidence: list[Evidence], missing: str
) -> tuple[str, str]:
    """The state and its reason. Experiments and facts that settle it count; notes never do."""
    settled = [e for e in evidence if e.decisive]
    pro = [f"{_pair(e)}: {said(e)}" for e in effects if e.state == "supported"]
    pro += [e.text for e in settled if e.says == FOR]
    con = [f"{_pair(e)}: {said(e)}" for e in effects if e.state == "refuted"]
    con += [e.text for e in settled if e.says == AGAINST]
    if pro and con:
        return "inconclusive", f"the evidence disagrees. For: {pro[0]}. Against: {con[0]}"
    if pro:
        return "supported", pro[0]
    if con:
        return "refuted", con[0]
    if effects:
        return "inconclusive", f"{_pair(effects[-1])}: {said(effects[-1])}"
    if missing:
        return "not_testable", missing
    if cause.tests:
        return "not_tested", "no two replays of this tape differ in this alone"
    return "not_testable", cause.why_not


def said(effect: Effect) -> str:
    """What an effect shows, in words: no share of the gap without its measure."""
    n = effect.numbers or {}
    if "share" not in n:
        return effect.why
    if effect.kind == "size":
        return f"{effect.why}, in {MEASURE}"
    share, low, high = (float(n[name]) for name in ("share", "low", "high"))
    if share < 0:  # growth, and the interval of the growth
        span = f"(95 %: {_percent(-high)} to {_percent(-low)})"
        text = f"the gap grows by {_percent(-share)} {span} in {MEASURE}: none of it goes"
    else:
        span = f"(95 %: {_percent(low)} to {_percent(high)})"
        text = f"{_percent(share)} of the gap goes {span} in {MEASURE}"
    text += _of_k3(n.get("k3_before"), n.get("k3_after"))
    return text + (_few(n["with_gap"], " with a gap") if n["with_gap"] < FEWEST else "")


def _of_k3(before: float | None, after: float | None) -> str:
    if before is None or after is None or not (before > 0 and math.isfinite(after)):
        return ""
    share = 1 - after / before
    return f"; k3 grows by {_percent(-share)}" if share < 0 else f"; of k3 {_percent(share)} goes"


def _pair(effect: Effect) -> str:
    if effect.kind == "size":
        return f"re-executed with {effect.switch}={effect.values[1]}"
    return f"{effect.switch} {effect.values[0]} \N{RIGHTWARDS ARROW} {effect.values[1]}"


def _order(row: dict[str, Any]) -> tuple[int, float]:
    shares = [(e["numbers"] or {}).get("share") for e in row["effects"]]
    return STATES.index(row["state"]), -max((s for s in shares if s is not None), default=0.0)
