"""Paired replays: two reports of a tape whose replays differ in one switch, and what it changes.

The measure is the sum of |d| over the tokens that both reports compared. Its interval is a
percentile bootstrap over sequences: sequences are drawn with replacement, each with its sums of
both reports, and the share is taken of the drawn totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.viewer.library import Pair

#: The whole interval of the share lies above this: supported.
SUPPORTED_OVER = 0.10
#: The whole interval lies within this distance of 0: refuted.
REFUTED_WITHIN = 0.05
#: With fewer sequences that have a gap an interval says nothing.
FEWEST = 8
RESAMPLES = 1000
#: Reports that are paired with each other, the newest.
MOST = 16
METHOD = (
    f"share = 1 - sum|d| after / sum|d| before, over the sequences that both reports compared at "
    f"as many tokens; 95 % interval: percentile bootstrap over sequences, {RESAMPLES:,} resamples, "
    f"seed 0. Supported: the whole interval is above {SUPPORTED_OVER:.0%}. Refuted: all of it is "
    f"within {REFUTED_WITHIN:.0%} of 0. Else (a gap that grows among them), or with fewer than "
    f"{FEWEST} sequences that have a gap: inconclusive. A re-execution with a switch that differs "
    "is judged only where one without a switch is identical."
)

_LIBRARIES = ("torch", "transformers", "vllm", "sglang", "tensorrt_llm", "flash_attn")

#: Values that stand for "nothing changed", where a tape is older than the switch.
DEFAULTS = {
    "routing": "live",
    "support": "full",
    "temperature": "recorded",
    "dtype": "model",
    "lm_head": "model",
    "router": "model",
    "attention": "model",
    "weights": "recorded",
    "layout": "padded",
    "tokens_per_batch": "8192",
}
#: Settings of a replay that stand beside the switches and are as controlled as they are.
_BESIDE = ("layout", "tokens_per_batch")
#: Settings in force that a switch changes by what it is for.
_EXPLAINS = {"attention": ("attention",), "dtype": ("dtype", "experts"), "weights": ("weights",)}


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Per sequence of a report what is summed over its compared tokens, by id on side A.

    Args:
        ids: sequences, string [n].
        tokens: compared, int64 [n].
        absolute: sum of |d|, float64 [n].
        k3: sum of e^d - 1 - d, float64 [n].
        max_at: position of the largest |d|, int64 [n]; -1 unknown.
    """

    ids: pa.Array
    tokens: np.ndarray
    absolute: np.ndarray
    k3: np.ndarray
    max_at: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A report whose side B is a replay of the tape. It holds no folder open.

    Args:
        rep: uuid of the report.
        name: of its folder.
        paths: of side B, if it is open, and of the report.
        mode: `score` or `re-execute`.
        switches: value by switch, and of `layout` and `tokens_per_batch`.
        around: everything else that should be equal in a controlled pair.
        verdict: of the report.
        column: which logprobs its numbers are of.
        sums: of its sequences.
    """

    rep: str
    name: str
    paths: tuple[str, ...]
    mode: str
    switches: Mapping[str, str]
    around: Mapping[str, str]
    verdict: str | None
    column: str | None
    sums: Sums

    @property
    def changed(self) -> dict[str, str]:
        """Switches that are not at their default."""
        return {k: v for k, v in self.switches.items() if v != default(k, self.mode)}

    @property
    def told(self) -> bool:
        """Whether it says anything of the engine and the settings that it ran with."""
        return any(v for k, v in self.around.items() if k not in ("on", "weights"))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rep": self.rep,
            "name": self.name,
            "mode": self.mode,
            "switches": dict(self.switches),
            "changed": self.changed,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a side B was made.

    Args:
        mode: `score` or `re-execute`.
        switches: as in `Replay`.
        around: as in `Replay`.
    """

    mode: str
    switches: Mapping[str, str]
    around: Mapping[str, str]


def default(switch: str, mode: str) -> str:
    """The value of a switch that changes nothing."""
    return "recorded" if mode == "re-execute" else DEFAULTS.get(switch, "recorded")


