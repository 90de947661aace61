"""Our own capture against what vLLM's second model runner returns itself: `make test-native`."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rolltape

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        os.environ.get("ROLLTAPE_NATIVE") != "1" or not Path(PYTHON).exists(),
        reason="`make test-native` runs it: it needs vLLM 0.32 and Triton's interpreter",
    ),
]


def test_routes_sets_and_logprobs_are_the_engines_own(tmp_path: Path) -> None:
    tape, outputs = tmp_path / "tape", tmp_path / "outputs"
    job = [PYTHON, str(Path(__file__).with_name("vllm_native_job.py"))]
    done = subprocess.run(
        [
            *[PYTHON, "-m", "rolltape", "record", "-o", str(tape), "--"],
            *[*job, str(ROOT / "examples/models/tiny-moe"), str(outputs)],
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recorded = {tuple(s.tokens.values.tolist()): s for s in rolltape.open(tape)}
    with open(outputs, "rb") as file:
        native = pickle.load(file)
    assert len(native) == len(recorded) == 4
    for out in native:
        sequence = recorded[(*out["prompt"], *out["ids"])]
        first = len(out["prompt"])
        routes, theirs = sequence.routes(), out["routes"]
        assert routes.valid[: len(theirs)].all()
        assert (routes.ids[: len(theirs)] == theirs[:, list(routes.layers)]).all()
        processed = sequence.logprob("processed").values[first:]
        assert (processed == np.array(out["logprobs"], np.float32)).all()
        supports = sequence.supports()
        for i, kept in enumerate(out["sets"]):
            assert set(supports.at(first + i).tolist()) == set(kept)
