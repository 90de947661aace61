"""`rolltape doctor` on engines that are whole, changed, broken and absent."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolltape.cli import main
from rolltape.recorder import doctor
from rolltape.recorder.doctor import ADAPTERS, bindings, examine, lines, targets_of
from rolltape.recorder.targets import Target, check

GRPO = """
class GRPOTrainer:
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep):
        pass

    def _generate_and_score_completions(self, batch):
        pass
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `trl` that is found first, also by children; its module is to be written."""
    file = tmp_path / "trl" / "trainer" / "grpo_trainer.py"
    file.parent.mkdir(parents=True)
    for folder in (file.parent, file.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def python(tmp_path: Path, line: str) -> str:
    """An interpreter that is started by a shell line."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)


def status_of(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *args])
    return int(end.value.code or 0)


def test_each_target_is_found_changed_or_missing(engine: Path) -> None:
    engine.write_text(GRPO)
    found = {b.target.symbol: (b.state, b.detail) for b in bindings("trl")}
    module = "trl.trainer.grpo_trainer"
    assert found == {
        "GRPOTrainer._get_per_token_logps_and_entropies": ("bound", ""),
        "GRPOTrainer._generate_and_score_completions": ("changed", "no parameter inputs"),
        "GRPOTrainer._calculate_rewards": ("missing", f"no _calculate_rewards in {module}"),
    }
    (report,) = examine(("trl",)).engines
    assert report.kinds["logprobs"] == "yes" and report.kinds["lifecycle"] == "no"
    text = "\n".join(lines(examine(("trl",))))
    # whatever distribution of that name is installed besides
    assert re.search(
        r"^trl (\(version unknown\)|\d\S*): 1 of 3 hook targets bind$", text, re.MULTILINE
    )
    assert "rewards are not annotated" in text


FIELDS = """
class Request:
    declared: int
    def __init__(self):
        self.made = self.twice = 0
    @property
    def size(self):
        return self.made
    @size.setter
    def size(self, value):
        self.stored = value
    def read(self):
        return self.never
class Child(Request):
    pass
"""


def test_fields_that_only_objects_have_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_engine.py").write_text(FIELDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {
        name: check(Target(module="an_engine", symbol=name, gives="schedule")).state
        for name in ("Child.made", "Child.declared", "Request.stored", "Request.twice")
    }
    assert set(found.values()) == {"bound"}
    for name in ("Child.never", "Request.absent"):
        assert check(Target(module="an_engine", symbol=name, gives="")).state == "missing"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise OSError('libcuda.so is missing')", "OSError: libcuda.so is missing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os; os._exit(7)", "exit status 7"),
        ("import time; time.sleep(60)", "it took more than 3 s"),
    ],
)
def test_an_import_that_fails_is_reported(engine: Path, code: str, why: str) -> None:
    engine.write_text(code)
    found = bindings("trl", timeout=3 if "sleep" in code else 60)
    assert {b.state for b in found} == {"failed"}
    assert all(why in b.detail for b in found)
    assert len(found) == len(targets_of("trl"))


def test_the_engine_is_not_recorded_meanwhile(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    engine.write_text(
        f"import os; open({str(note)!r}, 'w').write(str('ROLLTAPE_TAPE' in os.environ))"
    )
    monkeypatch.setenv("ROLLTAPE_TAPE", str(tmp_path / "tape"))
    bindings("trl")
    assert note.read_text() == "False"


def test_every_target_of_every_adapter_is_looked_for() -> None:
    listed, asked = set(), set()
    for references in ADAPTERS.values():
        for reference in references:
            module, _, symbol = reference.partition(":")
            listed |= {t.name for t in getattr(importlib.import_module(module), symbol)}
    for name in ADAPTERS:
        found = targets_of(name)
        assert found, name
        asked |= {t.name for t in found}
    assert asked == listed


def test_the_lists_import_no_engine() -> None:
    code = (
        "import sys; from rolltape.recorder.doctor import ADAPTERS, targets_of; "
        "[targets_of(name) for name in ADAPTERS]; "
        "print(sorted(set(ADAPTERS) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- the ways in --------------------------------------------------------------------------


def test_the_hook_is_seen_to_run() -> None:
    way = doctor._by_pythonpath(os.environ)
    assert (way.name, way.state) == ("sitecustomize", "open")


def test_a_sitecustomize_in_front_of_ours_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "site" / "sitecustomize.py"
    other.parent.mkdir()
    other.touch()
    line = f'PYTHONPATH={other.parent}:$PYTHONPATH exec {sys.executable} "$@"'
    monkeypatch.setattr(sys, "executable", python(tmp_path, line))
    way = doctor._by_pythonpath(os.environ)
    assert way.state == "shadowed" and str(other) in way.detail


def test_an_isolated_python_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f'exec {sys.executable} -I "$@"'
    monkeypatch.setattr(sys, "executable", python(tmp_path, line))
    assert doctor._by_pythonpath(os.environ).state in ("closed", "shadowed")


def test_plugins_that_are_absent_excluded_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "an.engine.plugins"
    assert doctor._by_plugin(group, "AN_ENGINE_PLUGINS", {}).state == "absent"
    folder = tmp_path / "fake-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\nrolltape = a.module:function\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor._by_plugin(group, "AN_ENGINE_PLUGINS", {}).state == "open"
    way = doctor._by_plugin(group, "AN_ENGINE_PLUGINS", {"AN_ENGINE_PLUGINS": "theirs"})
    assert way.state == "excluded" and "add `,rolltape`" in way.detail
    allowed = {"AN_ENGINE_PLUGINS": "theirs, rolltape"}
    assert doctor._by_plugin(group, "AN_ENGINE_PLUGINS", allowed).state == "open"


# -- the command --------------------------------------------------------------------------


def test_status_and_json(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.write_text(GRPO)
    assert status_of("--engine", "trl", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == 1
    (found,) = said["engines"]
    assert found["recorded"] == {
        "logprobs": "yes",
        "routes": "yes",
        "weights": "yes",
        "lifecycle": "no",
    }
    assert {t["state"] for t in found["targets"]} == {"bound", "changed", "missing"}
    whole = GRPO.replace("self, batch", "self, inputs")
    engine.write_text(whole + "\n    def _calculate_rewards(self):\n        pass\n")
    assert status_of("--engine", "trl") == 0


def test_nothing_to_record_and_nonsense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda name: False)
    assert status_of() == 3
    assert "not installed: transformers, vllm" in capsys.readouterr().out
    assert status_of("--engine", "nonsense") == 2
