"""What takes too long for every run of CI: `make test-native`.

Our own capture against what vLLM's second model runner returns itself; speculation, tensor
parallel and torch.compile against transformers.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from tests.integration.teacher import check_positions, teacher

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny-moe"
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        os.environ.get("ROLLTAPE_NATIVE") != "1" or not Path(PYTHON).exists(),
        reason="`make test-native` runs it: it needs vLLM 0.32 and Triton's interpreter",
    ),
]


def run(folder: Path, script: str, *more: str, record: str = "tape", **env: str) -> Path:
    """The outputs of a job, which is recorded unless `record` is empty."""
    outputs = folder / f"outputs{record}"
    job = [PYTHON, str(Path(__file__).with_name(script)), str(MODEL), str(outputs), *more]
    prefix = [PYTHON, "-m", "rolltape", "record", "-o", str(folder / record), "--"]
    done = subprocess.run(
        [*(prefix if record else ()), *job],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return outputs


def check(tape: Any, outputs: dict[str, Any]) -> None:
    """Every output is on the tape, whole; every position is what transformers says."""
    truth = teacher(MODEL)
    recorded = {tuple(s.tokens.values.tolist()): s for s in tape}
    assert len(recorded) == len(outputs["done"])
    for out in outputs["done"]:
        sequence = recorded[(*out["prompt"], *out["ids"])]
        first, raw = sequence.prompt_len, sequence.logprob("raw")
        assert raw.valid[first:].all() and sequence.routes().valid[:-1].all()
        check_positions(sequence, truth)
        if out["logprobs"]:
            # of a verified draft the engine's own number is another sum of the same logits
            own = np.array(out["logprobs"], np.float32)
            np.testing.assert_allclose(raw.values[first:], own, atol=1e-6, rtol=0)
    assert not [row for row in tape.rows("events") if row["kind"] in ("gap", "hook_error")]


def test_routes_sets_and_logprobs_are_the_engines_own(tmp_path: Path) -> None:
    with open(run(tmp_path, "vllm_native_job.py"), "rb") as file:
        native = pickle.load(file)
    recorded = {tuple(s.tokens.values.tolist()): s for s in rolltape.open(tmp_path / "tape")}
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


def test_drafts_are_counted_and_accepted_tokens_have_logprobs(tmp_path: Path) -> None:
    outputs = json.loads(run(tmp_path, "vllm_modes_job.py", "speculation").read_text())
    tape = rolltape.open(tmp_path / "tape")
    check(tape, outputs)
    rows = [row for row in tape.rows("forwards") if row["drafted"]]
    counts = outputs["counts"]
    assert counts["num_accepted_tokens"] > 10
    assert sum(row["drafted"] for row in rows) == counts["num_draft_tokens"]
    assert sum(row["accepted"] for row in rows) == counts["num_accepted_tokens"]
    for sequence in tape:
        processed = sequence.logprob("processed")
        assert processed.valid[sequence.prompt_len :].all()
        if not sequence.info["sampling"]["temperature"]:
            assert (processed.values[sequence.prompt_len :] == 0).all()


def test_tensor_parallel_is_one_record_and_its_ranks_are_compared(tmp_path: Path) -> None:
    outputs = json.loads(run(tmp_path, "vllm_modes_job.py", "parallel").read_text())
    tape = rolltape.open(tmp_path / "tape")
    check(tape, outputs)
    ranks = [row["ranks"]["tp"] for row in tape.processes if row["ranks"]]
    assert sorted(ranks) == [[0, 2], [1, 2]]
    events = [row for row in tape.rows("events") if row["kind"] in ("replica", "finding")]
    told = [json.loads(row["detail"]) for row in events]
    assert {detail["rank"] for detail in told} == {0, 1}  # and no finding


def test_code_compiled_without_a_recording_is_not_taken_for_one(tmp_path: Path) -> None:
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    plain = run(tmp_path, "vllm_modes_job.py", "compiled", record="", **cache)
    first = run(tmp_path, "vllm_modes_job.py", "compiled", **cache)
    check(rolltape.open(tmp_path / "tape"), json.loads(first.read_text()))
    assert json.loads(first.read_text()) == json.loads(plain.read_text())
    again = run(tmp_path, "vllm_modes_job.py", "compiled", record="", **cache)
    assert json.loads(again.read_text()) == json.loads(plain.read_text())
    assert len(list((tmp_path / "cache/torch_compile_cache/torch_aot_compile").iterdir())) == 2
