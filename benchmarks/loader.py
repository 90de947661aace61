"""How fast training batches with routes come from a tape, beside other formats, in the same run.

`python benchmarks/loader.py [--json]`. The rollout in benchmarks/data is repeated, each time with
experts numbered anew and other noise in its log-probabilities: nobody can store a copy once.
Every contender gives the same padded batches of the same sequences in the same order, which is
checked, in one process without workers, with a warm page cache; best of `--repeat` passes, taken in
turns. What a contender reads it may map, cache or prefetch as its library does by default.

`ratio_packed` is tokens/s of the compacted tape to the fastest contender that is not larger on
disk, or to the smallest if all are larger; `ratio_plain` that of the tape that `compact --routes
plain` makes to the fastest of all; `tape recorded` is the tape as it was written; `size_packed` is
bytes of the compacted tape to those of the smallest contender. One that cannot be imported is
named in `not_run`.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import numpy as np
import pyarrow as pa
import torch

from rolltape.store import TapeWriter, codecs, create_tape, new_uuid, seal, token_digest
from rolltape.store.compact import compact
from rolltape.store.loader import TapeDataset

DATA = Path(__file__).parent / "data" / "moe128-rollout.npz"
TARGETS = {"ratio_packed": 2.0, "ratio_plain": 1.0}

Fields = dict[str, torch.Tensor]
#: Gets ready for one pass and returns it; only the pass is timed.
Reader = Callable[[], Iterator[Fields]]


@dataclass(frozen=True)
class Rollout:
    """n sequences of T tokens: tokens uint32 [n, T], logprobs float32 [n, T - P] of the response,
    routes uint8 [n, T - 1, layers, k]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray

    @property
    def prompt(self) -> int:
        return self.tokens.shape[1] - self.logprobs.shape[1]


def load(count: int) -> Rollout:
    """`count` sequences: those of the file, then again and again in other words."""
    with np.load(DATA, allow_pickle=False) as file:
        tokens = np.concatenate([file["prompt"], file["toks"]], 1).astype(np.uint32)
        logprobs, routes = file["proc"].astype(np.float32), file["route"].astype(np.uint8)
    copy, pick = np.divmod(np.arange(count), len(tokens))
    routes = routes[pick]
    rng = np.random.default_rng(1)
    for number in range(1, int(copy[-1]) + 1):
        names = rng.permuted(np.tile(np.arange(128, dtype=np.uint8), (routes.shape[2], 1)), axis=1)
        mine = copy == number
        routes[mine] = names[np.arange(routes.shape[2])[:, None], routes[mine]]
    noise = np.random.default_rng(0).normal(0, 1e-3, (count, logprobs.shape[1]))
    return Rollout(tokens[pick], logprobs[pick] + noise.astype(np.float32), routes)


# ours


def write_tape(path: Path, data: Rollout) -> None:
    """One fragment a sequence, as an engine that records at the end of a request writes it."""
    _, rows, layers, k = data.routes.shape
    total, prompt, engine = data.tokens.shape[1], data.prompt, new_uuid()
    blank = np.full(prompt, np.nan, np.float32)
    mask = np.arange(total) >= prompt
    experts = 128
    create_tape(path, role="rollout")
    with TapeWriter(path) as writer:
        writer.append(
            "engines",
            {
                "engine": engine,
                "writer": writer.id,
                "role": "rollout",
                "adapter": "benchmark",
                "moe_layers": [list(range(layers))],
                "num_experts": experts,
                "experts_per_token": k,
            },
        )
        for i in range(len(data.tokens)):
            key = {"engine": engine, "request": str(i), "sample": 0, "pass": 0}
            ids = data.tokens[i]
            closing = {"prompt_len": prompt, "length": total, "finish": "length"}
            digest = token_digest(prompt, ids)
            writer.append("sequences", {**key, **closing, "digest": digest, "opened_ns": i})
            scored = pa.array(np.concatenate([blank, data.logprobs[i]]), mask=~mask)
            writer.append(
                "tokens",
                {
                    **key,
                    "start": 0,
                    "n": total,
                    "ids": [ids],
                    "loss_mask": [mask],
                    "processed": pa.ListArray.from_arrays([0, total], scored),
                },
            )
            writer.append(
                "routes",
                {
                    **key,
                    "start": 0,
                    "n": rows,
                    "role": "used",
                    "layers": [list(range(layers))],
                    "k": k,
                    "num_experts": experts,
                    "encoding": "plain",
                    "ids": codecs.encode_plain(data.routes[i], experts),
                },
            )
    seal(path)


