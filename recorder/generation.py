"""From what the hooks of one `generate()` call kept to rows of a tape; runs in the writer thread.

Words used here: a *step* is one sampling step i = 0, 1, ...; a *column* is an index into the padded
batch; row b's position is column - pad_left[b]. The forwards of step i end at column S + i - 1,
where S is the padded prompt width, and token i of a row stands at column S + i.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.recorder.sampling import Sampling
from rolltape.recorder.session import Job
from rolltape.store import Masked, TapeWriter, codecs, token_digest
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL

if TYPE_CHECKING:
    import torch

_CODEC = "plain"


@dataclass
class Forward:
    """One forward of the model: `columns` tokens for every row of the batch.

    `routes` maps the index of a MoE block to (ids, weights), each [rows * columns, k]; `layers`
    maps a site to hidden states [kept rows, columns, width].
    """

    step: int
    t_ns: int
    columns: int
    experts: str | None
    routes: dict[int, tuple[torch.Tensor, torch.Tensor]]
    layers: dict[str, torch.Tensor]


@dataclass
class StepData:
    """One sampling step; tensors [rows], `support` a bitmap [rows, ceil(V / 8)]."""

    forwards: list[Forward]
    token: torch.Tensor
    raw: torch.Tensor | None
    scaled: torch.Tensor | None
    processed: torch.Tensor | None
    support: torch.Tensor | None
    alive: torch.Tensor  # before this step's token
    done: torch.Tensor  # the stopping criteria's answer after it

    def tensors(self) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        """Every tensor with the place that holds it: (container, key, tensor)."""
        for name in ("token", "raw", "scaled", "processed", "support", "alive", "done"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield self.__dict__, name, tensor
        for forward in self.forwards:
            for index, (ids, weights) in forward.routes.items():
                yield forward.routes, (index, 0), ids
                yield forward.routes, (index, 1), weights
            for site, hidden in forward.layers.items():
                yield forward.layers, site, hidden

    @property
    def nbytes(self) -> int:
        """Memory held by the tensors."""
        return sum(tensor.nbytes for _, _, tensor in self.tensors())


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one call.

    Args:
        first: number of the first step.
        steps: what was kept, on the host or on its way there.
        vocab: width of the logits.
        finish: why rows that have not ended do end with this block; None: they ran to the end.
        closing: whether this is the last block of the call.
        ready: something with `synchronize()` to wait for before reading, or None.
    """

    first: int
    steps: list[StepData]
    vocab: int
    finish: str | None
    closing: bool
    ready: Any


@dataclass
class Call:
    """One `generate()` call. The fields after `threads` are kept up by the writer thread.

    Args:
        prompts: token ids [rows, S], left padded.
        pad_left: padding columns of each row.
        samples: rows per prompt.
        layers: model layer number of each MoE block; empty when routes are not recorded.
        kept_rows: rows whose layer outputs are kept.
        cached: columns that the KV cache held already.
        route_gap: reason given where a MoE block showed no route.
    """

    engine: str
    number: int
    prompts: np.ndarray
    pad_left: np.ndarray
    samples: int
    sampling: Sampling
    layers: tuple[int, ...]
    k: int
    num_experts: int
    weight_version: int
    kept_rows: int
    cached: int
    route_gap: str
    cache: str | None
    attention: str | None
    sdpa: str
    threads: int
    seen_columns: int = -1
    next_step: int = 0
    generated: list[np.ndarray] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        """Batch rows."""
        return len(self.prompts)

    @property
    def width(self) -> int:
        """Padded prompt width S."""
        return int(self.prompts.shape[1])

    def prompt_len(self, row: int) -> int:
        """Prompt tokens of a row."""
        return self.width - int(self.pad_left[row])

    def request(self, row: int) -> str:
        """Request id: call and prompt number."""
        return f"{self.number}-{row // self.samples}"

    def key(self, row: int) -> dict[str, Any]:
        """Key columns of a row."""
        return {
            "engine": self.engine,
            "request": self.request(row),
            "sample": row % self.samples,
            "pass": 0,
        }

    def keys(self, rows: list[int]) -> dict[str, list[Any]]:
        """Key columns of several rows."""
        keys = [self.key(row) for row in rows]
        return {name: [key[name] for key in keys] for name in ("engine", "request", "sample", "pass")}


