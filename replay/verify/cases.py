"""The cases of the determinism suite, what a case found, and what follows for the exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Verdict = Literal["passed", "failed", "not-run"]

#: The control of all others: a difference says nothing of a case where the same run twice differs.
CONTROL = "run-to-run"

#: Every case, in the order in which they are run.
CASES: Mapping[str, str] = {
    CONTROL: "the same batch twice",
    "batch": "each prompt alone and in smaller batches, against the whole batch",
    "slot": "the rows of the batch in reverse order",
    "prefill-decode": "decoded logprobs against one forward over the whole sequence",
    "chunked": "the prompt in chunks, against the prompt as a whole",
    "prefix-cache": "a prefix that comes from the cache, against one that is computed",
    "graphs": "padded graph sizes, against eager",
    "routes": "recorded routes forced, against live ones",
    "tp": "two tensor-parallel ranks, against one",
}


class NotApplicableError(Exception):
    """A case that this engine, model or machine cannot run; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One execution compared with the base rollout.

    Args:
        variant: what was changed, for example `batch of 1`.
        compared: how many values, by name.
        differ: how many of them have other bits.
        first: the first difference in execution order, see
            `rolltape.replay.bitwise.Difference.as_dict`; None if there is none.
        token: the first sampled-token logprob that differs, in the same form.
        sequences_differ: sequences with a difference.
        problem: why nothing can be said, or None.
    """

    variant: str
    compared: Mapping[str, int] = field(default_factory=dict)
    differ: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, Any] | None = None
    token: Mapping[str, Any] | None = None
    sequences_differ: int = 0
    problem: str | None = None

    @property
    def shown(self) -> Mapping[str, Any]:
        """The difference that is reported: that of the first token, else the first of all."""
        return self.token or self.first or {}

    def same_values(self, other: Comparison) -> bool:
        """Whether another run of the variant differs in the same way, as far as is told."""
        return all(
            getattr(self, name) == getattr(other, name) for name in ("differ", "first", "token")
        )

    @property
    def step(self) -> int | None:
        """Step of the base rollout with the first difference."""
        return None if self.first is None else int(self.first["step"])


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What became of a case.

    Args:
        case: its name.
        verdict: `passed` only if values were compared and every one has the same bits.
        reason: one line.
        asked: whether it was asked for by name.
        applies: whether this engine, model and machine have what it is about.
        comparisons: one for each execution.
        first: the comparison that the verdict rests on; None unless it failed.
        site: the first differing site: site, sequence, position, step; or `{"reason": ...}`. Of
            `tp` also `replicas`: where ranks disagree that hold the same, or None.
        repeatable: whether the execution that failed has the same values when it is run again;
            None where that is not known.
        seconds: that it took.
    """

    case: str
    verdict: Verdict
    reason: str
    asked: bool = False
    applies: bool = True
    comparisons: Sequence[Comparison] = ()
    first: Comparison | None = None
    site: Mapping[str, Any] | None = None
    repeatable: bool | None = None
    seconds: float = 0.0

    @property
    def missed(self) -> bool:
        """Whether it was not run, but should have been."""
        return self.verdict == "not-run" and (self.asked or self.applies)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        first = self.first
        return {
            "case": self.case,
            "verdict": self.verdict,
            "reason": self.reason,
            "asked": self.asked,
            "applies": self.applies,
            "variant": None if first is None else first.variant,
            "first": None if first is None else first.first,
            "token": None if first is None else first.token,
            "site": self.site,
            "repeatable": self.repeatable,
            "comparisons": [dict(vars(c)) for c in self.comparisons],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the suite found.

    Args:
        facts: engine, model, dtype, device, versions, seed, prompts, tokens.
        cases: in the order in which they ran.
    """

    facts: Mapping[str, Any]
    cases: Sequence[CaseResult]

    @property
    def exit_status(self) -> int:
        """0 all that applies passed, 1 a case failed, 3 nothing failed, but something that applies
        or was asked for by name, or everything, was not run.
        """
        verdicts = {case.verdict for case in self.cases}
        if "failed" in verdicts:
            return 1
        if "passed" not in verdicts:
            return 3
        return 3 if any(c.missed for c in self.cases) else 0

    @property
    def verdict(self) -> Verdict:
        """`failed` if a case failed, `not-run` as the exit status 3, else `passed`."""
        by_status: dict[int, Verdict] = {0: "passed", 1: "failed", 3: "not-run"}
        return by_status[self.exit_status]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        cases = [case.as_dict() for case in self.cases]
        return {"verdict": self.verdict, **self.facts, "cases": cases}


class Bench(Protocol):
    """An engine with a base rollout, on which cases are run."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was run: for the report."""

    def run(self, case: str) -> Sequence[Comparison]:
        """Run a case.

        Raises:
            NotApplicableError: it cannot be run here.
        """

    def again(self, case: str, variant: str) -> Comparison | None:
        """Run one variant of a case once more; None where that is not done."""

    def site(self, case: str, comparison: Comparison) -> Mapping[str, Any]:
        """The first differing site of a comparison of a case that failed."""

    def close(self) -> None:
        """Stop the engine."""
