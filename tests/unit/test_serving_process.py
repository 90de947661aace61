"""Blocks of steps are written by a process of their own, whatever becomes of it or the engine."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import rolltape  # noqa: E402
from rolltape import store  # noqa: E402
from rolltape.recorder import launch  # noqa: E402
from rolltape.recorder.launch import Job, run  # noqa: E402
from rolltape.recorder.options import Options  # noqa: E402
from rolltape.recorder.serving.batch import Life, Roster, Step  # noqa: E402
from rolltape.recorder.serving.blocks import Blocks  # noqa: E402
from rolltape.recorder.serving.scribe import Scribe  # noqa: E402
from rolltape.recorder.serving.scribe_process import left_alone  # noqa: E402
from rolltape.recorder.serving.wire import receive, send  # noqa: E402
from rolltape.recorder.session import Session  # noqa: E402
from rolltape.store.fsck import fsck  # noqa: E402

ENGINE = "cd" * 16
VOCAB, LAYERS, K = 1000, 3, 2


class Engine:
    """One request; step n draws token 100 + n, whose logprob is -n and whose routes say n."""

    def __init__(self, session: Session, name: str = "a", scribe: type[Scribe] = Scribe) -> None:
        self.session, self.steps = session, 0
        self.roster = Roster()
        self.life = self.roster.add(Life(name, 0, np.arange(3, dtype=np.uint32)))
        facts: dict[str, Any] = {"layers": tuple(range(LAYERS)), "k": K, "num_experts": 128}
        self.blocks = Blocks(session, self.roster, scribe(engine=ENGINE, **facts), self)

    def step(self, *, payload: int = 0) -> None:
        """One more; `payload` bytes of it are of no use."""
        number, prefill = self.steps, self.steps == 0
        start, n = (0, 3) if prefill else (2 + number, 1)
        values: dict[str, Any] = {
            "token": torch.tensor([[100 + number]]),
            "raw": torch.tensor([-float(number)]),
            "routes": torch.full((n, LAYERS, K), number % 100, dtype=torch.int16),
        }
        values["routes"][..., 1] += 1
        if payload:
            values["payload"] = torch.zeros(payload, dtype=torch.uint8)
        rows = self.roster.place([self.life], np.array([start]), np.array([n]))
        self.steps += 1
        self.blocks.add(
            Step(number=number, t_ns=number, rows=rows, version=0, values=values, vocab=VOCAB)
        )


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    path = tmp_path / "tape"
    store.create_tape(path, role="rollout", provenance={})
    return path


@pytest.fixture
def session(tape: Path) -> Iterator[Session]:
    made = Session(tape, Options())
    yield made
    end(made)


def end(session: Session) -> None:
    """As `stop` does."""
    session.flush()
    for call in list(session.before_close):
        session.safely("close", call)
    session.close()


def written(tape: Path) -> dict[str, Any]:
    """What there is of the request: `tokens`, `raw`, `routes`."""
    with store.TapeWriter(tape) as writer:
        writer.append(
            "sequences",
            {
                "engine": ENGINE, "request": "a", "sample": 0, "pass": 0, "prompt_len": 3,
                "finish": "open",
            },
        )  # fmt: skip
    (sequence,) = rolltape.open(tape)
    routes = sequence.routes()
    return {
        "tokens": sequence.tokens.values.tolist(),
        "raw": sequence.logprob("raw").values[3:].tolist(),
        "routes": routes.ids[routes.valid.all(1)][:, 0, 0].tolist(),
    }


def everything(steps: int) -> dict[str, Any]:
    return {
        "tokens": [0, 1, 2, *range(100, 100 + steps)],
        "raw": [-float(n) for n in range(steps)],
        "routes": [0, 0, 0, *range(1, steps)],
    }


def children() -> list[int]:
    """Processes that this one has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid() and state != "Z" and "python" in name:
            found.append(int(folder.name))
    return found


def test_steps_are_written_in_several_blocks(tape: Path, session: Session) -> None:
    engine = Engine(session)
    before = set(children())
    for _ in range(50):
        engine.step()
        if engine.steps % 7 == 0:
            engine.blocks.flush()
    assert session.commit()
    assert len(set(children()) - before) == 1
    end(session)
    assert set(children()) <= before
    assert written(tape) == everything(50)
    assert not rolltape.open(tape).rows("events")