def opening_job(call: Call) -> Job:
    """Prompts and the opening `sequences` rows."""
    opened = time.time_ns()

    def job(writer: TapeWriter) -> None:
        rows = list(range(call.rows))
        prompts = [call.prompts[row, call.pad_left[row] :] for row in rows]
        writer.append("sequences", {**_sequence(call, rows, prompts), "finish": "open",
                                    "opened_ns": opened})
        writer.append(
            "tokens",
            {
                **call.keys(rows),
                "start": 0,
                "n": [len(p) for p in prompts],
                "ids": prompts,
                "loss_mask": [np.zeros(len(p), bool) for p in prompts],
            },
        )

    return job


def _sequence(call: Call, rows: list[int], prompts: list[np.ndarray]) -> dict[str, Any]:
    many = call.samples > 1
    return {
        **call.keys(rows),
        "group": [
            call.request(row) if many else "p" + token_digest(len(p), p)[:16]
            for row, p in zip(rows, prompts, strict=True)
        ],
        "group_derived": not many,
        "prompt_len": [len(p) for p in prompts],
        "sampling": json.dumps(call.sampling.settings),
    }


def block_job(call: Call, block: Block) -> Job:
    """Everything that a block of steps says."""
    t_ns = time.time_ns()

    def job(writer: TapeWriter) -> None:
        if block.ready is not None:
            block.ready.synchronize()
        gapless = block.first == call.next_step
        call.next_step = block.first + len(block.steps)
        arrays = _Arrays.of(block)
        if gapless:
            call.generated.append(arrays.token)
        if block.steps:
            _write_steps(writer, call, block, arrays)
            _write_tokens(writer, call, block, arrays)
            _write_supports(writer, call, block, arrays)
            if call.layers:
                _write_routes(writer, call, block, arrays)
            if call.kept_rows:
                _write_layers(writer, call, block, arrays)
        _write_endings(writer, call, block, arrays, t_ns)

    return job


@dataclass(frozen=True)
class _Arrays:
    """The small tensors of a block as numpy: [steps, rows]; `counts[b]` steps are row b's own."""

    token: np.ndarray
    raw: np.ndarray | None
    scaled: np.ndarray | None
    processed: np.ndarray | None
    counts: np.ndarray
    done: np.ndarray

    @classmethod
    def of(cls, block: Block) -> _Arrays:
        def column(name: str) -> np.ndarray | None:
            parts = [getattr(step, name) for step in block.steps]
            return None if not parts or parts[0] is None else np.stack([p.numpy() for p in parts])

        alive, done, token = column("alive"), column("done"), column("token")
        if alive is None or done is None or token is None:
            empty = np.zeros((0, 0), np.int64)
            return cls(empty, None, None, None, np.zeros(0, np.int64), empty.astype(bool))
        logprobs = [column(name) for name in ("raw", "scaled", "processed")]
        return cls(token, *logprobs, counts=alive.sum(0), done=done)


def _semantics(call: Call, vocab: int) -> dict[str, Any]:
    sampling = call.sampling
    return {
        "temperature": sampling.temperature,
        "edits": list(sampling.edits),
        "truncation": list(sampling.truncation),
        "vocab_size": vocab,
        "dtype": "float32",
        "source": "engine",
    }


