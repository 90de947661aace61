"""A rollout of real vLLM is run again in its recorded steps, on a CPU, in BF16.

Requests join and leave, prompts are cut into chunks, a prefix comes from the cache, KV blocks run
out and requests are preempted, one is aborted. Seven engines are started.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

import rolltape  # noqa: E402
from rolltape.store import Tape  # noqa: E402
from tests.tampered import edited  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny-moe"
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no {PYTHON}: `make venv-vllm`"),
]


def call(*command: str | Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, *map(str, command)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    folder = tmp_path_factory.mktemp("recorded")
    job = [HERE / "vllm_job.py", MODEL, folder / "outputs.json", "--bf16"]
    call("-m", "rolltape", "record", "-o", folder / "tape", "--", PYTHON, *job)
    return rolltape.open(folder / "tape")


def flip(rows: list[dict[str, Any]]) -> None:
    """The last bit of one recorded logprob."""
    row = next(r for r in rows if r["processed"] and r["processed"][0] not in (None, 0.0))
    value = np.float32(row["processed"][0])
    row["processed"][0] = float((value.view(np.uint32) ^ np.uint32(1)).view(np.float32))


def move(rows: list[dict[str, Any]]) -> None:
    """One step gets a sequence less."""
    step = sorted({r["step"] for r in rows})[10]
    mine = [r for r in rows if r["step"] == step]
    assert len(mine) > 1
    rows.remove(mine[-1])


def swap(rows: list[dict[str, Any]]) -> None:
    """Two experts change places."""
    row = next(r for r in rows[len(rows) // 2 :] if r["ids"][0] != r["ids"][1])
    ids = np.frombuffer(row["ids"], np.uint8).copy()
    ids[0], ids[1] = ids[1], ids[0]
    row["ids"] = ids.tobytes()


@pytest.fixture(scope="module")
def found(tape: Tape, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the re-execution is to the recording, and to recordings that were tampered with."""
    folder = tmp_path_factory.mktemp("again")
    others = [
        edited(tape, folder / "flipped", tokens=flip).path,
        edited(tape, folder / "moved", forwards=move).path,
        edited(tape, folder / "swapped", routes=swap).path,
    ]
    result = folder / "result.json"
    call(HERE / "vllm_reexecute_job.py", tape.path, folder / "tape", MODEL, result, *others)
    answers: dict[str, Any] = json.loads(result.read_text())
    return answers


def test_the_recorded_steps_make_the_recorded_bits(tape: Tape, found: dict[str, Any]) -> None:
    kinds = {row["kind"] for row in tape.rows("forwards")}
    assert {"prefill", "decode", "recompute", "cached"} <= kinds
    assert {e["kind"] for e in tape.rows("events")} >= {"preempt", "abort"}
    answer = found["itself"]
    assert answer["verdict"] == "identical", answer
    assert answer["compared"]["steps"] == tape.table("steps").num_rows
    assert answer["compared"]["processed"] == sum(s.length - s.prompt_len for s in tape)
    assert answer["compared"]["routes.ids"] > 0
    assert answer["sequences"] == len(tape)
    assert answer["not_compared"] == [] and answer["differ"] == {}
    assert answer["self_test"]["neutral"] is True and answer["self_test"]["control"] is True


def test_a_recording_that_was_tampered_with_is_not_reproduced(
    tape: Tape, found: dict[str, Any]
) -> None:
    flipped = found["flipped"]
    assert (flipped["verdict"], flipped["differ"]) == ("not-reproduced", {"processed": 1})
    assert flipped["first"]["what"] == "processed" and flipped["first"]["ulp"] == 1
    moved = found["moved"]
    assert moved["verdict"] == "not-reproduced"
    assert moved["first"]["what"].startswith("composition")
    steps = sorted({row["step"] for row in tape.rows("forwards")})
    assert moved["first"]["step"] == steps[10]
    swapped = found["swapped"]
    assert swapped["verdict"] == "not-reproduced"
    assert swapped["first"]["what"].startswith("routes") and swapped["first"]["layer"] is not None


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the weights of one norm moved by one unit in the last place."""
    model = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(MODEL, model)
    weights = load_file(model / "model.safetensors")
    norm = weights["model.layers.3.input_layernorm.weight"]
    bits = norm.view(torch.int16 if norm.element_size() == 2 else torch.int32)
    bits += 1 if norm.element_size() == 2 else 1 << 16  # what one is in BF16
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_a_weight_moved_by_one_ulp_is_seen(tape: Tape, changed: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    call(HERE / "vllm_reexecute_job.py", tape.path, tmp_path / "tape", changed, result)
    answer = json.loads(result.read_text())["itself"]
    assert answer["verdict"] == "not-reproduced"
    assert answer["first"]["step"] == 0
    assert answer["first"]["layer"] is None or answer["first"]["layer"] >= 3
    assert any("weights of version 0: layers.3.norm is" in text for text in answer["warnings"])


def test_alternatives_on_the_same_tape(tape: Tape, changed: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    job = [HERE / "vllm_reexecute_job.py", "--alternatives", tape.path, tmp_path, MODEL, result]
    call(*job, changed)
    found = json.loads(result.read_text())
    assert {name: answer["left"] for name, answer in found.items() if answer["left"]} == {}

    for name in ("chunk", "uncached"):
        answer = found[name]
        assert answer["verdict"] in ("identical", "divergent"), answer
        assert answer["sequences"] == len(tape) and answer["not_compared"] == []
        assert answer["compared"]["processed"] == sum(s.length - s.prompt_len for s in tape)
        assert "steps" not in answer["compared"] and not answer["differ"].get("tokens")
    steps = rolltape.open(tmp_path / "chunk").table("steps").column("tokens").to_pylist()
    assert max(steps) == 32 < max(tape.table("steps").column("tokens").to_pylist())
    kinds = {row["kind"] for row in rolltape.open(tmp_path / "uncached").rows("forwards")}
    assert "cached" not in kinds and "prefill" in kinds
    assert "chunk=8" in found["few"]["error"] and "max_num_seqs=16" in found["few"]["error"]

    version = found["version"]
    assert version["verdict"] == "identical" and version["compared"]["steps"] > 0
    assert any("could not be compared: repacked" in text for text in version["warnings"])
    assert "weights of version 0: layers.3.norm is" in found["wrong"]["error"]
    assert not (tmp_path / "wrong").exists()
    assert "no weight version 1 (it has: 0" in found["unknown"]["error"]
