"""The session of a process: bounded, isolated from the job, and never silent about a loss."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.recorder import session as sessions
from rolltape.recorder.options import Options
from rolltape.recorder.session import MAX_FAULTS, Session
from rolltape.store import StorageError, TapeWriter, UsageError

ROW = {"engine": "e" * 32, "sample": 0, "pass": 0, "prompt_len": 1, "finish": "stop"}


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    return store.create_tape(tmp_path / "a", role="rollout")


@pytest.fixture
def make(tape: Path) -> Iterator[Any]:
    made = []

    def make(**options: Any) -> Session:
        made.append(Session(tape, Options(**options)))
        return made[-1]

    yield make
    for session in made:
        session.close()


def row(name: str) -> Any:
    return lambda writer: writer.append("sequences", {**ROW, "request": name})


def put(session: Session, name: str, nbytes: int = 1) -> bool:
    return session.put(row(name), nbytes=nbytes, gap={"request": name, "detail": {"what": name}})


def events(tape: Path, kind: str) -> list[dict[str, Any]]:
    found = [e for e in store.open(tape).rows("events") if e["kind"] == kind]
    return [{**e, "detail": json.loads(e["detail"])} for e in found]


def test_jobs_are_written_in_order(tape: Path, make: Any) -> None:
    session = make()
    for i in range(50):
        assert put(session, str(i))
    assert session.drain()
    assert [s.key.request for s in store.open(tape)] == [str(i) for i in range(50)]


def test_a_process_that_records_nothing_leaves_nothing(tape: Path, make: Any) -> None:
    make().close()
    assert [p.name for p in tape.iterdir()] == ["tape.json"]


def test_a_full_queue_drops_and_records_the_gap(tape: Path, make: Any) -> None:
    session = make(queue_mb=1)
    hold, held = threading.Event(), threading.Event()

    def wait(writer: TapeWriter) -> None:
        held.set()
        hold.wait()

    session.put(wait, nbytes=0, gap={"detail": {}})
    assert held.wait(10)
    assert put(session, "fits", 1 << 20)
    assert not put(session, "does not", 1)
    hold.set()
    assert session.drain()
    assert [s.key.request for s in store.open(tape)] == ["fits"]
    (gap,) = events(tape, "gap")
    assert gap["request"] == "does not" and gap["detail"] == {"what": "does not"}
    assert session.dropped == 1


def test_block_waits_for_room_instead(tape: Path, make: Any) -> None:
    session = make(queue_mb=1, on_full="block")
    hold = threading.Event()
    held, done = threading.Event(), threading.Event()

    def wait(writer: TapeWriter) -> None:
        held.set()
        hold.wait()

    def second() -> None:
        assert put(session, "second", 1 << 20)
        done.set()

    session.put(wait, nbytes=0, gap={"detail": {}})
    assert held.wait(10)
    assert put(session, "first", 1 << 20)  # fills the queue
    waiter = threading.Thread(target=second)
    waiter.start()
    assert not done.wait(0.2), "there is no room before the writer goes on"
    hold.set()
    assert done.wait(10) and session.drain()
    waiter.join()
    assert {s.key.request for s in store.open(tape)} == {"first", "second"}
    assert not events(tape, "gap")


def test_a_job_that_fails_is_a_recorded_gap_and_the_rest_goes_on(
    tape: Path, make: Any, capfd: Any
) -> None:
    session = make()

    def broken(writer: TapeWriter) -> None:
        raise ZeroDivisionError("boom")

    session.put(broken, nbytes=1, gap={"request": "lost", "detail": {"steps": 4}})
    put(session, "kept")
    assert session.drain()
    assert [s.key.request for s in store.open(tape)] == ["kept"]
    (gap,), (error,) = events(tape, "gap"), events(tape, "hook_error")
    assert gap["request"] == "lost" and gap["detail"] == {"steps": 4}
    assert "boom" in error["detail"]["error"] and "boom" in capfd.readouterr().err


def test_a_hook_is_disabled_after_three_faults(tape: Path, make: Any) -> None:
    session, calls = make(), []

    def broken() -> None:
        calls.append(1)
        raise RuntimeError("boom")

    for _ in range(10):
        assert session.safely("hook", broken) is None
    assert len(calls) == MAX_FAULTS
    assert session.safely("another", lambda: 5) == 5
    session.close()
    assert [e["detail"]["disabled"] for e in events(tape, "hook_error")] == [False, False, True]


def test_what_is_never_disabled_is_not_said_to_be(tape: Path, make: Any) -> None:
    session, calls = make(), []

    def broken() -> None:
        calls.append(1)
        raise RuntimeError("boom")

    session.flushers.append(broken)
    for _ in range(5):
        assert not session.flush()
    assert len(calls) == 5
    session.flushers.clear()
    session.close()
    assert [e["detail"]["disabled"] for e in events(tape, "hook_error")] == [False] * 3


def test_strict_raises(make: Any) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        make(strict=True).safely("hook", _boom)


def _boom() -> None:
    raise RuntimeError("boom")


def test_a_tape_that_goes_away_ends_the_recording_not_the_job(
    tape: Path, make: Any, capfd: Any, monkeypatch: Any
) -> None:
    session = make()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    put(session, "written")
    assert session.drain()
    monkeypatch.setattr("rolltape.store.shards.ShardWriter.write", full)
    put(session, "lost")
    assert not session.drain()
    assert not put(session, "after")
    session.close()
    assert "recording stopped: OSError" in capfd.readouterr().err
    monkeypatch.undo()
    store.seal(tape)
    assert [s.key.request for s in store.open(tape)] == ["written"]


def test_a_stopped_recording_names_what_was_in_its_queue(
    tape: Path, make: Any, capfd: Any, monkeypatch: Any
) -> None:
    session = make()
    hold, held = threading.Event(), threading.Event()

    def fail(writer: TapeWriter) -> None:
        held.set()
        hold.wait()
        raise StorageError("the disk is full")

    session.put(fail, nbytes=1, gap={"request": "in flight", "detail": {}})
    assert held.wait(10)
    put(session, "queued")
    hold.set()
    session.close()
    found = events(tape, "gap")
    assert {e["request"] for e in found} == {None, "in flight", "queued"}
    (end,) = [e["detail"] for e in found if e["request"] is None]
    assert end == {"reason": "recording stopped: the disk is full", "dropped": 1}


def test_max_bytes_ends_with_a_gap(tape: Path, make: Any) -> None:
    session = make(max_bytes=1)
    put(session, "first")  # nothing is there yet
    session.drain()
    put(session, "second")
    session.close()
    assert [s.key.request for s in store.open(tape)] == ["first"]
    assert any("has reached 1 bytes" in str(e["detail"]) for e in events(tape, "gap"))


def test_an_event_is_written_without_a_block_and_makes_no_gap(tape: Path, make: Any) -> None:
    session = make(queue_mb=1)
    hold, held = threading.Event(), threading.Event()

    def wait(writer: TapeWriter) -> None:
        held.set()
        hold.wait()

    session.put(wait, nbytes=9 << 20, gap={"detail": {}})
    assert held.wait(10)
    put(session, "fits", 1)
    session.event("notice", detail={"what": "seen"})
    hold.set()
    assert session.drain()
    assert [e["detail"] for e in events(tape, "notice")] == [{"what": "seen"}]
    session.event("notice", detail={"what": "alone"})
    assert session.drain()
    assert len(events(tape, "notice")) == 2


def test_gaps_do_not_pile_up_without_bound(tape: Path, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sessions, "_MOST_GAPS", 5)
    session = make(queue_mb=1)
    hold, held = threading.Event(), threading.Event()

    def wait(writer: TapeWriter) -> None:
        held.set()
        hold.wait()

    session.put(wait, nbytes=0, gap={"detail": {}})
    assert held.wait(10)
    put(session, "fits", 1 << 20)
    for i in range(9):
        assert not put(session, str(i))
    hold.set()
    assert session.drain()
    details = [e["detail"] for e in events(tape, "gap")]
    assert [d["what"] for d in details[:5]] == list("01234")
    assert details[5:] == [{"reason": "too many gaps to list", "gaps": 4}]


def test_a_forked_child_records_under_a_writer_of_its_own(tape: Path) -> None:
    session = sessions.start(tape, Options())
    try:
        put(session, "parent")
        child = os.fork()
        if child == 0:
            mine = sessions.active()
            ok = mine is not None and mine is not session and put(mine, "child")
            sessions.stop()
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        sessions.stop()
    assert {s.key.request for s in store.open(tape)} == {"parent", "child"}
    assert len(list((tape / "sequences").iterdir())) == 2


def test_options_travel_by_environment(tmp_path: Path) -> None:
    options = Options(
        level="layers", layers=3, on_full="block", queue_mb=9, fsync=True, strict=True
    )
    assert Options.from_environment(options.environment(tmp_path)) == options


@pytest.mark.parametrize(
    "env",
    [{"ROLLTAPE_LEVEL": "all"}, {"ROLLTAPE_LAYERS": "x"}, {"ROLLTAPE_ON_FULL": "wait"}],
)
def test_bad_options_are_named(env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Options.from_environment(env)


def test_jobs_that_share_a_flush_are_all_named_if_it_fails(
    tape: Path, make: Any, monkeypatch: Any
) -> None:
    session, held = make(), threading.Event()
    session.put(lambda writer: bool(held.wait(60)), nbytes=0, gap=[])
    for i in range(20):
        put(session, str(i))
    flush = TapeWriter._flush_table

    def full(self: TapeWriter, table: str) -> None:
        if table == "sequences":
            raise StorageError("no space left")
        flush(self, table)

    monkeypatch.setattr(TapeWriter, "_flush_table", full)
    held.set()
    assert not session.drain()
    session.close()
    assert {e["detail"].get("what") for e in events(tape, "gap")} >= {str(i) for i in range(20)}
    assert len(store.open(tape)) == 0


def test_a_job_that_holds_nothing_is_never_dropped(tape: Path, make: Any) -> None:
    session, held = make(queue_mb=1), threading.Event()
    session.put(lambda writer: bool(held.wait(60)), nbytes=2 << 20, gap=[])
    put(session, "large", nbytes=2 << 20)
    done = threading.Thread(target=lambda: committed.append(session.commit()))
    committed: list[bool] = []
    session.committers.append(lambda writer: committed.append(True))
    done.start()
    held.set()
    done.join()
    assert committed == [True, True]


def test_a_flusher_that_fails_disables_neither_itself_nor_others(tape: Path, make: Any) -> None:
    session, calls = make(), []

    def fails() -> None:
        calls.append("fails")
        raise ValueError("no")

    session.flushers += [fails, lambda: calls.append("works")]
    for _ in range(5):
        assert not session.commit()
    assert calls == ["fails", "works"] * 5


def test_strict_faults_at_the_end_leave_no_session_behind(tape: Path) -> None:
    session = sessions.start(tape, Options(strict=True))

    def fails() -> None:
        raise ValueError("no")

    session.flushers.append(fails)
    with pytest.raises(ValueError, match="no"):
        sessions.stop()
    assert sessions.active() is None


def test_a_session_that_ended_records_nothing_more(tape: Path, make: Any, monkeypatch: Any) -> None:
    session = make(max_bytes=1)
    monkeypatch.setattr(sessions, "_active", session)
    assert sessions.recording() is session
    for i in range(3):
        put(session, str(i))
        session.drain()
    assert session.dead and sessions.recording() is None


def test_an_interpreter_that_ends_starts_no_thread(tape: Path, make: Any, monkeypatch: Any) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    session = make()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert put(session, "late")
    session.close()
    assert [s.key.request for s in store.open(tape)] == ["late"]


def test_the_end_does_not_wait_for_ever_for_room(tape: Path, make: Any) -> None:
    session, held = make(queue_mb=1, on_full="block"), threading.Event()
    session.put(lambda writer: bool(held.wait(60)), nbytes=1 << 20, gap=[])
    put(session, "a", nbytes=1 << 20)
    session.end_waits(0.0)
    assert not put(session, "b", nbytes=1 << 20)
    held.set()
    session.close()
    assert [e["detail"]["what"] for e in events(tape, "gap")] == ["b"]
