"""What `store.py` and `big_tape.py` measure in processes that see a tape for the first time.

Not a benchmark. A task takes paths, numbers and words and returns its figures; `fresh` runs one in
a new process and adds the memory of that process.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pyarrow as pa

from rolltape import store
from rolltape.store import codecs
from rolltape.store.compact import compact

PICKS = 200
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"routes": "plain"},
    "packed": {},
    "packed sets": {"sets": True},
}


def read_all(sequence: store.Sequence) -> int:
    """Every column of a sequence; the bytes of its route ids."""
    for column in (sequence.tokens, sequence.loss_mask):
        assert column.valid.all()
    for name in ("raw", "processed"):
        assert sequence.logprob(name).valid[-1]
    routes = sequence.routes()
    assert routes is not None and routes.valid[:-1].all()
    return int(routes.ids[:-1].nbytes)


def warm() -> None:
    """What happens once a process: the first array makes pyarrow import pandas, if it is there."""
    pa.array([0])


def task_base(_: Path) -> dict[str, float]:
    warm()
    return {}


def task_open(path: Path) -> dict[str, float]:
    warm()
    begin = time.perf_counter()
    tape = store.open(path)
    opened = time.perf_counter()
    count = len(tape.keys())
    listed = time.perf_counter()
    tape.rollups()
    rolled = time.perf_counter()
    read_all(tape.sequence(tape.keys()[count // 2]))
    first = time.perf_counter()
    return {
        "open_ms": 1e3 * (opened - begin),
        "list_ms": 1e3 * (listed - opened),
        "rollups_ms": 1e3 * (rolled - listed),
        "first_sequence_ms": 1e3 * (first - rolled),
    }


def task_random(path: Path) -> dict[str, float]:
    """Milliseconds a sequence; those of the processor too, which a busy machine changes less."""
    warm()
    tape = store.open(path)
    keys = tape.keys()
    picks = np.random.default_rng(0).permutation(len(keys))[: PICKS + 20]
    wall, cpu = [], []
    for i in picks:
        begin, used = time.perf_counter(), time.process_time()
        read_all(tape.sequence(keys[i]))
        wall.append(1e3 * (time.perf_counter() - begin))
        cpu.append(1e3 * (time.process_time() - used))
    found = {}
    for name, times in (("", wall), ("cpu_", cpu)):
        kept = times[20:]  # the first ones load the index, and numba where routes are packed
        found[f"{name}median"] = statistics.median(kept)
        found[f"{name}p95"] = float(np.percentile(kept, 95))
    return found


def task_iterate(path: Path) -> dict[str, float]:
    warm()
    begin = time.perf_counter()
    total = sum(read_all(sequence) for sequence in store.open(path))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "route_mb_s": total / 1e6 / seconds}


def task_rollups(path: Path) -> dict[str, float]:
    warm()
    begin = time.perf_counter()
    rows = store.open(path).rollups().num_rows
    return {"seconds": time.perf_counter() - begin, "rows": rows}


def task_routes(path: Path) -> dict[str, float]:
    """MB/s of ids through `Sequence.routes()`: index, batches and checksums included."""
    tape = store.open(path)
    sequences = list(tape)
    sequences[-1].routes()  # the index is there now
    total, begin = 0, time.perf_counter()
    for sequence in sequences:
        routes = sequence.routes()
        assert routes is not None
        total += routes.ids[:-1].nbytes
    return {"mb_s": total / 1e6 / (time.perf_counter() - begin)}


def task_codec(_: Path) -> dict[str, float]:
    """MB/s of ids of one thread: zstd as the shards have it, then `decode_plain`."""
    rollout = peers.load()
    n, layers, k = rollout.shape
    codec = pa.Codec("zstd", compression_level=1)
    plain = [codecs.encode_plain(r, peers.EXPERTS) for r in rollout.routes]
    cells = [codec.compress(data) for data in plain]
    size = len(plain[0])
    begin = time.perf_counter()
    for cell in cells:
        codecs.decode_plain(codec.decompress(cell, size), n, layers, k, peers.EXPERTS)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    for cell in cells:
        codec.decompress(cell, size)
    alone = time.perf_counter() - begin
    total = rollout.routes.nbytes / 1e6
    return {"mb_s": total / seconds, "zstd_mb_s": total / alone}


def task_write(path: Path, copies: int) -> dict[str, float]:
    warm()
    rollout = peers.load()
    begin = time.perf_counter()
    count = peers.write_tape(path, peers.copies(rollout, copies))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "sequences": count}


def task_compact(path: Path, out: Path, kind: str) -> dict[str, float]:
    warm()
    begin = time.perf_counter()
    done = compact(path, out, **KINDS[kind])
    return {
        "seconds": time.perf_counter() - begin,
        "route_rows": done.route_rows,
        "route_bytes": done.route_bytes,
    }


TASKS: dict[str, Callable[..., dict[str, float]]] = {
    name.removeprefix("task_"): function
    for name, function in list(globals().items())
    if name.startswith("task_")
}


def resident() -> dict[str, float]:
    """MB: the highest resident set of this process, and what of it is there now."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssAnon", "RssFile"):
            found[name] = int(value.split()[0]) * 1024 / 1e6
    return {
        "peak_mb": found["VmHWM"],  # not getrusage: that includes the parent before the exec
        "private_mb_at_end": found["RssAnon"],
        "mapped_mb_at_end": found["RssFile"],
    }


def fresh(task: str, *args: object, script: str) -> dict[str, float]:
    """Run a task in a new process; what it returns, and its memory."""
    command = [sys.executable, script, "--task", task, *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_task(tasks: dict[str, Callable[..., dict[str, float]]], words: list[str]) -> int:
    """In the new process: NAME, then paths, numbers or words."""
    name, *rest = words
    args = [int(w) if w.isdecimal() else Path(w) if "/" in w else w for w in rest]
    print(json.dumps(tasks[name](*args) | resident()))
    return 0