def replay_of(pair: Pair) -> Replay | None:
    """The report as a replay; None if its side B is none of the tape, or does not say how."""
    found, report = conditions(pair), pair.report
    if found is None or report is None:
        return None
    verdict, column = pair.summary.get("verdict"), pair.summary.get("column")
    return Replay(
        rep=report.uuid,
        name=report.path.name,
        paths=tuple(str(f.path) for f in (pair.b, report) if f is not None),
        mode=found.mode,
        switches=found.switches,
        around=found.around,
        verdict=str(verdict) if verdict else None,
        column=str(column) if column else None,
        sums=sums_of(pair),
    )


def conditions(pair: Pair) -> Conditions | None:
    """How the report's side B was made; None if it is no replay of the tape, or does not say."""
    settings = pair.summary.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    if pair.b is not None:
        given = pair.b.header.get("provenance")
        given = given if isinstance(given, dict) else {}
        if pair.b.parent != pair.run.id or not isinstance(given.get("switches"), dict):
            return None
        mode = str(given.get("mode") or "score")
        switches = {str(k): _word(v) for k, v in given["switches"].items() if v is not None}
        switches |= {k: _word(given[k]) for k in _BESIDE if given.get(k) is not None}
        around = {"on": _word(given.get("on")), **_around(pair.b)}
    else:  # its settings in force stand in the report
        if pair.side("b").get("parent") not in (None, pair.run.id):
            return None
        switches = {
            k.removeprefix("switch."): _word(v[1])
            for k, v in settings.items()
            if k.startswith("switch.") and isinstance(v, list) and len(v) == 2 and v[1] is not None
        }
        if not switches:
            return None
        mode, around = "score", {}
    return Conditions(mode=mode, switches=switches, around=around)


def _around(tape: Tape) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, engine in enumerate(tape.engines.values()):
        facts = {"device": engine.get("device"), "dtype": engine.get("dtype")}
        facts |= {f"versions.{k}": (engine.get("versions") or {}).get(k) for k in _LIBRARIES}
        facts |= {
            k: v
            for k, v in (engine.get("effective") or {}).items()
            if not k.startswith("switch.") and k not in _BESIDE
        }
        found |= {f"{k}#{number}" if number else k: _word(v) for k, v in facts.items()}
    found["weights"] = _word(sorted(whole_digests(tape)))
    return found


def whole_digests(tape: Tape) -> set[tuple[int, int]]:
    """(version, digest of the whole model) of every version that has one."""
    found = set()
    for _, _, batch in tape.batches("weights", ["version", "group", "digest"]):
        whole = pc.equal(pc.fill_null(batch.column("group"), ""), "")
        rows = batch.filter(pc.and_(whole, pc.is_valid(batch.column("digest"))))
        found |= {(r["version"], r["digest"]) for r in rows.to_pylist()}
    return found


def _word(value: Any) -> str:
    return "" if value is None else str(value)


def differing(one: Replay, other: Replay) -> tuple[list[str], list[str]]:
    """Switches that differ, and other conditions that do and that no switch explains."""
    names = sorted({*one.switches, *other.switches})
    switches = []
    for name in names:
        values = [r.switches.get(name, default(name, r.mode)) for r in (one, other)]
        if values[0] != values[1]:
            switches.append(name)
    excused = {s for name in switches for s in _EXPLAINS.get(name, ())}
    shared = one.around.keys() & other.around.keys()
    around = [
        name
        for name in sorted(shared)
        if one.around[name] != other.around[name] and name.partition("#")[0] not in excused
    ]
    return switches, around


def sums_of(pair: Pair) -> Sums:
    """From the rows of the report's `sequences`; those where nothing was compared are left out."""
    table = pair.report_columns(["a", "compared", "mean_abs", "k3", "max_at"])
    table = table.filter(pa.array(last_of_each(table.column("a"))))

    def column(name: str, missing: float) -> np.ndarray:
        found = table.column(name).fill_null(missing).combine_chunks()
        return np.asarray(found.to_numpy(zero_copy_only=False))

    tokens = column("compared", 0).astype(np.int64)
    absolute = column("mean_abs", float("nan")) * tokens
    k3 = column("k3", float("nan")) * tokens
    at = column("max_at", -1).astype(np.int64)
    keep = (tokens > 0) & np.isfinite(absolute)
    return Sums(
        ids=table.column("a").combine_chunks().filter(pa.array(keep)),
        tokens=tokens[keep],
        absolute=absolute[keep],
        k3=k3[keep],
        max_at=at[keep],
    )


