"""Digest of a model's weights that does not depend on how they are sharded or ordered.

    digest = sum over all elements of mix(hash(name) + flat_index * ODD + bits)  mod 2^64

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Addition commutes, so shards
that know their global flat indices add up to the digest of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch
    from torch import nn

_CHUNK = 1 << 22
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB


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


def tensor_digest(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Partial digest of one tensor in the dtype it is in, as an int64 scalar on its device."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    width = flat.element_size()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    flat = flat.view(bits)
    seed = xxhash.xxh3_64_intdigest(name.encode())
    seed = seed - (1 << 64) if seed >= 1 << 63 else seed
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        total += _mix(index.mul_(_ODD).add_(part).add_(seed)).sum()
    return total


def _mix(z: torch.Tensor) -> torch.Tensor:
    # int64 arithmetic wraps, its right shift is arithmetic: mask the sign bits away
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)).mul_(_M1)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)).mul_(_M2)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def named_weights(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters once each (tied ones under their first name) and persistent buffers."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def weights_digest(model: nn.Module) -> Digest:
    """Digest of a whole model."""
    totals, tensors, elements = [], 0, 0
    for name, tensor in named_weights(model):
        totals.append(tensor_digest(name, tensor))
        tensors += 1
        elements += tensor.numel()
    here = not any(total.is_meta for total in totals)
    value = sum(int(t) for t in totals) % (1 << 64) if here else None
    return Digest(value, tensors, elements)


def weights_stamp(model: nn.Module) -> int:
    """A cheap sign that weights may have changed: storage, version counters, a few elements.

    In-place updates move the version counter, assignments move the storage. A write through `.data`
    does neither: it shows only if it changes an element that is looked at, eight of every slice
    along the first axis for tensors of three axes (experts), eight of every other tensor.
    """
    import torch

    parts = xxhash.xxh3_64()
    looks: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in named_weights(model):
        version = 0 if tensor.is_inference() else tensor._version
        if tensor.is_meta:  # offloaded: only its version can be seen
            parts.update(f"{name}:{version}".encode())
            continue
        parts.update(f"{name}:{tensor.data_ptr()}:{version}".encode())
        slices = tensor.detach().reshape(len(tensor) if tensor.ndim > 2 else 1, -1)
        step = max(1, slices.shape[1] // 8)
        seen = slices[:, ::step][:, :8].to(torch.float64).reshape(-1)
        looks.setdefault(seen.device, []).append(seen)
    for parts_seen in looks.values():
        parts.update(torch.cat(parts_seen).cpu().numpy().tobytes())
    return parts.intdigest()
