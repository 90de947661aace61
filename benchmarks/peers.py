"""One rollout, as a tape and in the formats that people keep such data in otherwise.

Not a benchmark: what `store.py` and `big_tape.py` share. Every peer holds the same columns and
nothing else: token ids, loss mask, raw and processed logprobs, and routes with slot order. Each is
written in the layout and at the level that gave the smallest files of those that were tried, and
what it gives back is compared bit for bit.
"""

import functools
import itertools
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
        noisy = [
            x + rng.normal(0, 1e-3, x.shape).astype(np.float32)
            for x in (rollout.raw, rollout.processed)
        ]
        routes = names[layers, rollout.routes]
        yield Rollout(rollout.tokens, rollout.loss_mask, *noisy, routes)


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
    return Rollout(tokens, mask, *scored, routes[:, :-1])


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

#: Writes into an empty folder.
Write = Callable[[Rollout, Path], None]
#: Reads the arrays of all sequences; the rollout gives shapes only.
Read = Callable[[Path, Rollout], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Peer:
    """A format: the module that it needs, how to write it and how to read it."""

    module: str
    write: Write
    read: Read


def planes(routes: np.ndarray) -> np.ndarray:
    """Routes [..., T, layers, k] as [..., k, layers, T]: each slot of a layer is one run."""
    return np.ascontiguousarray(np.swapaxes(routes, -1, -3))


def _write_npz(rollout: Rollout, folder: Path, *, dtype: type) -> None:
    arrays = rollout.arrays()
    arrays["routes"] = planes(rollout.routes).astype(dtype)
    np.savez_compressed(folder / "rollout.npz", **arrays)  # type: ignore[arg-type]


def _read_npz(folder: Path, _: Rollout) -> dict[str, np.ndarray]:
    with np.load(folder / "rollout.npz", allow_pickle=False) as file:
        found = {name: file[name] for name in COLUMNS}
    found["routes"] = planes(found["routes"]).astype(np.uint8)
    return found


def sequence_table(rollout: Rollout) -> pa.Table:
    """A row a sequence, list columns; each slot of a layer of the routes is one run."""
    return pa.table(
        {
            name: _lists(planes(array) if name == "routes" else array)
            for name, array in rollout.arrays().items()
        }
    )


def _lists(array: np.ndarray) -> pa.ListArray:
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * np.int32(flat.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.ravel()))


def _from_table(table: pa.Table, rollout: Rollout) -> dict[str, np.ndarray]:
    found = {}
    for name, like in rollout.arrays().items():
        flat = table.column(name).combine_chunks().flatten()
        values = flat.to_numpy(zero_copy_only=False)
        if name == "routes":
            rows, layers, k = rollout.shape
            found[name] = planes(values.reshape(-1, k, layers, rows))
        else:
            found[name] = values.reshape(-1, *like.shape[1:])
    return found
