"""`rolltape.record` from inside a program: what it sets up is gone afterwards."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import Options
from rolltape.store import UsageError

CHILD = "import os; print(os.environ.get('ROLLTAPE_TAPE'), os.environ.get('ROLLTAPE_LEVEL'))"


def child() -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    ).stdout.split()


def test_processes_started_inside_record_into_the_same_tape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLTAPE_LEVEL", "routing")
    with rolltape.record("a", level="tokens"):
        assert child() == [str(tmp_path / "a"), "tokens"]
    assert child() == ["None", "routing"]
    assert os.environ["ROLLTAPE_LEVEL"] == "routing"


def test_engines_are_watched_only_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    (tmp_path / "anengine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_rolltape_hook, "HOOKS", {"anengine": "rolltape.recorder.fake:bind"})
    fake = type(sys)("rolltape.recorder.fake")
    fake.bind = lambda: calls.append("bind")
    fake.unbind = lambda: calls.append("unbind")
    monkeypatch.setitem(sys.modules, "rolltape.recorder.fake", fake)
    with pytest.raises(ZeroDivisionError), rolltape.record(tmp_path / "a"):  # noqa: PT012
        with pytest.raises(UsageError, match="already"), rolltape.record(tmp_path / "b"):
            pass
        assert calls == []
        importlib.import_module("anengine")
        assert calls == ["bind"]
        raise ZeroDivisionError
    assert calls == ["bind", "unbind"]
    assert session.active() is None
    assert rolltape.open(tmp_path / "a").seal["status"] == {"api": "error"}
    del sys.modules["anengine"]
    with rolltape.record(tmp_path / "c"):
        pass
    assert calls[2:] == ["unbind"]
    importlib.import_module("anengine")
    assert len(calls) == 3


CHOSEN = """
import os
from rolltape.recorder.options import Options
print(sorted(n for n in os.environ if n.startswith("TLLM_ROLLTAPE_")), Options.from_environment())
"""


def test_processes_started_inside_have_exactly_the_options_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {
        "ROLLTAPE_SAMPLE_RATE": "0.1",
        "ROLLTAPE_STEPS": "5:6",
        "ROLLTAPE_COMMIT_LOG": str(tmp_path / "log"),
        "ROLLTAPE_STORAGE_OPTIONS": '{"key": "x"}',
        "ROLLTAPE_LAYERS": "7",
        "TLLM_ROLLTAPE_STEPS": "5:6",
    }
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    for options in ({}, {"sample_rate": 0.5, "steps": "1:2"}):
        with rolltape.record(tmp_path / f"tape{len(options)}", **options):
            done = subprocess.run(
                [sys.executable, "-c", CHOSEN], capture_output=True, text=True, check=True
            )
            assert done.stdout == f"[] {Options(**options)}\n"
        assert {name: os.environ.get(name) for name in stale} == stale
        assert "ROLLTAPE_LEVEL" not in os.environ


def test_what_an_engine_leaves_for_its_workers_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolltape.recorder.tensorrt_llm import identity, settings

    monkeypatch.setattr(identity, "_own", set())
    with rolltape.record(tmp_path / "a", steps="1:2"):
        engine = identity.announce()
        settings.leave_environment()
        assert os.environ["TLLM_ROLLTAPE_TAPE"] == str(tmp_path / "a")
        assert os.environ["TRTLLM_ROLLTAPE_ENGINE"] == engine
    assert [name for name in os.environ if "ROLLTAPE" in name] == []
    with rolltape.record(tmp_path / "b"):
        os.environ["TLLM_ROLLTAPE_STEPS"] = "1:2"  # of a launcher's own making
        identity.announce()
        assert "TLLM_ROLLTAPE_STEPS" not in os.environ


def test_a_process_that_is_recorded_already_keeps_its_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhooked: list[Any] = []
    monkeypatch.setattr(_rolltape_hook, "unwatch", unhooked.append)
    monkeypatch.setenv("ROLLTAPE_TAPE", "s3://bucket/outer?secret=1")
    with (
        pytest.raises(UsageError, match="recorded already, into s3://bucket/outer \\(") as error,
        rolltape.record(tmp_path / "inner"),
    ):
        pass
    assert "one recording at a time" in str(error.value.hint)
    assert not unhooked and not (tmp_path / "inner").exists()
