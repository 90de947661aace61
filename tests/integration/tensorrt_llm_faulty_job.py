"""The scenario `small` of `tensorrt_llm_job.py` under a recorder with a fault, one after another.

    tensorrt_llm_faulty_job.py OUTPUTS FOLDER

Each fault has a tape of its own in FOLDER. `none` is without a recording, with the hooks in place.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tensorrt_llm_job as job

from rolltape import store
from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import Options
from rolltape.recorder.serving import blocks
from rolltape.recorder.tactics.autotuner import _Observer
from rolltape.recorder.tensorrt_llm import bind, frontend, identity, weights, worker
from rolltape.recorder.tensorrt_llm.loop import Recorder
from rolltape.recorder.tensorrt_llm.routes import RouteTap

#: Name of a hook -> what it calls.
HOOKS: dict[str, tuple[Any, str]] = {
    "tensorrt_llm.announce": (bind, "_announce"),
    "tensorrt_llm.engine": (identity, "start_engine"),
    "tensorrt_llm.llm": (frontend, "engine_started"),
    "tensorrt_llm.open": (frontend, "opened"),
    "tensorrt_llm.tokens": (frontend, "received"),
    "tensorrt_llm.close": (frontend, "handled"),
    "tensorrt_llm.extra": (frontend, "_extra"),
    "tensorrt_llm.launch": (worker, "_launch"),
    "tensorrt_llm.step": (Recorder, "ran"),
    "tensorrt_llm.graph": (Recorder, "replayed"),
    "tensorrt_llm.padding": (Recorder, "padded_batch"),
    "tensorrt_llm.end": (worker, "_ended"),
    "tensorrt_llm.child": (worker, "_number_child"),
    "tensorrt_llm.load": (worker, "_loaded"),
    "tensorrt_llm.weights": (worker, "_loading"),
    "tensorrt_llm.reset": (worker, "_complete"),
    "tensorrt_llm.digest": (weights, "weights_digest"),
    "tensorrt_llm.routes": (RouteTap, "_write"),
    "tensorrt_llm.shutdown": (worker, "_close"),
    "tactics.autotuner": (_Observer, "_look"),
}
#: Hooks that raise at every second call only, by the name of the part.
SOMETIMES = {
    "second-launch": "tensorrt_llm.launch",
    "second-tokens": "tensorrt_llm.tokens",
    "second-routes": "tensorrt_llm.routes",
}
#: Bytes that a file may have on the full disk.
ROOM = 4 << 10


class Raises:
    """In the place of a method or function."""

    def __init__(self, original: Any, every: int) -> None:
        self.original, self.every, self.count = original, every, 0
        # taps see the warm-up as well: three faults there, and they are disabled
        self.tap = every > 1 and getattr(original, "__name__", "") == "_write"

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tap or worker._Running.recorder is not None:
            self.count += 1
            # of a layer that runs in chunks the first ones
            if self.count % self.every == int(self.tap):
                raise RuntimeError("injected")
        return self.original(*args, **kwargs)


@contextlib.contextmanager
def fault(name: str, now: session.Session) -> Iterator[None]:
    """The recorder has it inside; what waited is let go afterwards."""
    hook = SOMETIMES.get(name, name)
    if hook in HOOKS:
        owner, attribute = HOOKS[hook]
        raises = Raises(getattr(owner, attribute), 2 if name in SOMETIMES else 1)
        with mock.patch.object(owner, attribute, raises):
            yield
        return
    if name == "full-disk":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
        try:
            yield
            now.commit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    gate, stuck = threading.Event(), threading.Event()

    def wait(writer: Any) -> None:
        stuck.set()
        gate.wait()

    def close(recorder: Recorder) -> None:
        gate.set()  # what the loop is shut down for is written first
        closes(recorder)

    closes = Recorder.close
    now.put(wait, nbytes=1, gap={})
    stuck.wait()
    if name == "full-queue":
        now.put(lambda writer: None, nbytes=1 << 20, gap={})
    with mock.patch.object(Recorder, "close", close):
        yield


def main(outputs: str, folder: str) -> None:
    _rolltape_hook.watch(_rolltape_hook.HOOKS)
    blocks.BLOCK_STEPS = 4
    found = {"none": job.small()}
    truths = {}
    for name in (*HOOKS, *SOMETIMES, "full-queue", "full-disk", "slow-disk"):
        job.TRUTH.clear()
        tape = Path(folder, name)
        store.create_tape(tape, role="rollout", provenance={})
        now = session.start(tape, Options(queue_mb=1))
        with fault(name, now):
            found[name] = job.small()
        session.stop()
        store.seal(tape)
        truths[name] = copy.deepcopy(job.TRUTH)
    with open(outputs, "wb") as file:
        pickle.dump({"answers": found, "truths": truths}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
