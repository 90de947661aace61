"""Kills, full disks, broken disks and crowds: what was committed is there, and only once."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.recorder.options import Options
from rolltape.recorder.session import Session
from rolltape.store.follow import Follower
from rolltape.store.fsck import fsck

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kill_writers.py"
RECORD = [sys.executable, "-m", "rolltape", "record"]
JOB = [
    sys.executable,
    str(ROOT / "examples" / "rollout_transformers.py"),
    *("--model", str(ROOT / "examples" / "models" / "tiny-moe")),
    *("--device", "cpu"),
]
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def script() -> Any:
    spec = importlib.util.spec_from_file_location("kill_writers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kill_writers = script()


def run_python(code: str, *args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process without torch."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


# -- SIGKILL ----------------------------------------------------------------------------------


def test_200_kills_lose_nothing_that_was_committed() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "200", "--seed", str(time.time_ns()), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    facts = json.loads(done.stdout)
    assert facts["committed"] > 200, "the writers were killed after their first commit"
    assert facts["recovered"] > 100, "shards were open when their writers died"
    assert facts["lost"] == 0 and facts["twice"] == 0, facts
    assert facts["missing_of_written_blocks"] == 0 and facts["findings"] == 0, facts
    # committed, and killed before the log said so: the rows of one block
    assert facts["most_unlogged"] <= 4, facts
    assert done.returncode == 0


def test_the_comparison_sees_a_loss_and_a_copy(tmp_path: Path) -> None:
    tape, log = tmp_path / "tape", tmp_path / "log"
    store.create_tape(tape, role="rollout")
    for copies in (1, 2):  # the second time the same rows again, by another writer
        with store.TapeWriter(tape, commit_log=log if copies == 1 else None) as writer:
            for table, columns in kill_writers.block(0).items():
                writer.append(table, columns)
    store.seal(tape)
    assert kill_writers.compare(tape, log)["twice"] == 4
    with log.open("a") as file:
        file.write(log.read_text().splitlines()[0].replace('"start": 0', '"start": 7') + "\n")
    assert kill_writers.compare(tape, log)["lost"] == 1


@pytest.mark.engine
@pytest.mark.parametrize("run", range(5))
def test_a_killed_rollout_loses_nothing_that_was_committed(tmp_path: Path, run: int) -> None:
    tape, log = tmp_path / "tape", tmp_path / "log"
    command = [*JOB, "--prompts", "16", "--batch", "2", "--max-new-tokens", "48"]
    launcher = subprocess.Popen(
        [*RECORD, "-o", str(tape), "--commit-log", str(log), "--", *command],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (log.exists() and log.stat().st_size) and launcher.poll() is None:
        time.sleep(0.005)
    time.sleep(random.Random(run).uniform(0, 1.0))
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    _, said = launcher.communicate(timeout=120)
    if children:
        assert launcher.returncode == 128 + signal.SIGKILL, said
        assert "killed by SIGKILL" in said
    facts = kill_writers.compare(tape, log)
    assert facts["committed"] > 0
    assert facts["lost"] == 0 and facts["twice"] == 0, facts
    assert facts["findings"] == 0, fsck(tape)


# -- disks ------------------------------------------------------------------------------------


class Failing:
    """A file that takes so many bytes and then fails, for good or for a while."""

    def __init__(self, file: Any, room: int, code: int) -> None:
        self.file, self.room, self.code = file, room, code

    def write(self, data: memoryview) -> int:
        part = data[: self.room]
        if not len(part):
            raise OSError(self.code, os.strerror(self.code))
        self.room -= len(part)
        return self.file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def append(writer: store.TapeWriter, *, rows: dict[str, Any]) -> None:
    writer.append("tokens", rows)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_was_committed_before_a_write_failed_stays(
    tmp_path: Path, monkeypatch: Any, code: int
) -> None:
    from rolltape.store.shards import ShardWriter

    real = ShardWriter.__init__
    room = 0

    def broken(self: ShardWriter, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        if self.path.parent.name == "tokens":
            self._batches._sink.file = Failing(self._file, room, code)

    whole = tmp_path / "whole"
    store.create_tape(whole, role="rollout")
    with store.TapeWriter(whole) as writer:
        for number in range(2):
            writer.append("tokens", kill_writers.block(number)["tokens"])
            writer.flush()
        size = writer._open["tokens"].size
    monkeypatch.setattr(ShardWriter, "__init__", broken)
    seen = set()
    for room in [*range(0, size, max(1, size // 150)), size - 1]:
        tape, log = tmp_path / f"{room}", tmp_path / f"{room}.log"
        store.create_tape(tape, role="rollout")
        session = Session(tape, Options(commit_log=str(log)))
        taken = 0
        for number in range(3):
            rows = kill_writers.block(number)["tokens"]
            taken += session.put(
                partial(append, rows=rows),
                nbytes=1,
                gap={"detail": {"block": str(rows["start"])}},
            )
            session.drain()  # else they may share a flush, which is smaller
        session.close()
        with pytest.MonkeyPatch.context() as undo:
            undo.setattr(ShardWriter, "__init__", real)
            store.seal(tape)
        opened = store.open(tape)
        committed = Counter(kill_writers.log_of(log)) if log.exists() else Counter()
        assert kill_writers.rows_of(opened) == committed, room
        seen.add(sum(committed.values()))
        gaps = [json.loads(e["detail"]) for e in opened.rows("events") if e["kind"] == "gap"]
        assert any(os.strerror(code) in gap.get("reason", "") for gap in gaps), room
        named = {gap["block"] for gap in gaps if "block" in gap}
        assert len(named) == taken - sum(committed.values()) // 2
        assert not fsck(tape).findings
    assert seen == {0, 2}, "some failed in the first block, some in the second"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "rolltape", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    def endless() -> None:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(OSError, match="No space left"):
        endless()


WRITER = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    import kill_writers
    from rolltape.recorder import session as sessions
    session = sessions.start_from_env()
    for number in range(int(sys.argv[2])):
        rows = kill_writers.block(number)
        def job(writer, rows=rows):
            for table, columns in rows.items():
                writer.append(table, columns)
        session.put(job, nbytes=1, gap={"detail": {"block": number}})
        if len(sys.argv) > 3:
            session.drain()
    print("job done")
"""


