"""The main job from the command line: record a script that knows nothing, replay, diff."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.routing_replay import measure
from rolltape import store
from tests.integration.conftest import DEVICE, ROOT, TINY_MOE

pytestmark = pytest.mark.engine

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
SCRIPT = [sys.executable, str(ROOT / "examples/rollout_transformers.py"), "--model", str(TINY_MOE)]
SAMPLED = ["--prompts", "12", "--max-new-tokens", "24", "--top-k", "40", "--top-p", "0.95"]
SCORE = ["--on", "transformers", "--mode", "score", "--switch", "dtype=float32"]


def run(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(a) for a in args]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, check=False)


def rolltape(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "rolltape", *args)


def ok(done: subprocess.CompletedProcess[str], status: int = 0) -> str:
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory: Any) -> Path:
    """A recorded rollout `a`, its scoring with live routes `live` and with forced ids `ids`."""
    folder: Path = tmp_path_factory.mktemp("job")
    out = ["--out", folder / "recorded.json"]
    ok(rolltape("record", "-o", folder / "a", "--layers", "2", "--", *SCRIPT, *SAMPLED, *out))
    for routing in ("live", "ids"):
        switches = ["--switch", f"routing={routing}", "--switch", "support=recorded"]
        ok(
            rolltape(
                "replay", folder / "a", "-o", folder / routing, *SCORE, *switches, "--layers", "2"
            )
        )
    return folder


def test_recording_does_not_change_the_sampled_tokens(job: Path) -> None:
    ok(run(*SCRIPT, *SAMPLED, "--out", job / "plain.json"))
    plain = json.loads((job / "plain.json").read_text())
    assert plain == json.loads((job / "recorded.json").read_text())
    tape = store.open(job / "a")
    responses = {tuple(s.tokens.values[s.prompt_len :]) for s in tape}
    assert len(tape) == 12 and all(tuple(row[-24:]) in responses for row in plain)


def test_the_diff_says_what_the_issue_tracker_needs(job: Path) -> None:
    done = rolltape("diff", job / "a", job / "live", "--json", "--layers", "-o", job / "report")
    diff = json.loads(ok(done, status=1))
    assert diff["verdict"] == "divergent" and diff["identity"] == []
    assert diff["tokens_compared"] == 12 * 24 and diff["non_finite"] == 0
    assert 0 < diff["mean_abs"] < diff["max_abs"]
    assert {"k1", "k3", "frac_ratio_gt_2"} <= set(diff)
    worst = store.open(job / "a").sequence(diff["max_at"]["sequence"])
    position = diff["max_at"]["position"]
    scored = next(s for s in store.open(job / "live") if s.origin == worst.key)
    delta = float(scored.logprob("processed").values[position]) - float(
        worst.logprob("processed").values[position]
    )
    assert abs(abs(delta) - diff["max_abs"]) < 1e-9
    routing = diff["routing"]
    assert routing["decisions"] > 0 and 0 < routing["disagree"] < routing["decisions"]
    assert [row["layer"] for row in routing["per_layer"]] == list(range(6))
    assert sum(row["disagree"] for row in routing["per_layer"]) == routing["disagree"]
    assert 0 < routing["tokens_any"] <= routing["disagree"]
    report = store.open_report(job / "report")
    assert report.summary["k3"] == diff["k3"]
    assert report.table("sequences").num_rows == 12
    assert set(report.table("activations").column("site").to_pylist()) == {
        f"layers.{i}.out" for i in range(6)
    }


def test_forcing_the_recorded_ids_closes_most_of_the_gap(job: Path) -> None:
    def k3(name: str) -> float:
        return float(json.loads(rolltape("diff", job / "a", job / name, "--json").stdout)["k3"])

    assert k3("ids") <= 0.7 * k3("live")


def test_wrong_ids_are_far_worse_so_forcing_is_not_an_echo(tmp_path: Path) -> None:
    diffs = measure(
        str(TINY_MOE), tmp_path, count=32, tokens=64, dtype="float32", device=DEVICE, seed=0
    )
    live, ids = diffs["live"], diffs["ids"]
    assert live["routing"]["disagree"] > 0
    assert ids["k3"] <= 0.7 * live["k3"]
    assert diffs["ids+weights"]["k3"] <= 0.7 * live["k3"]
    assert diffs["ids shifted by one"]["k3"] >= 100 * live["k3"]
    assert diffs["random ids"]["verdict"] == "divergent"
    assert diffs["random ids"]["k3"] >= 100 * live["k3"]
    for name in ("ids shifted by one", "random ids"):
        problems = json.dumps([diffs[name]["identity"], diffs[name].get("warnings")])
        assert "route" in problems, "that the forced routes are not the recorded ones must be said"


@pytest.mark.parametrize(
    "sampling",
    [["--temperature", "1"], ["--temperature", "0.7", "--repetition-penalty", "1.2"]],
    ids=["T1", "T0.7-penalty"],
)
def test_in_fp32_every_logprob_is_reproduced(tmp_path: Path, sampling: Sequence[str]) -> None:
    options = ["--dtype", "float32", "--top-k", "20", "--top-p", "0.9", *sampling]
    ok(
        rolltape(
            "record",
            "-o",
            tmp_path / "a",
            "--",
            *SCRIPT,
            "--prompts",
            "6",
            "--max-new-tokens",
            "16",
            *options,
        )
    )
    ok(
        rolltape(
            "replay", tmp_path / "a", "-o", tmp_path / "b", *SCORE, "--switch", "support=recorded"
        )
    )
    diff = json.loads(rolltape("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert diff["identity"] == [] and diff["column"] == "processed"
    columns = {"processed": diff, **diff["by_semantics"]}
    for column in ("processed", "scaled", "raw"):
        assert columns[column]["tokens_compared"] == 6 * 16, column
        assert columns[column]["max_abs"] < 2e-5, column
    assert diff["routing"]["disagree"] == 0


def test_a_tape_is_identical_to_itself(job: Path) -> None:
    diff = json.loads(ok(rolltape("diff", job / "a", job / "a", "--json")))
    assert diff["verdict"] == "identical" and diff["tokens_compared"] == 12 * 24


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_the_scripts_own(tmp_path: Path, status: int) -> None:
    code = f"import sys, transformers.generation.utils; sys.exit({status})"
    done = rolltape("record", "-o", tmp_path / "a", "--", sys.executable, "-c", code)
    assert done.returncode == status
    assert store.open(tmp_path / "a").seal is not None


def test_a_script_that_dies_half_way_keeps_what_it_generated(tmp_path: Path) -> None:
    script = tmp_path / "rollout.py"
    script.write_text(
        "import os, signal, time, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(TINY_MOE)!r})\n"
        "for i in range(3):\n"
        "    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)\n"
        "import rolltape\n"
        "def closed():\n"
        "    tape = rolltape.open(os.environ['ROLLTAPE_TAPE'])\n"
        "    return sum(s.finish == 'length' for s in tape)\n"
        "while closed() < 3:\n"  # until the writer thread has handed all of it to the kernel
        "    time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = rolltape("record", "-o", tmp_path / "a", "--", script)
    assert done.returncode == 137
    tape = store.open(tmp_path / "a")
    assert [s.length for s in tape] == [7, 7, 7]
    assert not tape.problems


# -- bad input: one clear line, exit 2 -------------------------------------------------------


def one_line(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("rolltape: error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for text in says:
        assert text in lines[0]


@pytest.mark.parametrize("command", ["info", "show", "diff", "replay"])
def test_not_a_tape(job: Path, tmp_path: Path, command: str) -> None:
    more: dict[str, list[Any]] = {"diff": [job / "a"], "replay": ["-o", tmp_path / "b", *SCORE]}
    one_line(rolltape(command, tmp_path, *more.get(command, [])), "is not a tape")


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job / "a", tmp_path / "copy"))


def test_a_newer_major_format(copy: Path) -> None:
    header = json.loads((copy / "tape.json").read_text())
    (copy / "tape.json").write_text(json.dumps({**header, "format": "2.0"}))
    one_line(rolltape("info", copy), "format 2.0", "upgrade rolltape")


@pytest.mark.parametrize("command", ["info", "diff"])
def test_a_truncated_shard(job: Path, copy: Path, command: str) -> None:
    shard = next((copy / "routes").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-100])
    rest = [str(job / "live")] if command == "diff" else []
    one_line(rolltape(command, copy, *rest), shard.name)


def changed_model(folder: Path, *, config: dict[str, Any], weights: bool = False) -> Path:
    shutil.copytree(TINY_MOE, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if weights:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"].view(torch.int16)[0] ^= 1  # one weight, one bit
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("config", "weights", "field"),
    [
        ({"vocab_size": 4097}, False, "vocab_size"),
        ({"num_hidden_layers": 5}, False, "num_layers"),
        ({"num_local_experts": 8, "num_experts": 8}, False, "num_experts"),
        ({}, True, "digest"),
    ],
    ids=["vocabulary", "layers", "experts", "digest"],
)
def test_a_model_that_is_not_the_one_of_the_tape(
    job: Path, tmp_path: Path, config: dict[str, Any], weights: bool, field: str
) -> None:
    model = changed_model(tmp_path / "model", config=config, weights=weights)
    done = rolltape("replay", job / "a", "-o", tmp_path / "b", *SCORE, "--model", model)
    one_line(done, field)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("switch", "says"),
    [
        ("routing=sometimes", "routing"),
        ("nonsense=1", "nonsense"),
        ("attention=flash_attention_2", "flash"),
    ],
)
def test_a_switch_that_cannot_be_done(job: Path, tmp_path: Path, switch: str, says: str) -> None:
    done = rolltape("replay", job / "a", "-o", tmp_path / "b", *SCORE, "--switch", switch)
    one_line(done, says)


def test_an_output_that_is_there_is_not_overwritten(job: Path) -> None:
    one_line(rolltape("replay", job / "a", "-o", job / "live", *SCORE), str(job / "live"))
