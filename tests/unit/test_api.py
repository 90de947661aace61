"""`rolltape.record` from inside a program: what it sets up is gone afterwards."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
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
    fake.bind = lambda: calls.append("bind")  # type: ignore[attr-defined]
    fake.unbind = lambda: calls.append("unbind")  # type: ignore[attr-defined]
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