def record_writer(
    tape: Path | str, blocks: int, *options: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """`rolltape record` of a process without an engine that records through a session."""
    code = ["-c", textwrap.dedent(WRITER), str(SCRIPT.parent), str(blocks)]
    return subprocess.run(
        [*RECORD, "-o", str(tape), *options, "--", sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**ENV, **env},
    )


def test_a_full_disk_ends_the_recording_not_the_job(small_disk: Path, tmp_path: Path) -> None:
    tape, log = small_disk / "tape", tmp_path / "log"
    done = record_writer(tape, 3000, "--commit-log", str(log))
    assert done.returncode == 0 and done.stdout == "job done\n", done.stderr
    assert "recording stopped: StorageError" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    logged = kill_writers.log_of(log)
    assert logged
    assert Counter(logged) == kill_writers.rows_of(store.open(tape))


def test_sealing_on_a_full_disk_says_so_in_one_line_and_works_later(small_disk: Path) -> None:
    tape = store.create_tape(small_disk / "tape", role="rollout")
    done = run_python(
        """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import kill_writers
        from rolltape import store
        writer = store.TapeWriter(sys.argv[2])
        for number in range(40):
            writer.append("tokens", kill_writers.block(number)["tokens"])
            writer.flush()
        os.kill(os.getpid(), 9)
        """,
        SCRIPT.parent,
        tape,
    )
    assert done.returncode == -signal.SIGKILL
    before = kill_writers.rows_of(store.open(tape))
    assert len(before) == 80
    filler = small_disk / "filler"
    fill(filler)
    with pytest.raises(store.StorageError, match="No space left on device") as caught:
        store.seal(tape)
    assert "\n" not in str(caught.value)
    assert kill_writers.rows_of(store.open(tape)) == before
    filler.unlink()
    store.seal(tape)
    assert kill_writers.rows_of(store.open(tape)) == before
    assert not fsck(tape).findings


# -- options ----------------------------------------------------------------------------------


def test_max_bytes_stops_the_recording_with_a_gap_and_the_job_goes_on(tmp_path: Path) -> None:
    tape, log = tmp_path / "tape", tmp_path / "log"
    done = record_writer(tape, 400, "--max-bytes", "200000", "--commit-log", str(log))
    assert done.returncode == 0 and done.stdout == "job done\n", done.stderr
    assert "recording stopped: TapeFullError" in done.stderr and "--max-bytes" in done.stderr
    opened = store.open(tape)
    assert Counter(kill_writers.log_of(log)) == kill_writers.rows_of(opened)
    gaps = [json.loads(e["detail"]) for e in opened.rows("events") if e["kind"] == "gap"]
    assert any("has reached 200,000 bytes" in gap.get("reason", "") for gap in gaps)
    size = sum(p.stat().st_size for p in tape.glob("*/*.arrow") if "rollups" not in str(p))
    assert 150_000 < size < 600_000
    assert opened.seal is not None and not fsck(tape).findings


def test_fsync_reaches_the_disk(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    trace = tmp_path / "synced"
    synced = f"""
import os
real = os.fsync
def fsync(file):
    open({str(trace)!r}, "a").write(os.readlink(f"/proc/self/fd/{{file}}") + chr(10))
    real(file)
os.fsync = fsync
"""
    code = [synced + textwrap.dedent(WRITER), str(SCRIPT.parent), "3"]
    for option in ([], ["--fsync"]):
        done = subprocess.run(
            [*RECORD, *option, "-o", f"{tape}{len(option)}", "--", sys.executable, "-c", *code],
            env=ENV,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        names = trace.read_text().splitlines() if trace.exists() else []
        assert bool(names) == bool(option)
    assert {"tokens", "routes", "sequences"} <= {Path(name).parent.name for name in names}


# -- many at once -----------------------------------------------------------------------------

READER = """
    import json, sys, time, collections
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import kill_writers
    from rolltape import store
    tape, stop = Path(sys.argv[2]), Path(sys.argv[3])
    before, opened, ended = {}, 0, False
    while not ended:
        ended = stop.exists()
        now = collections.defaultdict(list)
        try:
            found = store.open(tape)
            for file, number, batch in found.batches("tokens"):
                writer = file.partition("-")[0]
                now[writer] += list(zip(batch.column("request").to_pylist(),
                                        batch.column("sample").to_pylist(),
                                        batch.column("start").to_pylist()))
        finally:
            opened += 1
        for writer, rows in before.items():
            assert now[writer][:len(rows)] == rows, "not a prefix"
        for writer, rows in now.items():
            assert len(set(rows)) == len(rows), "twice"
        before = dict(now)
    print(json.dumps({"opened": opened, "rows": {w: len(r) for w, r in before.items()}}))
"""


def test_eight_writers_and_readers_that_open_it_again_and_again(tmp_path: Path) -> None:
    tape = store.create_tape(tmp_path / "tape", role="rollout")
    log, stop = tmp_path / "log", tmp_path / "stop"
    blocks = 60
    environment = {
        **ENV,
        **Options(commit_log=str(log)).environment(str(tape)),
    }
    code = textwrap.dedent(WRITER).replace(
        "session = ", "from rolltape.store import writer\nwriter.SHARD_BYTES = 60_000\nsession = "
    )
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(READER), str(SCRIPT.parent), tape, stop],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(SCRIPT.parent), str(blocks), "one at a time"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    follower = Follower(tape, tables=("tokens",))
    arrived: list[Any] = []
    while any(writer.poll() is None for writer in writers):
        arrived += follower.poll()
    for writer in writers:
        assert writer.wait() == 0, writer.stderr.read()
        writer.stderr.close()
    arrived += follower.poll()
    stop.touch()
    for reader in readers:
        said, problem = reader.communicate(timeout=60)
        assert reader.returncode == 0, problem
        facts = json.loads(said)
        assert facts["opened"] > 1 and list(facts["rows"].values()) == [2 * blocks] * 8
    places = Counter((a.writer, a.number, a.batch_index) for a in arrived)
    assert set(places.values()) == {1}
    assert sum(a.batch.num_rows for a in arrived) == 8 * 2 * blocks
    for name in {a.writer for a in arrived}:
        order = [(a.number, a.batch_index) for a in arrived if a.writer == name]
        assert order == sorted(order)
    store.seal(tape)
    # the writers recorded the same blocks: every row is there once for each of them
    found = kill_writers.rows_of(store.open(tape))
    assert set(found.values()) == {8} and found == Counter(kill_writers.log_of(log))


def test_two_recorders_of_one_folder_one_is_refused(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    command = [*RECORD, "-o", str(tape), "--", sys.executable, "-c", "import time; time.sleep(2)"]
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENV) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2], said
    refused = said[[process.returncode for process in started].index(2)]
    assert "is not empty" in refused and "Traceback" not in refused
    assert store.open(tape).seal is not None


def test_two_parts_of_one_tape_sealed_at_once_are_both_whole(tmp_path: Path) -> None:
    tape = store.create_tape(tmp_path / "tape", role="rollout")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import kill_writers
        from rolltape import store
        for number in range(6):
            with store.TapeWriter(sys.argv[2]) as writer:
                for table, columns in kill_writers.block(number).items():
                    writer.append(table, columns)
            store.seal(sys.argv[2])
            store.open(sys.argv[2])
    """
    parts = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(SCRIPT.parent), tape])
        for _ in range(3)
    ]
    assert [part.wait(timeout=120) for part in parts] == [0, 0, 0]
    assert set(kill_writers.rows_of(store.open(tape)).values()) == {3}
    assert not fsck(tape).findings


def test_a_forked_child_neither_writes_to_the_shard_nor_keeps_its_lock(tmp_path: Path) -> None:
    tape = store.create_tape(tmp_path / "tape", role="rollout")
    done = run_python(
        """
        import os, signal, sys, time
        sys.path.insert(0, sys.argv[1])
        import kill_writers
        from rolltape import store
        writer = store.TapeWriter(sys.argv[2])
        writer.append("tokens", kill_writers.block(0)["tokens"])
        writer.flush()
        if os.fork() == 0:
            sys.stdout.close()
            os.close(1), os.close(2)
            time.sleep(20)  # outlives its parent
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        SCRIPT.parent,
        tape,
    )
    assert done.returncode == -signal.SIGKILL
    sealed = store.seal(tape)
    assert sealed["live"] == [] and sealed["recovered"][0]["rows"] == 2
