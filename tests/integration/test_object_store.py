"""Tapes in an object store: a real S3 server over HTTP, with a line to it that can be broken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.recorder.options import Options
from rolltape.recorder.session import Session
from rolltape.store.compact import compact
from rolltape.store.follow import Follower
from rolltape.store.fsck import fsck
from rolltape.store.places import ObjectPlace, place_of
from tests.integration.test_faults import (
    ENV,
    JOB,
    RECORD,
    SCRIPT,
    WRITER,
    kill_writers,
    record_writer,
)

moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
BUCKET = "tapes"
QUICK = {"connect_timeout": 1, "request_timeout": 1, "max_attempts": 1}


class Line:
    """A TCP line to a server that can be told to fail.

    Attributes:
        mode: "ok", "500", "503" (answers with it), "hang" (no answer), "cut" (closes).
        broken: requests that were not passed on.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self.mode = "ok"
        self.broken = 0
        self._left = 0
        self._then = "ok"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, pieces: int, mode: str) -> None:
        """Fail when so many more pieces of up to 64 KiB have been passed on."""
        self._left, self._then = pieces, mode

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._to) as server:
            back = threading.Thread(target=self._back, args=(server, client), daemon=True)
            back.start()
            try:
                while data := client.recv(1 << 16):
                    if self._left:
                        self._left -= 1
                        if not self._left:
                            self.mode = self._then
                    if self.mode != "ok":
                        self._fail(client)
                        break
                    server.sendall(data)
            except OSError:
                pass  # the client went away: that is what this is for
            server.close()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            return

    def _fail(self, client: socket.socket) -> None:
        self.broken += 1
        if self.mode in ("500", "503"):
            client.sendall(
                f"HTTP/1.1 {self.mode} Out of order\r\nContent-Length: 0\r\n"
                "Connection: close\r\n\r\n".encode()
            )
        elif self.mode == "hang":
            end = time.monotonic() + 30
            while self.mode == "hang" and time.monotonic() < end:
                time.sleep(0.02)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        started = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        started.start()
        host, port = started.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield f"{host}:{port}"
        started.stop()


@pytest.fixture
def line(server: str) -> Iterator[Line]:
    host, _, port = server.partition(":")
    opened = Line(host, int(port))
    yield opened
    opened.mode = "ok"
    opened.close()


def options_of(address: str, **more: Any) -> dict[str, Any]:
    return {"endpoint_override": f"http://{address}", "region": "us-east-1", **more}


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/runs/{abs(hash(request.node.name))}"


def put(session: Session, number: int) -> bool:
    rows = kill_writers.block(number)

    def job(writer: store.TapeWriter) -> None:
        for table, columns in rows.items():
            writer.append(table, columns)

    return session.put(job, nbytes=300_000, gap={"detail": {"block": number}})


def gaps_of(tape: store.Tape) -> list[dict[str, Any]]:
    return [json.loads(e["detail"]) for e in tape.rows("events") if e["kind"] == "gap"]


def rolltape(*args: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rolltape", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**ENV, **KEYS, "AWS_ENDPOINT_URL": f"http://{address}"},
    )


# -- the round trip ---------------------------------------------------------------------------


