"""Where the time of our hooks in vLLM goes: `python benchmarks/vllm_hooks.py -- ARGS`.

Runs vllm_job.py (its arguments follow `--`) under a recording in this process, and prints for each
part of the recorder microseconds a step on the engine's thread, processor time of every thread a
step, and with `--kernels` how busy the device was. The parts lie within each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import vllm_job

import rolltape

SPENT: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])


def timed(owner: Any, name: str, label: str | None = None) -> None:
    """Add up the time that one function takes on the main thread."""
    wrapped, main = getattr(owner, name), threading.main_thread()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not main:
            return wrapped(*args, **kwargs)
        begin = time.perf_counter()
        try:
            return wrapped(*args, **kwargs)
        finally:
            spent = SPENT[label or name]
            spent[0] += time.perf_counter() - begin
            spent[1] += 1

    setattr(owner, name, call)


def named(session: Any) -> None:
    """The same of every hook, by the name that its errors have."""
    wrapped, main = session.safely, threading.main_thread()

    def safely(self: Any, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return wrapped(self, name, call, *args, **kwargs)
        finally:
            if threading.current_thread() is main:
                spent = SPENT[name]
                spent[0] += time.perf_counter() - begin
                spent[1] += 1

    session.safely = safely


def threads() -> dict[str, float]:
    """Processor seconds of every thread of this process, by its name."""
    names = {t.native_id: t.name for t in threading.enumerate()}
    tick, found = os.sysconf("SC_CLK_TCK"), defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        found[name] += (int(fields[11]) + int(fields[12])) / tick
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", action="store_true", help="without a recording")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("job", nargs="*")
    args = parser.parse_args()
    sys.argv = ["vllm_job.py", *args.job]
    before: dict[str, float] = {}
    import vllm

    generate, calls = vllm.LLM.generate, 0
    after: dict[str, float] = {}

    def watched(llm: Any, *a: Any, **k: Any) -> Any:
        nonlocal calls, before, after
        calls += 1
        if calls == 2:  # the first is not timed
            SPENT.clear()
            before = threads()
        if calls == 3 and args.kernels:
            return profiled(lambda: generate(llm, *a, **k))
        try:
            return generate(llm, *a, **k)
        finally:
            after = threads()

    vllm.LLM.generate = watched
    with tempfile.TemporaryDirectory() as folder:
        if args.bare:
            vllm_job.main()
        else:
            with rolltape.record(Path(folder) / "tape"):
                from rolltape.recorder.serving import batch, blocks, device
                from rolltape.recorder.session import Session
                from rolltape.recorder.vllm import record

                named(Session)
                timed(record, "measure")
                timed(device.Outlet, "copy", "outlet.copy")
                timed(device.Outlet, "done", "outlet.done")
                timed(device.RouteBuffer, "leave", "routes.leave")
                timed(blocks.Blocks, "add", "blocks.add")
                timed(batch.Roster, "place", "roster.place")
                timed(record, "_graph")
                timed(record.Recorder, "launch")
                timed(record.Recorder, "finish")
                timed(blocks.Blocks, "flush", "blocks.flush")
                vllm_job.main()
    steps = SPENT["vllm.schedule"][1] or 1
    for name, (spent, count) in sorted(SPENT.items(), key=lambda item: -item[1][0]):
        print(f"{name:40} {spent / steps * 1e6:9.1f} us a step, {count / steps:.2f} calls")
    for name, cpu in sorted(after.items(), key=lambda item: -item[1])[:14]:
        print(f"thread {name:33} {(cpu - before.get(name, 0.0)) / steps * 1e6:9.1f} us a step")
    print(json.dumps({"steps": steps}))


def profiled(run: Any) -> Any:
    """Run once under torch's profiler; prints how busy the device was."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        begin = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    events = found.key_averages()
    rows = sorted(((e.self_device_time_total, e.count, e.key) for e in events), reverse=True)
    print(f"device busy {sum(r[0] for r in rows) / 1e6:.2f} s of {wall:.2f} s")
    for spent, count, key in rows[:40]:
        print(f"  {spent / 1e3:9.1f} ms {count:7} {key[:100]}")
    return result


if __name__ == "__main__":
    main()