def read_tape(path: Path, batch: int) -> Reader:
    def read() -> Iterator[Fields]:
        # opened anew for each pass: nothing that is decoded is still there
        dataset = TapeDataset(path, batch_size=batch, columns=("logprobs", "routes"))
        return ({name: getattr(b, name) for name in FIELDS} for b in dataset)

    return read


# the others: what is the same for all of them


FIELDS = ("input_ids", "loss_mask", "logprobs", "routes", "routes_valid")

#: (tokens, logprobs, routes) of one sequence, as numpy arrays.
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


def assemble(triples: list[Triple], shape: tuple[int, int]) -> Fields:
    """A padded batch of sequences that are all of one length."""
    total, prompt = shape
    n, (layers, k) = len(triples), triples[0][2].shape[1:]
    tokens = np.empty((n, total), np.int64)
    logprobs = np.full((n, total), np.nan, np.float32)
    routes = np.zeros((n, total, layers, k), np.uint8)
    valid = np.zeros((n, total, layers), bool)
    loss = np.zeros((n, total), bool)
    loss[:, prompt:] = True
    valid[:, : total - 1] = True
    for i, (ids, scores, experts) in enumerate(triples):
        tokens[i] = ids
        logprobs[i, prompt:] = scores
        routes[i, : total - 1] = experts
    arrays = dict(zip(FIELDS, (tokens, loss, logprobs, routes, valid), strict=True))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def arrow_triples(table: pa.Table, routes_shape: tuple[int, ...]) -> list[Triple]:
    """Rows of a table with list columns tokens, logprobs and binary routes, without copies."""
    ids, scores, routes = (table.column(c).combine_chunks() for c in COLUMNS)
    parts = []
    for array in (ids, scores):
        edges = array.offsets.to_numpy()
        flat = array.values.to_numpy()
        parts.append([flat[a:b] for a, b in itertools.pairwise(edges)])
    experts = [np.frombuffer(value.as_buffer(), np.uint8).reshape(routes_shape) for value in routes]
    return list(zip(*parts, experts, strict=True))


COLUMNS = ("tokens", "logprobs", "routes")


def arrow_table(data: Rollout) -> pa.Table:
    return pa.table(
        {
            "tokens": pa.array(list(data.tokens), pa.list_(pa.uint32())),
            "logprobs": pa.array(list(data.logprobs), pa.list_(pa.float32())),
            "routes": pa.array([r.tobytes() for r in data.routes], pa.binary()),
        }
    )


@dataclass(frozen=True)
class Setting:
    """What a contender is given: the data, a new folder, sequences a batch."""

    data: Rollout
    folder: Path
    batch: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.tokens.shape[1], self.data.prompt

    @property
    def starts(self) -> range:
        return range(0, len(self.data.tokens), self.batch)

    def rows(self, start: int) -> range:
        return range(start, min(start + self.batch, len(self.data.tokens)))

    def by_item(self, get: Callable[[int], Triple]) -> Reader:
        def read() -> Iterator[Fields]:
            for start in self.starts:
                yield assemble([get(i) for i in self.rows(start)], self.shape)

        return read


def npz(setting: Setting, *, dtype: type) -> Reader:
    data, path = setting.data, setting.folder / "data.npz"
    members: dict[str, Any] = {}
    for i in range(len(data.tokens)):
        members[f"tokens{i}"] = data.tokens[i]
        members[f"logprobs{i}"] = data.logprobs[i]
        members[f"routes{i}"] = data.routes[i].astype(dtype)
    np.savez_compressed(path, **members)
    file = np.load(path, allow_pickle=False)
    return setting.by_item(lambda i: tuple(file[f"{c}{i}"] for c in COLUMNS))  # type: ignore[arg-type,return-value]


