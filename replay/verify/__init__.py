"""Determinism suite: one rollout of an engine, run again in other ways, compared bit by bit."""

from rolltape.replay.verify.cases import CASES, CaseResult, Comparison, Report
from rolltape.replay.verify.suite import verify

__all__ = ["CASES", "CaseResult", "Comparison", "Report", "verify"]
