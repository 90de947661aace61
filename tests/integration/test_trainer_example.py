"""The trainer example: a rollout, a step, and what the diff says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolltape import store
from rolltape.replay import diff_tapes
from tests.integration.conftest import ROOT, TINY_MOE

pytestmark = pytest.mark.engine

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the example's tapes, and what it printed."""
    folder = tmp_path_factory.mktemp("step")
    script = str(ROOT / "examples/trainer_logprobs.py")
    done = subprocess.run(
        [sys.executable, script, "--model", str(TINY_MOE), "--out", str(folder)],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_before_the_step_they_differ_by_arithmetic_only(out: tuple[Path, str]) -> None:
    rollout, trainer = (store.open(out[0] / name) for name in ("rollout", "trainer"))
    found = diff_tapes(rollout, trainer, scoring="old")
    assert found["compared"]["sequences"] == found["alignment"]["by_key"] == 8
    assert found["identity"] == []
    assert 0 < found["mean_abs"] < 0.1 and found["compared"]["routes"] > 1000
    # a rollout decodes token by token, a trainer sees all at once: some experts flip in bfloat16
    assert 0 < found["routing"]["disagree"] < 0.1 * found["compared"]["routes"]


def test_after_the_step_the_diff_says_that_the_weights_are_others(out: tuple[Path, str]) -> None:
    rollout, trainer = (store.open(out[0] / name) for name in ("rollout", "trainer"))
    before = diff_tapes(rollout, trainer, scoring="old")
    after = diff_tapes(rollout, trainer, scoring="after")
    assert [p["kind"] for p in after["identity"]] == ["weights"]
    assert after["mean_abs"] > before["mean_abs"]
    versions = {
        row["version"]: (row["label"], row["digest"])
        for row in trainer.rows("weights")
        if row["group"] == ""
    }
    assert [versions[v][0] for v in sorted(versions)] == ["step 0", "step 1"]
    (ran,) = {row["digest"] for row in rollout.rows("weights") if row["group"] == ""}
    assert versions[0][1] == ran != versions[1][1]


def test_it_prints_both(out: tuple[Path, str]) -> None:
    text = out[1]
    assert text.count("$ rolltape diff ") == 2
    first, second = text.split("$ rolltape diff ")[1:]
    assert "routing: " in first and "other weights" not in first
    assert "other weights: a version 0 " in second
    assert re.search(r"next: rolltape diff .* --scoring after -o \S+trainer\.report", second)
