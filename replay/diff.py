"""The diff of any two tapes: align, check identity, subtract, and say what was compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Names
from pathlib import Path
from typing import Any

from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.align import Alignment, Pair, alignment_problems, select
from rolltape.replay.drift import counts_over, drift, first_divergent
from rolltape.replay.front import Floor, floor_of, front_of
from rolltape.replay.identity import (
    Problem,
    WeightUse,
    fold,
    gap_problem,
    range_problem,
    settings_that_differ,
    tape_warnings,
    token_problem,
)
from rolltape.replay.measures import (
    by_group,
    by_pair,
    by_position,
    by_version,
)
from rolltape.replay.pair import PairResult, PairTokens, read_pair
from rolltape.replay.report import refuse_existing, write_report
from rolltape.replay.routing_diff import PairRouting, RoutingTally, input_version, own_choice
from rolltape.replay.semantics import clash_problems
from rolltape.replay.summary import (
    Answer,
    answer_of,
    column_problems,
    describe_side,
    group_of,
    headline_column,
    judge,
    kept_sets,
    meanings,
    seen_of,
    sequence_row,
    why_no_column,
    why_no_routes,
)
from rolltape.replay.suspicions import (
    DOUBT,
    agreement,
    foreign_problems,
    route_problems,
    shift_problem,
    shifted_logprobs,
)
from rolltape.replay.value_floor import ColumnSeen, Seen, ValueFloor, above_floor, floor_of_values
from rolltape.store.errors import UsageError
from rolltape.store.jsonable import jsonable
from rolltape.store.keys import Key
from rolltape.store.sequences import LOGPROBS, Sequence, Tape

#: Exit status of each verdict.
EXIT_STATUS = {
    "identical": 0,
    "within-noise": 0,
    "divergent": 1,
    "not-reproduced": 1,
    "inconclusive": 3,
    "not-run": 3,
}

_RECORD_LAYERS = "rolltape record --layers N or --sketches N, rolltape replay --layers N"


def diff_tapes(
    a: Tape,
    b: Tape,
    *,
    layers: bool = False,
    floor: Path | None = None,
    save_floor: Path | None = None,
    sequences: Names[str] | None = None,
    scoring: str | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Compare two tapes token by token.

    Args:
        a: the reference side; d = log p_B - log p_A.
        b: the other side.
        layers: compare recorded activations too; a floor that has some asks for them, too.
        floor: file of a measured noise floor; see `rolltape.replay.front` and `.value_floor`.
        save_floor: where to write the differences as a noise floor: the two sides should agree.
        sequences: ids (of either tape) to compare; all if None.
        scoring: of `b` only what a trainer scored for this purpose: old, current, reference.
            Both may then be one tape, which holds the rollouts and the trainer.
        out: folder to write a report into; must not exist or be empty.

    Returns:
        The object that `rolltape diff --json` prints (docs/diff.md), ready for JSON.

    Raises:
        UsageError: a sequence that neither tape has, or a scoring that `b` does not have; a file
            that is no noise floor; differences that can be none.
        TapeExistsError: there is something at `out`.
        TapeError: a tape cannot be read.
    """
    if out is not None:
        refuse_existing(out)
    if sequences is not None and scoring is not None:
        raise UsageError("sequences and scoring were both chosen", hint="choose one of them")
    alignment = select(a, b, sequences, scoring)
    noise = None if floor is None else Floor.load(floor)
    layers |= noise is not None and bool(noise.sites)
    layers |= save_floor is not None and all(len(t.table("activations")) for t in (a, b))
    work = _Work(a, b, layers=layers, floor=noise)
    work.note(*alignment_problems(a, b, alignment))
    for pair in alignment.pairs:
        work.compare(pair)
    summary = {**work.summary(alignment), "scoring": scoring}
    plain: dict[str, Any] = jsonable(summary)
    if save_floor is not None:
        measured = {f"{_description(a)} against {_description(b)}": work.sites}
        count, values = int(plain["compared"]["sequences"]), floor_of_values(work.seen)
        floor_of(measured, work.engines(), sequences=count, values=values).save(save_floor)
    if out is not None:
        write_report(
            out,
            summary=plain,
            results=work.results,
            by_pair=work.by_pair,
            column=work.headline,
            routing=work.routing.rows(),
            activations=work.sites.rows(),
        )
    return plain