def test_a_dropped_block_is_a_gap_and_its_lives_are_known_later(tape: Path) -> None:
    session = Session(tape, Options(queue_mb=1))
    engine, held = Engine(session), threading.Event()
    for nbytes in (1 << 20, 0):  # the queue is full
        session.put(lambda writer: bool(held.wait(60)), nbytes=nbytes, gap=[])
    engine.step()
    engine.step(payload=1 << 19)
    engine.blocks.flush()
    held.set()
    assert session.drain()
    for _ in range(3):
        engine.step()
    end(session)
    (gap,) = rolltape.open(tape).rows("events")
    assert (gap["kind"], gap["request"], gap["start"], gap["n"]) == ("gap", "a", 0, 5)
    assert written(tape)["raw"][-3:] == [-2.0, -3.0, -4.0]


def test_an_engine_that_is_gone_leaves_nothing_behind(tape: Path, session: Session) -> None:
    before = set(children())
    engine = Engine(session)
    for _ in range(5):
        engine.step()
    engine.blocks.flush()
    for _ in range(3):
        engine.step()
    del engine
    gc.collect()
    limit = time.monotonic() + 30
    while (session.flushers or set(children()) - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert set(children()) <= before
    assert session.drain()
    assert written(tape) == everything(8)


def test_the_process_dies(tape: Path, session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(children())
    engine = Engine(session)
    engine.step()
    assert session.commit()
    (child,) = set(children()) - before
    os.kill(child, signal.SIGKILL)
    engine.step()
    engine.step()
    assert not session.commit()  # recording has ended, and the engine goes on
    engine.step()
    engine.blocks.flush()
    end(session)
    assert "recording stopped: OSError: the process that writes the rows" in capfd.readouterr().err
    gaps = rolltape.open(tape).rows("events")
    assert {(row["request"], row["start"], row["n"]) for row in gaps if row["request"]} == {
        ("a", 3, 3)
    }
    assert written(tape) == everything(1)


def test_the_tape_cannot_be_written(tape: Path, session: Session) -> None:
    before = set(children())
    engine = Engine(session)
    engine.step()
    assert session.commit()
    (child,) = set(children()) - before
    resource.prlimit(child, resource.RLIMIT_FSIZE, (0, 0))  # as a disk that is full
    for _ in range(200):
        engine.step()
    assert not session.commit()
    end(session)
    assert set(children()) <= before
    gap = next(row for row in rolltape.open(tape).rows("events") if row["request"])
    assert gap["start"] == 3
    assert written(tape)["tokens"][:4] == [0, 1, 2, 100]


def test_a_fault_in_the_process_is_one_gap(tape: Path, session: Session) -> None:
    engine = Engine(session)
    engine.step()
    engine.blocks.flush()
    stray = engine.roster.place([engine.life], np.array([3]), np.array([1]))
    stray.life[:] = 77  # nobody
    engine.blocks.add(Step(number=1, t_ns=1, rows=stray, version=0, values={}))
    engine.blocks.flush()
    engine.steps = 2
    engine.step()
    end(session)
    events = rolltape.open(tape).rows("events")
    assert [row["kind"] for row in events] == ["hook_error"]
    assert "KeyError" in str(events[0]["detail"])
    assert written(tape)["raw"][0] == 0.0
    assert written(tape)["raw"][-1] == -2.0


def test_a_block_that_fails_before_it_is_sent_costs_only_itself(
    tape: Path, session: Session
) -> None:
    engine = Engine(session)

    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    engine.step()
    engine.blocks._steps[-1] = replace(engine.blocks._steps[-1], ready=Broken())
    engine.blocks.flush()
    for _ in range(3):
        engine.step()
    end(session)
    events = rolltape.open(tape).rows("events")
    assert [(e["kind"], e["start"], e["n"]) for e in events if e["kind"] == "gap"] == [
        ("gap", 0, 4)
    ]
    assert written(tape)["raw"][-3:] == [-1.0, -2.0, -3.0]


def test_many_open_files(tape: Path, session: Session) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        engine = Engine(session)
        engine.step()
        assert session.commit()
        end(session)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert written(tape) == everything(1)


def test_what_lies_in_the_folder_of_the_job_is_not_imported(
    tape: Path, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "signal.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # Python takes a `Path`, too
    engine = Engine(session)
    engine.step()
    end(session)
    assert written(tape) == everything(1)


def test_signals_to_the_job_are_not_for_the_process(tape: Path, session: Session) -> None:
    before = set(children())
    engine = Engine(session)
    engine.step()
    engine.blocks.flush()
    while not (child := set(children()) - before):  # before it has imported anything
        time.sleep(0.001)
    assert os.getpgid(child.pop()) != os.getpgid(0)
    end(session)
    assert written(tape) == everything(1)


def test_an_interpreter_that_cannot_be_started_again_writes_in_place(
    tape: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    before = set(children())
    engine = Engine(session)
    for _ in range(4):
        engine.step()
    assert session.commit() and set(children()) == before
    end(session)
    assert written(tape) == everything(4)


def test_it_ends_although_the_queue_is_full(tape: Path) -> None:
    before = set(children())
    session, held = Session(tape, Options(queue_mb=1)), threading.Event()
    engine = Engine(session)
    engine.step()
    assert session.commit()
    for nbytes in (1 << 20, 1 << 20):
        session.put(lambda writer: bool(held.wait(60)), nbytes=nbytes, gap=[])
    engine.blocks.close()
    held.set()
    session.close()
    assert set(children()) <= before
    assert not list(tape.glob("*/*.live*"))


KILLED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from test_serving_process import Engine, Options, Session
session = Session(sys.argv[1], Options())
engine = Engine(session)
for _ in range(20):
    engine.step()
assert session.commit()
if os.fork() == 0:  # holds the sockets open
    signal.pause()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_handed_over_survives_the_engine(tape: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tape), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        group = engine.pid
        limit = time.monotonic() + 60
        # the shards get their final names when the process has seen that the engine is gone
        while list(tape.glob("*/*.live*")) and time.monotonic() < limit:
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
    assert engine.returncode == -signal.SIGKILL
    assert written(tape) == everything(20)


class Slow(Scribe):
    """Writes a second after its engine is gone, as to a disk that is busy."""

    def write(self, *args: Any, **kwargs: Any) -> Any:
        Path(os.environ["BEGUN"]).touch()
        engine = int(os.environ["ENGINE"])
        while os.getppid() == engine:
            time.sleep(0.01)
        time.sleep(1.0)
        return super().write(*args, **kwargs)


KILLED_AT_WORK = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from test_serving_process import Engine, Options, Session, Slow
os.environ["ENGINE"] = str(os.getpid())
session = Session(os.environ["ROLLTAPE_TAPE"], Options())
engine = Engine(session, scribe=Slow)
for _ in range(20):
    engine.step()
engine.blocks.flush()
while not os.path.exists(os.environ["BEGUN"]):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_launcher_seals_after_what_a_killed_engine_left_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    tape, folder = tmp_path / "tape", str(Path(__file__).parent)
    job = Job(
        command=(sys.executable, "-c", KILLED_AT_WORK, folder), tape=str(tape), options=Options()
    )
    recorded = run(job)
    assert recorded.ended.signal == signal.SIGKILL
    assert recorded.sealed and recorded.problems == () and recorded.summary is not None
    assert recorded.summary.live == () and recorded.summary.tokens == 23
    assert fsck(tape).findings == ()
    assert not list((tape / "procs").glob("rows-*"))
    assert written(tape) == everything(20)


def test_the_launcher_does_not_wait_for_ever(tape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ROWS_SECONDS", 0.1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tape / "procs").mkdir()
    mark = tape / "procs" / f"rows-{dead.pid}-1"
    mark.write_text(json.dumps({"host": os.uname().nodename, "engine": dead.pid}))
    job = Job(command=("true",), tape=str(tape), options=Options())
    with open(mark) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recorded = run(job, append=True)
        assert recorded.sealed and "are still being written" in recorded.problems[0]
        assert f"rolltape record --append -o {tape} -- true" in recorded.problems[0]
    assert run(job, append=True).problems == () and not mark.exists()


def test_the_launcher_does_not_wait_for_an_engine_that_lives(tape: Path) -> None:
    (tape / "procs").mkdir()
    mark = tape / "procs" / f"rows-{os.getpid()}-1"
    mark.write_text(json.dumps({"host": os.uname().nodename, "engine": os.getpid()}))
    with open(mark) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert left_alone(tape / "procs") == [] and mark.exists()


def test_messages_of_any_size_and_number_of_arrays() -> None:
    ours, theirs = socket.socketpair()
    rng = np.random.default_rng(0)
    message: dict[str, Any] = {
        "small": [rng.integers(0, 9, n).astype(np.int16) for n in range(2500)],
        "large": rng.random((1 << 20) + 1),
        "none": np.zeros((0, 4), np.int64),
        "strided": np.arange(24).reshape(4, 6)[:, ::2],
    }
    sender = threading.Thread(target=lambda: send(ours, message))
    sender.start()
    got = receive(theirs)
    sender.join()
    for a, b in zip(message["small"], got["small"], strict=True):
        assert a.dtype == b.dtype and (a == b).all()
    for name in ("large", "none", "strided"):
        assert got[name].shape == message[name].shape and (got[name] == message[name]).all()
    got["large"][0] = 1  # may be written to
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
    theirs.close()
