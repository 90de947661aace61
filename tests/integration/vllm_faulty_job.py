"""`vllm_job.py` under a recorder with a fault of another kind in each part, each on its own tape.

mixed: a hook raises at every third step. cached: the disk takes nothing until the part is over.
preempted: no file may grow beyond 40 KiB. aborted: the disk takes nothing and the queue is full.
"""

from __future__ import annotations

import itertools
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import vllm_job

from rolltape import store
from rolltape.recorder import session
from rolltape.recorder.options import Options
from rolltape.recorder.serving import blocks, steady
from rolltape.recorder.serving.scribe_process import ScribeProcess
from rolltape.recorder.vllm.record import Recorder

ROOM = 40 << 10

_disk = threading.Event()  # set: it takes what it is given
_disk.set()
_part = "mixed"
_count = itertools.count(1)
_launch, _write = Recorder.launch, ScribeProcess.write


def launch(self: Any, *args: Any) -> None:
    if _part == "mixed" and next(_count) % 3 == 0:
        raise RuntimeError("injected")
    _launch(self, *args)


def write(self: Any, *args: Any) -> None:
    _disk.wait()
    _write(self, *args)


class Parts:
    """Called before each part of the job: ends the tape of the last one and starts another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tape: Path | None = None  # the first is that of `rolltape record`
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __call__(self, part: str) -> None:
        global _part
        _part = part
        _disk.set()
        if part == "mixed":
            return
        session.stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        if self.tape is not None:
            store.seal(self.tape)
        if part == "over":
            return
        self.tape = self.folder / part
        store.create_tape(self.tape, role="rollout", provenance={})
        now = session.start(self.tape, Options(queue_mb=1))
        if part == "preempted":
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, self.limits[1]))
        else:
            _disk.clear()
        if part == "aborted":
            stuck = threading.Event()

            def wait(writer: Any) -> None:
                stuck.set()
                _disk.wait()

            now.put(wait, nbytes=1, gap={})
            stuck.wait()
            now.put(lambda writer: None, nbytes=1 << 20, gap={})


if __name__ == "__main__":
    setattr(Recorder, "launch", launch)  # noqa: B010
    setattr(ScribeProcess, "write", write)  # noqa: B010
    blocks.BLOCK_STEPS = steady.MOST_STEPS = 4
    vllm_job.main(*sys.argv[1:], Parts(Path(sys.argv[2]).parent))