class _Work:
    """What one diff gathers on its way over the pairs."""

    def __init__(self, a: Tape, b: Tape, *, layers: bool, floor: Floor | None = None) -> None:
        self.a, self.b, self.layers, self.floor = a, b, layers, floor
        self.results: list[PairResult] = []
        self.routing = RoutingTally()
        self.sites = SiteTally()
        self.weights = WeightUse(a, b)
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.suspects: list[tuple[Sequence, Sequence]] = []
        self.headline: str | None = None
        self.seen = Seen(
            logprobs={}, routes=None, weights_differ=0, weights_non_finite=0, choices={}
        )
        self.by_pair: list[dict[str, Any]] = []

    # -- one pair -------------------------------------------------------------------------

    def compare(self, pair: Pair) -> None:
        """Read one pair and add it to everything."""
        a, b = _fresh(self.a, pair.a), _fresh(self.b, pair.b)
        wrong = token_problem(a, b)
        if wrong is not None:
            self.problems.append(wrong)
            self.results.append(PairResult(pair, _light(a), _light(b), None, None))
            return
        self.note(range_problem(a, b))
        self.note(gap_problem(a, b))
        tokens = read_pair(pair, a, b)
        self.weights.add(a, b, tokens.counted)
        routing = self._compare_routes(a, b)
        if self.layers:
            self.problems += self.sites.add(a, b)
        # what is kept for the report must not hold the columns that were only needed here
        tokens = dataclasses.replace(tokens, a=_light(a), b=_light(b))
        self.results.append(PairResult(pair, tokens.a, tokens.b, tokens, routing))

    def _compare_routes(self, a: Sequence, b: Sequence) -> PairRouting | None:
        first, second = own_choice(a), own_choice(b)
        for side, sequence, choice in (("a", a, first), ("b", b, second)):
            if choice is None:
                continue
            self.note(*route_problems(side, sequence, choice.routes))
            if choice.used is not None and choice.used is not choice.routes:
                self.note(*route_problems(side, sequence, choice.used))
        if first is None or second is None:
            return None
        n = min(a.length, b.length)
        doubtful = False
        looks = [("the routes", first.routes, second.routes)]
        if "live" in (first.role, second.role) and first.used and second.used:
            looks = [
                ("the live routes", *looks[0][1:]),
                ("the used routes", first.used, second.used),
            ]
        for what, x, y in looks:
            found = agreement(x, y, n)
            if found is not None:
                self.note(shift_problem(a, what, found))
                doubtful |= found.rate < DOUBT and not found.shift
        if doubtful:
            self.suspects.append((_light(a), _light(b)))
        versions = input_version(a, n)
        if not versions.valid.any():
            versions = input_version(b, n)
        routing, problems = self.routing.add(a, b, first, second, version=versions)
        self.note(*problems)
        return routing

    def note(self, *problems: Problem | None) -> None:
        """Keep what is a problem; None is none."""
        for problem in problems:
            if problem is not None:
                about_identity = problem.blocks or problem.kind == "ambiguous"
                (self.problems if about_identity else self.warnings).append(problem)

    # -- the answer -----------------------------------------------------------------------

    def summary(self, alignment: Alignment) -> dict[str, Any]:
        """The report's summary, numbers not yet made ready for JSON."""
        pairs = [r.tokens for r in self.results if r.tokens is not None]
        self.headline = column = headline_column(pairs)
        main = answer_of(self.results, column)
        self.by_pair = by_pair(main.deltas, len(self.results))
        kept = kept_sets(pairs)
        self._gather_problems(pairs)
        compared = {
            "sequences": len(pairs),
            "logprobs": len(main.deltas),
            "routes": self.routing.decisions,
            "supports": kept["compared"],
            "activations": self.sites.positions,
        }
        columns = {c: sum(p.differ(c) for p in pairs) for c in LOGPROBS}
        # one column after the other: the deltas of one are some thirty bytes a token
        plain, seen = {}, {}
        for c in LOGPROBS:
            plain[c], seen[c] = self._measured(c, main, columns[c])
        differences = {
            "logprobs": max(columns.values()),
            **self.routing.differences,
            "supports": kept["differ"],
            "activations": self.sites.differences,
        }
        self.seen = Seen(
            logprobs=seen,
            routes=self.routing.seen,
            weights_differ=differences["route_weights"],
            weights_non_finite=self.routing.weights_non_finite,
            choices={"used_routes": differences["used_routes"], "kept_sets": kept["differ"]},
        )
        activations, noise = self._activations(), self._noise()
        above = None if noise is None or noise["unlike"] else noise["above"]
        if above is not None and activations and activations["verdict"] == "divergent":
            above.append(f"activations from {activations['front']['site']} on")
        verdict, reason = judge(
            compared,
            differences,
            blocking=sum(p.blocks for p in self.problems),
            layers_missing=self.layers and not self.sites.positions,
            above=above,
            columns=columns,
        )
        if noise is not None and noise["unlike"] and verdict == "divergent":
            reason += f"; the noise floor is of another kind: {'; '.join(noise['unlike'])}"
        return {
            "verdict": verdict,
            "reason": reason,
            **main.plain,
            "over": counts_over(main.deltas.delta),
            "first_divergent": first_divergent(activations, self.routing.rows()),
            "drift": drift(main.deltas, self.results, self.a, self.b),
            "routing": self.routing.summary(),
            "supports": kept,
            "activations": activations,
            "noise": noise,
            "identity": fold(self.problems),
            "warnings": fold(self.warnings),
            "compared": compared,
            "differences": differences,
            "not_compared": self._not_compared(pairs, kept),
            "semantics": meanings(pairs, column),
            "by_semantics": {
                c: plain[c] for c in LOGPROBS if c != column and any(p.held(c) for p in pairs)
            },
            "by_position": by_position(main.deltas),
            "by_version": by_version(main.deltas),
            "by_group": by_group(main.deltas, [group_of(r.a, r.b) for r in self.results]),
            "by_sequence": [
                sequence_row(r, m, column) for r, m in zip(self.results, self.by_pair, strict=True)
            ],
            "alignment": {
                "pairs": len(alignment.pairs),
                "by_key": sum(p.by == "key" for p in alignment.pairs),
                "by_digest": sum(p.by == "digest" for p in alignment.pairs),
                "ambiguous": sum(p.ambiguous for p in alignment.pairs),
                "unmatched_a": len(alignment.unmatched_a),
                "unmatched_b": len(alignment.unmatched_b),
            },
            "a": describe_side(self.a),
            "b": describe_side(self.b),
            "settings": settings_that_differ(
                self.a,
                self.b,
                {p.a.engine for p in alignment.pairs},
                {p.b.engine for p in alignment.pairs},
            ),
        }

    def _measured(self, column: str, main: Answer, unequal: int) -> tuple[Any, ColumnSeen]:
        answer = main if column == self.headline else answer_of(self.results, column)
        return answer.plain, seen_of(answer, unequal)

    def _gather_problems(self, pairs: list[PairTokens]) -> None:
        self.note(
            *clash_problems([c for p in pairs for c in p.comparison.clashes]),
            *column_problems(pairs, self.headline),
            *self.weights.problems(),
            *self.routing.problems(b_replays_a=self.b.parent == self.a.uuid),
        )
        self.note(*one_sided(self.a, self.b))
        for role in ("used", "live"):
            self.note(*foreign_problems(self.suspects, self.a, role=role))
        self.note(*tape_warnings(self.a, "a"))
        if self.a.uuid != self.b.uuid:
            self.note(*tape_warnings(self.b, "b"))
        if self.headline is not None:
            self.note(*(shifted_logprobs(p, self.headline) for p in pairs))
        masks = sum(p.mask_differs for p in pairs)
        if masks:
            message = f"{masks:,} response tokens are masked on one side only; not compared"
            self.note(Problem("loss_mask", message, False, {"tokens": masks}))

    def engines(self) -> list[Mapping[str, Any]]:
        """Rows of `engines` of both sides."""
        return [row for tape in (self.a, self.b) for row in tape.engines.values()]

    def _activations(self) -> dict[str, Any] | None:
        if not self.layers:
            return None
        if not self.sites.positions:
            reason = self._lacking("activations") or "no site and position on both sides"
            return {"verdict": "not-run", "reason": reason, "hint": _RECORD_LAYERS, "sites": []}
        floor = self.floor
        unlike = floor.unlike(self.engines()) if floor is not None else []
        found = front_of(self.sites, None if unlike else floor)
        if unlike:
            found["reason"] += f"; the noise floor is of another kind: {'; '.join(unlike)}"
        return {**found, "sites": self.sites.summary()}

    def _noise(self) -> dict[str, Any] | None:
        """The floor of values, and what is above it; None without a floor."""
        floor = self.floor
        if floor is None:
            return None
        values = floor.values or ValueFloor(logprobs={})
        return {
            "executions": list(floor.executions),
            "sequences": floor.sequences,
            "margin": floor.margin,
            **dataclasses.asdict(values),
            "unlike": floor.unlike(self.engines()),
            "above": above_floor(self.seen, values, floor.margin),
        }

    def _lacking(self, table: str) -> str | None:
        sides = [s for s, t in (("a", self.a), ("b", self.b)) if not len(t.table(table))]
        return f"{' and '.join(sides)} recorded none" if sides else None

    def _not_compared(self, pairs: list[PairTokens], kept: dict[str, Any]) -> dict[str, str]:
        """Why there is nothing to say of a kind of value."""
        if not pairs:
            reason = "no pair of sequences with the same tokens"
            return dict.fromkeys(("logprobs", "routes", "supports", "activations"), reason)
        found = {}
        if self.headline is None:
            found["logprobs"] = why_no_column(pairs)
        if not self.routing.decisions:
            found["routes"] = why_no_routes(self.a, self.b)
        if not kept["compared"]:
            reason = "no position with a kept set on both sides"
            found["supports"] = self._lacking("supports") or reason
        if not self.sites.positions:
            reason = "no site and position on both sides"
            found["activations"] = self._lacking("activations") or reason
            if not self.layers:
                found["activations"] = "not asked for (--layers)"
        return found


