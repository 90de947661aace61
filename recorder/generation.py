"""From a block of one `generate()` call to rows of a tape; runs in the writer thread.

`rolltape.recorder.blocks` says what a step and a column are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.recorder import bitmaps
from rolltape.recorder.blocks import Block, Call, host_array
from rolltape.recorder.session import Job
from rolltape.recorder.sketch_rows import write_sketches
from rolltape.store import TapeWriter, codecs, token_digest
from rolltape.store.columns import ragged
from rolltape.store.distributions import distribution_columns, raw_semantics
from rolltape.store.kept import encode_kept
from rolltape.store.schema import SEMANTICS, SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

_CODEC = "plain"


def opening_job(call: Call) -> Job:
    """Prompts and the opening `sequences` rows."""
    opened = time.time_ns()

    def job(writer: TapeWriter) -> None:
        rows = call.recorded
        prompts = [call.prompts[row, call.pad_left[row] :] for row in rows]
        writer.append(
            "sequences", {**_sequence(call, rows, prompts), "finish": "open", "opened_ns": opened}
        )
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
            f"{call.engine[:8]}.{call.request(row)}" if many else "p" + token_digest(len(p), p)[:16]
            for row, p in zip(rows, prompts, strict=True)
        ],
        "group_derived": not many,
        "prompt_len": [len(p) for p in prompts],
        "origin": [None if call.origins is None else call.origins[row] for row in rows],
        "sampling": [json.dumps(call.settings(row)) for row in rows],
    }


def block_job(call: Call, block: Block) -> Job:
    """Everything that a block of steps says."""
    t_ns = time.time_ns()

    def job(writer: TapeWriter) -> None:
        if block.ready is not None:
            block.ready.synchronize()
        arrays = _Arrays.of(block, call.rows, call.wanted)
        if block.first == call.next_step:  # no block was dropped before
            call.generated.append(arrays.token)
        call.next_step = block.first + block.steps
        end = call.width + block.first + block.steps - 1
        if block.steps:
            _write_steps(writer, call, block, arrays)
        if arrays.rows:
            _write_tokens(writer, call, block, arrays)
            _write_supports(writer, call, block, arrays)
            _write_distributions(writer, call, block, arrays)
            if call.layers:
                _write_routes(writer, call, block, arrays)
            if block.layers:
                _write_layers(writer, call, block, arrays)
                write_sketches(writer, call, block, arrays.counts)
            call.seen_columns = end
        _write_endings(writer, call, block, arrays, t_ns)

    return job


@dataclass(frozen=True)
class _Arrays:
    """The small tensors of a block as numpy: [steps, rows]; `counts[b]` steps are row b's own.

    `own` is [rows, steps]; `rows` are those with any. A row that is not recorded has none;
    `ran` has the counts of all. `top` is ids and logprobs [steps, rows, k] and tail [steps, rows].
    """

    token: np.ndarray
    logprobs: dict[str, np.ndarray]
    support: np.ndarray | None
    done: np.ndarray
    counts: np.ndarray
    ran: np.ndarray
    own: np.ndarray
    rows: list[int]
    top: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @classmethod
    def of(cls, block: Block, rows: int, wanted: np.ndarray | None) -> _Arrays:
        if not block.steps:  # the call ended between two blocks, or before its first token
            none = np.zeros((0, rows), np.int64)
            return cls(none, {}, None, none, none.sum(0), none.sum(0), none.T.astype(bool), [])
        small = {name: host_array(tensor) for name, tensor in block.small.items()}
        ran = small["alive"].sum(0)
        counts = ran if wanted is None else np.where(wanted, ran, 0)
        return cls(
            token=small["token"],
            logprobs={n: small[n] for n in ("raw", "scaled", "processed") if n in small},
            support=small.get("support"),
            done=small["done"],
            counts=counts,
            ran=ran,
            own=np.arange(block.steps) < counts[:, None],
            rows=np.flatnonzero(counts).tolist(),
            top=(small["top_ids"], small["top_logprobs"], small["tail"])
            if "tail" in small
            else None,
        )

    def cells(self, values: np.ndarray, type_: pa.DataType) -> pa.ListArray:
        """List column over `rows` from values [steps, rows]."""
        return ragged(values.T[self.own], self.counts[self.rows], type_)


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
    logprobs = dict(arrays.logprobs)
    if call.sampling.greedy:  # all mass on the argmax
        logprobs["processed"] = np.zeros(arrays.token.shape, np.float32)
    semantics = pa.scalar(_semantics(call, block.vocab), type=SEMANTICS)
    writer.append(
        "tokens",
        {
            **call.keys(arrays.rows),
            "start": [call.prompt_len(b) + block.first for b in arrays.rows],
            "n": arrays.counts[arrays.rows],
            "ids": arrays.cells(arrays.token, pa.uint32()),
            "loss_mask": arrays.cells(np.ones(arrays.token.shape, bool), pa.bool_()),
            **{name: arrays.cells(v, pa.float32()) for name, v in logprobs.items()},
            "semantics": pa.repeat(semantics, len(arrays.rows)),
        },
    )


#: Ids of the explicit sets of a row in steps [first, stop): (row, first, stop) -> uint32.
_IdsOf = Callable[[int, int, int], np.ndarray]

#: Ids a position, on average, from which kept sets are not written as lists.
_LARGE_SETS = 1024


def _write_supports(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    sizes, full, ids_of = _sets(call, block, arrays)
    unseen = arrays.support is None and not call.sampling.greedy
    state = np.where(full, SUPPORT_FULL, SUPPORT_UNRECORDED if unseen else SUPPORT_EXPLICIT)
    for spans in bitmaps.pieces(sizes, arrays.counts):
        rows = [b for b, _, _ in spans]
        lengths = np.array([stop - first for _, first, stop in spans])
        ids = [ids_of(*span) for span in spans]
        large = sum(map(len, ids)) > _LARGE_SETS * int(lengths.sum())
        cells: dict[str, Any] = {
            "ids": ragged(np.concatenate(ids), np.array([len(i) for i in ids]), pa.uint32())
        }
        if large:  # a bitmap, or the few ids that were cut, is many times smaller than a list
            counts = [sizes[b, first:stop] for b, first, stop in spans]
            cells = {
                "ids": ragged(np.zeros(0, np.uint32), np.zeros(len(ids), np.int64), pa.uint32()),
                "encoding": "kept",
                "data": [
                    encode_kept(c, i, vocab_size=block.vocab)
                    for c, i in zip(counts, ids, strict=True)
                ],
            }
        writer.append(
            "supports",
            {
                **call.keys(rows),
                "start": [call.prompt_len(b) + block.first + first for b, first, _ in spans],
                "n": lengths,
                "derived": False,
                "state": ragged(_cut(state, spans), lengths, pa.uint8()),
                "counts": ragged(_cut(sizes, spans), lengths, pa.int32()),
                **cells,
            },
        )


def _cut(values: np.ndarray, spans: list[bitmaps.Span]) -> np.ndarray:
    """Values [rows, steps] of the spans, one after another."""
    return np.concatenate([values[b, first:stop] for b, first, stop in spans])


def _sets(call: Call, block: Block, arrays: _Arrays) -> tuple[np.ndarray, np.ndarray, _IdsOf]:
    """The sets of a block.

    Returns:
        int64 [rows, steps] sizes of the explicit sets, 0 where there is none; bool [rows, steps]
        where the whole vocabulary was kept; and what gives the ids of a span.
    """
    shape = (call.rows, block.steps)
    support = arrays.support
    if support is None:
        # a greedy set is the token itself
        sizes = np.full(shape, int(call.sampling.greedy))
        full = np.full(shape, not (call.sampling.greedy or call.sampling.cuts))
        kept = 1 if call.sampling.greedy else 0
        return sizes, full, lambda row, first, stop: arrays.token[first:stop, row][: kept * stop]
    found = bitmaps.listed(support)
    sizes = bitmaps.set_sizes(support) if found is None else found[0]
    full = sizes == block.vocab
    explicit = np.where(arrays.own & ~full, sizes, 0)
    if found is not None:
        ends = np.cumsum(sizes).reshape(shape)
        ids = found[1]

        def slices(row: int, first: int, stop: int) -> np.ndarray:
            begin = int(ends[row, first] - sizes[row, first])
            part: np.ndarray = ids[begin : int(ends[row, stop - 1])]
            if not full[row, first:stop].any():
                return part
            rest: np.ndarray = part[np.repeat(~full[row, first:stop], sizes[row, first:stop])]
            return rest

        return explicit, full, slices
    return (
        explicit,
        full,
        lambda row, first, stop: bitmaps.set_ids(
            support[first:stop, row][explicit[row, first:stop] > 0]
        ),
    )


def _write_distributions(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    if arrays.top is None:
        return
    semantics = raw_semantics(vocab_size=block.vocab, dtype="float32", source="engine")
    lengths = arrays.counts[arrays.rows]
    ids, logprobs, tail = (part.swapaxes(0, 1)[arrays.own] for part in arrays.top)
    writer.append(
        "distributions",
        {
            **call.keys(arrays.rows),
            "start": [call.prompt_len(b) + block.first for b in arrays.rows],
            "n": lengths,
            **distribution_columns(ids, logprobs, tail, lengths),
            "semantics": pa.repeat(pa.scalar(semantics, type=SEMANTICS), len(lengths)),
        },
    )


def _write_steps(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    steps: list[dict[str, Any]] = []
    spans: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
    seen = call.seen_columns
    for i, forwards in enumerate(block.forwards):
        begin = call.begin(block.first + i, [columns for _, _, columns, _ in forwards])
        own = arrays.ran > i
        for step, t_ns, columns, experts in forwards:
            stop = begin + columns
            start = np.maximum(begin - call.pad_left, 0)
            n = np.maximum(stop - call.pad_left - start, 0)
            kind = _kind(begin, seen, call, columns)
            real = int(n[own].sum())
            steps.append(
                {
                    "step": step,
                    "kind": kind if kind == "decode" else "prefill",
                    "t_ns": t_ns,
                    "columns": columns,
                    "tokens": real,
                    "padded_tokens": call.rows * columns - real,
                    "experts": experts,
                }
            )
            spans.append((step, start, n, np.where(own, _KINDS.index(kind), _DUMMY)))
            begin, seen = stop, max(seen, stop)
    if not steps:
        return
    writer.append(
        "steps",
        {
            **{name: [row[name] for row in steps] for name in steps[0]},
            "engine": call.engine,
            "call": call.number,
            "rows": call.rows,
            "attention": call.attention,
            "sdpa": call.sdpa,
            "cache": call.cache,
            "threads": call.threads,
        },
    )
    times, mine = len(spans), call.recorded
    rows = np.tile(np.arange(len(mine)), times)
    keys = call.keys(mine)
    writer.append(
        "forwards",
        {
            "engine": call.engine,
            "step": np.repeat([step for step, _, _, _ in spans], len(mine)),
            "row": np.tile(mine, times),
            "request": pa.array(keys["request"]).take(pa.array(rows)),
            "sample": np.array(keys["sample"])[rows],
            "pass": 0,
            "start": np.concatenate([start[mine] for _, start, _, _ in spans]),
            "n": np.concatenate([n[mine] for _, _, n, _ in spans]),
            "kind": pa.array(_KINDS).take(pa.array(np.concatenate([k[mine] for *_, k in spans]))),
            "pad_left": np.tile(call.pad_left[mine], times),
            "weight_version": call.weight_version,
            # a cache that was passed in was filled by an earlier call
            "kv_source": "shared" if call.cached else "own",
        },
    )


_KINDS = ("prefill", "decode", "recompute", "dummy")
_DUMMY = _KINDS.index("dummy")


def _kind(begin: int, seen: int, call: Call, columns: int) -> str:
    if begin < seen and seen > call.cached:
        return "recompute"
    return "decode" if columns == 1 and begin >= call.width else "prefill"


def _write_routes(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    first_column, ids, weights, valid = _route_columns(call, block)
    first_step = next((f[0] for forwards in block.forwards for f in forwards), None)
    ending = _endings(call, block, arrays)
    own_column = call.begin(block.first, [columns for _, _, columns, _ in block.forwards[0]])
    rows, cells = [], []
    for b in arrays.rows:
        count = int(arrays.counts[b])
        pad = int(call.pad_left[b])
        begin = max(first_column, pad)
        end = max(begin, call.width + block.first + count - 1)
        span = slice(begin - first_column, end - first_column)
        missing: list[list[Any]] = []
        if block.first == 0 and call.cached > pad:
            missing.append([0, call.cached - pad, None, "cached"])
        for index in np.flatnonzero(~valid[span].all(0)):
            for start, n in _runs(~valid[span, index]):
                lost = min(n, max(0, own_column - begin - start))  # with a block that was dropped
                for part, length, reason in (
                    (0, lost, "dropped"),
                    (lost, n - lost, call.route_gap),
                ):
                    if length:
                        at = begin - pad + start + part
                        missing.append([at, length, call.layers[index], reason])
        if b in ending:
            missing.append([ending[b][0] - 1, 1, None, "last"])
        rows.append(b)
        cells.append(
            {
                "start": begin - pad,
                "n": end - begin,
                "ids": codecs.encode_plain(ids[b, span], call.num_experts),
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


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of every run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _route_columns(call: Call, block: Block) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Routes of the columns that this block ran for the first time.

    Returns:
        (first column, ids [rows, columns, layers, k], weights of the same shape,
        valid [columns, layers]).
    """
    end = call.width + block.first + block.steps - 1
    seen = begin = call.seen_columns
    shape = (call.rows, max(0, end - begin), len(call.layers), call.k)
    ids = np.zeros(shape, codecs.route_dtype(call.num_experts))
    weights = np.zeros(shape, np.float32)
    valid = np.zeros(shape[1:3], bool)
    for piece in block.routes:
        forwards, layers = piece.ids.shape[:2]
        stop = piece.column + forwards * piece.columns
        fresh = max(piece.column, seen)  # what a recompute repeats is not the behaviour record
        if fresh >= stop:
            continue
        span = slice(fresh - begin, stop - begin)
        split = (forwards, layers, call.rows, piece.columns, call.k)
        for target, source in ((ids, piece.ids), (weights, piece.weights)):
            part = host_array(source).reshape(split).transpose(2, 0, 3, 1, 4)  # rows first
            part = np.reshape(part, (call.rows, stop - piece.column, layers, call.k))
            target[:, span, list(piece.indexes)] = part[:, fresh - piece.column :]
        valid[span, list(piece.indexes)] = True
        seen = stop
    return begin, ids, weights, valid


