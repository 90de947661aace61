"""Digests of weights that do not depend on how the weights are sharded, fused or ordered.

    digest = sum over all elements of mix(hash(name) + flat_index * ODD + bits)  mod 2^64

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Addition commutes, so pieces
that know where they lie in the tensors of the checkpoint add up to the digest of the whole, whoever
holds them. Nothing here waits for a device until all has been added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from rolltape.recorder.adapters import adapters_in_force, is_dormant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Elements that are worked on at once: what stays in a cache of the device.
_CHUNK, _CHUNK_CPU = 1 << 22, 1 << 17
_ODD = 0x9E3779B97F4A7C15
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB

#: Groups that are no part of the checkpoint, and so not of the whole model's digest.
APART = ("derived", "lora")


@dataclass(frozen=True)
class Digest:
    """Sum over the tensors that were given.

    Args:
        value: unsigned 64-bit digest; None if some tensor is not in memory (offloaded).
        tensors: how many there were.
        elements: their elements in all.
    """

    value: int | None
    tensors: int
    elements: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A piece of one or several tensors of the checkpoint, as it lies in memory.

    Element [i, j, ...] of `tensor` is the element with flat index
    offset + i * strides[0] + j * strides[1] + ... of the checkpoint's tensor.

    Args:
        name: the checkpoint's name of the tensor.
        tensor: any shape, any layout; not copied.
        group: the group that it counts for.
        names: one name for each index along the first axis (experts); the tensors of all names
            have one shape, and `strides[0]` is 0. By default all is `name`.
        offset: flat index of the first element.
        strides: one for each axis; by default those of a whole, contiguous tensor.
        as_dtype: digest floating-point values as they are in this wider dtype, because
            implementations keep one tensor in several.
        reason: why the digest cannot be compared with another implementation's: the tensor was
            repacked, quantised, or has no counterpart in a checkpoint. Such a part still shows
            whether its weights move.
    """

    name: str
    tensor: torch.Tensor
    group: str
    names: tuple[str, ...] | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None
    as_dtype: torch.dtype | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupDigest:
    """Sum over the parts of one group.

    Args:
        group: "" is the whole model: every group that is not in `APART`.
        value: unsigned 64-bit digest; None if some tensor is not in memory or cannot be read.
        tensors: tensors of the checkpoint whose first element is in these parts.
        elements: elements in all.
        reason: why there is no digest, or why it cannot be compared with another implementation's.
    """

    group: str
    value: int | None
    tensors: int
    elements: int
    reason: str | None = None


def group_digests(parts: Iterable[Part], *, dtype: torch.dtype | None = None) -> list[GroupDigest]:
    """Digests of all groups, by name, and that of the whole model last.

    Args:
        parts: read one by one; nothing is kept of them.
        dtype: digest floating-point weights as they would be in this dtype, as a trainer does that
            keeps float32 masters of what an engine runs in bfloat16.
    """
    import torch

    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    found: dict[str, GroupDigest] = {}
    scratch: dict[torch.device, _Scratch] = {}
    for part in parts:
        tensor = part.tensor.data
        row = found.get(part.group) or GroupDigest(group=part.group, value=0, tensors=0, elements=0)
        whole = len(part.names or "x") if part.offset == 0 and tensor.numel() else 0
        problem = _unreadable(tensor)
        if problem is None and part.reason and not tensor.numel():
            problem = part.reason  # an engine emptied it: whether the weights move cannot be seen
        found[part.group] = replace(
            row,
            value=row.value if problem is None else None,
            tensors=row.tensors + whole,
            elements=row.elements + tensor.numel(),
            reason=row.reason or problem or part.reason,
        )
        if problem is None and tensor.numel():
            if tensor.is_floating_point():
                tensor = tensor if dtype is None else tensor.to(dtype)
                tensor = tensor if part.as_dtype is None else tensor.to(part.as_dtype)
            space = scratch.setdefault(tensor.device, _Scratch(tensor.device))
            total = sums.setdefault(tensor.device, {}).setdefault(part.group, space.zero())
            for piece in _pieces(part, tensor, space.chunk):
                total += space.digest(piece)
    for totals in sums.values():
        values = torch.stack(list(totals.values())).tolist()  # the one copy to the host
        for group, value in zip(totals, values, strict=True):
            row = found[group]
            if row.value is not None:
                found[group] = replace(row, value=(row.value + value) % (1 << 64))
    rows = sorted(found.values(), key=lambda row: group_order(row.group))
    return [*rows, _whole(rows)]


