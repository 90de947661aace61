"""Real vLLM on a CPU, in FP32, recorded from outside and compared with transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


import rolltape  # noqa: E402
from rolltape.recorder.moe import find_moe_blocks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny-moe"
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no {PYTHON}: `make venv-vllm`"),
]


def run(
    folder: Path, *flags: str, record: bool = True, script: str = "vllm_job.py"
) -> tuple[Any, dict[str, Any]]:
    tape, outputs = folder / "tape", folder / "outputs.json"
    job = [PYTHON, str(Path(__file__).with_name(script)), str(MODEL), str(outputs), *flags]
    prefix = [PYTHON, "-m", "rolltape", "record", "-o", str(tape), "--"] if record else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*prefix, *job], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return (rolltape.open(tape) if record else None), json.loads(outputs.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def truth() -> Any:
    """ids -> (raw logprobs [T], routes [T, layers, k]) by a teacher-forced pass.

    In float64: a reference in float32 has errors of its own that are as large as the engine's,
    and depend on the number of threads.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    blocks = find_moe_blocks(model)
    got: dict[int, Any] = {}
    for index, block in enumerate(blocks):
        block.experts.register_forward_pre_hook(
            lambda _, args, index=index: got.__setitem__(index, args[1])
        )

    def score(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(given).logits[0].double().log_softmax(-1)
        raw = np.zeros(len(ids))
        raw[1:] = logprobs[:-1].gather(-1, given[0, 1:, None])[:, 0].numpy()
        return raw, np.stack([got[i].numpy() for i in range(len(blocks))], 1)

    return score


def check(tape: Any, outputs: dict[str, Any], truth: Any) -> None:
    by_ids = {tuple(s.tokens.values.tolist()): s for s in tape}
    for out in outputs["done"]:
        sequence = by_ids[(*out["prompt"], *out["ids"])]
        assert sequence.finish == "length"
        assert sequence.info["external"] == out["external"]
        assert sequence.key.sample == out["sample"]
    assert not [row for row in tape.rows("events") if row["kind"] in ("gap", "hook_error")]
    explicit = 0
    for sequence in tape:
        ids, first = sequence.tokens, sequence.prompt_len
        assert ids.valid.all()
        raw, routes = truth(ids.values)
        mine = sequence.logprob("raw")
        assert mine.valid[first:].all()
        np.testing.assert_allclose(mine.values[mine.valid], raw[mine.valid], atol=1e-5, rtol=0)
        got = sequence.routes()
        assert got.valid[: len(ids) - 1].all()
        there = got.valid
        assert (np.sort(got.ids, -1)[there] == np.sort(routes, -1)[there]).all()
        supports = sequence.supports()
        for position in range(first, len(ids)):
            kept = supports.at(position)
            if kept is not None:
                explicit += 1
                assert int(ids.values[position]) in kept
                assert len(kept) <= (sequence.info["sampling"].get("top_k") or len(kept))
    assert explicit
    done = subprocess.run([PYTHON, "-m", "rolltape", "fsck", str(tape.place)], capture_output=True)
    assert done.returncode == 0, done.stdout


def test_every_position_is_what_transformers_says(recorded: Any, truth: Any) -> None:
    tape, outputs = recorded
    assert len(list(tape)) == len(outputs["done"]) + 1
    check(tape, outputs, truth)


def test_the_tape_shows_what_the_engine_did(recorded: Any) -> None:
    tape, outputs = recorded
    kinds = {row["kind"] for row in tape.rows("forwards")}
    assert {"prefill", "decode", "recompute", "cached"} <= kinds
    assert max(row["tokens"] for row in tape.rows("steps")) <= 256
    gone = next(s for s in tape if s.tokens.values[: s.prompt_len].tolist() == outputs["aborted"])
    assert gone.finish == "abort"
    assert gone.info["external"] == "to-abort"
    groups = [s.info["group"] for s in tape if s.key.sample == 3]
    assert sum(s.info["group"] == groups[0] for s in tape) == 4


def test_recording_changes_no_token(
    recorded: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, plain = run(tmp_path_factory.mktemp("plain"), record=False)
    assert [o["ids"] for o in plain["done"]] == [o["ids"] for o in recorded[1]["done"]]


def test_a_hook_that_raises_costs_steps_and_no_token(
    recorded: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tape, outputs = run(tmp_path_factory.mktemp("fault"), script="vllm_faulty_job.py")
    assert [o["ids"] for o in outputs["done"]] == [o["ids"] for o in recorded[1]["done"]]
    events = list(tape.rows("events"))
    errors = [row for row in events if row["kind"] == "hook_error"]
    assert errors and "injected" in errors[0]["detail"]
    assert any(row["kind"] == "gap" and "vllm.rows" in row["detail"] for row in events)
    assert len(list(tape)) == len(list(recorded[0]))


def test_a_core_in_a_process_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, truth: Any
) -> None:
    tape, outputs = run(tmp_path_factory.mktemp("mp"), "--mp")
    assert {row["process"] for row in tape.processes} == {"frontend", "worker"}
    check(tape, outputs, truth)
    for sequence in tape:  # greedy: no other token was more probable
        sets = [sequence.supports().at(p) for p in range(sequence.prompt_len, sequence.length)]
        assert all(len(kept) == 1 for kept in sets)
        assert (sequence.logprob("processed").values[sequence.prompt_len :] == 0).all()
