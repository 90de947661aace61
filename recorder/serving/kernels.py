"""One pass over the logits of a step: log-sum-exp and the kept set of every row, on the device.

Written for Triton, because the same in torch operations reads the logits five times. The plain
version in `rolltape.recorder.serving.distribution` is what it is tested against, and what runs
where there is no Triton or no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Logits that one program reads.
BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _chunks(  # type: ignore[no-untyped-def]
    raw,
    raw_stride,
    masked,
    masked_stride,
    temperature,
    sums,
    counts,
    ids,
    vocab,
    chunks,
    most,
    RAW: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    cell = row * chunks + chunk
    none = float("-inf")
    if RAW:
        x = tl.load(raw + row * raw_stride + column, mask=inside, other=none).to(tl.float32)
        top = tl.max(x, 0)
        shift = tl.where(top == none, 0.0, top)
        tl.store(sums + cell * 6, top)
        tl.store(sums + cell * 6 + 1, tl.sum(tl.exp(x - shift), 0))
        if SCALED:
            y = x / tl.load(temperature + row)
            top = tl.max(y, 0)
            shift = tl.where(top == none, 0.0, top)
            tl.store(sums + cell * 6 + 2, top)
            tl.store(sums + cell * 6 + 3, tl.sum(tl.exp(y - shift), 0))
    if MASKED:
        z = tl.load(masked + row * masked_stride + column, mask=inside, other=none).to(tl.float32)
        top = tl.max(z, 0)
        shift = tl.where(top == none, 0.0, top)
        tl.store(sums + cell * 6 + 4, top)
        tl.store(sums + cell * 6 + 5, tl.sum(tl.exp(z - shift), 0))
        kept = (z > none).to(tl.int32)
        tl.store(counts + cell, tl.sum(kept, 0))
        if LIST:
            at = tl.cumsum(kept, 0) - 1
            tl.store(ids + cell * most + at, column, mask=(kept > 0) & (at < most))


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    raw,
    raw_stride,
    masked,
    masked_stride,
    temperature,
    token,
    token_stride,
    sums,
    counts,
    ids,
    out,
    out_ids,
    out_counts,
    rows,
    chunks,
    most,
    RAW: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    LIST: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    cell = row * chunks + chunk
    none = float("-inf")
    chosen = tl.load(token + row * token_stride).to(tl.int64)
    if RAW:
        value = tl.load(raw + row * raw_stride + chosen).to(tl.float32)
        top = tl.load(sums + cell * 6, mask=inside, other=none)
        total = tl.load(sums + cell * 6 + 1, mask=inside, other=0.0)
        best = tl.max(top, 0)
        whole = tl.sum(tl.where(top == none, 0.0, total * tl.exp(top - best)), 0)
        tl.store(out + row, (value - best) - tl.log(whole))
        if SCALED:
            value = value / tl.load(temperature + row)
            top = tl.load(sums + cell * 6 + 2, mask=inside, other=none)
            total = tl.load(sums + cell * 6 + 3, mask=inside, other=0.0)
            best = tl.max(top, 0)
            whole = tl.sum(tl.where(top == none, 0.0, total * tl.exp(top - best)), 0)
            tl.store(out + rows + row, (value - best) - tl.log(whole))
    if MASKED:
        value = tl.load(masked + row * masked_stride + chosen).to(tl.float32)
        top = tl.load(sums + cell * 6 + 4, mask=inside, other=none)
        total = tl.load(sums + cell * 6 + 5, mask=inside, other=0.0)
        best = tl.max(top, 0)
        whole = tl.sum(tl.where(top == none, 0.0, total * tl.exp(top - best)), 0)
        tl.store(out + 2 * rows + row, (value - best) - tl.log(whole))
        size = tl.load(counts + cell, mask=inside, other=0)
        tl.store(out_counts + row, tl.sum(size, 0))
        if LIST:
            begin = 0
            lane = tl.arange(0, MOST)
            for c in range(chunks):
                n = tl.load(counts + row * chunks + c)
                here = (lane < n) & (lane < most)
                some = tl.load(ids + (row * chunks + c) * most + lane, mask=here, other=0)
                place = begin + lane
                tl.store(out_ids + row * most + place, some, mask=here & (place < most))
                begin += n


def measure(
    *,
    token: torch.Tensor,
    raw: torch.Tensor | None,
    masked: torch.Tensor | None,
    temperature: torch.Tensor | None,
    most: int,
) -> dict[str, torch.Tensor]:
    """What `distribution.measure` says, in two launches.

    Args:
        token: integers [rows] or [rows, 1], the token drawn in each row.
        raw: [rows, V] logits as the model gave them, or None.
        masked: [rows, V] logits after truncation, -inf outside the kept set, or None.
        temperature: float32 [rows]; None if all are 1, then there is no `scaled`.
        most: ids that a kept set may have; 0 for no list.

    Returns:
        float32 [rows] `raw`, `scaled`, `processed`, int32 [rows] `kept_n` and int32 [rows, most]
        `kept`, ascending: those that can be said.
    """
    first = raw if raw is not None else masked
    assert first is not None
    rows, vocab = first.shape
    chunks = triton.cdiv(vocab, BLOCK)
    device = first.device
    width = max(most, 1)
    work = torch.empty(rows * chunks * (7 + width), dtype=torch.int32, device=device)
    sums, counts, ids = work.split([n * rows * chunks for n in (6, 1, width)])
    sums = sums.view(torch.float32)
    # one storage for all that leaves the device, so that it leaves in one copy
    result = torch.empty(rows * (4 + width), dtype=torch.int32, device=device)
    numbers, kept_n, kept = result.split([3 * rows, rows, rows * width])
    out, kept = numbers.view(torch.float32).view(3, rows), kept.view(rows, width)
    flags: dict[str, Any] = {
        "RAW": raw is not None,
        "SCALED": raw is not None and temperature is not None,
        "MASKED": masked is not None,
        "LIST": masked is not None and most > 0,
    }
    a = raw if raw is not None else first
    b = masked if masked is not None else first
    t = temperature if temperature is not None else out
    token = token.reshape(rows, -1)
    _chunks[(rows, chunks)](
        a, a.stride(0), b, b.stride(0), t, sums, counts, ids, vocab, chunks, most,
        **flags, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _rows[(rows,)](
        a, a.stride(0), b, b.stride(0), t, token, token.stride(0), sums, counts, ids, out, kept,
        kept_n, rows, chunks, most,
        **flags, CHUNKS=triton.next_power_of_2(chunks), MOST=triton.next_power_of_2(max(most, 1)),
        num_warps=1,
    )  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    if flags["RAW"]:
        found["raw"] = out[0]
    if flags["SCALED"]:
        found["scaled"] = out[1]
    if flags["MASKED"]:
        found["processed"], found["kept_n"] = out[2], kept_n
    if flags["LIST"]:
        found["kept"] = kept
    return found
