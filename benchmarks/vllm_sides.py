"""The vLLM part of `record_overhead.py`: engine starts with and without recording, in turn."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB = Path(__file__).with_name("vllm_job.py")


class Side:
    """One engine start, with or without recording; measures a workload when it is told to.

    Args:
        job: arguments of vllm_job.py.
        tape: where to record; None for without.
        log: folder for what it prints to stderr.
    """

    def __init__(self, job: list[str], tape: Path | None, log: Path) -> None:
        self.tape, self._log = tape, log / f"stderr{time.monotonic_ns()}"
        self.command = [sys.executable, str(JOB), "--turns", *job]
        if tape is not None:
            record = [sys.executable, "-m", "rolltape", "record", "-o", str(tape), "--"]
            self.command = [*record, *self.command]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with open(self._log, "w") as errors:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.facts: dict[str, Any] = {}
        self.rates: dict[str, list[float]] = {}
        self.thread: dict[str, list[float]] = {}

    @property
    def name(self) -> str:
        return "not recorded" if self.tape is None else "recorded"

    def ready(self) -> None:
        """Wait until its engine has started."""
        self._read_until("started_s")

    def measure(self, workload: str) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        self._read_until("done")
        rate, busy = statistics.mean(self.rates[workload]), statistics.mean(self.thread[workload])
        print(f"{self.name}: {workload} {rate:,.0f} tok/s, thread {busy:.0%} busy", flush=True)

    def end(self) -> None:
        """Wait for its end, and remove its tape."""
        self._read_until(None)
        if self._process.wait():
            self._fail()
        errors = self._log.read_text()
        self.facts["summary"] = [line for line in errors.splitlines() if "rolltape:" in line]
        if self.tape is not None:
            print(*self.facts["summary"][:2], sep="\n", flush=True)
            shutil.rmtree(self.tape)

    def kill(self) -> None:
        self._process.kill()

    def _read_until(self, key: str | None) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "workload" in row:
                self.rates.setdefault(row["workload"], []).append(row["rate"])
                self.thread.setdefault(row["workload"], []).append(row["thread"])
            else:
                self.facts |= row
            if key in row:
                return
        if key is not None:
            self._fail()

    def _fail(self) -> None:
        errors = self._log.read_text()[-6000:]
        raise SystemExit(f"{' '.join(self.command)} failed:\n{errors}")


def compare(args: argparse.Namespace, job: list[str]) -> dict[str, Any]:
    """Alternate starts; the rate of a start is the mean of its timed runs.

    Args:
        args: `starts` a side, of which `together` (both sides counted) are up at the same time;
            only one of them ever measures.
        job: arguments of vllm_job.py.

    Returns:
        By workload the ratio of the mean rates recorded / not recorded, with the rates of every
        start, and the memory of both sides.
    """
    order = [number % 2 == 1 for number in range(2 * args.starts)]
    ended: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        for first in range(0, len(order), args.together):
            wave = [
                Side(job, log / f"tape{first + i}" if recorded else None, log)
                for i, recorded in enumerate(order[first : first + args.together])
            ]
            try:
                for side in wave:
                    side.ready()
                for workload in args.workloads.split(","):
                    for side in wave:
                        side.measure(workload)
                for side in wave:
                    side.end()
            except BaseException:
                for side in wave:
                    side.kill()
                raise
            ended += wave
    sides = {
        recorded: [s for s in ended if (s.tape is not None) is recorded]
        for recorded in (True, False)
    }
    result: dict[str, Any] = {}
    for name in sides[True][0].rates:
        with_, without = (
            [statistics.mean(one.rates[name]) for one in sides[side]] for side in (True, False)
        )
        ratio = statistics.mean(with_) / statistics.mean(without)
        spread = math.sqrt(
            sum(
                statistics.variance(side) / len(side) / statistics.mean(side) ** 2
                for side in (with_, without)
                if len(side) > 1
            )
        )
        result[name] = {
            "ratio": round(ratio, 4),
            "standard_error": round(ratio * spread, 4),
            "recorded": [round(rate, 1) for rate in with_],
            "not_recorded": [round(rate, 1) for rate in without],
            "runs": sum(len(one.rates[name]) for one in sides[True]),
            "thread": [
                round(statistics.mean(x for one in sides[side] for x in one.thread[name]), 3)
                for side in (True, False)
            ],
        }
    for key in ("rss_mb", "device_peak_mb"):
        if key in sides[True][0].facts:
            result[key] = {
                "recorded": round(max(one.facts[key] for one in sides[True])),
                "not_recorded": round(max(one.facts[key] for one in sides[False])),
            }
    return result
