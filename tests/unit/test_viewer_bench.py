"""The made-up tapes that the viewer is measured on hold what a diff of them finds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape.store as store
from rolltape.replay.diff import diff_tapes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tapes")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    try:
        write = importlib.import_module("viewer_tape").write
        made = write(out, tokens=40_000, sequences=64, layers=5, dense=8)
    finally:
        patch.undo()
        for name in ("viewer_tape", "viewer_plan", "viewer_report"):
            sys.modules.pop(name, None)
    assert made["sequences"] == 64
    assert abs(made["tokens"] - 40_000) < 4_000
    return out


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return diff_tapes(store.open(folder / "a"), store.open(folder / "b"))


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report" / "report.json").read_text())["summary"])


def test_the_report_says_what_a_diff_of_the_tapes_finds(
    found: dict[str, Any], said: dict[str, Any]
) -> None:
    assert set(said) == set(found)
    for name in (
        "verdict",
        "column",
        "tokens_compared",
        "tokens",
        "max_abs",
        "max_at",
        "alignment",
    ):
        assert said[name] == found[name], name
    for name in ("decisions", "disagree", "order_only", "tokens", "tokens_any", "missing_a"):
        assert said["routing"][name] == found["routing"][name], name
    ours, theirs = ({r["a"]: r for r in side["by_sequence"]} for side in (said, found))
    assert set(ours) == set(theirs)
    for name, row in ours.items():
        assert set(row) == set(theirs[name])
        assert row["mean_abs"] == pytest.approx(theirs[name]["mean_abs"])
        assert row["routing"] == theirs[name]["routing"]


def test_every_drawn_token_has_a_step_and_a_version(folder: Path) -> None:
    tape = store.open(folder / "a")
    assert not tape.problems
    kinds = set(tape.table("forwards").column("kind").to_pylist())
    assert {"prefill", "decode", "cached"} <= kinds
    for sequence in tape:
        drawn = slice(sequence.prompt_len, sequence.length)
        if sequence.finish == "open":
            continue
        assert sequence.tokens.valid.all()
        assert sequence.logprob("processed").valid[drawn].all()
        assert sequence.step.valid[drawn].all()
        assert sequence.weight_version.valid[drawn].all()
        assert np.all(np.diff(sequence.step.values[drawn]) > 0)
