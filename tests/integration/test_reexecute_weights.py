"""Alternatives of a re-execution on transformers: versions, chunks; and what is undone."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from click.testing import CliRunner

import rolltape
from rolltape.recorder import session
from rolltape.recorder import transformers as adapter
from rolltape.recorder.parts import digests_of_transformers
from rolltape.replay.cli import replay
from rolltape.replay.executors import transformers as executor
from rolltape.replay.executors.protocol import Changes, NotRunError
from rolltape.replay.executors.serving import Weights, weights_of
from rolltape.replay.reexecute import reexecute
from rolltape.replay.score import replay as score
from rolltape.replay.shrink import shrink
from rolltape.store import ModelMismatchError, Tape
from rolltape.store.errors import UsageError
from tests.integration.conftest import DEVICE, ROOT, TINY_MOE

pytestmark = [pytest.mark.engine, pytest.mark.skipif(DEVICE != "cpu", reason="bits of the CPU")]

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 50, "max_new_tokens": 5, "pad_token_id": 0}
MOVED = "model.layers.2.post_attention_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recorded job that updates its weights between calls, and the checkpoints that it wrote."""

    tape: Path
    paths: tuple[Path, Path]

    def checkpoints(self, *versions: int) -> list[str]:
        """For `--checkpoint`."""
        return [f"{version}={self.paths[version]}" for version in versions]

    def digests(self, version: int) -> set[int]:
        """Of the whole model, as recorded."""
        return digests(rolltape.open(self.tape), version)


def digests(tape: Tape, version: int) -> set[int]:
    rows = tape.rows("weights")
    return {r["digest"] for r in rows if r["version"] == version and not r["group"]}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    ids = torch.randint(2, 4000, (4, 11), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(11) >= torch.arange(4)[:, None]).long()

    def generate(rows: int) -> None:
        model.generate(ids[:rows], attention_mask=mask[:rows], **SAMPLED)

    with rolltape.record(folder / "a"):
        torch.manual_seed(0)
        model.save_pretrained(folder / "step-0")
        generate(4)
        with torch.no_grad():
            model.get_parameter(MOVED).view(torch.int16)[3] += 1
        model.save_pretrained(folder / "step-10")
        generate(4)
        generate(2)
    return Job(tape=folder / "a", paths=(folder / "step-0", folder / "step-10"))


# -- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(0, 1), (1,)], ids=["both", "the-other-is-the-tapes-model"])
def test_every_call_runs_with_its_own_version(
    job: Job, tmp_path: Path, given: tuple[int, ...]
) -> None:
    found = reexecute(job.tape, tmp_path / "b", checkpoints=job.checkpoints(*given))
    assert found["verdict"] == "identical", found
    assert found["not_compared"] == [] and found["sequences"] == 10
    assert found["checkpoints"] == {str(v): str(job.paths[v]) for v in given}
    rows = rolltape.open(tmp_path / "b").rows("weights")
    ran = {row["digest"] for row in rows if not row["group"]}
    assert ran == job.digests(0) | job.digests(1) and len(ran) == 2
    assert session.active() is None


def test_batches_of_another_size_never_mix_versions(job: Job, tmp_path: Path) -> None:
    given = job.checkpoints(0, 1)
    found = reexecute(job.tape, tmp_path / "b", checkpoints=given, switches=["batch=3"])
    assert found["verdict"] in ("identical", "divergent") and found["sequences"] == 10
    b = rolltape.open(tmp_path / "b")
    for sequence in b:
        assert sequence.origin is not None
        was = rolltape.open(job.tape).sequence(sequence.origin).weight_version.values[-1]
        engine = {r["digest"] for r in b.rows("weights")
                  if r["engine"] == sequence.key.engine and not r["group"]}  # fmt: skip
        assert engine == job.digests(int(was))