def parquet(setting: Setting) -> Reader:
    import pyarrow.parquet as pq

    path = setting.folder / "data.parquet"
    pq.write_table(
        arrow_table(setting.data),
        path,
        compression="zstd",
        row_group_size=setting.batch,
        use_dictionary=False,
    )
    file = pq.ParquetFile(path, memory_map=True)
    shape = setting.data.routes.shape[1:]

    def read() -> Iterator[Fields]:
        for group in range(file.num_row_groups):
            yield assemble(arrow_triples(file.read_row_group(group), shape), setting.shape)

    return read


def lance(setting: Setting) -> Reader:
    import lance as library

    path = setting.folder / "data.lance"
    library.write_dataset(arrow_table(setting.data), path)
    dataset = library.dataset(path)
    shape = setting.data.routes.shape[1:]

    def read() -> Iterator[Fields]:
        for found in dataset.to_batches(batch_size=setting.batch):
            yield assemble(arrow_triples(pa.Table.from_batches([found]), shape), setting.shape)

    return read


def hf_datasets(setting: Setting) -> Reader:
    import datasets as library

    library.disable_progress_bars()
    table = arrow_table(setting.data)
    library.Dataset(library.table.InMemoryTable(table)).save_to_disk(setting.folder / "data")
    dataset = library.load_from_disk(setting.folder / "data").with_format("arrow")
    shape = setting.data.routes.shape[1:]

    def read() -> Iterator[Fields]:
        for start in setting.starts:
            rows = setting.rows(start)
            yield assemble(arrow_triples(dataset[rows.start : rows.stop], shape), setting.shape)

    return read


def mds(setting: Setting, *, compression: str | None) -> Reader:
    import streaming

    data, out = setting.data, str(setting.folder / "data")
    columns = {"tokens": "ndarray:uint32", "logprobs": "ndarray:float32", "routes": "ndarray:uint8"}
    with streaming.MDSWriter(out=out, columns=columns, compression=compression) as writer:
        for row in zip(data.tokens, data.logprobs, data.routes, strict=True):
            writer.write(dict(zip(COLUMNS, row, strict=True)))
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=out, batch_size=setting.batch, shuffle=False)

    def get(i: int) -> Triple:
        found = dataset[i]
        return found["tokens"], found["logprobs"], found["routes"]

    return setting.by_item(get)


def _row(i: int, data: Rollout) -> dict[str, np.ndarray]:
    return {"tokens": data.tokens[i], "logprobs": data.logprobs[i], "routes": data.routes[i]}


def lit_data(setting: Setting, *, compression: str | None) -> Reader:
    import litdata

    out = str(setting.folder / "data")
    litdata.optimize(
        fn=functools.partial(_row, data=setting.data),
        inputs=list(range(len(setting.data.tokens))),
        output_dir=out,
        chunk_bytes="64MB",
        num_workers=1,
        compression=compression,
        verbose=False,
    )
    dataset = litdata.StreamingDataset(out, shuffle=False)

    def get(i: int) -> Triple:
        found = dataset[i]
        return found["tokens"], found["logprobs"], found["routes"]

    return setting.by_item(get)


#: By name: the module that it needs, and how it is written and read.
PEERS: dict[str, tuple[str, Callable[[Setting], Reader]]] = {
    "npz int16": ("numpy", functools.partial(npz, dtype=np.int16)),
    "npz uint8": ("numpy", functools.partial(npz, dtype=np.uint8)),
    "parquet zstd": ("pyarrow.parquet", parquet),
    "lance": ("lance", lance),
    "mosaicml mds": ("streaming", functools.partial(mds, compression=None)),
    "mosaicml mds zstd": ("streaming", functools.partial(mds, compression="zstd")),
    "hf datasets": ("datasets", hf_datasets),
    "litdata": ("litdata", functools.partial(lit_data, compression=None)),
    "litdata zstd": ("litdata", functools.partial(lit_data, compression="zstd")),
}


