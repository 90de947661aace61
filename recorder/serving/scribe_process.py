"""A process beside an engine that turns its steps into rows of the tape.

The rows of a block take tens of milliseconds of Python. In a thread of the engine's process they
would take the interpreter away from the engine for that long, which costs several per cent of its
throughput; here they cost it one call that hands a block over.

The engine's writer thread waits for the answer to each block. So what is not yet written counts in
its queue, and an error is raised there as if the block had been written in place.

If the engine is killed, the process writes what it was given and ends. It holds a locked file in
the `procs` folder of the recording meanwhile, so that the launcher can wait for it before it seals.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolltape.recorder.options import TAPE_VARIABLE
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.serving.wire import Block, readable, receive, send
from rolltape.recorder.session import CPUS, FATAL, PUT_SECONDS, Session, open_writer
from rolltape.store import TapeWriter
from rolltape.store.shards import is_locked

_START = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
import json
sys.path[:] = json.loads(sys.argv[3])
from rolltape.recorder.serving.scribe_process import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""
_MARK = "rows-"  # how the names of those files begin
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ScribeProcess:
    """The engine's end. Only the writer thread of a session calls it.

    Args:
        session: whose tape is written.
        scribe: one that has not written anything; the process goes on with a copy.

    The process starts with the first message and ends when it is told to or when this one is gone.
    """

    def __init__(self, session: Session, scribe: Scribe) -> None:
        self._session = session
        self._hello = os.fspath(session.tape), session.options, scribe, sorted(CPUS)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def write(self, message: Block) -> None:
        """Have a block written.

        Raises:
            OSError: the process is gone.
            RolltapeError: whatever writing it raised there.
        """
        self._ask(message)

    def commit(self) -> None:
        """In an object store, put what there is."""
        if self._socket is not None:
            self._ask("commit")

    def close(self) -> None:
        """Have the shards finished, and wait until the process has ended."""
        if self._socket is not None:
            try:
                self._ask("close")
            finally:
                self._hang_up()

    def _ask(self, message: Block | str) -> None:
        try:
            to = self._socket or self._start()
            send(to, message)
            hurried = False
            while not readable(to, 1.0):
                if not hurried and self._session.hurried:
                    send(to, "hurry")
                    hurried = True
            error = receive(to)
        except (OSError, EOFError) as gone:
            self._hang_up()
            reason = f"the process that writes the rows of this engine is gone: {gone!r}"
            raise OSError(reason) from gone
        if isinstance(error, FATAL):
            self._hang_up()
        if error is not None:
            raise error

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, _at_work(self._session) as marks:
            numbers = [str(theirs.fileno()), str(os.getpid())]
            # isolated: what lies in the job's folder is not for us
            command = [sys.executable, "-I", "-c", _START, *numbers, json.dumps(_search_path())]
            env = {**os.environ, **_ONE_THREAD}
            env.pop(TAPE_VARIABLE, None)  # it is no process of the job
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *marks],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # what a terminal sends to the job is not for it
            )
        self._socket = ours
        send(ours, self._hello)
        return ours

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(PUT_SECONDS)
            except subprocess.TimeoutExpired:  # a store or disk that does not answer
                self._process.kill()
            self._process = None


@contextmanager
def _at_work(session: Session) -> Iterator[list[int]]:
    """The descriptor of a locked file that a process which inherits it holds until it ends.

    The list is empty where there is no launcher, or its folder is not to be reached.
    """
    folder = os.environ.get("ROLLTAPE_PROCS") or os.path.join(os.fspath(session.tape), "procs")
    facts = {"host": os.uname().nodename, "engine": os.getpid()}
    path = Path(folder, f"{_MARK}{facts['engine']}-{time.time_ns()}")
    try:
        file = open(path, "x")  # noqa: SIM115 - closed below
    except OSError:
        yield []
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps(facts))
            file.flush()
        except OSError:  # full, or a file system without locks
            path.unlink(missing_ok=True)
            yield []
            return
        yield [file.fileno()]


def left_alone(procs: Path) -> list[Path]:
    """Marks of processes on this machine that still write what an engine has left, which is dead.

    Args:
        procs: the folder of the recording. Marks that nobody holds any more are removed from it.
    """
    found = []
    for path in procs.glob(f"{_MARK}*"):
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError):  # another machine's, gone, or not yet written
            continue
        if facts.get("host") != os.uname().nodename:
            continue
        if not is_locked(path):
            path.unlink(missing_ok=True)
        elif not _is_alive(facts["engine"]):
            found.append(path)
    return found


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _search_path() -> list[str]:
    """Where this process imports from; "" is the folder that it is in now."""
    path = [os.fspath(entry) for entry in sys.path]
    try:
        return [entry or os.getcwd() for entry in path]
    except OSError:  # that folder is gone
        return [entry for entry in path if entry]


def can_start() -> bool:
    """Whether this interpreter can be started again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def main(descriptor: int, engine: int) -> None:
    """The process: answers each message with None or an exception.

    Args:
        descriptor: of its end of a socket pair.
        engine: process id of the other end.
    """
    source = socket.socket(fileno=descriptor)
    end = float("inf")

    def give_up() -> bool:
        """A store that does not answer is not waited for long once the recording ends."""
        nonlocal end
        # while a message is being answered, the only other one says to hurry
        if os.getppid() != engine or readable(source, 0):
            end = min(end, time.monotonic() + PUT_SECONDS)
        return time.monotonic() >= end

    writer: TapeWriter | None = None
    try:
        tape, options, scribe, cpus = receive(source)
        with suppress(OSError, AttributeError):  # engines bind the thread that started us
            os.sched_setaffinity(0, cpus)
        while True:
            # a fork of the engine may hold its end of the socket open: ask for the engine itself
            while not readable(source, 1.0):
                if writer is not None and writer.waiting:
                    writer.flush()
                if os.getppid() != engine:
                    return
            message = receive(source)
            if message == "hurry":  # it came when the answer was on its way
                continue
            try:
                if writer is None:
                    writer = open_writer(tape, options, give_up)
                _answer(writer, scribe, message)
                answer = None
            except Exception as error:
                answer = _sendable(error)
            send(source, answer)
            if isinstance(answer, FATAL):
                _finish(writer, quiet=True)
                writer = None
                return
            if message == "close":
                writer = None
                return
    except (EOFError, OSError):
        return  # the engine is gone
    finally:
        _finish(writer)


def _answer(writer: TapeWriter, scribe: Scribe, message: Block | str) -> None:
    if isinstance(message, Block):
        message.write(writer, scribe)
        writer.flush()
    elif message == "commit":
        writer.commit()
    else:
        writer.close()


def _finish(writer: TapeWriter | None, *, quiet: bool = False) -> None:
    if writer is None:
        return
    try:
        writer.close()
    except Exception as error:
        if not quiet:
            text = f"rolltape: the end of the recording could not be written: {error}"
            print(text, file=sys.stderr)
        writer.abandon()


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