def sum_shards(shards: Iterable[Iterable[GroupDigest]]) -> list[GroupDigest]:
    """Rows of several processes that hold pieces of one model, as if one had held all of it."""
    found: dict[str, GroupDigest] = {}
    for rows in shards:
        for row in rows:
            if row.group:
                have = found.get(row.group)
                found[row.group] = row if have is None else _added(have, row)
    out = sorted(found.values(), key=lambda row: group_order(row.group))
    return [*out, _whole(out)]


def group_order(group: str) -> tuple[tuple[int, str], ...]:
    """Sorting key of group names: layer 10 comes after layer 9."""
    return tuple((int(p), "") if p.isdecimal() else (-1, p) for p in group.split("."))


def _added(a: GroupDigest, b: GroupDigest) -> GroupDigest:
    known = a.value is not None and b.value is not None
    return GroupDigest(
        group=a.group,
        value=((a.value or 0) + (b.value or 0)) % (1 << 64) if known else None,
        tensors=a.tensors + b.tensors,
        elements=a.elements + b.elements,
        reason=a.reason or b.reason,
    )


def _whole(rows: list[GroupDigest]) -> GroupDigest:
    whole = GroupDigest(group="", value=0, tensors=0, elements=0)
    counted = [row for row in rows if row.group not in APART]
    for row in counted:
        whole = _added(whole, replace(row, reason=None))
    flawed = [row for row in counted if row.reason]
    if flawed:
        reason = f"{len(flawed)} of {len(counted)} groups, such as {flawed[0].group}: "
        whole = replace(whole, reason=reason + str(flawed[0].reason))
    return whole


# -- the sum ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Some elements, and what is added to each: base + sum of steps[k] * index, or seeds[index]."""

    tensor: torch.Tensor
    base: int
    steps: tuple[int, ...]
    seeds: tuple[int, ...] | None


def _unreadable(tensor: torch.Tensor) -> str | None:
    import torch

    if type(tensor) is not torch.Tensor:
        return f"a tensor of type {type(tensor).__name__} cannot be read bit by bit"
    if tensor.is_meta:
        return "not in memory"
    if tensor.layout != torch.strided or tensor.element_size() not in (1, 2, 4, 8):
        return f"{tensor.layout} {tensor.dtype} cannot be read bit by bit"
    return None


def _pieces(part: Part, tensor: torch.Tensor, chunk: int) -> Iterator[_Piece]:
    strides = part.strides
    if strides is None:
        strides = tuple(math.prod(tensor.shape[k + 1 :]) for k in range(tensor.ndim))
    if part.names is None:
        seeds = None
        base = _hash(part.name) + part.offset * _ODD
        tensor, strides = _collapsed(tensor, strides)
    else:
        seeds = tuple(_hash(name) for name in part.names)
        base = part.offset * _ODD
    steps = tuple(stride * _ODD for stride in strides)
    yield from _split(_Piece(tensor, base, steps, seeds), chunk)