def check(name: str, ours: Reader, theirs: Reader) -> None:
    """Every batch equal, NaN where nothing was recorded."""
    count = 0
    for a, b in zip(ours(), theirs(), strict=True):
        for field in FIELDS:
            x, y = a[field], b[field]
            if field == "routes":
                x, y = x[a["routes_valid"]], y[b["routes_valid"]]
            if x.dtype != y.dtype or not torch.equal(
                x.nan_to_num(7.0) if x.is_floating_point() else x,
                y.nan_to_num(7.0) if y.is_floating_point() else y,
            ):
                raise SystemExit(f"{name}: {field} of batch {count} is not what the tape holds")
        count += 1
    if not count:
        raise SystemExit(f"{name}: no batch")


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def seconds(read: Reader) -> float:
    batches = read()
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def contenders(
    setting: Setting, only: list[str] | None
) -> tuple[dict[str, Reader], dict[str, Path], dict[str, str]]:
    """Readers and folders by name, ours first, and why some do not run."""
    readers: dict[str, Reader] = {}
    folders: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    recorded = setting.folder / "recorded"
    write_tape(recorded, setting.data)
    ours = {"recorded": recorded, "plain": setting.folder / "plain"}
    ours["packed"] = setting.folder / "packed"
    for routes in ("plain", "packed"):
        compact(recorded, ours[routes], routes=routes)
    for name, folder in ours.items():
        readers[f"tape {name}"] = read_tape(folder, setting.batch)
        folders[f"tape {name}"] = folder
    for name, (module, make) in PEERS.items():
        if only is not None and name not in only:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises
            skipped[name] = str(error).splitlines()[0]
            continue
        folder = setting.folder / name.replace(" ", "-")
        folder.mkdir()
        readers[name] = make(Setting(setting.data, folder, setting.batch))
        folders[name] = folder
    return readers, folders, skipped


def measure(setting: Setting, repeat: int, only: list[str] | None) -> dict[str, Any]:
    readers, folders, skipped = contenders(setting, only)
    for name, read in readers.items():
        check(name, readers["tape plain"], read)  # this also warms the page cache
    # after reading: some keep a decompressed copy beside the file
    sizes = {name: size_of(folder) for name, folder in folders.items()}
    best = dict.fromkeys(readers, float("inf"))
    for _ in range(repeat):
        for name, read in readers.items():
            best[name] = min(best[name], seconds(read))
    tokens = setting.data.tokens.size
    speed = {name: tokens / taken for name, taken in best.items()}
    peers = [name for name in readers if not name.startswith("tape")]
    fastest = max(peers, key=speed.__getitem__)
    ratios: dict[str, Any] = {
        "ratio_plain": speed["tape plain"] / speed[fastest],
        "ratio_plain_to": fastest,
    }
    small = [name for name in peers if sizes[name] <= sizes["tape packed"]]
    # nobody is as small: the smallest one there is
    rival = max(small, key=speed.__getitem__) if small else min(peers, key=sizes.__getitem__)
    ratios |= {
        "ratio_packed": speed["tape packed"] / speed[rival],
        "ratio_packed_to": rival,
        "ratio_packed_rival_is_larger": not small,
        "size_packed": sizes["tape packed"] / min(sizes[name] for name in peers),
    }
    rows = {
        name: {
            "bytes": sizes[name],
            "bytes_per_token": sizes[name] / tokens,
            "tokens_per_s": speed[name],
            "to_tape_plain": speed[name] / speed["tape plain"],
        }
        for name in readers
    }
    return {"rows": rows, **ratios, "not_run": skipped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", help="only these, by name, with commas between")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    only = args.peers.split(",") if args.peers else None
    try:
        found = measure(Setting(load(args.sequences), folder, args.batch), args.repeat, only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "benchmark": "loader",
        "sequences": args.sequences,
        "batch": args.batch,
        **found,
        "targets": TARGETS,
        "torch": torch.__version__,
    }
    if not args.json:
        for name, row in found["rows"].items():
            print(
                f"{name:18} {row['bytes'] / 1e6:8.1f} MB {row['bytes_per_token']:7.1f} B/token "
                f"{row['tokens_per_s'] / 1e6:8.2f} M tokens/s"
            )
        for name, reason in found["not_run"].items():
            print(f"{name:18} not run: {reason}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