@pytest.mark.parametrize("version", [0, 1])
def test_all_calls_at_one_version(job: Job, tmp_path: Path, version: int) -> None:
    options = {"switches": [f"weights={version}"], "checkpoints": job.checkpoints(0, 1)}
    found = reexecute(job.tape, tmp_path / "b", **options)
    assert found["verdict"] == "divergent" and found["sequences"] == 10
    others = {s.id for s in rolltape.open(job.tape) if s.weight_version.values[-1] != version}
    first = found["first"]
    assert first["sequence"] in others and found["sequences_differ"] <= len(others)
    # nothing before the weight can differ, and what it feeds is the router of its own layer
    assert first["what"].startswith("routes.") and first["layer"] == 2
    assert "steps" not in found["differ"]
    assert digests(rolltape.open(tmp_path / "b"), 0) == job.digests(version)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"checkpoints": ["1={0}"]}, ["weights of version 1: layers.2.norm is", "it is version 0"]),
        (
            {"checkpoints": ["1={0}"], "switches": ["weights=1"]},
            ["weights of version 1: layers.2.norm is", "it is version 0"],
        ),
        ({"switches": ["weights=1"]}, ["weights of version 1: layers.2.norm is"]),
        ({"switches": ["weights=1"], "model": "{0}"}, ["weights of version 1: layers.2.norm is"]),
    ],
)
def test_a_wrong_checkpoint_is_refused_before_anything_is_written(
    job: Job, tmp_path: Path, options: dict[str, Any], messages: list[str]
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{0}", str(job.paths[0]))

    with pytest.raises(ModelMismatchError) as caught:
        reexecute(job.tape, tmp_path / "b", **{k: filled(v) for k, v in options.items()})
    for message in messages:
        assert message in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switches": ["weights=2"]}, "no weight version 2 .it has: 0, 1"),
        ({"checkpoints": ["2=x"]}, "no weight version 2 .it has: 0, 1"),
        ({"checkpoints": ["x"]}, "checkpoint 'x' is not VERSION=PATH"),
        ({"checkpoints": ["v1=x"]}, "is not VERSION=PATH"),
        ({"checkpoints": ["1="]}, "is not VERSION=PATH"),
        ({"checkpoints": ["1=x", "01=y"]}, "of version 1 is given twice"),
        ({"checkpoints": ["1=/nowhere"]}, "/nowhere: no such folder"),
        ({"checkpoints": ["1=x"], "switches": ["weights=1"], "model": "y"}, "both x and a model"),
        ({"switches": ["prefix_cache=off"]}, "has no prefix cache"),
        ({"switches": ["prefix_cache=on"]}, "prefix_cache=on: no such value"),
        ({"switches": ["chunk=0"]}, "chunk=0: no such value"),
        ({"switches": ["chunk=one"]}, "chunk=one: no such value"),
        ({"foreign_pins": True}, "pins no choice"),
    ],
)
def test_what_cannot_be_asked(
    job: Job, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        reexecute(job.tape, tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_a_version_without_digest_cannot_be_asked_for(job: Job, tmp_path: Path) -> None:
    from tests.tampered import edited

    def forget(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["digest"], row["reason"] = None, "out of memory"

    a = edited(rolltape.open(job.tape), tmp_path / "a", weights=forget)
    with pytest.raises(ModelMismatchError, match=r"nothing of .* can be compared.*out of memory"):
        reexecute(a, tmp_path / "b", switches=["weights=1"], checkpoints=job.checkpoints(1))


def test_serving_engines_run_with_one_version(job: Job) -> None:
    tape = rolltape.open(job.tape)
    (engine,) = tape.engines
    at = {0: str(job.paths[0]), 1: str(job.paths[1])}
    with pytest.raises(NotRunError, match="updated while it ran, from version 0 to 1"):
        weights_of(tape, engine, Changes(), at, None)
    with pytest.raises(UsageError, match="no weight version 2"):
        weights_of(tape, engine, Changes(weights="2"), at, None)
    chosen = weights_of(tape, engine, Changes(weights="1"), at, None)
    assert chosen == Weights(path=at[1], version=1, named=True)
    for version in (0, 1):
        model = hf.AutoModelForCausalLM.from_pretrained(at[version])
        found = digests_of_transformers(model)
        said = Weights(path=None, version=version, named=True)
        assert said.check(tape, engine, found, "m") == []
        wrong = Weights(path=None, version=1 - version, named=True)
        with pytest.raises(ModelMismatchError, match=rf"layers\.2\.norm .*version {version}"):
            wrong.check(tape, engine, found, "m")
        (line,) = dataclasses.replace(wrong, named=False).check(tape, engine, found, "m")
        assert line.startswith(f"weights of version {1 - version}: layers.2.norm is")
    unknown = Weights(path=None, version=7, named=False)
    assert "not compared" in unknown.check(tape, engine, found, "m")[0]
    assert Weights(path="m", version=None, named=True).check(tape, engine, found, "m") == []


# -- a tape scored at version v and v - 1 -----------------------------------------------------


def test_a_tape_is_scored_at_each_of_its_versions(job: Job, tmp_path: Path) -> None:
    raw: dict[str, dict[Any, np.ndarray]] = {}
    for version in (0, 1):
        out = tmp_path / f"v{version}"
        given = {"switches": [f"weights={version}"], "checkpoints": job.checkpoints(0, 1)}
        summary = score(job.tape, out, **given)
        (versions,) = summary["weight_versions"].values()
        assert versions == {"scored": version, "recorded": [0, 1]}
        assert summary["switches"]["weights"] == str(version)
        assert digests(rolltape.open(out), version) == job.digests(version)
        score(job.tape, tmp_path / f"m{version}", model=str(job.paths[version]))
        for name in (f"v{version}", f"m{version}"):
            tape = rolltape.open(tmp_path / name)
            raw[name] = {s.origin or s.key: s.logprob("raw").values for s in tape}
    for version in (0, 1):
        for key, values in raw[f"v{version}"].items():
            np.testing.assert_array_equal(values, raw[f"m{version}"][key])
    assert any(not np.array_equal(raw["v0"][k], raw["v1"][k], equal_nan=True) for k in raw["v0"])


def test_scoring_refuses_other_weights_unless_they_are_meant(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"version 0: layers\.2\.norm .*it is version 1"):
        score(job.tape, tmp_path / "b", switches=["weights=0"], checkpoints=[f"0={job.paths[1]}"])
    with pytest.raises(UsageError, match="no weight version 5"):
        score(job.tape, tmp_path / "b", switches=["weights=5"])
    with pytest.raises(UsageError, match="without --switch weights=VERSION"):
        score(job.tape, tmp_path / "b", checkpoints=job.checkpoints(1))
    assert not (tmp_path / "b").exists()
    other = tmp_path / "other"
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2)
    model.save_pretrained(other)
    with pytest.raises(ModelMismatchError, match="weights digest"):
        score(job.tape, tmp_path / "b", model=str(other))
    summary = score(job.tape, tmp_path / "b", switches=[f"weights={other}"])
    (versions,) = summary["weight_versions"].values()
    assert versions["scored"] is None and summary["model"] == str(other)


# -- chunks -----------------------------------------------------------------------------------


def test_prompts_in_pieces_of_another_size(job: Job, tmp_path: Path) -> None:
    options = {"switches": ["chunk=3"], "checkpoints": job.checkpoints(0, 1)}
    found = reexecute(job.tape, tmp_path / "b", **options)
    assert found["verdict"] in ("identical", "divergent"), found
    assert found["not_compared"] == [] and "steps" not in found["compared"]
    forwards = rolltape.open(tmp_path / "b").rows("forwards")
    prompts = [row for row in forwards if row["kind"] == "prefill"]
    assert len(prompts) > 10 and max(row["n"] for row in prompts) <= 3
    assert max(row["n"] for row in rolltape.open(job.tape).rows("forwards")) == 11


# -- everything is put back -------------------------------------------------------------------


def test_a_run_that_fails_leaves_nothing_behind(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.utils import GenerationMixin

    model = hf.AutoModelForCausalLM.from_pretrained(job.paths[0]).eval()
    mine, before = model.generation_config, dict(vars(GenerationMixin))
    hooked = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    calls = 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 17:  # behind the self-test
            raise RuntimeError("out of memory")

    handle = model.lm_head.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):  # the job's model has version 0
        reexecute(job.tape, tmp_path / "b", model=model, checkpoints=job.checkpoints(1))
    handle.remove()
    assert (tmp_path / "b").exists(), "it is meant to fail while the new tape is written"
    assert rolltape.open(tmp_path / "b").header and session.active() is None
    assert dict(vars(GenerationMixin)) == before and not adapter._patches
    assert model.generation_config is mine
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooked

    monkeypatch.setattr(adapter, "bind", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        executor.run(rolltape.open(job.tape), tmp_path / "c", changes=Changes(), model=model)
    assert session.active() is None


# -- the command line -------------------------------------------------------------------------


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = line.replace("rolltape ", f"{shlex.quote(sys.executable)} -m rolltape ")
    command = ["bash", "-c", text]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--checkpoint", "1={1}"], 0),
        (["--checkpoint", "0={0}", "--switch", "weights=0"], 1),
        ([], 3),
        (["--switch", "batch=one"], 3),
    ],
    ids=["identical", "divergent", "inconclusive", "batches"],
)
def test_the_next_line_is_a_command_that_runs(
    job: Job, tmp_path: Path, options: list[str], status: int
) -> None:
    shutil.copytree(job.tape, tmp_path / "a tape")
    given = [o.replace("{0}", str(job.paths[0])).replace("{1}", str(job.paths[1])) for o in options]
    arguments = [str(tmp_path / "a tape"), "-o", str(tmp_path / "b"), "--mode", "re-execute"]
    ran = CliRunner().invoke(replay, [*arguments, *given], standalone_mode=False)
    if options[:1] == ["--switch"]:  # alone in a batch the bits may be others
        assert ran.return_value in (1, status), ran.output
    else:
        assert ran.return_value == status, ran.output
    (line,) = [x for x in ran.output.splitlines() if x.startswith("next: ")]
    done = run(line.removeprefix("next: "), ROOT)
    assert done.returncode in (0, 1, 3), line + done.stderr
    assert done.stdout and "rolltape: " not in done.stderr, line + done.stderr


def test_the_commands_of_the_page_about_versions_run(job: Job, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reexecute.md").read_text()
    lines = [x for x in page.splitlines() if x.startswith("    rolltape ") and "--checkpoint" in x]
    assert len(lines) == 2
    shutil.copytree(job.tape, tmp_path / "runs" / "a")
    (tmp_path / "ckpt").symlink_to(job.paths[0].parent)
    for line in lines:
        done = run(line.strip(), tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    wrong = lines[1].replace("runs/v1", "runs/x").replace("ckpt/step-10", "ckpt/step-0")
    done = run(wrong.strip(), tmp_path)
    assert done.returncode == 2 and not (tmp_path / "runs" / "x").exists()
    said = re.sub("[0-9a-f]{16}", "DIGEST", done.stderr).replace(f"{tmp_path}/", "")
    (shown,) = [x for x in page.splitlines() if x.startswith("    weights of version 1: ")]
    assert re.sub("[0-9a-f]{16}", "DIGEST", shown.strip()) in said


def test_options_of_one_mode_are_refused_in_the_other(job: Job, tmp_path: Path) -> None:
    arguments = [str(job.tape), "-o", str(tmp_path / "b"), "--foreign-pins"]
    ran = CliRunner().invoke(replay, arguments, standalone_mode=False)
    assert isinstance(ran.exception, UsageError) and "mode re-execute" in str(ran.exception)
    arguments = [*arguments, "--mode", "re-execute"]
    ran = CliRunner().invoke(replay, arguments, standalone_mode=False)
    assert isinstance(ran.exception, UsageError) and "pins no choice" in str(ran.exception)


def test_a_re_execution_with_checkpoints_is_shrunk(job: Job, tmp_path: Path) -> None:
    options = {"switches": ["weights=0"], "checkpoints": job.checkpoints(0)}
    reexecute(job.tape, tmp_path / "b", **options)
    found = shrink(job.tape, tmp_path / "b", tmp_path / "s")
    assert found["verdict"] == "shrunk" and found["checkpoints"] == job.checkpoints(0), found
    again = reexecute(tmp_path / "s", tmp_path / "c", **options)
    assert again["verdict"] == "divergent"
    assert json.dumps(again["first"]) == json.dumps(found["first"])
