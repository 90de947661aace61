"""Runs a command as a child, changes nothing of it, and seals the tape whatever happened to it."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

import rolltape
from rolltape.recorder.injection import interpreter_of, prepended, pth_file, with_our_plugin
from rolltape.recorder.options import OPTIONAL_VARIABLES, STORAGE_VARIABLE, Options
from rolltape.recorder.provenance import mask_argv, provenance
from rolltape.recorder.reached import find_unreached
from rolltape.recorder.serving.ranks import compare_ranks
from rolltape.recorder.serving.scribe_process import left_alone
from rolltape.recorder.session import PUT_SECONDS
from rolltape.recorder.settings import launch_variables
from rolltape.recorder.summary import Summary, notes_to_events, summarize
from rolltape.recorder.tensorrt_llm.identity import copies
from rolltape.store import create_tape, seal
from rolltape.store.places import LocalPlace, ObjectPlace, place_of
from rolltape.store.seal import add_index
from rolltape.store.tape import read_seal

#: Exit statuses of shells for a command that could not be started.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
#: Exit status of `--strict` when the command went well and the recording did not.
STRICT_FAULT = 70

#: For the rows of engines that were killed; a store is not waited for longer than this anyway.
ROWS_SECONDS = PUT_SECONDS + 5.0
SEAL_SECONDS = 10.0
#: For the index, which takes a pass over the tape.
INDEX_SECONDS = 60.0

_RELAYED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: A terminal sends these to the whole foreground group: the command has them already.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to be recorded.

    Args:
        command: program and arguments, as they will be executed.
        tape: where to record: an absolute path, or a URL.
        options: what to record.
        inject: `sitecustomize` or `pth`.
        env: environment of the launcher.
    """

    command: tuple[str, ...]
    tape: str
    options: Options
    inject: str = "sitecustomize"
    env: Mapping[str, str] = field(default_factory=lambda: inherited_environment())

    @cached_property
    def place(self) -> LocalPlace | ObjectPlace:
        """Where the tape lies."""
        return place_of(self.tape, self.options.storage_options)

    @cached_property
    def procs(self) -> Path:
        """Folder on this machine in which processes leave their heartbeats."""
        if isinstance(self.place, LocalPlace):
            return self.place.path / "procs"
        return Path(tempfile.mkdtemp(prefix="rolltape-procs-"))

    @property
    def variables(self) -> dict[str, str]:
        """The variables that are set for the command, on top of `env`."""
        variables = self.options.environment(self.tape) | launch_variables(self.env)
        variables |= with_our_plugin(self.env)
        if not isinstance(self.place, LocalPlace):
            variables["ROLLTAPE_PROCS"] = str(self.procs)
        # where a job finds us in spite of a folder of our name beside its script
        variables["ROLLTAPE_PACKAGE"] = str(rolltape.__file__)
        if self.inject == "sitecustomize":
            variables["PYTHONPATH"] = prepended(self.env.get("PYTHONPATH"))
        return variables | copies(variables)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the command; options that are not chosen now are not in it."""
        # keys of a store may be given by the environment alone
        gone = dict.fromkeys(set(OPTIONAL_VARIABLES) - {STORAGE_VARIABLE}, "")
        gone |= copies(gone)
        return {n: v for n, v in self.env.items() if n not in gone} | self.variables


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended.

    Args:
        exit: its exit status, or the one a shell gives if it could not be started.
        signal: number of the signal that killed it; `exit` is None then.
        wall_s: seconds it ran.
        error: why it could not be started.
    """

    exit: int | None
    signal: int | None = None
    wall_s: float = 0.0
    error: str | None = None

    @property
    def status(self) -> int:
        """The exit status that a shell reports."""
        return 128 + self.signal if self.signal is not None else int(self.exit or 0)

    @property
    def words(self) -> str:
        """For people."""
        if self.error is not None:
            return self.error
        if self.signal is not None:
            return f"the command was killed by {signal_name(self.signal)}"
        return f"the command exited with {self.exit}"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What `run` leaves: how the command ended, and what is on the tape.

    Args:
        ended: how the command ended.
        summary: what the tape holds; None when it could not be read (see `problems`).
        sealed: whether the tape is sealed.
        problems: what went wrong with sealing or reading, one line each.
        hung: sealing or reading did not end in time and a thread is still at it.
    """

    ended: Ended
    summary: Summary | None
    sealed: bool
    problems: tuple[str, ...] = ()
    hung: bool = False


def inherited_environment() -> dict[str, str]:
    """Our environment as we were given it.

    In the C locale Python sets LC_CTYPE for itself (PEP 538); the command should not see that.
    """
    env = dict(os.environ)
    try:
        given = Path("/proc/self/environ").read_bytes()
    except OSError:  # not Linux: one harmless variable more
        return env
    if not any(entry.startswith(b"LC_CTYPE=") for entry in given.split(b"\0")):
        env.pop("LC_CTYPE", None)
    return env


def with_python(command: Sequence[str]) -> tuple[str, ...]:
    """`script.py ...` and `-m module ...` get our interpreter in front; others stay."""
    if command and (command[0].endswith(".py") or command[0].startswith("-m")):
        return (sys.executable, *command)
    return tuple(command)


def start_tape(job: Job, *, append: bool) -> None:
    """Make the tape of a job, unless another part is appended to one, and its `procs` folder."""
    if not append:
        facts = provenance(job.command, env=job.environment)
        create_tape(
            job.tape,
            role="rollout",
            provenance=facts,
            storage_options=job.options.storage_options,
        )
    job.procs.mkdir(exist_ok=True)


# -- the run ------------------------------------------------------------------------------


def refusal(command: Sequence[str], env: Mapping[str, str]) -> Ended | None:
    """Why a command cannot be started, in the exit statuses of a shell; None if it can."""
    program = command[0]
    if shutil.which(program, path=env.get("PATH")) is not None:
        return None
    folders = os.get_exec_path(dict(env)) if os.sep not in program else [""]
    if any(os.path.lexists(os.path.join(folder, program)) for folder in folders):
        return Ended(exit=NOT_EXECUTABLE, error=f"{program}: not executable")
    return Ended(exit=NOT_FOUND, error=f"{program}: command not found")


def run(job: Job, *, append: bool = False) -> Recorded:
    """Run a job to its end and seal its tape.

    Call it from the main thread: signals are relayed to the command meanwhile.

    Raises:
        InjectionError: with `--inject pth`; nothing has been started then.
        TapeExistsError: there is something at `job.tape`, and `append` is not set.
    """
    before = summarize(job.place, job.procs) if append else None
    started_ns = time.time_ns()
    with contextlib.ExitStack() as stack:
        # signals are ours before anything exists that would have to be undone
        relay = stack.enter_context(Relay())
        if job.inject == "pth":
            stack.enter_context(pth_file(interpreter_of(job.command, job.env)))
        start_tape(job, append=append)
        try:
            ended = relay.run(job.command, job.environment)
        except OSError as error:
            ended = _not_started(job.command[0], error)
        return _close(job, ended, started_ns=started_ns, before=before)


def _not_started(program: str, error: OSError) -> Ended:
    words = f"{program}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return Ended(exit=NOT_EXECUTABLE, error=f"{program}: the interpreter of its #! is missing")
    if isinstance(error, FileNotFoundError):
        return Ended(exit=NOT_FOUND, error=words)
    return Ended(exit=NOT_EXECUTABLE, error=words)


class Relay:
    """Runs one child and passes signals on to it; our own default actions are off meanwhile."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._early: list[int] = []
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        for number in (*_RELAYED, *_FROM_TERMINAL):
            # what is ignored (nohup, a background job of sh) stays ignored, also in the child
            if signal.getsignal(number) is not signal.SIG_IGN:
                handler = self._relay if number in _RELAYED else self._nothing_to_do
                self._old[number] = signal.signal(number, handler)
        # the end of the command wakes us; ignored, the kernel would throw its exit status away
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._nothing_to_do)
        # Signals also write to this pipe: one that comes just before we wait would else be seen
        # only after the wait.
        self._wake, self._signals = os.pipe()
        os.set_blocking(self._signals, False)
        self._old_wakeup = signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, old in self._old.items():
            signal.signal(number, old)
        os.close(self._wake)
        os.close(self._signals)

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Ended:
        """Start the command with our stdin, stdout, stderr and open files, and wait for it.

        Raises:
            OSError: it could not be started.
        """
        begin = time.monotonic()
        # Handlers are not inherited over exec, so the child starts with default actions. Naming
        # the files keeps Popen from posix_spawn, which leaves signals 32 and 33 ignored.
        child = subprocess.Popen(list(command), env=dict(env), pass_fds=_inheritable_files())
        self._pid = child.pid
        for number in self._early:
            os.kill(child.pid, number)
        # not reaped here: until `child.wait` the pid can be nobody else's, and relaying is safe
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.read(self._wake, 4096)
        self._pid = None
        code = child.wait()
        wall = time.monotonic() - begin
        if code < 0:
            return Ended(exit=None, signal=-code, wall_s=wall)
        return Ended(exit=code, wall_s=wall)

    def _relay(self, number: int, frame: FrameType | None) -> None:
        if self._pid is not None:
            os.kill(self._pid, number)
        else:
            self._early.append(number)

    def _nothing_to_do(self, number: int, frame: FrameType | None) -> None:
        """A handler rather than SIG_IGN, which the child would inherit."""


