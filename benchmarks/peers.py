"""One rollout, as a tape and in the formats that people keep such data in otherwise.

Not a benchmark: what `store.py` and `big_tape.py` share. Every peer holds the same columns and
nothing else: token ids, loss mask, raw and processed logprobs, and routes with slot order. Each has
the layout and level that gave the smallest files of those that were tried: a row a sequence, routes
by layer. What it gives back is compared bit for bit.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import numpy as np
import pyarrow as pa

from rolltape.store import Masked, TapeWriter, codecs, create_tape, new_uuid, seal, token_digest
from rolltape.store.schema import SEMANTICS

DATA = Path(__file__).parent / "data" / "moe128-rollout.npz"
EXPERTS = 128
COLUMNS = ("tokens", "loss_mask", "raw", "processed", "routes")


@dataclass(frozen=True)
class Rollout:
    """n sequences of T tokens, the first P of them a prompt.

    Args:
        tokens: uint32 [n, T].
        loss_mask: bool [n, T].
        raw: float32 [n, T - P], of the response.
        processed: the same.
        routes: uint8 [n, T - 1, layers, k].
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    raw: np.ndarray
    processed: np.ndarray
    routes: np.ndarray

    @property
    def prompt(self) -> int:
        return int(self.tokens.shape[1] - self.raw.shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the routes of one sequence."""
        return self.routes.shape[1:]

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in COLUMNS}

    def row(self, i: int) -> dict[str, np.ndarray]:
        return {name: array[i] for name, array in self.arrays().items()}


def load(path: Path = DATA) -> Rollout:
    """The rollout in benchmarks/data."""
    with np.load(path, allow_pickle=False) as file:
        tokens = np.concatenate([file["prompt"], file["toks"]], 1).astype(np.uint32)
        mask = np.broadcast_to(np.arange(tokens.shape[1]) >= file["prompt"].shape[1], tokens.shape)
        raw, processed = file["raw"].astype(np.float32), file["proc"].astype(np.float32)
        return Rollout(tokens, mask, raw, processed, file["route"].astype(np.uint8))


def copies(rollout: Rollout, count: int) -> Iterator[Rollout]:
    """The rollout, then again and again in other words, so that nobody can store a copy once.

    Each has the experts of every layer numbered anew, which keeps their statistics, and noise in
    its logprobs.
    """
    layers = np.arange(rollout.shape[1])[:, None]
    for number in range(count):
        if not number:
            yield rollout
            continue
        rng = np.random.default_rng(number)
        names = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (len(layers), 1)), axis=1)
        noise = rng.normal(0, 1e-3, (2, *rollout.raw.shape)).astype(np.float32)
        yield dataclasses.replace(
            rollout,
            raw=rollout.raw + noise[0],
            processed=rollout.processed + noise[1],
            routes=names[layers, rollout.routes],
        )


def joined(rollout: Rollout, count: int) -> Rollout:
    """Fewer and longer sequences: `count` of them beside each other are one, less the last rows."""
    if count == 1:
        return rollout
    n, prompt = len(rollout.tokens) // count, rollout.prompt
    last = rollout.routes[:, -1:]
    routes = np.concatenate([rollout.routes, last], 1).reshape(n, -1, *rollout.shape[1:])
    tokens = rollout.tokens.reshape(n, -1)
    scored = [
        np.pad(x, ((0, 0), (prompt, 0)), mode="reflect").reshape(n, -1)[:, prompt:]
        for x in (rollout.raw, rollout.processed)
    ]
    mask = np.broadcast_to(np.arange(tokens.shape[1]) >= prompt, tokens.shape)
    return Rollout(tokens, mask, scored[0], scored[1], routes[:, :-1])


# -- the tape -----------------------------------------------------------------------------


def write_tape(path: Path, rollouts: Iterable[Rollout], *, fragment: int = 64) -> int:
    """As a serving engine writes it: all sequences of a batch side by side, a fragment at a time.

    Args:
        path: of the new tape.
        rollouts: one after another, each a batch of running sequences.
        fragment: tokens.

    Returns:
        Number of sequences.
    """
    create_tape(path, role="rollout")
    engine, written = new_uuid(), 0
    with TapeWriter(path) as writer:
        for number, rollout in enumerate(rollouts):
            if not number:
                writer.append("engines", _engine_row(engine, writer.id, rollout))
            _write_batch(writer, engine, number, rollout, fragment)
            written += len(rollout.tokens)
    seal(path)
    return written


def _engine_row(engine: str, writer: str, rollout: Rollout) -> dict[str, Any]:
    _, layers, k = rollout.shape
    return {
        "engine": engine,
        "writer": writer,
        "role": "rollout",
        "adapter": "benchmark",
        "vocab_size": 4096,
        "num_layers": layers,
        "moe_layers": [list(range(layers))],
        "num_experts": EXPERTS,
        "experts_per_token": k,
    }


def _write_batch(
    writer: TapeWriter, engine: str, number: int, rollout: Rollout, fragment: int
) -> None:
    (n, total), prompt = rollout.tokens.shape, rollout.prompt
    rows, layers, k = rollout.shape
    requests = [f"{number}-{i // 8}" for i in range(n)]
    samples = [i % 8 for i in range(n)]
    key = {"engine": engine, "request": requests, "sample": samples, "pass": 0}
    for finish in ("open", "length"):
        done = finish != "open"
        writer.append(
            "sequences",
            {
                **key,
                "group": requests,
                "prompt_len": prompt,
                "length": total if done else None,
                "digest": [token_digest(prompt, t) if done else None for t in rollout.tokens],
                "finish": finish,
                "sampling": '{"temperature": 1.0, "top_k": 50, "top_p": 0.95}',
                "opened_ns": None if done else [number * 1000 + i for i in range(n)],
            },
        )
    semantics = pa.scalar(
        {
            "temperature": 1.0,
            "edits": [],
            "truncation": ["top_k=50", "top_p=0.95"],
            "vocab_size": 4096,
            "dtype": "float32",
            "source": "engine",
        },
        type=SEMANTICS,
    )
    for start in range(0, total, fragment):
        end = min(start + fragment, total)
        cells = {
            name: _scored(getattr(rollout, name), prompt, start, end)
            for name in ("raw", "processed")
        }
        span = slice(start, end)
        writer.append(
            "tokens",
            {
                **key,
                "start": start,
                "n": end - start,
                "ids": list(rollout.tokens[:, span]),
                "loss_mask": list(rollout.loss_mask[:, span]),
                **cells,
                "semantics": pa.repeat(semantics, n),
            },
        )
        end = min(end, rows)  # the last token is never an input
        if end == start:
            continue
        writer.append(
            "routes",
            {
                **key,
                "start": start,
                "n": end - start,
                "role": "used",
                "step": number * total + start,
                "weight_version": 0,
                "layers": [list(range(layers))] * n,
                "k": k,
                "num_experts": EXPERTS,
                "encoding": "plain",
                "ids": [codecs.encode_plain(r[start:end], EXPERTS) for r in rollout.routes],
            },
        )


def _scored(values: np.ndarray, prompt: int, start: int, end: int) -> list[Masked | None]:
    """Cells of a logprob column: missing in the prompt, null where all are."""
    if end <= prompt:
        return [None] * len(values)
    blank = max(prompt - start, 0)
    valid = np.arange(start, end) >= prompt
    part = values[:, max(start - prompt, 0) : end - prompt]
    return [Masked(v, valid) for v in np.pad(part, ((0, 0), (blank, 0)))]


# -- peers --------------------------------------------------------------------------------

Arrays = dict[str, np.ndarray]
#: Writes into an empty folder.
Write = Callable[[Rollout, Path], None]
#: Reads the arrays of all sequences; the rollout gives shapes only.
Read = Callable[[Path, Rollout], Arrays]


@dataclass(frozen=True)
class Peer:
    """A format: the module that it needs, how to write it and how to read it."""

    module: str
    write: Write
    read: Read


def by_layer(routes: np.ndarray) -> np.ndarray:
    """Routes [n, T, layers, k] as [n, layers, T, k], or back: of all orders of the axes the one
    that every general codec likes best."""
    return np.ascontiguousarray(np.swapaxes(routes, 1, 2))


def _write_npz(rollout: Rollout, folder: Path, *, dtype: type) -> None:
    arrays: dict[str, Any] = rollout.arrays()
    arrays["routes"] = by_layer(rollout.routes).astype(dtype)
    np.savez_compressed(folder / "rollout.npz", **arrays)


def _read_npz(folder: Path, _: Rollout) -> Arrays:
    with np.load(folder / "rollout.npz", allow_pickle=False) as file:
        found = {name: file[name] for name in COLUMNS}
    found["routes"] = by_layer(found["routes"]).astype(np.uint8)
    return found


def _table(rollout: Rollout, routes: dict[str, np.ndarray]) -> pa.Table:
    """A row a sequence: list columns, and routes [n, ...] as binary cells."""
    columns = {name: _lists(a) for name, a in rollout.arrays().items() if name != "routes"}
    columns |= {n: pa.array([x.tobytes() for x in a], pa.binary()) for n, a in routes.items()}
    return pa.table(columns)


def _lists(array: np.ndarray) -> pa.ListArray:
    offsets = np.arange(len(array) + 1, dtype=np.int32) * np.int32(array.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(array.ravel()))


def _arrays(table: pa.Table, rollout: Rollout) -> Arrays:
    """Arrays of a table from `_table`, routes in a column or in one a layer."""
    found = {}
    for name, like in rollout.arrays().items():
        if name != "routes":
            flat = table.column(name).combine_chunks().flatten()
            found[name] = flat.to_numpy(zero_copy_only=False).reshape(-1, *like.shape[1:])
    rows, layers, k = rollout.shape
    names = [name for name in table.column_names if name.startswith("routes")]
    parts = [np.frombuffer(b"".join(table.column(name).to_pylist()), np.uint8) for name in names]
    shape = (table.num_rows, layers // len(names), rows, k)
    found["routes"] = by_layer(np.concatenate([p.reshape(shape) for p in parts], axis=1))
    return found


def _write_parquet(rollout: Rollout, folder: Path, *, level: int) -> None:
    import pyarrow.parquet as pq

    floats = ["raw.list.element", "processed.list.element"]
    pq.write_table(
        _table(rollout, {"routes": by_layer(rollout.routes)}),
        folder / "rollout.parquet",
        compression="zstd",
        compression_level=level,
        use_dictionary=["tokens.list.element"],
        use_byte_stream_split=floats,
    )


def _read_parquet(folder: Path, rollout: Rollout) -> Arrays:
    import pyarrow.parquet as pq

    return _arrays(pq.read_table(folder / "rollout.parquet"), rollout)


def _write_lance(rollout: Rollout, folder: Path) -> None:
    import lance

    layers = by_layer(rollout.routes)
    routes = {f"routes{i:02}": layers[:, i] for i in range(layers.shape[1])}
    table = _table(rollout, routes)
    metadata = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "19"}
    schema = pa.schema([field.with_metadata(metadata) for field in table.schema])
    lance.write_dataset(table.cast(schema), folder / "rollout", data_storage_version="2.1")


def _read_lance(folder: Path, rollout: Rollout) -> Arrays:
    import lance

    return _arrays(lance.dataset(folder / "rollout").to_table(), rollout)


def _write_hf(rollout: Rollout, folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    table = datasets.table.InMemoryTable(_table(rollout, {"routes": by_layer(rollout.routes)}))
    datasets.Dataset(table).save_to_disk(folder / "rollout")


def _read_hf(folder: Path, rollout: Rollout) -> Arrays:
    import datasets

    dataset = datasets.load_from_disk(folder / "rollout").with_format("arrow")
    return _arrays(dataset[:], rollout)


def _item(rollout: Rollout, i: int) -> Arrays:
    row = rollout.row(i)
    row["routes"] = by_layer(row["routes"][None])[0]
    return row


def _stacked(items: Iterable[Arrays]) -> Arrays:
    rows = list(items)
    found = {name: np.stack([row[name] for row in rows]) for name in COLUMNS}
    found["routes"] = by_layer(found["routes"])
    return found


def _write_mds(rollout: Rollout, folder: Path) -> None:
    import streaming

    columns = {n: f"ndarray:{a.dtype.name}" for n, a in rollout.arrays().items()}
    columns["loss_mask"] = "ndarray:uint8"  # it has no bool
    out = str(folder / "rollout")
    with streaming.MDSWriter(out=out, columns=columns, compression="zstd:19") as writer:
        for i in range(len(rollout.tokens)):
            item = _item(rollout, i)
            writer.write({**item, "loss_mask": item["loss_mask"].astype(np.uint8)})


def _read_mds(folder: Path, _: Rollout) -> Arrays:
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder / "rollout"), batch_size=1)
    found = _stacked(dataset[i] for i in range(dataset.num_samples))
    return found | {"loss_mask": found["loss_mask"].astype(bool)}


def _write_litdata(rollout: Rollout, folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=functools.partial(_item, rollout),
        inputs=list(range(len(rollout.tokens))),
        output_dir=str(folder / "rollout"),
        chunk_bytes="64MB",
        num_workers=1,
        compression="zstd",
        verbose=False,
    )


def _read_litdata(folder: Path, _: Rollout) -> Arrays:
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "rollout"), shuffle=False)
    return _stacked(dataset[i] for i in range(len(dataset)))


PEERS = {
    "npz int16": Peer("numpy", functools.partial(_write_npz, dtype=np.int16), _read_npz),
    "npz uint8": Peer("numpy", functools.partial(_write_npz, dtype=np.uint8), _read_npz),
    "parquet zstd-3": Peer("pyarrow", functools.partial(_write_parquet, level=3), _read_parquet),
    "parquet zstd-19": Peer("pyarrow", functools.partial(_write_parquet, level=19), _read_parquet),
    "lance zstd-19": Peer("lance", _write_lance, _read_lance),
    "mosaicml mds zstd-19": Peer("streaming", _write_mds, _read_mds),
    "hf datasets": Peer("datasets", _write_hf, _read_hf),
    "litdata zstd": Peer("litdata", _write_litdata, _read_litdata),
}


def missing(peer: Peer) -> str | None:
    """Why a peer cannot run here, or None."""
    try:
        importlib.import_module(peer.module)
    except Exception as error:  # a module that is half there raises whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def size_of(path: Path) -> int:
    """Bytes of all files in a folder, metadata and indices too."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def check(name: str, found: Arrays, rollout: Rollout) -> None:
    """Exit unless every array is what the rollout holds, bit for bit."""
    for column, array in rollout.arrays().items():
        got = found[column]
        same = got.dtype == array.dtype and got.shape == array.shape
        if not same or np.ascontiguousarray(got).tobytes() != array.tobytes():
            raise SystemExit(f"{name}: {column} is not what was written")


def measure(name: str, rollout: Rollout, folder: Path) -> int:
    """Bytes of a peer that holds a rollout, after it was read back and compared."""
    peer = PEERS[name]
    folder.mkdir()
    peer.write(rollout, folder)
    size = size_of(folder)  # before reading: some keep a decompressed copy beside the file
    check(name, peer.read(folder, rollout), rollout)
    return size
