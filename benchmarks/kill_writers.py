"""Kills recording processes at random moments and counts what is lost of what was committed.

    python benchmarks/kill_writers.py --runs 1000 --json

Each run is a process that records blocks through a real session, one at a time, until it is killed
with SIGKILL at a random moment after the first line of its commit log. Then the tape is sealed and
compared with the log: every row that the log calls committed must be there with its checksum, no
row may be there twice, at most the block in flight may be missing, and `fsck` must find nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rolltape import store
from rolltape.recorder.options import Options
from rolltape.recorder.session import Session
from rolltape.store import codecs, shards, writer
from rolltape.store.fsck import fsck
from rolltape.store.schema import TAPE_TABLES

ENGINE = "e" * 32
POSITIONS, FRAGMENTS = 24, 4
LAYERS, K, EXPERTS = 4, 2, 16
SPANNED = [n for n, s in TAPE_TABLES.items() if {"pass", "start", "n"} <= {*s.names}]


def block(number: int) -> dict[str, dict[str, Any]]:
    """The rows of one block: a fragment of two sequences."""
    rng = np.random.default_rng(number)
    sequence, part = divmod(number, FRAGMENTS)
    start = part * POSITIONS
    ids = rng.integers(0, 1000, (2, POSITIONS)).astype(np.uint32)
    routes = rng.integers(0, EXPERTS, (2, POSITIONS, LAYERS, K))
    samples = list(range(2))
    key = {"engine": ENGINE, "request": str(sequence), "sample": samples, "pass": 0}
    where = {**key, "start": start, "n": POSITIONS}
    return {
        "tokens": {
            **where,
            "ids": list(ids),
            "loss_mask": [np.ones(POSITIONS, bool)] * 2,
            "raw": list(-rng.exponential(1, (2, POSITIONS)).astype(np.float32)),
        },
        "routes": {
            **where,
            "role": "used",
            "layers": [list(range(LAYERS))] * 2,
            "k": K,
            "num_experts": EXPERTS,
            "encoding": "plain",
            "ids": [codecs.encode_plain(r, EXPERTS) for r in routes],
        },
        "sequences": {
            **key,
            "prompt_len": 1,
            "length": None if part < FRAGMENTS - 1 else FRAGMENTS * POSITIONS,
            "finish": "open" if part < FRAGMENTS - 1 else "stop",
        },
    }


def write(tape: Path, log: Path, done: mmap.mmap) -> None:
    """Record blocks until somebody kills this process; `done` counts those that are written."""
    session = Session(tape, Options(commit_log=str(log)))
    number = 0
    while True:
        rows = block(number)

        def job(writer: store.TapeWriter, rows: dict[str, dict[str, Any]] = rows) -> None:
            for table, columns in rows.items():
                writer.append(table, columns)

        if not session.put(job, nbytes=1, gap={"detail": {}}) or not session.drain():
            os._exit(1)
        number += 1
        done[:8] = struct.pack("<q", number)


def start(tape: Path, log: Path, shard_bytes: int) -> tuple[int, mmap.mmap]:
    """Fork a writer, so that no run pays for the start of an interpreter."""
    done = mmap.mmap(-1, 8)
    pid = os.fork()
    if pid == 0:
        try:
            writer.SHARD_BYTES = shard_bytes
            write(tape, log, done)
        finally:
            os._exit(1)
    return pid, done


def rows_of(tape: store.Tape) -> collections.Counter[tuple[Any, ...]]:
    """(table, engine, request, sample, pass, start, n, checksum) of every row with positions."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    names = ["engine", "request", "sample", "pass", "start", "n"]
    for table in SPANNED:
        for _, _, batch in tape.batches(table):
            for i, row in enumerate(batch.select(names).to_pylist()):
                found[table, *row.values(), shards.row_checksum(batch, i)] += 1
    return found


def log_of(path: Path) -> list[tuple[Any, ...]]:
    """The same of a commit log. A last line without its end was not written in full."""
    lines = path.read_text().split("\n")[:-1]
    return [tuple(json.loads(line).values()) for line in lines]


def compare(tape: Path, log: Path, *, blocks: int | None = None) -> dict[str, int]:
    """Count rows of a sealed tape that are lost, twice there, or not in the log.

    Args:
        tape: sealed.
        log: its commit log.
        blocks: blocks of `write` that were written.
    """
    found = rows_of(store.open(tape))
    logged = set(log_of(log))
    checked = fsck(tape)
    missing = 0
    if blocks is not None:
        there = {(row[0], row[2], row[3], row[5]) for row in found}
        for number in range(blocks):
            sequence, part = divmod(number, FRAGMENTS)
            for table in ("tokens", "routes"):
                for sample in range(2):
                    missing += (table, str(sequence), sample, part * POSITIONS) not in there
    return {
        "committed": len(logged),
        "lost": len(logged - set(found)),
        "twice": sum(n - 1 for n in found.values()),
        "unlogged": len(set(found) - logged),
        "missing_of_written_blocks": missing,
        "findings": len(checked.findings),
    }


def kill_once(folder: Path, rng: random.Random) -> dict[str, int]:
    """One run; what `compare` found, and whether a shard had to be recovered."""
    tape, log = folder / "tape", folder / "log"
    store.create_tape(tape, role="rollout")
    pid, done = start(tape, log, rng.choice([8_000, 30_000, 64 << 20]))
    end = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size):
        if time.monotonic() > end:
            raise SystemExit("no commit within 60 s")
        time.sleep(0.0005)
    time.sleep(rng.expovariate(1 / 0.01))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer had ended by itself"
    sealed = store.seal(tape)
    facts = compare(tape, log, blocks=struct.unpack("<q", done[:8])[0])
    torn = sum(entry["torn"] > 0 for entry in sealed["recovered"])
    return {**facts, "recovered": len(sealed["recovered"]), "torn": torn}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    total: collections.Counter[str] = collections.Counter()
    most_unlogged = 0
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="rolltape-kill-"))
    try:
        for number in range(options.runs):
            folder = scratch / str(number)
            folder.mkdir()
            facts = kill_once(folder, rng)
            total.update(facts)
            most_unlogged = max(most_unlogged, facts["unlogged"])
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report: dict[str, Any] = {
        "runs": options.runs,
        **total,
        "most_unlogged": most_unlogged,
        "seconds": round(time.monotonic() - begin, 1),
    }
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:<28} {value}")
    bad = ("lost", "twice", "missing_of_written_blocks", "findings")
    return 1 if any(report[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