def _description(tape: Tape) -> str:
    return f"{tape.role} {tape.uuid[:8]}"


def one_sided(a: Tape, b: Tape) -> Iterator[Problem]:
    """Kinds of values that one side recorded and the other, which has them too, did not."""
    kinds = ["routes"] if has_moe_layers(a) and has_moe_layers(b) else []
    kinds += ["supports"] if a.role == b.role == "rollout" else []
    for kind in kinds:
        held = {"a": len(a.table(kind)) > 0, "b": len(b.table(kind)) > 0}
        for side, other in (("a", "b"), ("b", "a")):
            if held[other] and not held[side]:
                message = f"{side} recorded no {kind}, {other} did: they are not compared"
                yield Problem(f"{kind}_missing", message, fields={"side": side})


def has_moe_layers(tape: Tape) -> bool:
    """Whether some engine of a tape may route: a dense model says that it does not."""
    return any(row["moe_layers"] != [] for row in tape.engines.values()) or not tape.engines


def _fresh(tape: Tape, key: Key) -> Sequence:
    """A sequence whose cached columns live no longer than the pair."""
    return dataclasses.replace(tape.sequence(key))


def _light(sequence: Sequence) -> Sequence:
    """The same sequence without what has been read of it."""
    return dataclasses.replace(sequence)