def _write_layers(writer: TapeWriter, call: Call, block: Block, arrays: _Arrays) -> None:
    rows: list[int] = []
    cells: list[dict[str, Any]] = []
    for piece in block.layers:
        values = host_array(piece.hidden).astype(np.float32, copy=False)
        for b in range(call.kept_rows):
            pad = int(call.pad_left[b])
            skip = max(0, pad - piece.column)
            if piece.step >= arrays.counts[b] or skip >= values.shape[1]:
                continue
            rows.append(b)
            cells.append(
                {
                    "start": piece.column + skip - pad,
                    "n": values.shape[1] - skip,
                    "site": piece.site,
                    "dtype": str(piece.hidden.dtype).removeprefix("torch."),
                    "width": values.shape[-1],
                    "data": codecs.encode_floats(values[b, skip:]),
                }
            )
    if rows:
        columns = {name: [cell[name] for cell in cells] for name in cells[0]}
        writer.append("activations", {**call.keys(rows), **columns})


def _endings(call: Call, block: Block, arrays: _Arrays) -> dict[int, tuple[int, str]]:
    """Rows that end in this block: row -> (length, finish)."""
    endings: dict[int, tuple[int, str]] = {}
    going = np.ones(call.rows, bool) if block.alive is None else host_array(block.alive)
    for b in range(call.rows):
        if b in call.closed:
            continue
        count = int(arrays.counts[b])
        length = call.prompt_len(b) + block.first + count
        if count and arrays.done[count - 1, b]:
            token = int(arrays.token[count - 1, b])
            limit = call.sampling.max_length
            full = limit is not None and call.width + block.first + count >= limit
            stop = token in call.sampling.eos or not full
            endings[b] = (length, "stop" if stop else "length")
        elif block.closing and going[b]:  # a row that ended in a block that was lost stays open
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
        digests.append(
            token_digest(len(prompt), np.concatenate([prompt, response])) if whole else None
        )
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
