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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB = Path(__file__).with_name("vllm_job.py")


def start(job: list[str], tape: Path | None) -> dict[str, Any]:
    """One engine start: rates by workload, memory, seconds until it was ready."""
    command = [sys.executable, str(JOB), *job]
    if tape is not None:
        command = [sys.executable, "-m", "rolltape", "record", "-o", str(tape), "--", *command]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    found: dict[str, Any] = {"rates": {}}
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        if "workload" in row:
            found["rates"].setdefault(row["workload"], []).append(row["rate"])
        else:
            found |= row
    found["summary"] = [line for line in done.stderr.splitlines() if line.startswith("rolltape:")]
    return found


def compare(args: argparse.Namespace, job: list[str]) -> dict[str, Any]:
    """Alternate starts; the rate of a start is the mean of its timed runs.

    Returns:
        By workload the ratio of the mean rates recorded / not recorded, with the rates of every
        start, and the memory of both sides.
    """
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.starts):
            for recorded in (True, False) if number % 2 else (False, True):
                tape = Path(folder) / f"tape{number}" if recorded else None
                one = start(job, tape)
                sides[recorded].append(one)
                if tape is not None:
                    shutil.rmtree(tape)
                means = {name: statistics.mean(r) for name, r in one["rates"].items()}
                print(
                    f"start {number + 1}, {'recorded' if recorded else 'not recorded'}: "
                    f"ready after {one['started_s']} s, "
                    + ", ".join(f"{name} {mean:,.0f} tok/s" for name, mean in means.items()),
                    *one["summary"][:2],
                    flush=True,
                )
    result: dict[str, Any] = {}
    for name in sides[True][0]["rates"]:
        with_, without = (
            [statistics.mean(one["rates"][name]) for one in sides[side]] for side in (True, False)
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
            "runs": sum(len(one["rates"][name]) for one in sides[True]),
        }
    for key in ("rss_mb", "device_peak_mb"):
        if key in sides[True][0]:
            result[key] = {
                "recorded": round(max(one[key] for one in sides[True])),
                "not_recorded": round(max(one[key] for one in sides[False])),
            }
    return result
