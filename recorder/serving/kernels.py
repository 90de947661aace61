"""One pass over the logits of a step: log-sum-exp and the kept set of every row, on the device.

Written for Triton, because the same in torch operations reads the logits five times, and in one
launch, because each launch takes the engine's thread tens of microseconds a step. The plain version
in `rolltape.recorder.serving.distribution` is what it is tested against, and what runs where there
is no Triton or no GPU.

A row is a program of its own: what it computes does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Logits that one program reads at a time.
BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    raw,
    raw_stride,
    masked,
    masked_stride,
    temperature,
    own,
    own_stride,
    token,
    token_stride,
    out,
    routes,
    rows,
    vocab,
    most,
    per_row,
    RAW: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    LIST: tl.constexpr,
    OWN: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    none = float("-inf")
    chosen = tl.load(token + row * token_stride).to(tl.int64)
    tl.store(out + 4 * rows + row, chosen.to(tl.int32))
    numbers = out.to(tl.pointer_type(tl.float32))
    if OWN:
        tl.store(numbers + 3 * rows + row, tl.load(own + row * own_stride))
    if ROUTES:
        cell = tl.arange(0, ROUTES)
        mine = routes + row * per_row + cell
        short = (out + rows * (6 + most)).to(tl.pointer_type(tl.int16))
        tl.store(short + row * per_row + cell, tl.load(mine, mask=cell < per_row), cell < per_row)
        tl.store(mine, tl.full((ROUTES,), -1, tl.int16), cell < per_row)  # the buffer is empty
    divisor = 1.0
    if SCALED:
        divisor = tl.load(temperature + row)
    # of each lane: the greatest so far, and the sum of exp(x - that)
    top_x = tl.full((BLOCK,), none, tl.float32)
    sum_x = tl.zeros((BLOCK,), tl.float32)
    top_y = tl.full((BLOCK,), none, tl.float32)
    sum_y = tl.zeros((BLOCK,), tl.float32)
    top_z = tl.full((BLOCK,), none, tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    count = 0
    for begin in range(0, vocab, BLOCK):
        column = begin + lane
        inside = column < vocab
        if RAW:
            x = tl.load(raw + row * raw_stride + column, mask=inside, other=none).to(tl.float32)
            top = tl.maximum(top_x, x)
            shift = tl.where(top == none, 0.0, top)
            sum_x = sum_x * tl.exp(top_x - shift) + tl.exp(x - shift)
            top_x = top
            if SCALED:
                y = x / divisor
                top = tl.maximum(top_y, y)
                shift = tl.where(top == none, 0.0, top)
                sum_y = sum_y * tl.exp(top_y - shift) + tl.exp(y - shift)
                top_y = top
        if MASKED:
            z = tl.load(masked + row * masked_stride + column, mask=inside, other=none)
            z = z.to(tl.float32)
            top = tl.maximum(top_z, z)
            shift = tl.where(top == none, 0.0, top)
            sum_z = sum_z * tl.exp(top_z - shift) + tl.exp(z - shift)
            top_z = top
            kept = (z > none).to(tl.int32)
            here = tl.sum(kept, 0)
            if LIST:  # noqa: SIM102 - decided when this is compiled
                if here > 0:
                    at = count + tl.cumsum(kept, 0) - 1
                    place = out + 6 * rows + row * most + at
                    tl.store(place, column, mask=(kept > 0) & (at < most))
            count += here
    if RAW:
        value = tl.load(raw + row * raw_stride + chosen).to(tl.float32)
        best = tl.max(top_x, 0)
        whole = tl.sum(tl.where(top_x == none, 0.0, sum_x * tl.exp(top_x - best)), 0)
        tl.store(numbers + row, (value - best) - tl.log(whole))
        if SCALED:
            value = value / divisor
            best = tl.max(top_y, 0)
            whole = tl.sum(tl.where(top_y == none, 0.0, sum_y * tl.exp(top_y - best)), 0)
            tl.store(numbers + rows + row, (value - best) - tl.log(whole))
    if MASKED:
        value = tl.load(masked + row * masked_stride + chosen).to(tl.float32)
        best = tl.max(top_z, 0)
        whole = tl.sum(tl.where(top_z == none, 0.0, sum_z * tl.exp(top_z - best)), 0)
        tl.store(numbers + 2 * rows + row, (value - best) - tl.log(whole))
        tl.store(out + 5 * rows + row, count)


def measure(
    *,
    out: torch.Tensor,
    token: torch.Tensor,
    raw: torch.Tensor | None,
    masked: torch.Tensor | None,
    temperature: torch.Tensor | None,
    own: torch.Tensor | None,
    most: int,
    routes: torch.Tensor | None = None,
) -> None:
    """Write what `distribution.measure` says of a step, and more, into its table.

    Args:
        out: int32 words as `distribution.table_layout` wants them.
        token: integers [rows] or [rows, 1], the token drawn in each row.
        raw: [rows, V] logits as the model gave them, or None.
        masked: [rows, V] logits after truncation, -inf outside the kept set, or None.
        temperature: float32 [rows]; None if all are 1, then there is no `scaled`.
        own: float32 [rows] logprobs that the engine computed itself, or None.
        most: ids that a kept set may have; 0 for no list.
        routes: int16 [at least rows, layers, k] whose first rows are moved to the table: -1 stays
            behind.
    """
    first = raw if raw is not None else masked
    rows, vocab = (len(token), 0) if first is None else first.shape
    scaled = raw is not None and temperature is not None
    per_row = 0 if routes is None else routes.stride(0)
    a = raw if raw is not None else out
    b = masked if masked is not None else out
    _measure[(rows,)](
        a, a.stride(0), b, b.stride(0), temperature if scaled else out,
        own if own is not None else out, 0 if own is None else own.stride(0),
        token, token.stride(0), out, out if routes is None else routes,
        rows, vocab, most, per_row,
        RAW=raw is not None, SCALED=scaled, MASKED=masked is not None, LIST=most > 0,
        OWN=own is not None, ROUTES=0 if routes is None else triton.next_power_of_2(per_row),
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