def _write_tokens(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    rows = [b for b in range(call.rows) if arrays.counts[b]]
    if not rows:
        return

    def cells(values: np.ndarray | None) -> list[np.ndarray] | None:
        return None if values is None else [values[: arrays.counts[b], b] for b in rows]

    processed = cells(arrays.processed)
    if call.sampling.greedy:  # all mass on the argmax
        processed = [np.zeros(arrays.counts[b], np.float32) for b in rows]
    writer.append(
        "tokens",
        {
            **call.keys(rows),
            "start": [call.prompt_len(b) + block.first for b in rows],
            "n": [int(arrays.counts[b]) for b in rows],
            "ids": cells(arrays.token),
            "loss_mask": [np.ones(arrays.counts[b], bool) for b in rows],
            "raw": cells(arrays.raw),
            "scaled": cells(arrays.scaled),
            "processed": processed,
            "semantics": [_semantics(call, block.vocab)] * len(rows),
        },
    )


def _write_supports(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    rows = [b for b in range(call.rows) if arrays.counts[b]]
    sizes, ids, full = _kept_sets(call, block, arrays)
    states, counts, kept = [], [], []
    for b in rows:
        n = arrays.counts[b]
        whole = full[b, :n]
        states.append(np.where(whole, SUPPORT_FULL, SUPPORT_EXPLICIT).astype(np.uint8))
        counts.append(np.where(whole, 0, sizes[b, :n]).astype(np.int32))
        keep = np.repeat(~whole, sizes[b, :n])
        kept.append(ids[b][: int(sizes[b, :n].sum())][keep])
    if rows:
        writer.append(
            "supports",
            {
                **call.keys(rows),
                "start": [call.prompt_len(b) + block.first for b in rows],
                "n": [int(arrays.counts[b]) for b in rows],
                "derived": False,
                "state": states,
                "counts": counts,
                "ids": kept,
            },
        )


def _kept_sets(
    call: Call, block: Block, arrays: _Arrays
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(sizes [rows, steps], ids per row over its steps, whole vocabulary kept [rows, steps])."""
    shape = (call.rows, len(block.steps))
    if call.sampling.greedy:
        return np.ones(shape, np.int64), list(arrays.token.T), np.zeros(shape, bool)
    if not call.sampling.truncation:
        return np.zeros(shape, np.int64), [np.zeros(0, np.uint32)] * call.rows, np.ones(shape, bool)
    maps = [step.support.numpy() for step in block.steps if step.support is not None]
    packed = np.ascontiguousarray(np.stack(maps, axis=1))  # [rows, steps, bytes]
    width = packed.shape[-1]
    flat = packed.reshape(-1)
    where = np.flatnonzero(flat)  # few bytes are not zero: only those are unpacked
    bits = np.unpackbits(flat[where, None], axis=1, bitorder="little")
    byte, bit = np.nonzero(bits)
    cell, column = np.divmod(where[byte], width)
    sizes = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
    tokens = (column * 8 + bit).astype(np.uint32)
    ids = np.split(tokens, np.cumsum(sizes.sum(1))[:-1])
    return sizes, ids, sizes == block.vocab


def _write_steps(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    step_rows: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    seen = call.seen_columns if call.seen_columns >= 0 else call.cached
    for i, step in enumerate(block.steps):
        end = call.width + block.first + i
        begin = end - sum(f.columns for f in step.forwards)
        active = arrays.counts > i
        for forward in step.forwards:
            stop = begin + forward.columns
            start = np.maximum(begin - call.pad_left, 0)
            n = np.maximum(stop - call.pad_left - start, 0)
            kind = _kind(begin, seen, call, forward.columns)
            real = int(n[active].sum())
            step_rows.append(
                {
                    "step": forward.step,
                    "kind": "prefill" if kind != "decode" else kind,
                    "t_ns": forward.t_ns,
                    "columns": forward.columns,
                    "tokens": real,
                    "padded_tokens": call.rows * forward.columns - real,
                    "experts": forward.experts,
                }
            )
            spans.append(
                {"step": forward.step, "start": start, "n": n, "active": active, "kind": kind}
            )
            begin, seen = stop, max(seen, stop)
    if not step_rows:
        return
    writer.append(
        "steps",
        {
            **{name: [row[name] for row in step_rows] for name in step_rows[0]},
            "engine": call.engine,
            "call": call.number,
            "rows": call.rows,
            "attention": call.attention,
            "sdpa": call.sdpa,
            "cache": call.cache,
            "threads": call.threads,
        },
    )
    _write_forwards(writer, call, spans)


def _kind(begin: int, seen: int, call: Call, columns: int) -> str:
    if begin < seen and seen > call.cached:
        return "recompute"
    return "decode" if columns == 1 and begin >= call.width else "prefill"


def _write_forwards(writer: TapeWriter, call: Call, spans: list[dict[str, Any]]) -> None:
    rows, times = np.arange(call.rows), len(spans)
    keys = call.keys(list(range(call.rows)))
    kinds = [np.where(s["active"], s["kind"], "dummy") for s in spans]
    writer.append(
        "forwards",
        {
            "engine": call.engine,
            "step": np.repeat([s["step"] for s in spans], call.rows),
            "row": np.tile(rows, times),
            "request": keys["request"] * times,
            "sample": keys["sample"] * times,
            "pass": 0,
            "start": np.concatenate([s["start"] for s in spans]),
            "n": np.concatenate([s["n"] for s in spans]),
            "kind": np.concatenate(kinds).tolist(),
            "pad_left": np.tile(call.pad_left, times),
            "weight_version": call.weight_version,
            "kv_source": "own",
        },
    )


def _write_routes(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    first_column, ids, weights, valid, first_step = _route_columns(call, block)
    ending = _endings(call, block, arrays)
    rows, cells = [], []
    for b in range(call.rows):
        count = int(arrays.counts[b])
        if not count:
            continue
        pad = int(call.pad_left[b])
        begin = max(first_column, pad)
        end = max(begin, call.width + block.first + count - 1)
        span = slice(begin - first_column, end - first_column)
        missing: list[list[Any]] = []
        if block.first == 0 and call.cached > pad:
            missing.append([0, call.cached - pad, None, "cached"])
        for index in np.flatnonzero(~valid[span].all(0)):
            missing.append([begin - pad, end - begin, call.layers[index], call.route_gap])
        if b in ending:
            missing.append([ending[b][0] - 1, 1, None, "last"])
        rows.append(b)
        cells.append(
            {
                "start": begin - pad,
                "n": end - begin,
                "ids": codecs.ROUTE_CODECS[_CODEC].encode(ids[b, span], call.num_experts),
                "weights": codecs.encode_floats(weights[b, span]),
                "valid": codecs.encode_bits(valid[span]),
                "missing": json.dumps(missing) if missing else None,
            }
        )
    if not rows:
        return
    writer.append(
        "routes",
        {
            **call.keys(rows),
            **{name: [cell[name] for cell in cells] for name in cells[0]},
            "role": "used",
            "step": first_step,
            "weight_version": call.weight_version,
            "layers": [np.array(call.layers)] * len(rows),
            "k": call.k,
            "num_experts": call.num_experts,
            "encoding": _CODEC,
        },
    )


def _route_columns(
    call: Call, block: Block
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, int | None]:
    """Routes of the columns that this block ran for the first time.

    Returns:
        (first column, ids [rows, columns, layers, k], weights of the same shape,
        valid [columns, layers], step of the first forward).
    """
    end = call.width + block.first + len(block.steps) - 1
    begin = call.seen_columns if call.seen_columns >= 0 else call.cached
    shape = (call.rows, max(0, end - begin), len(call.layers), call.k)
    ids = np.zeros(shape, codecs.route_dtype(call.num_experts))
    weights = np.zeros(shape, np.float32)
    valid = np.zeros(shape[1:3], bool)
    for i, step in enumerate(block.steps):
        column = call.width + block.first + i - sum(f.columns for f in step.forwards)
        for forward in step.forwards:
            stop = column + forward.columns
            fresh = max(column, begin)
            if fresh < stop:
                span = slice(fresh - begin, stop - begin)
                for index, (chosen, combine) in forward.routes.items():
                    part = slice(fresh - column, forward.columns)
                    split = (call.rows, forward.columns, call.k)
                    ids[:, span, index] = host_array(chosen).reshape(split)[:, part]
                    weights[:, span, index] = host_array(combine).reshape(split)[:, part]
                    valid[span, index] = True
            column = stop
    call.seen_columns = end
    forwards = [f for step in block.steps for f in step.forwards]
    return begin, ids, weights, valid, forwards[0].step if forwards else None


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """numpy view of a CPU tensor; bfloat16 becomes float32, exactly, without torch's threads."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    array: np.ndarray = tensor.numpy()
    return array


def _write_layers(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    columns: dict[str, list[Any]] = {n: [] for n in ("row", "start", "n", "site", "dtype", "width", "data")}
    for i, step in enumerate(block.steps):
        begin = call.width + block.first + i - sum(f.columns for f in step.forwards)
        for forward in step.forwards:
            for site, hidden in forward.layers.items():
                values = host_array(hidden).astype(np.float32, copy=False)
                for b in range(call.kept_rows):
                    pad = int(call.pad_left[b])
                    skip = max(0, pad - begin)
                    if i >= arrays.counts[b] or skip >= forward.columns:
                        continue
                    columns["row"].append(b)
                    columns["start"].append(begin + skip - pad)
                    columns["n"].append(forward.columns - skip)
                    columns["site"].append(site)
                    columns["dtype"].append(str(hidden.dtype).removeprefix("torch."))
                    columns["width"].append(values.shape[-1])
                    columns["data"].append(codecs.encode_floats(values[b, skip:]))
            begin += forward.columns
    rows = columns.pop("row")
    if rows:
        writer.append("activations", {**call.keys(rows), **columns})


def _endings(call: Call, block: Block, arrays: _Arrays) -> dict[int, tuple[int, str]]:
    """Rows that end in this block: row -> (length, finish)."""
    endings: dict[int, tuple[int, str]] = {}
    for b in range(call.rows):
        if b in call.closed:
            continue
        count = int(arrays.counts[b]) if block.steps else 0
        length = call.prompt_len(b) + block.first + count
        if count and arrays.done[count - 1, b]:
            token = int(arrays.token[count - 1, b])
            limit = call.sampling.max_length
            full = limit is not None and call.width + block.first + count >= limit
            stop = token in call.sampling.eos or not full
            endings[b] = (length, "stop" if stop else "length")
        elif block.closing and (count == len(block.steps)):
            endings[b] = (length, block.finish or "length")
    return endings


def _write_endings(
    writer: TapeWriter, call: Call, block: Block, arrays: _Arrays, t_ns: int
) -> None:
    endings = _endings(call, block, arrays)
    if not endings:
        return
    rows = sorted(endings)
    call.closed.update(rows)
    prompts = [call.prompts[b, call.pad_left[b] :] for b in rows]
    generated = np.concatenate(call.generated) if call.generated else np.zeros((0, call.rows))
    digests = []
    for b, prompt in zip(rows, prompts, strict=True):
        response = generated[: endings[b][0] - len(prompt), b]
        whole = len(prompt) + len(response) == endings[b][0]
        digests.append(token_digest(len(prompt), np.concatenate([prompt, response])) if whole else None)
    writer.append(
        "sequences",
        {
            **_sequence(call, rows, prompts),
            "length": [endings[b][0] for b in rows],
            "finish": [endings[b][1] for b in rows],
            "digest": digests,
            "closed_ns": t_ns,
        },
    )


__all__ = ["Block", "Call", "Forward", "Masked", "StepData", "block_job", "opening_job"]
