"""One pass over the logits of a step: log-sum-exp and the kept set of every row, on the device.

Written for Triton, because the same in torch operations reads the logits five times, and in one
launch, because each launch takes the engine's thread tens of microseconds a step. The plain version
in `rolltape.recorder.serving.distribution` is what it is tested against, and what runs where there
is no Triton or no GPU.

A row is a program of its own: what it computes does not depend on the other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from rolltape.recorder.serving.batch import Table

#: Logits that one program reads at a time.
BLOCK = 8192
#: Columns of the result in front of the lists: see `_layout`.
_COLUMNS = ("raw", "scaled", "processed", "own", "token", "kept_n")


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
    rows,
    vocab,
    most,
    RAW: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    LIST: tl.constexpr,
    OWN: tl.constexpr,
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


class Measure:
    """Measures steps one after another into one piece of device memory, which is used again.

    What it returned last has to be copied away, in the same stream, before it is called again.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def __call__(
        self,
        *,
        token: torch.Tensor,
        raw: torch.Tensor | None,
        masked: torch.Tensor | None,
        temperature: torch.Tensor | None,
        own: torch.Tensor | None,
        kind: str | None,
        most: int,
    ) -> Table:
        """What `distribution.measure` says, and the token.

        Args:
            token: integers [rows] or [rows, 1], the token drawn in each row.
            raw: [rows, V] logits as the model gave them, or None.
            masked: [rows, V] logits after truncation, -inf outside the kept set, or None. One of
                the two is there.
            temperature: float32 [rows]; None if all are 1, then there is no `scaled`.
            own: float32 [rows] logprobs that the engine computed itself, or None.
            kind: which column they are: `raw` or `processed`.
            most: ids that a kept set may have; 0 for no list.

        Returns:
            int32 `token` [rows, 1], float32 [rows] `raw`, `scaled`, `processed`, int32 [rows]
            `kept_n` and int32 [rows, most] `kept`, ascending: those that can be said.
        """
        first = raw if raw is not None else masked
        assert first is not None
        rows, vocab = first.shape
        scaled = raw is not None and temperature is not None
        most = most if masked is not None else 0
        size = rows * (len(_COLUMNS) + most)
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.int32, device=first.device)
        out = self._memory[:size]
        a = raw if raw is not None else first
        b = masked if masked is not None else first
        _measure[(rows,)](
            a, a.stride(0), b, b.stride(0), temperature if scaled else out,
            own if own is not None else out, own.stride(0) if own is not None else 0,
            token, token.stride(0), out, rows, vocab, most,
            RAW=raw is not None, SCALED=scaled, MASKED=masked is not None, LIST=most > 0,
            OWN=own is not None, BLOCK=BLOCK, num_warps=16,
        )  # fmt: skip
        said = raw is not None, scaled, masked is not None, kind if own is not None else None
        return Table(data=out, layout=_layout(rows, most, *said))


@functools.lru_cache(maxsize=4096)
def _layout(
    rows: int, most: int, raw: bool, scaled: bool, masked: bool, own: str | None
) -> Mapping[str, tuple[int, str, tuple[int, ...]]]:
    """Where the columns of a result lie."""
    there = {"raw": raw, "scaled": scaled, "processed": masked, "token": True, "kept_n": masked}
    found: dict[str, Any] = {}
    for number, name in enumerate(_COLUMNS):
        if there.get(name):
            exact = name in ("token", "kept_n")
            shape = (rows, 1) if name == "token" else (rows,)
            found[name] = number * rows, "int32" if exact else "float32", shape
    if own is not None:
        found[own] = _COLUMNS.index("own") * rows, "float32", (rows,)
    if most:
        found["kept"] = len(_COLUMNS) * rows, "int32", (rows, most)
    return found
