"""The recording of one process: a bounded queue, one writer thread, and faults kept apart.

The hot path only enqueues. A job is a function that turns what a hook kept into rows; it runs in
the writer thread. Nothing that goes wrong here reaches the engine, unless `strict` is set.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from rolltape.recorder.options import TAPE_VARIABLE, Options
from rolltape.store import NotATapeError, StorageError, TapeFullError, TapeWriter

Job = Callable[[TapeWriter], None]
Gap = dict[str, Any] | list[dict[str, Any]]
P = ParamSpec("P")
T = TypeVar("T")

#: A hook that failed this often is not called again.
MAX_FAULTS = 3
#: Processors that this process may use, before an engine binds its threads.
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
#: How long the end of a process waits for its recording, and how much of it for a store that
#: does not answer.
_CLOSE_SECONDS = 60.0
PUT_SECONDS = 20.0
#: While there are more jobs to do, rows are flushed this often.
_FLUSH_SECONDS = 0.2
#: Errors of a writer after which nothing more can be written.
FATAL = (OSError, StorageError, TapeFullError)
#: Rows of events kept while nothing can be written; what is more is only counted.
_MOST_GAPS = 10_000


@dataclass(frozen=True)
class _Item:
    job: Job
    nbytes: int
    gap: Gap


class _End:
    """There is nothing more to write."""


class Session:
    """Records into one tape from this process.

    Args:
        tape: folder or URL of an existing tape.
        options: what to record.

    The writer and its thread start with the first `put`, so that a process which records
    nothing leaves nothing behind. After a fork the child has a session of its own.
    """

    def __init__(self, tape: str | os.PathLike[str], options: Options) -> None:
        self.tape = tape
        self.options = options
        self.faults: dict[str, int] = {}
        self.dropped = 0
        #: Hand over what a hook keeps back; called by `flush` and `commit`.
        self.flushers: list[Callable[[], None]] = []
        #: Called by `stop`, after `flush`, while rows can still be put.
        self.before_close: list[Callable[[], None]] = []
        #: Jobs of `commit`, beside that of the session's own writer.
        self.committers: list[Job] = []
        self._lock = threading.Condition()
        self._items: deque[_Item] = deque()
        self._bytes = 0
        self._busy = False
        self._closing = False
        self._dead = False
        self._thread: threading.Thread | None = None
        self._alone = False
        self._gaps: list[dict[str, Any]] = []
        self._uncounted = 0
        self._give_up_at = float("inf")
        self._block_until = float("inf")

    # -- the hot path ---------------------------------------------------------------------

    def put(self, job: Job, *, nbytes: int, gap: Gap) -> bool:
        """Hand a job to the writer thread.

        Args:
            job: called with the writer; must not touch the engine.
            nbytes: memory that it holds until it has run; with 0 it is never dropped.
            gap: what will be missing if it is dropped: one or several dicts with keys of the
                `events` table, `detail` as a dict.

        Returns:
            False when it was dropped. The gap is then recorded as soon as there is room.
        """
        limit = self.options.queue_mb << 20
        with self._lock:
            if self._closing or self._dead:
                self.dropped += 1
                return False
            # A job that holds nothing is always taken; one larger than the whole queue is let
            # through alone, else it never could be.
            while nbytes and self._items and self._bytes + nbytes > limit:
                over = time.monotonic() >= self._block_until
                if self.options.on_full == "drop" or over:
                    self.dropped += 1
                    self._add_gap(gap)
                    return False
                self._lock.wait(timeout=1.0)
                if self._dead:
                    return False
            self._items.append(_Item(job, nbytes, gap))
            self._bytes += nbytes
            self._wake()
        return True

    def _wake(self) -> None:
        if self._thread is None and not self._alone:
            thread = threading.Thread(target=self._run, name="rolltape-writer", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the interpreter ends: `close` writes what there is
                self._alone = True
        self._lock.notify_all()

    def _add_gap(self, gap: Gap) -> None:
        for row in gap if isinstance(gap, list) else [gap]:
            if len(self._gaps) < _MOST_GAPS:
                self._gaps.append({"t_ns": time.time_ns(), "kind": "gap", **row})
            else:
                self._uncounted += 1

    def event(self, kind: str, *, detail: dict[str, Any], **columns: Any) -> None:
        """Record an event; small, and never dropped for want of room."""
        row = {"t_ns": time.time_ns(), "kind": kind, "detail": detail, **columns}
        with self._lock:
            over = self._closing and threading.current_thread() is not self._thread
            if over or self._dead:  # nobody will write it, and it must not pile up
                return
            self._gaps.append(row)
            self._wake()

    # -- faults ---------------------------------------------------------------------------

    def safely(
        self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call a hook; its errors are counted and recorded, and after three it is disabled."""
        if self.faults.get(name, 0) >= MAX_FAULTS:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.fault(name, error, disables=True)
            return None

    def always(self, name: str, call: Callable[[], object]) -> bool:
        """Call something that is never disabled: what others recorded depends on it."""
        try:
            call()
        except Exception as error:
            self.fault(name, error)
            return False
        return True

    @property
    def dead(self) -> bool:
        """Whether nothing can be written any more."""
        return self._dead

    @property
    def hurried(self) -> bool:
        """Whether the recording ends: a store that does not answer is not waited for long."""
        return self._give_up_at != float("inf")

    def fault(
        self, name: str, error: BaseException, *, disables: bool = False, **columns: Any
    ) -> None:
        """Count and record an error of the recorder; the job goes on unless `strict`.

        Args:
            name: of the hook or part that failed.
            error: what it raised.
            disables: whether it is not called again after `MAX_FAULTS` of them.
            columns: more columns of the `events` table.
        """
        count = self.faults[name] = self.faults.get(name, 0) + 1
        where = "".join(traceback.format_exception(error)[-3:])
        detail: dict[str, Any] = {
            "hook": name,
            "error": f"{type(error).__name__}: {error}",
            "trace": where[-2000:],
        }
        if count == 1:
            warn(f"{name}: {detail['error']} (the job goes on; this part is not recorded)")
        if count <= MAX_FAULTS:
            detail["disabled"] = disables and count == MAX_FAULTS
            self.event("hook_error", detail=detail, **columns)
        if self.options.strict:
            raise error

    # -- the writer thread ----------------------------------------------------------------

    def _run(self) -> None:
        writer: TapeWriter | None = None
        ran: list[_Item] = []  # and what they wrote is not yet flushed
        try:
            # while the job runs a store may come back; what does not fit is dropped meanwhile
            writer = open_writer(
                self.tape, self.options, lambda: time.monotonic() >= self._give_up_at
            )
            flushed = time.monotonic()
            while not isinstance(item := self._next(writer), _End):
                if item is not None and self._do(item, writer):
                    ran.append(item)
                # many small jobs share a flush, which takes the interpreter longer than they do
                if self._items and time.monotonic() - flushed < _FLUSH_SECONDS:
                    continue
                self._flush(writer, ran)
                ran, flushed = [], time.monotonic()
            self._write_gaps(writer)
            writer.close()
        except Exception as error:  # disk full, folder gone: recording ends, the job does not
            try:
                if writer is not None and ran:
                    writer.flush()
                    ran = []
            except Exception:  # these are lost as well
                pass
            with self._lock:
                self._dead = True
                for item in ran:
                    self._add_gap(item.gap)
                self.dropped += len(self._items)
                for item in self._items:
                    self._add_gap(item.gap)
                self._items.clear()
                self._lock.notify_all()
            unseen = isinstance(error, NotATapeError)
            hint = "; not shared with this machine? see docs/injection.md" if unseen else ""
            warn(f"recording stopped: {type(error).__name__}: {error}{hint}")
            if writer is not None:
                self._last_words(writer, error)
        finally:
            with self._lock:
                self._busy = False
                self._lock.notify_all()

    def _next(self, writer: TapeWriter) -> _Item | _End | None:
        """The next job; None when there are events to write or rows that grow old."""
        with self._lock:
            self._busy = False
            self._lock.notify_all()
            while not self._items:
                if self._closing:
                    return _End()
                if self._gaps:
                    self._busy = True
                    return None
                if not self._lock.wait(timeout=1.0 if writer.waiting else None):
                    return None
            self._busy = True
            return self._items.popleft()

    def _do(self, item: _Item, writer: TapeWriter) -> bool:
        """Run a job; whether it did what it should."""
        try:
            return self._apart(lambda: item.job(writer), [item])
        finally:
            with self._lock:
                self._bytes -= item.nbytes
                self._lock.notify_all()

    def _flush(self, writer: TapeWriter, ran: list[_Item]) -> None:
        self._write_gaps(writer)
        self._apart(writer.flush, ran)

    def _apart(self, call: Callable[[], None], items: list[_Item]) -> bool:
        """Call something of the writer; what is missing if it fails are the gaps of `items`."""
        try:
            call()
            return True
        except Exception as error:
            with self._lock:
                for item in items:
                    self._add_gap(item.gap)
                items.clear()  # said
            if isinstance(error, FATAL):
                raise
            try:
                self.fault("writer", error)
            except Exception:  # strict: there is no job on this thread that could fail
                warn("strict: the writer thread failed; the recording is incomplete")
            return False

    def _write_gaps(self, writer: TapeWriter) -> None:
        with self._lock:
            rows, self._gaps = self._gaps, []
            if self._uncounted:
                more = {"reason": "too many gaps to list", "gaps": self._uncounted}
                rows.append({"t_ns": time.time_ns(), "kind": "gap", "detail": more})
                self._uncounted = 0
        for row in rows:
            detail = json.dumps(row.get("detail", {}))
            writer.append("events", {**row, "writer": writer.id, "detail": detail})

    def _last_words(self, writer: TapeWriter, error: Exception) -> None:
        detail = {"reason": f"recording stopped: {error}", "dropped": self.dropped}
        with self._lock:
            # first: nothing else says so if there is room for only some of them
            self._gaps.insert(0, {"t_ns": time.time_ns(), "kind": "gap", "detail": detail})
        try:
            if time.monotonic() < self._give_up_at:
                self._write_gaps(writer)
                writer.close()
        except Exception as again:
            warn(f"the end of the recording could not be written either: {again}")
        finally:
            writer.abandon()

    # -- life -----------------------------------------------------------------------------

    def drain(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """Wait until everything enqueued so far is written; False if it took too long.

        In an object store that is not yet committed, see `commit`.
        """
        end = time.monotonic() + timeout
        with self._lock:
            while (self._items or self._gaps or self._busy) and not self._dead:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._lock.wait(timeout=left)
        return not self._dead

    def flush(self) -> bool:
        """Enqueue what hooks keep back; False if that of some could not be."""
        return all([self.always("flush", call) for call in list(self.flushers)])

    def commit(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """`flush` and `drain`, and in an object store put what there is: this process may end."""
        flushed = self.flush()
        for job in [*self.committers, lambda writer: writer.commit()]:
            self.put(job, nbytes=0, gap=[])
        return self.drain(timeout) and flushed

    def end_waits(self, timeout: float = _CLOSE_SECONDS) -> None:
        """From now on nobody waits longer than this for room in the queue."""
        self._block_until = time.monotonic() + timeout

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Write what is queued, finish the shards, stop the thread. May be called twice."""
        with self._lock:
            self._give_up_at = min(self._give_up_at, time.monotonic() + min(timeout, PUT_SECONDS))
            self._closing = True
            self._lock.notify_all()
            thread = self._thread
            alone, self._alone = self._alone, False
        if alone:
            self._thread = threading.current_thread()
            self._run()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                warn(f"the writer did not finish within {timeout:.0f} s; the tape is incomplete")


def open_writer(
    tape: str | os.PathLike[str], options: Options, give_up: Callable[[], bool]
) -> TapeWriter:
    """The writer of a recording with these options; `give_up` is as in `TapeWriter`."""
    return TapeWriter(
        tape,
        fsync=options.fsync,
        storage_options=options.storage_options,
        commit_log=options.commit_log or None,
        max_bytes=options.max_bytes or None,
        give_up=give_up,
    )


_active: Session | None = None
_starting = threading.Lock()


def active() -> Session | None:
    """The session that hooks of this process record into, if any."""
    return _active


def start(tape: str | os.PathLike[str], options: Options) -> Session:
    """Make a session the active one of this process."""
    global _active
    _active = Session(tape, options)
    _stop_in_multiprocessing_children()
    return _active


def stop() -> None:
    """Close the active session; hooks are inert afterwards."""
    global _active
    if (session := _active) is not None:
        session.end_waits()
        try:
            session.flush()
            for call in list(session.before_close):
                session.safely("close", call)
        finally:
            _active = None
            session.close()


def start_from_env() -> Session | None:
    """The session that `rolltape record` asked for by environment variables, started once."""
    tape = os.environ.get(TAPE_VARIABLE)
    with _starting:
        if _active is None and tape:
            start(tape, Options.from_environment())
            atexit.register(stop)
    return _active


_refused = False


def recording() -> Session | None:
    """The session that a hook records into, started if the environment asks for one.

    If it cannot be started that is said once, and the job goes on without.
    """
    global _refused
    try:
        session = _active or start_from_env()
        return None if session is not None and session.dead else session
    except Exception as error:
        if not _refused:
            warn(f"not recording: {error}")
        _refused = True
        return None


class _Mark:
    """Something for multiprocessing to hold on to."""


_mark = _Mark()
_registered = False


def _stop_in_multiprocessing_children() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    # Children of multiprocessing leave by os._exit: only its finalizers run there, and a forked
    # child forgets those of its parent first.
    from multiprocessing import util

    def finalize(_: _Mark) -> None:
        util.Finalize(None, stop, exitpriority=1)

    finalize(_mark)
    util.register_after_fork(_mark, finalize)


def _after_fork() -> None:
    # threads and locks did not come along; what was queued belongs to the parent
    global _active, _starting
    _starting = threading.Lock()
    if _active is not None:
        _active = Session(_active.tape, _active.options)


os.register_at_fork(after_in_child=_after_fork)


def warn(message: str) -> None:
    """One line on stderr, whatever the job did to its logging."""
    try:
        print(f"rolltape: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # stderr closed: nobody is there to be told
        return
