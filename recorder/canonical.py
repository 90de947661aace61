"""The checkpoint's names of a model's weights, and where a fused tensor lies in them.

The checkpoint is what every engine and every trainer reads, so its names and shapes are the ones
that two of them can be compared by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolltape.recorder.digest import Part

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(
    r"^(?:model\.|language_model\.|transformer\.|decoder\.)*(?:layers|h)\.(\d+)\.(.+)$"
)
_ATTENTION = re.compile(r"(?:^|_)(?:attn|attention)$")
_NORM = re.compile(r"norm\d*$|^ln_\d$")
_DERIVED = re.compile(
    r"\brotary_emb\b|inv_freq$|cos_sin_cache$|(?:^|[._])(?:[kvq]|prob)_scale(?:_float)?$"
)
_LORA = re.compile(r"(?:^|\.)(?:lora_[a-z]+|modules_to_save)(?:\.|_|$)", re.IGNORECASE)

#: (block, gate, up, down) in the checkpoint of families whose experts are one tensor each there.
_QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERTS = {
    "deepseek_v2": _QWEN,
    "deepseek_v3": _QWEN,
    "glm4_moe": _QWEN,
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
}
#: Families whose checkpoint holds the experts of a layer in one tensor, as transformers does.
_FUSED_IN_CHECKPOINT = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True)
class Region:
    """A box of an implementation's tensor that lies in one tensor of the checkpoint.

    Args:
        name: of the checkpoint's tensor.
        start, stop: corners of the box.
        strides: elements of the checkpoint's tensor for a step along each axis of the box.
        offset: flat index in the checkpoint's tensor of the box's first element.
        names: one for each index along the first axis, if they are tensors of their own.
    """

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    names: tuple[str, ...] | None = None


def whole(name: str, shape: Sequence[int]) -> Region:
    """A tensor that is one of the checkpoint's."""
    return Region(name=name, start=(0,) * len(shape), stop=tuple(shape), strides=contiguous(shape))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def place(
    region: Region, tensor: torch.Tensor, *, group: str, origin: Sequence[int] | None = None
) -> Iterator[Part]:
    """What of a region lies in a tensor; nothing if they do not meet.

    Args:
        region: in the coordinates of the implementation's whole tensor.
        tensor: a shard of that one, a box too.
        group: of the part.
        origin: where the shard begins; by default it is the whole tensor.
    """
    origin = (0,) * tensor.ndim if origin is None else origin
    low = [max(a, b) for a, b in zip(region.start, origin, strict=True)]
    high = [min(a, b + n) for a, b, n in zip(region.stop, origin, tensor.shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    cut = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
    steps = [(a - s) * t for a, s, t in zip(low, region.start, region.strides, strict=True)]
    first = region.start[0] if region.names else 0
    yield Part(
        name=region.name,
        tensor=tensor.data[cut] if cut else tensor.data,
        group=group,
        as_dtype=_router_dtype(group),
        names=region.names[low[0] - first : high[0] - first] if region.names else None,
        offset=region.offset + sum(steps),
        strides=region.strides,
    )


def _router_dtype(group: str) -> torch.dtype | None:
    """Some engines hold routers in float32 that others hold in the model's dtype."""
    if not group.endswith(".router"):
        return None
    import torch

    return torch.float32


def group_of(name: str) -> str:
    """Group of a tensor by the checkpoint's name: `layers.7.experts`, `embed`, `lora`."""
    if _LORA.search(name):
        return "lora"
    if _DERIVED.search(name):
        return "derived"
    match = _LAYER.match(name)
    if match is None:
        path = name.split(".")
        owner = path[-2] if len(path) > 1 else path[0]
        if owner in ("lm_head", "output"):
            return "lm_head"
        if owner in ("embed_tokens", "wte", "wpe"):
            return "embed"
        return "norm" if _NORM.search(owner) or owner == "ln_f" else "other"
    return f"layers.{match[1]}.{_component(match[2].split('.'))}"


def _component(path: list[str]) -> str:
    if _NORM.search(path[0]):
        return "norm"
    if _ATTENTION.search(path[0]):
        return "attn"
    inner = path[1] if len(path) > 1 else ""
    if inner == "experts":
        return "experts"
    if inner in ("gate", "router"):
        return "router"
    if inner.startswith("shared_expert"):
        return "shared"
    return "mlp" if path[0] in ("mlp", "feed_forward", "block_sparse_moe") else "other"


# -- experts ------------------------------------------------------------------------------


def has_fused_experts(family: str | None) -> bool:
    """Whether the checkpoint holds the experts of a layer in one tensor."""
    return family in _FUSED_IN_CHECKPOINT


def expert_names(family: str | None) -> tuple[str, str, str, str] | None:
    """(block, gate, up, down) in the checkpoint; None if they are not one tensor each there."""
    return _EXPERTS.get(family or "")


def gate_up(
    prefix: str,
    names: tuple[str, str],
    experts: Sequence[int],
    shape: Sequence[int],
    *,
    row: int = 0,
) -> Iterator[Region]:
    """Regions of a tensor [experts, 2 * rows, columns] that holds gate above up.

    Args:
        prefix: of all experts in the checkpoint.
        names: of the two projections there, in the order of the tensor.
        experts: number of each expert of the tensor.
        shape: of the tensor.
        row: of the checkpoint's tensors that the first of the `rows` is.
    """
    count, both, columns = shape
    rows = both // 2
    for half, projection in enumerate(names):
        yield Region(
            name=f"{prefix}.{projection}",
            start=(0, half * rows, 0),
            stop=(count, (half + 1) * rows, columns),
            strides=(0, columns, 1),
            offset=row * columns,
            names=_of_experts(prefix, projection, experts),
        )


def down(
    prefix: str,
    projection: str,
    experts: Sequence[int],
    shape: Sequence[int],
    *,
    column: int = 0,
    columns: int | None = None,
) -> Region:
    """Region of a tensor [experts, rows, columns here] of the `columns` in the checkpoint."""
    return Region(
        name=f"{prefix}.{projection}",
        start=(0, 0, 0),
        stop=tuple(shape),
        strides=(0, columns or shape[2], 1),
        offset=column,
        names=_of_experts(prefix, projection, experts),
    )


def _of_experts(prefix: str, projection: str, experts: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{expert}.{projection}.weight" for expert in experts)


def regions_of_transformers(
    name: str, shape: Sequence[int], family: str | None
) -> list[Region] | str:
    """Where a tensor of a transformers model lies in the checkpoint, or why that is not known.

    Args:
        name: of the parameter or buffer, without wrappers.
        shape: of the whole tensor.
        family: `model_type` of the (text) configuration.
    """
    known = expert_names(family)
    if known is not None and known[0] != "mlp":
        name = re.sub(r"(layers\.\d+\.)mlp\.", rf"\1{known[0]}.", name)
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith("experts") or len(shape) < 2 or has_fused_experts(family):
        return [whole(name, shape)]
    if known is not None and len(shape) == 3 and last == "gate_up_proj":
        return list(gate_up(prefix, known[1:3], range(shape[0]), shape))
    if known is not None and len(shape) == 3 and last == "down_proj":
        return [down(prefix, known[3], range(shape[0]), shape)]
    return f"experts of {family}: where they lie in the checkpoint is not known"
