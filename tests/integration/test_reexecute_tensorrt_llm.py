"""A rollout on the double of TensorRT-LLM is run again in its recorded steps.

With the overlap scheduler, chunks of prompts and of experts, graphs that pad their batches,
several samples of a request, stop tokens, prompt logprobs, a cancelled request, prefixes from the
cache and preemption. Tokens really are forced: the double would draw others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

import rolltape  # noqa: E402
from rolltape.store import Tape  # noqa: E402
from tests.tampered import edited  # noqa: E402

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = str(ROOT / "tests" / "doubles")
JOB = Path(__file__).with_name("tensorrt_llm_reexecute_job.py")
OP = "trtllm::double_fused_moe"


def call(*command: str | Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLTAPE_", "TLLM_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([DOUBLES, str(ROOT)])}
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; one parameter is moved by one ulp in `<it>.changed`."""
    folder = tmp_path_factory.mktemp("model")
    code = """
import json, sys, torch
from pathlib import Path
from tensorrt_llm import _double_model as double
config = {"num_experts_per_tok": 3}  # of two the order does not matter, so nor would the tactic
model = double.DoubleForCausalLM(double.Config(**config), double.plain_mapping())
weights = double.make_weights("double", model)
for name in sys.argv[1:]:
    Path(name).mkdir()
    (Path(name) / "config.json").write_text(json.dumps(config))
    torch.save(weights, Path(name) / "weights.pt")
    weights["model.layers.3.input_layernorm.weight"].view(torch.int32).add_(1)
"""
    call("-c", code, folder / "double", folder / "double.changed")
    return folder / "double"