def _inheritable_files() -> list[int]:
    files = []
    for name in os.listdir("/dev/fd"):
        # the listing itself used a descriptor that is closed by now
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(name)):
                files.append(int(name))
    return files


# -- the end ------------------------------------------------------------------------------


class _Bounded(Generic[T]):
    """Work in a thread that is given up after some seconds."""

    def __init__(self, work: Callable[[], T], seconds: float) -> None:
        self.value: T | None = None
        self.error: Exception | None = None
        thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        thread.start()
        thread.join(seconds)
        self.hung = thread.is_alive()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.value = work()
        except Exception as error:
            self.error = error


def _close(job: Job, ended: Ended, *, started_ns: int, before: Summary | None) -> Recorded:
    problems: list[str] = []
    rows = _Bounded(lambda: _rows_left(job.procs), ROWS_SECONDS + SEAL_SECONDS)
    if rows.error is not None:
        problems.append(f"cannot tell who still writes: {type(rows.error).__name__}: {rows.error}")
    elif rows.hung or rows.value:
        problems.append(
            f"the rows of a killed engine are still being written after {ROWS_SECONDS:.0f} s: the "
            "seal does not cover all of them; when they are: "
            f"{shlex.join(['rolltape', 'record', '--append', '-o', str(job.place), '--', 'true'])}"
        )
    sealing = _Bounded(lambda: _seal(job, ended, started_ns=started_ns), SEAL_SECONDS)
    if sealing.hung:
        problems.append(
            f"sealing did not end within {SEAL_SECONDS:.0f} s; what is written stays readable"
        )
    elif sealing.error is not None:
        problems.append(f"could not seal: {type(sealing.error).__name__}: {sealing.error}")
    summary = None
    hung = sealing.hung
    if not hung and sealing.error is None:
        # a pass over the whole tape: it is sealed and readable without
        indexing = _Bounded(lambda: add_index(job.place), INDEX_SECONDS)
        hung = indexing.hung
        if hung or indexing.error is not None:
            why = indexing.error or f"it did not end within {INDEX_SECONDS:.0f} s"
            problems.append(f"no index: {why}; `rolltape fsck --repair` writes it")
    if not hung:
        reading = _Bounded(lambda: summarize(job.place, job.procs, before=before), SEAL_SECONDS)
        summary, hung = reading.value, reading.hung
        if hung:
            problems.append("the summary took too long; see `rolltape info`")
        elif reading.error is not None:
            problems.append(f"cannot read it back: {type(reading.error).__name__}: {reading.error}")
    if not isinstance(job.place, LocalPlace):
        shutil.rmtree(job.procs, ignore_errors=True)
    return Recorded(
        ended=ended,
        summary=summary,
        sealed=not sealing.hung and sealing.error is None,
        problems=tuple(problems),
        hung=hung,
    )