def last_of_each(ids: pa.ChunkedArray) -> np.ndarray:
    """bool [n]: the last row of each id, the one that counts."""
    codes = ids.combine_chunks().dictionary_encode()
    at = codes.indices.fill_null(len(codes.dictionary)).to_numpy(zero_copy_only=False)
    last = np.zeros(len(codes.dictionary) + 1, np.int64)
    last[at] = np.arange(len(at))  # of several rows the last assignment stays
    return np.asarray(last[at] == np.arange(len(at)))


def joined(one: Sums, other: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both for the sequences that were compared at as many tokens in each."""
    found = pc.fill_null(pc.index_in(one.ids, value_set=other.ids), -1)
    j = np.asarray(found.to_numpy(zero_copy_only=False))
    i = np.flatnonzero(j >= 0)
    j = j[i]
    same = one.tokens[i] == other.tokens[j]
    return i[same], j[same]


def interval(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap of sum(top) / sum(bottom) over sequences.

    Draws without any gap have no ratio and are left out.

    Args:
        top: float64 [n].
        bottom: float64 [n], its sum is not 0.
    """
    rng = np.random.default_rng(0)
    n = len(top)
    both = np.stack([top, bottom], axis=1)
    totals = np.empty((RESAMPLES, 2))
    for k in range(RESAMPLES):
        times = np.bincount(rng.integers(0, n, n, dtype=np.int32), minlength=n)
        totals[k] = times @ both
    above, below = totals.T
    ratios = np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0)
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def judge(low: float, high: float, sequences: int) -> str:
    """`supported`, `refuted` or `inconclusive` by the rule in `METHOD`.

    Args:
        low: lower end of the interval of the share.
        high: upper end.
        sequences: that have a gap.
    """
    if sequences < FEWEST:
        return "inconclusive"
    if low > SUPPORTED_OVER:
        return "supported"
    within = low >= -REFUTED_WITHIN and high <= REFUTED_WITHIN
    return "refuted" if within else "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one switch does to the difference, everything else being equal.

    Args:
        kind: `gap`: how much of the gap of `before` goes in `after`. `size`: how large what the
            switch does to the engine itself (`after`) is, against the gap of `before`.
        switch: its name.
        before: replay whose gap is explained.
        after: the other one.
        values: of the switch, before and after.
        numbers: counts, means and sums of both, the share and its interval; or None when they
            cannot be compared.
        state: supported, refuted or inconclusive.
        why: in words.
        top: sequences where most of the sum goes, with their ids, positions and sums.
    """

    kind: str
    switch: str
    before: Replay
    after: Replay
    values: tuple[str, str]
    numbers: Mapping[str, Any] | None
    state: str
    why: str
    top: tuple[Mapping[str, Any], ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        sides = {"before": self.before, "after": self.after}
        return {
            "kind": self.kind,
            "switch": self.switch,
            **{
                side: {
                    "rep": r.rep,
                    "name": r.name,
                    "value": v,
                    "mode": r.mode,
                }
                for (side, r), v in zip(sides.items(), self.values, strict=True)
            },
            "numbers": dict(self.numbers) if self.numbers is not None else None,
            "top": [dict(t) for t in self.top],
        }


class Effects:
    """All controlled pairs among the replays of a tape.

    Args:
        replays: newest last.
    """

    def __init__(self, replays: Iterable[Replay]) -> None:
        self.replays = list(replays)
        self.unused: list[str] = []
        self.found = [*self._pairs(), *self._sizes()]

    @property
    def baseline(self) -> Replay | None:
        """The scoring replay with the fewest switches, the newest of them."""
        scored = [r for r in self.replays if r.mode == "score"]
        return min(reversed(scored), key=lambda r: len(r.changed), default=None)

    def _pairs(self) -> Iterator[Effect]:
        for one, other in combinations([r for r in self.replays if r.mode == "score"], 2):
            switches, around = differing(one, other)
            names = f"{one.name} and {other.name}"
            if not switches or len(switches) > 1:
                continue  # the same again, or no controlled change
            if around:
                text = ", ".join(a.partition("#")[0] for a in around)
                self.unused.append(f"{names} differ in {switches[0]}, but in {text} as well")
                continue
            untold = [r for r in (one, other) if not r.told]
            if untold:
                text = "; ".join(f"{r.name}: {_untold(r)}" for r in untold)
                self.unused.append(f"{names} differ in {switches[0]}, but {text}")
                continue
            yield self._gap(switches[0], one, other)

    def _gap(self, switch: str, one: Replay, other: Replay) -> Effect:
        usual = default(switch, "score")
        value = [r.switches.get(switch, usual) for r in (one, other)]
        i, j = joined(one.sums, other.sums)
        # neither is the usual one: the share is that of the larger gap
        grows = one.sums.absolute[i].sum() < other.sums.absolute[j].sum()
        if value[1] == usual or (value[0] != usual and grows):
            one, other, value, i, j = other, one, value[::-1], j, i
        values = (value[0], value[1])
        common: dict[str, Any] = {
            "kind": "gap",
            "switch": switch,
            "before": one,
            "after": other,
            "values": values,
        }
        if one.column != other.column:
            why = _other_logprobs(one, other)
            return Effect(**common, numbers=None, state="inconclusive", why=why)
        x, y = one.sums, other.sums
        numbers = self._numbers(x, y, i, j)
        if not len(i) or not numbers["sum_before"]:
            why = (
                "no gap before" if len(i) else "no sequence was compared at as many tokens in both"
            )
            return Effect(**common, numbers=numbers, state="inconclusive", why=why)
        went = x.absolute[i] - y.absolute[j]
        low, high = interval(went, x.absolute[i])
        numbers |= {"share": float(went.sum() / numbers["sum_before"]), "low": low, "high": high}
        state = judge(low, high, numbers["with_gap"])
        top = _top(x, i, went, "went")
        return Effect(**common, numbers=numbers, state=state, why=_words(numbers), top=top)

    def _sizes(self) -> Iterator[Effect]:
        """What one switch does to the engine itself, against the gap to the trainer."""
        base = self.baseline
        again = [r for r in self.replays if r.mode == "re-execute"]
        steady = [r for r in again if not r.changed]
        shaky = [r for r in steady if r.verdict != "identical"]
        for replay in again:
            if len(replay.changed) != 1:
                continue
            ((switch, value),) = replay.changed.items()
            before = base or replay
            x, y = before.sums, replay.sums
            i, j = joined(x, y)
            numbers = self._numbers(x, y, i, j) if before.column == replay.column else None
            state, why = self._size_state(replay, base, numbers, x, y, i, j)
            if shaky:
                state = "inconclusive"
                why += (
                    "; but the engine does not repeat itself: "
                    f"{shaky[-1].name} is {shaky[-1].verdict} without any switch"
                )
            elif not steady and replay.verdict != "identical":  # which is as good a control
                state = "inconclusive"
                why += "; whether the engine repeats itself without a switch was not looked at"
            yield Effect(
                kind="size",
                switch=switch,
                before=before,
                after=replay,
                values=("recorded", value),
                numbers=numbers,
                state=state,
                why=why,
                top=_top(y, j, y.absolute[j], "sum") if numbers and numbers["sum_after"] else (),
            )

    def _size_state(
        self,
        replay: Replay,
        base: Replay | None,
        numbers: dict[str, Any] | None,
        x: Sums,
        y: Sums,
        i: np.ndarray,
        j: np.ndarray,
    ) -> tuple[str, str]:
        if replay.verdict == "identical":
            why = "it changes no bit of what the engine computes"
            few = len(y.ids) < FEWEST
            return ("inconclusive", why + _few(len(y.ids))) if few else ("refuted", why)
        if numbers is None:
            return "inconclusive", _other_logprobs(base or replay, replay)
        if not len(i):
            return "inconclusive", "no sequence was compared at as many tokens in both reports"
        if base is None:
            if not numbers["sum_after"]:
                return "inconclusive", "no logprob differs, but something else does"
            changed = int((y.absolute[j] > 0).sum())
            few = changed < FEWEST
            return "inconclusive" if few else "supported", (
                f"it changes what the engine itself computes: mean |d| {numbers['mean_after']:.3g} "
                f"nat over {numbers['tokens']:,} tokens; there is no replay as a trainer to set it "
                f"against{_few(changed, ' that differ' + 's' * (changed == 1)) if few else ''}"
            )
        if not numbers["sum_before"]:
            return "inconclusive", "the replay as a trainer has no gap to set it against"
        low, high = interval(y.absolute[j], x.absolute[i])
        share = numbers["sum_after"] / numbers["sum_before"]
        numbers |= {"share": float(share), "low": low, "high": high}
        state = judge(low, high, numbers["with_gap"])
        few = numbers["with_gap"] < FEWEST
        return state, (
            f"what it does to the engine itself is {_percent(share)} of the gap to the trainer in "
            f"size (95 %: {_percent(low)} to {_percent(high)}): at most so much of it"
            f"{_few(numbers['with_gap'], ' with a gap') if few else ''}"
        )

    def _numbers(self, x: Sums, y: Sums, i: np.ndarray, j: np.ndarray) -> dict[str, Any]:
        tokens = int(x.tokens[i].sum())
        sums = {
            "sum_before": float(x.absolute[i].sum()),
            "sum_after": float(y.absolute[j].sum()),
        }
        k3 = {"k3_before": x.k3[i].sum(), "k3_after": y.k3[j].sum()}
        means = {
            name.replace("sum", "mean"): value / tokens if tokens else None
            for name, value in sums.items()
        }
        return {
            "sequences": len(i),
            "with_gap": int((x.absolute[i] > 0).sum()),
            "left_out": len(x.ids) - len(i),
            "tokens": tokens,
            **sums,
            **means,
            **{name: float(value) / tokens if tokens else None for name, value in k3.items()},
        }

    def here(self, effect: Effect, sequence: str) -> dict[str, Any] | None:
        """The numbers of an effect for one sequence alone; None where a report lacks it.

        None, too, where the two reports are of other logprobs.
        """
        if effect.numbers is None:
            return None
        x, y = effect.before.sums, effect.after.sums
        i, j = (pc.index(s.ids, sequence).as_py() for s in (x, y))
        if i < 0 or j < 0:
            return None
        numbers = self._numbers(x, y, np.array([i]), np.array([j]))
        numbers["tokens_after"] = int(y.tokens[j])
        if numbers["sum_before"]:
            after, before = numbers["sum_after"], numbers["sum_before"]
            share = 1 - after / before if effect.kind == "gap" else after / before
            numbers["share"] = float(share)
        return numbers


def _top(of: Sums, rows: np.ndarray, by: np.ndarray, name: str) -> tuple[Mapping[str, Any], ...]:
    best = [k for k in np.argsort(-by, kind="stable")[:3] if by[k] > 0]
    return tuple(
        {
            "seq": of.ids[int(rows[k])].as_py(),
            "tok": int(of.max_at[rows[k]]) if of.max_at[rows[k]] >= 0 else None,
            name: float(by[k]),
        }
        for k in best
    )


def _words(numbers: Mapping[str, Any]) -> str:
    share, low, high = numbers["share"], numbers["low"], numbers["high"]
    span = f"(95 %: {_percent(low)} to {_percent(high)})"
    if share < 0:
        text = f"the gap grows by {_percent(-share)} {span}: none of it goes"
    else:
        text = f"{_percent(share)} of the gap goes {span}"
    if numbers["with_gap"] < FEWEST:
        text += _few(numbers["with_gap"], " with a gap")
    return text


def _few(sequences: int, which: str = "") -> str:
    many = f"{sequences} sequence{'s' if sequences != 1 else ''}{which}"
    return f"; {many} {'are' if sequences != 1 else 'is'} too few to decide, {FEWEST} are enough"


def _other_logprobs(one: Replay, other: Replay) -> str:
    return (
        f"the headlines are of other logprobs ({one.column}, {other.column}): their gaps are not "
        "the same quantity"
    )


def _untold(replay: Replay) -> str:
    """What is missing of a side that does not say how it ran; nothing is known of a closed one."""
    return "conditions not known" + ("" if replay.around else ": open tape B")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %".replace("-", "\N{MINUS SIGN}", 1)