@pytest.fixture(scope="module")
def tape(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tape:
    path = tmp_path_factory.mktemp("recorded") / "tape"
    call("-m", "rolltape", "record", "-o", path, "--", sys.executable, JOB, "record", model)
    return rolltape.open(path)


def flip(rows: list[dict[str, Any]]) -> None:
    """The last bit of one recorded logprob."""
    row = next(r for r in rows if r["raw"] and r["raw"][0] not in (None, 0.0))
    value = np.float32(row["raw"][0])
    row["raw"][0] = float((value.view(np.uint32) ^ np.uint32(1)).view(np.float32))


def full_step(rows: list[dict[str, Any]]) -> tuple[str, int]:
    """A step with several sequences, of the engine with the most rows: the one with graphs."""
    engine = Counter(r["engine"] for r in rows).most_common(1)[0][0]
    sizes = Counter(r["step"] for r in rows if r["engine"] == engine)
    return engine, sorted(step for step, size in sizes.items() if size > 2)[5]


def move(rows: list[dict[str, Any]]) -> None:
    """One step gets a sequence less."""
    at = full_step(rows)
    mine = [r for r in rows if (r["engine"], r["step"]) == at]
    rows.remove(max(mine, key=lambda row: row["row"]))


def unpin(rows: list[dict[str, Any]]) -> None:
    """What the tuner chose for 6 tokens is not known."""
    for row in [r for r in rows if r["op"] == OP]:
        key = json.loads(row["key"])
        if key.get("shapes", key.get("profile"))[0][0] in (6, 8):
            rows.remove(row)


def elsewhere(rows: list[dict[str, Any]]) -> None:
    """Another library made the choices."""
    for row in rows:
        facts = json.loads(row["fingerprint"])
        facts["versions"]["torch"] = "1.0"
        row["fingerprint"] = json.dumps(facts)


def other_tactics(rows: list[dict[str, Any]]) -> None:
    """The tuner chose the other tactic in all graphs."""
    for row in rows:
        if row["graph"]:
            row["tactic"] = str(1 - int(row["tactic"]))


@pytest.fixture(scope="module")
def found(tape: Tape, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What re-executions are to the recording, and to recordings that were tampered with."""
    folder = tmp_path_factory.mktemp("again")
    others = {
        "compared-flipped": {"tokens": flip},
        "moved": {"forwards": move},
        "unpinned": {"tactics": unpin},
        "foreign": {"tactics": elsewhere},
        "tuned_anew": {"tactics": other_tactics},
    }
    tapes = []
    for name, change in others.items():
        copy = edited(tape, folder / f"{name}.tape", **change)
        tapes.append(f"{name}={copy.path}")
    result = folder / "result.json"
    call(JOB, "again", tape.path, folder, result, f"{model}.changed", *tapes)
    answers: dict[str, Any] = json.loads(result.read_text())
    return answers


def test_the_recorded_steps_make_the_recorded_bits(tape: Tape, found: dict[str, Any]) -> None:
    kinds = {row["kind"] for row in tape.rows("forwards")}
    assert {"prefill", "decode", "recompute", "cached"} <= kinds
    assert {e["kind"] for e in tape.rows("events")} >= {"preempt", "abort"}
    steps = list(tape.rows("steps"))
    assert any(row["graph"] and row["padded_tokens"] for row in steps)
    answer = found["itself"]
    assert answer["verdict"] == "identical", answer
    assert answer["compared"]["steps"] == len(steps)
    logprobs = sum(int(s.logprob(name).valid.sum()) for s in tape for name in ("raw", "processed"))
    assert answer["compared"]["raw"] + answer["compared"]["processed"] == logprobs
    assert answer["compared"]["routes.ids"] > 0
    assert answer["sequences"] == len(tape)
    assert answer["not_compared"] == [] and answer["differ"] == {}
    assert answer["self_test"]["neutral"] is True and answer["self_test"]["control"] is True


def test_tokens_were_forced_and_it_says_what_was_not_pinned(found: dict[str, Any]) -> None:
    forced = [line for line in found["itself"]["warnings"] if "did not draw" in line]
    assert forced and int(forced[0].split()[0]) > 20
    assert any("could not be pinned" in line for line in found["itself"]["warnings"])


def test_a_recording_that_was_tampered_with_is_not_reproduced(found: dict[str, Any]) -> None:
    flipped = found["compared-flipped"]
    assert (flipped["verdict"], flipped["differ"]) == ("not-reproduced", {"raw": 1})
    assert flipped["first"]["what"] == "raw" and flipped["first"]["ulp"] == 1


def test_a_step_that_cannot_be_composed_again_is_named(tape: Tape, found: dict[str, Any]) -> None:
    answer = found["moved"]
    assert answer["verdict"] == "not-reproduced"
    assert answer["first"]["what"].startswith("composition")
    assert answer["first"]["step"] == full_step(list(tape.rows("forwards")))[1]


def test_a_choice_without_pin_is_an_error(found: dict[str, Any]) -> None:
    error = found["unpinned"]["error"]
    assert error.startswith("PinError") and OP in error
    assert "no pin for shapes [[6, 32]" in error or "no pin for shapes [[8, 32]" in error


def test_pins_of_another_library_are_refused_unless_told(found: dict[str, Any]) -> None:
    error = found["foreign"]["error"]
    assert error.startswith("PinError") and "torch 1.0" in error and "--foreign-pins" in error
    told = found["told"]
    assert told["verdict"] == "identical" and told["status"] == 0, told
    assert any(line.startswith("pins of torch 1.0, here") for line in told["warnings"])


def test_the_pins_are_what_runs(found: dict[str, Any]) -> None:
    answer = found["tuned_anew"]
    assert answer["verdict"] == "not-reproduced"
    assert not answer["first"]["what"].startswith("composition")


def test_a_weight_moved_by_one_ulp_is_seen(found: dict[str, Any]) -> None:
    answer = found["changed"]
    assert answer["verdict"] == "not-reproduced"
    assert answer["first"]["step"] == 0 and answer["first"]["layer"] in (None, 3)


def test_other_batches_are_a_change_on_purpose(found: dict[str, Any]) -> None:
    answer = found["batch"]
    assert answer["verdict"] in ("divergent", "identical"), answer
    assert answer["compared"]["routes.ids"] > 0 and not answer["differ"].get("tokens")


def test_the_prefix_cache_off_and_chunks_of_another_size(tape: Tape, found: dict[str, Any]) -> None:
    for name in ("uncached", "chunk"):
        answer = found[name]
        assert answer["verdict"] in ("divergent", "identical"), answer
        assert answer["sequences"] == len(tape) and not answer["differ"].get("tokens")
        assert answer["compared"]["raw"] == found["itself"]["compared"]["raw"]
        assert "steps" not in answer["compared"]
    kinds = {row["kind"] for row in rolltape.open(found["uncached"]["tape"]).rows("forwards")}
    assert "cached" not in kinds and "prefill" in kinds
    steps = rolltape.open(found["chunk"]["tape"]).table("steps").column("tokens").to_pylist()
    assert max(steps) == 12 < max(tape.table("steps").column("tokens").to_pylist())


def test_a_version_is_checked_by_its_digest(found: dict[str, Any]) -> None:
    assert found["version"]["verdict"] == "identical", found["version"]
    error = found["wrong"]["error"]
    assert error.startswith("ModelMismatchError: weights of version 0: the whole model is")


def test_no_run_leaves_a_patch_behind(found: dict[str, Any]) -> None:
    assert {name: answer["left"] for name, answer in found.items() if answer["left"]} == {}
    assert "error" in found["unpinned"] and "error" in found["wrong"]