def _rows_left(procs: Path) -> bool:
    """Wait until what killed engines have left is written; whether it still is not."""
    end = time.monotonic() + ROWS_SECONDS
    while left_alone(procs):
        if time.monotonic() >= end:
            return True
        time.sleep(0.05)
    return False


def _seal(job: Job, ended: Ended, *, started_ns: int) -> dict[str, Any]:
    notes_to_events(job.place, job.procs)
    compare_ranks(job.place)
    find_unreached(job.place)
    status: dict[str, Any] = {
        "argv": mask_argv(job.command),
        "host": platform.node(),
        "started": _utc("%Y-%m-%dT%H:%M:%SZ", started_ns / 1e9),
        "exit": ended.exit,
        "signal": None if ended.signal is None else signal_name(ended.signal),
        "wall_s": round(ended.wall_s, 3),
        "error": ended.error,
    }
    former = read_seal(job.place)
    if former is not None:  # another part of the same tape, see --append
        last = dict(former.get("status", {}))
        status["earlier"] = [*last.pop("earlier", []), last]
    return seal(job.place, status=status, index=False)


def signal_name(number: int) -> str:
    """`SIGTERM`; a real-time signal has only its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_like(ended: Ended, *, status: int, hung: bool = False) -> int:
    """Die of the signal that killed the command, else return `status`.

    Args:
        ended: how the command ended.
        status: exit status to leave with.
        hung: a thread of ours is stuck; leave without waiting for what it holds.
    """
    for stream in _open_streams():
        stream.flush()
    if ended.signal not in (None, signal.SIGKILL, signal.SIGSTOP):
        _die_of(ended.signal)
    if hung:
        os._exit(status)
    return status


def _die_of(number: int) -> None:
    # the command may have left a core file; one of ours beside it would only mislead
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)  # as process 1 of a container this does nothing, and we go on


def _open_streams() -> Iterator[Any]:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            yield stream


def _utc(form: str, seconds: float) -> str:
    return time.strftime(form, time.gmtime(seconds))