def test_record_info_show_fsck_and_compact_on_a_url(server: str, url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [
        word for pair in options_of(server).items() for word in ("--storage-option", *pair)
    ]
    done = record_writer(url, 40, "--commit-log", str(log), *arguments, **KEYS)
    assert done.returncode == 0 and done.stdout == "job done\n", done.stderr
    assert "key" not in done.stderr.split()
    tape = store.open(url, storage_options=options_of(server))
    assert tape.seal is not None and len(tape) == 20
    assert kill_writers.rows_of(tape) == Counter(kill_writers.log_of(log))
    assert len(log.read_text().splitlines()) == 160

    for command in (["info", url], ["show", url], ["show", url, "3.1"], ["fsck", url]):
        shown = rolltape(*command, address=server)
        assert shown.returncode == 0, (command, shown.stderr)
    assert rolltape("compact", url, "-o", f"{url}-c", address=server).returncode == 0
    copy = store.open(f"{url}-c", storage_options=options_of(server))
    assert len(copy) == 20
    assert (
        copy.sequence("3.1").tokens.values.tolist() == tape.sequence("3.1").tokens.values.tolist()
    )
    again = record_writer(url, 1, *arguments, **KEYS)
    assert again.returncode == 2 and "is not empty" in again.stderr


@pytest.mark.engine
def test_a_real_rollout_into_an_object_store(server: str, url: str, tmp_path: Path) -> None:
    out = tmp_path / "tokens.json"
    command = [*JOB, "--prompts", "4", "--max-new-tokens", "8", "--out", str(out)]
    where = [word for pair in options_of(server).items() for word in ("--storage-option", *pair)]
    done = subprocess.run(
        [*RECORD, "-o", url, *where, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**ENV, **KEYS},
    )
    assert done.returncode == 0, done.stderr
    tape = store.open(url, storage_options=options_of(server))
    assert len(tape) == 4 and not fsck(url, storage_options=options_of(server)).findings
    assert out.exists() and all(s.routes() is not None for s in tape)


def test_keys_in_a_url_are_never_shown(server: str, url: str) -> None:
    secret = url.replace("s3://", "s3://someone:hidden@")
    where = f"{secret}?endpoint_override={server}&scheme=http&region=us-east-1"
    store.create_tape(where, role="rollout")
    tape = store.open(where)
    assert "hidden" not in repr(tape) and "hidden" not in str(tape.place)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_stores(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    where = f"{scheme}://{tmp_path}/tape"
    store.create_tape(where, role="rollout")
    with store.TapeWriter(where) as writer:
        for table, columns in kill_writers.block(0).items():
            writer.append(table, columns)
    store.seal(where)
    tape = store.open(where)
    assert len(tape) == 2 and not fsck(where).findings
    compact(where, f"{where}-c")
    assert len(store.open(f"{where}-c")) == 2
    with pytest.raises(store.TapeExistsError):
        store.create_tape(where, role="rollout")
    assert isinstance(place_of(where), ObjectPlace) == (scheme == "memory")


# -- a store that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["500", "503", "cut", "hang"])
def test_a_store_that_fails_for_a_while_costs_nothing(
    server: str, line: Line, url: str, tmp_path: Path, monkeypatch: Any, mode: str
) -> None:
    monkeypatch.setattr("rolltape.store.writer.OBJECT_BYTES", 1)  # a put a block
    options = options_of(line.address, **QUICK)
    store.create_tape(url, role="rollout", storage_options=options)
    log = tmp_path / "log"
    session = Session(url, Options(storage_options=options, commit_log=str(log)))
    for number in range(3):
        assert put(session, number)
    assert session.drain()
    line.mode = mode
    for number in range(3, 8):
        assert put(session, number)  # never waits for the store
    end = time.monotonic() + 30
    while not line.broken and time.monotonic() < end:
        time.sleep(0.02)
    line.mode = "ok"
    session.close()
    assert line.broken and session.dropped == 0
    tape = store.open(url, storage_options=options_of(server))
    found = kill_writers.rows_of(tape)
    assert found == Counter(kill_writers.log_of(log)) and len(found) == 8 * 4
    assert not gaps_of(tape)


def test_a_store_that_stays_away_drops_with_gaps_that_are_recorded_when_it_is_back(
    server: str, line: Line, url: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("rolltape.store.writer.OBJECT_BYTES", 1)
    options = options_of(line.address, **QUICK)
    store.create_tape(url, role="rollout", storage_options=options)
    log = tmp_path / "log"
    session = Session(url, Options(storage_options=options, commit_log=str(log), queue_mb=1))
    assert put(session, 0) and session.drain()
    line.mode = "503"
    taken = [put(session, number) for number in range(1, 30)]
    assert taken[0] and not taken[-1], "the queue is full, and nobody waits"
    line.mode = "ok"
    assert session.drain()
    assert put(session, 30)
    session.close()
    tape = store.open(url, storage_options=options_of(server))
    dropped = [number for number, kept in enumerate(taken, 1) if not kept]
    assert sorted(gap["block"] for gap in gaps_of(tape)) == dropped
    found = kill_writers.rows_of(tape)
    assert found == Counter(kill_writers.log_of(log))
    assert len(found) == 4 * (2 + len(taken) - len(dropped))


@pytest.mark.parametrize("mode", ["503", "hang", "cut"])
def test_a_job_ends_also_when_the_store_never_comes_back(
    server: str, line: Line, url: str, tmp_path: Path, mode: str
) -> None:
    options = options_of(line.address, **QUICK)
    store.create_tape(url, role="rollout", storage_options=options)
    log = tmp_path / "log"
    code = textwrap.dedent(WRITER).replace(
        "session = ",
        "from rolltape.store import writer\nwriter.OBJECT_BYTES = 1\n"
        "sessions._PUT_SECONDS = 2.0\nsession = ",
    )
    code += "session.drain(); print('committed', flush=True); sys.stdin.readline()\n"
    code += "for number in range(100, 103): session.put(job, nbytes=1, gap={})\n"
    settings = Options(storage_options=options, commit_log=str(log))
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(SCRIPT.parent), "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, **KEYS, **settings.environment(url)},
    )
    assert [job.stdout.readline(), job.stdout.readline()] == ["job done\n", "committed\n"]
    line.mode = mode
    _, said = job.communicate("go\n", timeout=90)
    assert job.returncode == 0, said
    assert "recording stopped: StorageError" in said and "Traceback" not in said
    line.mode = "ok"
    tape = store.open(url, storage_options=options_of(server))
    found = kill_writers.rows_of(tape)
    assert found == Counter(kill_writers.log_of(log)) and len(found) == 16


def test_a_store_that_does_not_answer_is_one_line(server: str, line: Line, url: str) -> None:
    options = options_of(line.address, **QUICK)
    store.create_tape(url, role="rollout", storage_options=options)
    with store.TapeWriter(url, storage_options=options) as writer:
        writer.append("tokens", kill_writers.block(0)["tokens"])
    tape = store.open(url, storage_options=options)
    line.mode = "503"
    for action in (
        lambda: store.open(url, storage_options=options),
        lambda: tape.table("tokens"),
        lambda: store.seal(url, storage_options=options),
        lambda: fsck(url, repair=True, storage_options=options),
    ):
        with pytest.raises(store.StorageError) as caught:
            action()
        assert "\n" not in str(caught.value)
    line.mode = "ok"
    checked = fsck(url, repair=True, storage_options=options)
    assert [finding.code for finding in checked.findings] == ["unsealed"]
    assert store.open(url, storage_options=options).count("tokens") == 2


def test_a_large_shard_whose_upload_breaks_is_there_in_full_or_not_at_all(
    server: str, line: Line, url: str
) -> None:
    place, direct = (
        place_of(url, options_of(line.address, **QUICK)),
        place_of(url, options_of(server)),
    )
    data = os.urandom(24 << 20)  # several parts
    failed = 0
    for pieces in (20, 100, 200, 300):
        line.break_after(pieces, "503")
        try:
            place.put(f"tokens/{pieces}", data)
        except store.StorageError:
            failed += 1
        line.mode = "ok"
        assert direct.files("tokens").get(f"{pieces}", len(data)) == len(data), pieces
        place.put(f"tokens/{pieces}", data)
        assert direct.read(f"tokens/{pieces}") == data
    assert failed > 1


# -- many at once -----------------------------------------------------------------------------


def test_two_recorders_of_one_prefix_are_refused_or_both_safe(
    server: str, url: str, tmp_path: Path
) -> None:
    where = [word for pair in options_of(server).items() for word in ("--storage-option", *pair)]
    logs = [tmp_path / "a", tmp_path / "b"]
    code = ["-c", textwrap.dedent(WRITER), str(SCRIPT.parent), "12", "one at a time"]
    started = [
        subprocess.Popen(
            [*RECORD, "-o", url, *where, "--commit-log", str(log), "--", sys.executable, *code],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENV, **KEYS},
        )
        for log in logs
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    status = [process.returncode for process in started]
    assert set(status) <= {0, 2} and 0 in status, said
    for code_, text in zip(status, said, strict=True):
        assert code_ == 0 or "is not empty" in text or "another recording" in text
    committed: Counter[Any] = Counter()
    for log in logs:
        committed += Counter(kill_writers.log_of(log)) if log.exists() else Counter()
    options = options_of(server)
    assert kill_writers.rows_of(store.open(url, storage_options=options)) == committed
    fsck(url, repair=True, storage_options=options)
    assert kill_writers.rows_of(store.open(url, storage_options=options)) == committed
    assert not fsck(url, storage_options=options).findings


def test_writers_and_a_follower_in_one_prefix(server: str, url: str, tmp_path: Path) -> None:
    options = options_of(server)
    store.create_tape(url, role="rollout", storage_options=options)
    log = tmp_path / "log"
    code = textwrap.dedent(WRITER).replace(
        "session = ", "from rolltape.store import writer\nwriter.OBJECT_BYTES = 1\nsession = "
    )
    settings = Options(commit_log=str(log), storage_options=options)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(SCRIPT.parent), "8"],
            stdout=subprocess.DEVNULL,
            env={**ENV, **KEYS, **settings.environment(url)},
        )
        for _ in range(4)
    ]
    follower = Follower(url, tables=("tokens",), storage_options=options)
    rows = 0
    while any(writer.poll() is None for writer in writers):
        rows += sum(arrival.batch.num_rows for arrival in follower.poll())
        assert store.open(url, storage_options=options).count("tokens") >= rows
    assert [writer.returncode for writer in writers] == [0] * 4
    rows += sum(arrival.batch.num_rows for arrival in follower.poll())
    assert rows == 4 * 8 * 2
    found = kill_writers.rows_of(store.open(url, storage_options=options))
    assert found == Counter(kill_writers.log_of(log)) and set(found.values()) == {4}
