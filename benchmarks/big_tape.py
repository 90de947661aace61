"""A tape larger than memory should matter: written, then read in new processes, with peak memory.

`python benchmarks/big_tape.py --gb 10 --dir DIR [--json]`. The rollout in benchmarks/data is
repeated, each time with experts numbered anew and other noise in its logprobs, until the shards
have that size; routes are plain, as they are recorded. `--joined 8` makes eight sequences one, for
longer and fewer sequences (4,096 tokens); the default is as they are, 512 tokens and many of them,
which is the harder case. The tape is removed afterwards.

`peak_mb` is the resident set of a process as the kernel counts it. It includes the pages of the
files that are mapped, which the kernel takes back when it wants to; `private_mb_at_end` does not.
The goal for every reader is a peak of less than 500 MB.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import peers
from processes import TASKS, fresh, run_task, warm

from rolltape import store

GOAL_MB = 500.0


def task_write_gb(path: Path, megabytes: int, joined: int) -> dict[str, float]:
    warm()
    rollout = peers.joined(peers.load(), joined)
    begin = time.perf_counter()

    def until_large() -> Iterator[peers.Rollout]:
        for number, copy in enumerate(peers.copies(rollout, sys.maxsize)):
            if number % 16 == 0 and number and peers.size_of(path) >= megabytes * 1e6:
                return
            yield copy

    count = peers.write_tape(path, until_large())
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "sequences": count}


def task_count(path: Path) -> dict[str, float]:
    warm()
    begin = time.perf_counter()
    rows = store.open(path).count_rows()
    return {"seconds": time.perf_counter() - begin, "rows": rows}


def task_fragments(path: Path) -> dict[str, float]:
    """Rows of `tokens`, counted batch by batch."""
    warm()
    begin = time.perf_counter()
    rows = store.open(path).dataset("tokens").count_rows()
    return {"seconds": time.perf_counter() - begin, "rows": rows}


def task_duckdb(path: Path) -> dict[str, float]:
    """A scan of a list column of every sequence, through the Arrow stream."""
    import duckdb

    warm()
    begin = time.perf_counter()
    tape = store.open(path, columns=["id", "processed"])
    connection = duckdb.connect(config={"threads": 1})
    connection.register("tape", tape)
    query = "select count(*), avg(list_avg(processed)) from tape"
    rows, mean = connection.sql(query).fetchall()[0]
    return {"seconds": time.perf_counter() - begin, "rows": rows, "mean": mean}


def task_duckdb_facts(path: Path) -> dict[str, float]:
    """A scan of facts that the seal already has."""
    import duckdb

    warm()
    begin = time.perf_counter()
    tape = store.open(path, columns=["group", "processed_sum", "processed_count"])
    connection = duckdb.connect(config={"threads": 1})
    connection.register("tape", tape)
    query = 'select count(distinct "group"), sum(processed_count) from tape'
    groups, tokens = connection.sql(query).fetchall()[0]
    return {"seconds": time.perf_counter() - begin, "groups": groups, "tokens": int(tokens)}


READERS = ("open", "rollups", "count", "fragments", "duckdb_facts", "random", "duckdb", "iterate")
HERE = TASKS | {
    "write_gb": task_write_gb,
    "count": task_count,
    "fragments": task_fragments,
    "duckdb": task_duckdb,
    "duckdb_facts": task_duckdb_facts,
}


def measure(
    folder: Path, gigabytes: float, joined: int, repeat: int, *, quiet: bool
) -> dict[str, Any]:
    path = folder / "tape"
    rows: dict[str, dict[str, float]] = {}
    for name in ("base", "write_gb", *READERS):
        args = (int(1000 * gigabytes), joined) if name == "write_gb" else ()
        times = repeat if name in READERS else 1
        rounds = [fresh(name, path, *args, script=__file__) for _ in range(times)]
        rows[name] = {n: statistics.median(r[n] for r in rounds) for n in rounds[0]}
        rows[name]["peak_mb"] = max(r["peak_mb"] for r in rounds)
        if not quiet:
            report(name, rows[name])
    return {
        "bytes": peers.size_of(path),
        "sequences": rows["write_gb"]["sequences"],
        "processes": rows,
        "reader_peak_mb": max(rows[name]["peak_mb"] for name in READERS),
        "goal_mb": GOAL_MB,
    }


def report(name: str, row: dict[str, float]) -> None:
    rest = {n: round(v, 2) for n, v in row.items() if not n.endswith(("_mb", "_end"))}
    peak, private = row["peak_mb"], row["private_mb_at_end"]
    print(f"{name:14} peak {peak:6.0f} MB, {private:5.0f} private  {rest}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.5, help="size of the tape on disk")
    parser.add_argument("--joined", type=int, default=1, metavar="N", help="sequences made one")
    parser.add_argument("--repeat", type=int, default=1, help="processes a figure")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        return run_task(HERE, args.task)
    free = shutil.disk_usage(args.dir or tempfile.gettempdir()).free
    if free < 1.2e9 * args.gb:
        raise SystemExit(f"{free / 1e9:.1f} GB free, {args.gb} wanted: choose another --dir")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="big-tape-") as folder:
        found = measure(Path(folder), args.gb, args.joined, args.repeat, quiet=args.json)
    if not args.json:
        print(f"{found['bytes'] / 1e9:.2f} GB, {found['sequences']:,} sequences")
    print(json.dumps({"benchmark": "big_tape", "joined": args.joined, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
