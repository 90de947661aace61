"""Size, speed and memory of the tape store, beside other formats that hold the same columns.

`python benchmarks/store.py [--json]`. Everything is measured in one run, each figure of speed and
memory in a process of its own that sees a tape for the first time, with a warm page cache.

*Sizes* are all files of the rollout in benchmarks/data: header, seal and index of a tape, metadata
of a peer. `ratio_smallest_peer` is the packed tape to the smallest peer. `bytes_ordered` and
`bytes_set` are the shards of `routes` per (token, layer). A peer that is not installed is named in
`not_run`, with the reason.

*Speed and memory* are of `--copies` such rollouts, each with experts numbered anew and other noise
in its logprobs; 700 make a tape of more than 2 GB, and `tape_bytes` says how large it was.
`random_ms` is one sequence with all columns, for 200 picked at random, none twice (44 of the 64 in
one rollout, whose few batches are then soon in memory). Peak memory is the resident set
as the kernel counts it, mapped pages of files included; `base` is what the imports alone take.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import peers
import processes

from rolltape import store
from rolltape.store.compact import compact

TARGETS = {
    "ratio_smallest_peer": 0.75,
    "bytes_ordered": 3.9,
    "bytes_set": 3.2,
    "plain_decode_mb_s": 400,
    "random_ms plain": 10,
    "random_ms packed": 100,
}

# -- the comparison -------------------------------------------------------------------------


def sizes(folder: Path) -> dict[str, Any]:
    """Bytes of the rollout in every format."""
    rollout = peers.load()
    bytes_: dict[str, int] = {}
    routes: dict[str, float] = {}
    recorded = folder / "recorded"
    peers.write_tape(recorded, [rollout])
    check_tape(recorded, rollout)
    bytes_["tape recorded"] = peers.size_of(recorded)
    for kind, options in processes.KINDS.items():
        out = folder / kind.replace(" ", "-")
        done = compact(recorded, out, **options)
        bytes_[f"tape {kind}"] = peers.size_of(out)
        routes[kind] = done.route_bytes / done.route_rows
        if kind != "packed sets":
            check_tape(out, rollout)
    skipped = {}
    for name, peer in peers.PEERS.items():
        reason = peers.missing(peer)
        if reason is None:
            bytes_[name] = peers.measure(name, rollout, folder / name.replace(" ", "-"))
        else:
            skipped[name] = reason
    smallest = min((n for n in bytes_ if n in peers.PEERS), key=bytes_.__getitem__)
    return {
        "bytes": bytes_,
        "smallest_peer": smallest,
        "ratio_smallest_peer": bytes_["tape packed"] / bytes_[smallest],
        "ratio_to_peers": {
            n: bytes_["tape packed"] / bytes_[n] for n in bytes_ if n in peers.PEERS
        },
        "bytes_ordered": routes["packed"],
        "bytes_set": routes["packed sets"],
        "bytes_plain": routes["plain"],
        "not_run": skipped,
    }


def check_tape(path: Path, rollout: peers.Rollout) -> None:
    """Exit unless the tape gives back the rollout, bit for bit."""
    prompt = rollout.prompt
    found: dict[str, list[np.ndarray]] = {name: [] for name in peers.COLUMNS}
    for sequence in store.open(path):
        routes = sequence.routes()
        assert routes is not None and routes.valid[:-1].all() and not routes.valid[-1].any()
        for name in ("raw", "processed"):
            column = sequence.logprob(name)
            assert not column.valid[:prompt].any() and column.valid[prompt:].all()
            found[name].append(column.values[prompt:])
        found["tokens"].append(sequence.tokens.values)
        found["loss_mask"].append(sequence.loss_mask.values)
        found["routes"].append(routes.ids[:-1])
    peers.check(path.name, {n: np.stack(a) for n, a in found.items()}, rollout)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def speeds(folder: Path, copies: int, repeat: int) -> dict[str, Any]:
    """Times and memory of reading and writing `copies` rollouts."""
    fresh = functools.partial(processes.fresh, script=__file__)
    tapes = {kind: folder / f"large-{kind}" for kind in ("recorded", "plain", "packed")}
    memory = {"base": fresh("base", folder)}
    memory["write"] = fresh("write", tapes["recorded"], copies)
    for kind in ("plain", "packed"):
        memory[f"compact {kind}"] = fresh("compact", tapes["recorded"], tapes[kind], kind)
    found: dict[str, Any] = {
        "tape_bytes": {kind: peers.size_of(path) for kind, path in tapes.items()},
        "sequences": memory["write"]["sequences"],
        "random_ms": {},
        "open": {},
        "plain_decode_mb_s": {},
    }
    for kind, path in tapes.items():
        memory[f"iterate {kind}"] = fresh("iterate", path)
        rounds = [fresh("random", path) for _ in range(repeat)]
        found["random_ms"][kind] = {
            name: spread([r[name] for r in rounds])
            for name in ("median", "p95", "cpu_median", "cpu_p95")
        }
        rounds = [fresh("open", path) for _ in range(repeat)]
        found["open"][kind] = {
            name: spread([r[name] for r in rounds]) for name in rounds[0] if name.endswith("_ms")
        }
    memory["rollups"] = fresh("rollups", tapes["recorded"])
    for kind in ("recorded", "plain"):
        rounds = [fresh("routes", tapes[kind]) for _ in range(repeat)]
        found["plain_decode_mb_s"][f"{kind}, Sequence.routes"] = spread([r["mb_s"] for r in rounds])
    rounds = [fresh("codec", folder) for _ in range(repeat)]
    found["plain_decode_mb_s"]["codec alone"] = spread([r["mb_s"] for r in rounds])
    found["plain_decode_mb_s"]["zstd alone"] = spread([r["zstd_mb_s"] for r in rounds])
    return {**found, "memory": memory}


def report(found: dict[str, Any]) -> None:
    packed = found["bytes"]["tape packed"]
    for name, size in found["bytes"].items():
        print(f"{name:22} {size / 1e6:7.3f} MB   tape packed / this {packed / size:.3f}")
    for name, reason in found["not_run"].items():
        print(f"{name:22} not run: {reason}")
    for name in ("bytes_plain", "bytes_ordered", "bytes_set"):
        print(f"{name:22} {found[name]:7.3f} a (token, layer)")
    size = found["tape_bytes"]["recorded"] / 1e6
    print(f"measured on {found['sequences']:,} sequences, {size:,.0f} MB as recorded:")
    for kind, times in found["random_ms"].items():
        median, p95, cpu = (times[n]["median"] for n in ("median", "p95", "cpu_median"))
        print(f"one sequence, {kind:8} {median:7.2f} ms, p95 {p95:.2f} ms; processor {cpu:.2f} ms")
    for kind, times in found["open"].items():
        print(f"{kind:22} " + ", ".join(f"{n} {t['median']:.1f}" for n, t in times.items()))
    for name, speed in found["plain_decode_mb_s"].items():
        print(f"{name:26} {speed['median']:7.0f} MB/s of ids")
    for name, row in found["memory"].items():
        print(f"{name:22} peak {row['peak_mb']:6.0f} MB, {row.get('seconds', 0):.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=1, help="rollouts in the tape that is timed")
    parser.add_argument("--repeat", type=int, default=5, help="processes a figure of speed")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        return processes.run_task(processes.TASKS, args.task)
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="store-") as folder:
        found = sizes(Path(folder)) | speeds(Path(folder), args.copies, args.repeat)
    result = {"benchmark": "store", "copies": args.copies, **found, "targets": TARGETS}
    if not args.json:
        report(found)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
