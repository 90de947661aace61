"""Where the time of our hooks in vLLM goes: `python benchmarks/vllm_hooks.py -- ARGS`.

Runs vllm_job.py (its arguments follow `--`) under a recording in this process, and prints for each
part of the recorder microseconds a step on the engine's thread, processor time of every thread a
step, and with `--kernels` how busy the device was. The parts lie within each other.

With `--pairs` the recording is switched on and off from one run to the next, in one engine, and
what is printed is the mean ratio of tokens/s with it to without it, and its 95 % interval. Engine
starts differ by several per cent, runs of one engine by far less. The in-graph copies of the routes
run in both, so `record_overhead.py` is the whole cost and this the part that the host sees.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from record_overhead import student_95

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
    parser.add_argument("--pairs", action="store_true")
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

    if args.pairs:
        paired(generate)
        return
    vllm.LLM.generate = watched
    with tempfile.TemporaryDirectory() as folder:
        if args.bare:
            vllm_job.main()
        else:
            with rolltape.record(Path(folder) / "tape"):
                from rolltape.recorder.serving import batch, blocks, device, drawn
                from rolltape.recorder.session import Session
                from rolltape.recorder.vllm import record

                named(Session)
                timed(drawn.Drawn, "write", "measure")
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


def paired(generate: Any) -> None:
    """Run the job, its runs recorded and not in turn."""
    import vllm

    from rolltape.recorder import session as sessions

    with tempfile.TemporaryDirectory() as folder, rolltape.record(Path(folder) / "tape"):
        pairs = Pairs(sessions.active())
        first: set[str] = set()

        def run(llm: Any, prompts: Any, params: Any, **how: Any) -> Any:
            workload = "none" if params.logprobs is None else "logprobs"
            if workload not in first:  # not timed
                first.add(workload)
                return generate(llm, prompts, params, **how)
            return pairs.run(workload, lambda: generate(llm, prompts, params, **how))

        vllm.LLM.generate = run
        vllm_job.main()
        print(json.dumps(pairs.report()))


class Pairs:
    """Runs of one engine, recorded and not, in turn: on, off, off, on."""

    def __init__(self, session: Any) -> None:
        from rolltape.recorder.options import TAPE_VARIABLE

        os.environ.pop(TAPE_VARIABLE, None)  # else a hook that finds no session starts one
        self._session, self._seen = session, 0
        self.seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)

    def run(self, workload: str, call: Any) -> Any:
        """Time one run."""
        from rolltape.recorder import session as sessions

        if not self.seconds.get((workload, True)):
            self._seen = 0
        on = self._seen % 4 in (0, 3)
        self._seen += 1
        sessions._active = self._session if on else None
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[workload, on].append(time.perf_counter() - begin)
            sessions._active = self._session
            self._session.commit()  # what it still writes is not in the time of the next run

    def report(self) -> dict[str, Any]:
        """By workload the ratio of the mean rates, with its 95 % interval over the pairs."""
        found = {}
        for workload in dict.fromkeys(name for name, _ in self.seconds):
            both = zip(self.seconds[workload, False], self.seconds[workload, True], strict=False)
            ratios = [off / on for off, on in both]
            half = 0.0
            if len(ratios) > 1:
                error = statistics.stdev(ratios) / len(ratios) ** 0.5
                half = student_95(len(ratios) - 1) * error
            mean = statistics.mean(ratios)
            found[workload] = {
                "ratio": round(mean, 4), "lo": round(mean - half, 4), "hi": round(mean + half, 4),
                "pairs": len(ratios),
            }  # fmt: skip
        return found


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
