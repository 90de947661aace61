"""A process beside an engine that turns its steps into rows of the tape.

The rows of a block take tens of milliseconds of Python. In a thread of the engine's process they
would take the interpreter away from the engine for that long, which costs several per cent of its
throughput; here they cost it one call that hands a block over.

The engine's writer thread waits for the answer to each block. So what is not yet written counts in
its queue, and an error is raised there as if the block had been written in place.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rolltape.recorder.options import TAPE_VARIABLE, Options
from rolltape.recorder.serving.batch import Life, Step
from rolltape.recorder.serving.scribe import Scribe
from rolltape.recorder.serving.wire import pack, receive, send, travelling, unpack
from rolltape.recorder.session import FATAL, PUT_SECONDS, open_writer
from rolltape.store import TapeWriter

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rolltape.recorder.serving.scribe_process import main; main(int(sys.argv[1]))"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ScribeProcess:
    """The engine's end. Only the writer thread of a session calls it.

    Args:
        tape: folder or URL of the tape.
        options: of the recording.
        scribe: one that has not written anything; the process goes on with a copy.

    The process starts with the first message and ends when it is told to or when this one is gone.
    """

    def __init__(self, tape: str | os.PathLike[str], options: Options, scribe: Scribe) -> None:
        self._hello = os.fspath(tape), options, scribe
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def write(self, steps: Sequence[Step], new: Sequence[Life], ended: Sequence[Life]) -> None:
        """Have a block written.

        Args:
            steps: whose tensors are there.
            new: lives that the process does not know yet.
            ended: lives that no later step speaks of.

        Raises:
            OSError: the process is gone.
            RolltapeError: whatever writing them raised there.
        """
        block = pack(steps) if steps else None
        self._ask(("write", travelling(new), [life.index for life in ended], block))

    def commit(self) -> None:
        """In an object store, put what there is."""
        if self._socket is not None:
            self._ask(("commit",))

    def close(self) -> None:
        """Have the shards finished, and wait until the process has ended."""
        if self._socket is not None:
            try:
                self._ask(("close",))
            finally:
                self._hang_up()

    def _ask(self, message: tuple[Any, ...]) -> None:
        try:
            to = self._socket or self._start()
            send(to, message)
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
        with theirs:
            command = [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)]
            env = {**os.environ, **_ONE_THREAD}
            env.pop(TAPE_VARIABLE, None)  # it is no process of the job
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
            )
        self._socket = ours
        send(ours, self._hello)
        return ours

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def main(descriptor: int) -> None:
    """The process: answers each message with None or an exception.

    Args:
        descriptor: of its end of a socket pair.
    """
    # it ends with the engine, not with what ends the engine: there may be rows to write
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):  # engines bind the thread that we were started from
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    engine = os.getppid()
    end = float("inf")

    def give_up() -> bool:
        """A store that does not answer is not waited for long once the engine is gone."""
        nonlocal end
        if os.getppid() != engine:
            end = min(end, time.monotonic() + PUT_SECONDS)
        return time.monotonic() >= end

    source = socket.socket(fileno=descriptor)
    tape, options, scribe = receive(source)
    writer: TapeWriter | None = None
    try:
        while True:
            # a fork of the engine may hold its end of the socket open: ask for the engine itself
            while not select.select([source], [], [], 1.0)[0]:
                if writer is not None and writer.waiting:
                    writer.flush()
                if os.getppid() != engine:
                    return
            message = receive(source)
            try:
                if writer is None:
                    writer = open_writer(tape, options, give_up)
                _answer(writer, scribe, message)
                answer = None
            except Exception as error:
                answer = _sendable(error)
            send(source, answer)
            if message[0] == "close" or isinstance(answer, FATAL):
                return
    except (EOFError, OSError):
        return  # the engine is gone
    finally:
        if writer is not None:
            _finish(writer)


def _answer(writer: TapeWriter, scribe: Scribe, message: tuple[Any, ...]) -> None:
    match message:
        case ("write", new, ended, block):
            scribe.meet(new)
            try:
                if block is not None:
                    scribe.write(writer, unpack(block))
                writer.flush()
            finally:
                scribe.forget(ended)
        case ("commit",):
            writer.commit()
        case ("close",):
            writer.close()


def _finish(writer: TapeWriter) -> None:
    try:
        writer.close()
    except Exception as error:  # the engine has been told when it was written
        print(f"rolltape: the end of the recording could not be written: {error}", file=sys.stderr)
        writer.abandon()


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