def _split(piece: _Piece, chunk: int) -> Iterator[_Piece]:
    tensor = piece.tensor
    if tensor.numel() <= chunk or tensor.ndim == 0:
        yield piece
        return
    inner = tensor.numel() // len(tensor)
    rows = max(1, chunk // inner)
    for start in range(0, len(tensor), rows):
        seeds = piece.seeds and piece.seeds[start : start + rows]
        base = piece.base + start * piece.steps[0]
        if inner > chunk:  # a row at a time, and that in pieces too
            base += 0 if seeds is None else seeds[0]
            yield from _split(_Piece(tensor[start], base, piece.steps[1:], None), chunk)
        else:
            yield _Piece(tensor[start : start + rows], base, piece.steps, seeds)


def _collapsed(
    tensor: torch.Tensor, strides: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The same elements with as few axes as both orders allow: one, for a whole tensor."""
    shape: list[int] = []
    kept: list[int] = []
    lies: list[int] = []
    for size, stride, lie in zip(tensor.shape, strides, tensor.stride(), strict=True):
        if size == 1:
            continue
        if shape and kept[-1] == stride * size and lies[-1] == lie * size:
            shape[-1] *= size
            kept[-1], lies[-1] = stride, lie
        else:
            shape.append(size)
            kept.append(stride)
            lies.append(lie)
    return tensor.as_strided(shape, lies), tuple(kept)


class _Scratch:
    """Memory for one piece at a time on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.chunk = _CHUNK_CPU if device.type == "cpu" else _CHUNK
        self._space: torch.Tensor | None = None

    def zero(self) -> torch.Tensor:
        import torch

        return torch.zeros((), dtype=torch.int64, device=self.device)

    def digest(self, piece: _Piece) -> torch.Tensor:
        """Sum over a piece: an int64 scalar on the device."""
        import torch

        tensor, n = piece.tensor, piece.tensor.numel()
        if self._space is None or self._space.shape[1] < n:
            self._space = torch.empty((2, n), dtype=torch.int64, device=self.device)
        z, t = (row[:n].view(tensor.shape) for row in self._space)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        z.copy_(tensor.view(bits[tensor.element_size()]))
        base = piece.base
        for axis, size in enumerate(tensor.shape):
            if axis == 0 and piece.seeds is not None:
                seeds = torch.tensor([_signed(s) for s in piece.seeds])
                table = seeds.to(self.device, non_blocking=True)
            else:
                table = torch.arange(size, dtype=torch.int64, device=self.device)
                table.mul_(_signed(piece.steps[axis]))
            table.add_(_signed(base))
            base = 0
            z.add_(table.view(-1, *[1] * (tensor.ndim - axis - 1)))
        if tensor.ndim == 0:
            z.add_(_signed(base))
        # int64 arithmetic wraps, its right shift is arithmetic: mask the sign bits away
        for shift, factor in ((30, _M1), (27, _M2), (31, None)):
            torch.bitwise_right_shift(z, shift, out=t)
            z.bitwise_xor_(t.bitwise_and_((1 << (64 - shift)) - 1))
            if factor is not None:
                z.mul_(factor)
        total: torch.Tensor = z.sum()
        return total


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


# -- a model under its own names ----------------------------------------------------------


def named_weights(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters once each (tied ones under their first name) and persistent buffers."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def weights_digest(model: nn.Module) -> Digest:
    """Digest of a whole model under the names that its modules have: that of tapes before 1.2."""
    *_, whole = group_digests(
        Part(name=name, tensor=tensor, group="all") for name, tensor in named_weights(model)
    )
    tensors = sum(1 for _ in named_weights(model))
    return Digest(whole.value, tensors, whole.elements)


def weights_stamp(model: nn.Module) -> int:
    """A cheap sign that weights may have changed: storage, version counters, a few elements.

    In-place updates move the version counter, assignments move the storage. A write through `.data`
    does neither: it shows only if it changes an element that is looked at, eight of every slice
    along the first axis for tensors of three axes (experts), eight of every other tensor.
    Adapters that are switched off do not count, so that switching one is a change.
    """
    import torch

    parts = xxhash.xxh3_64()
    looks: dict[torch.device, list[torch.Tensor]] = {}
    in_force = adapters_in_force(model)
    for path in sorted(in_force):  # seen even where it changes no weight that is looked at
        parts.update(f"{path}:{sorted(in_force[path].active)}".encode())
    for name, weight in named_weights(model):
        if is_dormant(name, in_force):
            continue
        tensor: Any = weight
        if hasattr(tensor, "to_local"):  # a shard: of this process's piece, without asking others
            tensor = tensor.detach().to_local()
        version = 0 if tensor.is_inference() else tensor._version
        if tensor.is_meta:  # offloaded: only its version can be seen
            parts.update(f"{name}:{version}".encode())
            continue
        parts.update(f"{name}:{tensor.data_ptr()}:{version}".encode())
        if not tensor.numel():  # this process has no piece of it
            continue
        slices = tensor.detach().reshape(len(tensor) if tensor.ndim > 2 else 1, -1)
        step = max(1, slices.shape[1] // 8)
        seen = slices[:, ::step][:, :8].to(torch.float64).reshape(-1)
        looks.setdefault(seen.device, []).append(seen)
    for parts_seen in looks.values():
        parts.update(torch.cat(parts_seen).cpu().numpy().tobytes())
    return parts.intdigest()
