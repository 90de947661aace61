"""A model's weights as pieces of the checkpoint's tensors: transformers, shards, files.

Plain models, FSDP2 and tensor parallelism by DTensor, PEFT adapters, safetensors files; vLLM's
models are in `rolltape.recorder.parts_vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rolltape.recorder.adapters import (
    PROMPTS,
    Switch,
    adapters_in_force,
    is_dormant,
    unplaced_reason,
)
from rolltape.recorder.canonical import group_of, place, regions_of_transformers, whole
from rolltape.recorder.digest import GroupDigest, Part, group_digests, named_weights
from rolltape.recorder.parts_vllm import parts_of_vllm
from rolltape.store import UsageError

__all__ = [
    "digests_of_transformers",
    "parts_of_files",
    "parts_of_named",
    "parts_of_transformers",
    "parts_of_vllm",
]

#: Path elements that wrappers put into names.
_WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
    "token_adapter",
}


def parts_of_transformers(model: nn.Module) -> Iterator[Part]:
    """Pieces of a transformers model in this process.

    Args:
        model: plain or wrapped: DDP, torch.compile, FSDP2 (`fully_shard`), DTensor, PEFT. Of what
            several processes of a device mesh hold alike, only the first yields it, so that the
            digests of all processes add up. Of a PEFT model the adapters in force count.
    """
    family, in_force = _family(model), adapters_in_force(model)
    named = [(raw, one) for raw, one in named_weights(model) if not is_dormant(raw, in_force)]
    mesh: Any = next((getattr(p, "device_mesh", None) for _, p in named if _is_dtensor(p)), None)
    first = mesh is None or not any(mesh.get_coordinate() or (1,))
    for raw, tensor in named:
        name = _unwrapped(raw, learns_prompts=PROMPTS in in_force)
        group = group_of(name)
        problem = _foreign(raw, tensor) or unplaced_reason(raw, model)
        if _is_dtensor(tensor):
            local, origin, unknown = _shard(tensor)
            problem = problem or unknown
        elif first:
            local, origin = tensor, (0,) * tensor.ndim
        else:
            continue
        if local is None:
            continue
        regions = problem or regions_of_transformers(name, tensor.shape, family)
        if isinstance(regions, str):
            yield Part(name=name, tensor=local.data, group=group, reason=regions)
            continue
        for region in regions:
            yield from place(region, local, group=group_of(region.name), origin=origin)
    if first:
        yield from _derived(model, in_force)


def digests_of_transformers(model: nn.Module) -> list[GroupDigest]:
    """Digests of what of a transformers model is in this process; `reason` says if that is a shard.

    Args:
        model: as for `parts_of_transformers`.
    """
    rows = group_digests(parts_of_transformers(model))
    kinds: list[Any] = [getattr(tensor, "placements", ()) for _, tensor in named_weights(model)]
    if not any(placement.is_shard() for kind in kinds for placement in kind):
        return rows
    reason = "a shard: the digests of all processes add up to the model's"
    return [replace(row, reason=row.reason or reason) for row in rows]


def parts_of_named(
    named: Iterable[tuple[str, torch.Tensor]], reason: str | None = None
) -> Iterator[Part]:
    """Whole tensors under the names that they are given.

    Args:
        named: names of the checkpoint, if the digests are to be compared with others.
        reason: why they are not to be compared.
    """
    for name, tensor in named:
        yield Part(name=name, tensor=tensor.data, group=group_of(name), reason=reason)


def parts_of_files(folder: str | Path) -> Iterator[Part]:
    """Pieces of a checkpoint of safetensors files, tensor by tensor, on the CPU.

    Args:
        folder: with `*.safetensors` and, to know whether embeddings are tied, `config.json`.

    Raises:
        UsageError: no such files.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder}: no *.safetensors", hint="the folder of a checkpoint")
    tied = _tied(Path(folder, "config.json"))
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if not (tied and name.endswith("lm_head.weight")):
                    tensor = opened.get_tensor(name)
                    region = whole(name, tensor.shape)
                    yield from place(region, tensor, group=group_of(name))


def _tied(config: Path) -> bool:
    if not config.is_file():
        return False
    content = json.loads(config.read_text())
    text = content.get("text_config") or {}
    return bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _family(model: nn.Module) -> str | None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "model_type"):
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            return str(text.model_type)
    return None


def _unwrapped(name: str, *, learns_prompts: bool) -> str:
    """The checkpoint's name of a parameter of a wrapped model.

    Args:
        name: as the model's modules have it.
        learns_prompts: PEFT has no tuner around the model then.
    """
    path = [element for element in name.split(".") if element not in _WRAPPERS]
    if path[0] == "module":
        path = path[1:]
    if path[0] == "base_model" and learns_prompts:
        path = path[1:]
    if path[:2] == ["base_model", "model"]:  # PEFT
        path = path[2:]
    path = [element for element in path if element != "original_module"]
    for index, element in enumerate(path):
        if element.startswith("lora_") and index + 1 < len(path):
            del path[index + 1]  # the adapter's name in this process; its file has none
            break
    return ".".join(path)


def _foreign(name: str, tensor: torch.Tensor) -> str | None:
    if "_flat_param" in name:
        return "FSDP1 keeps the weights of several layers in one flat tensor"
    if hasattr(tensor, "quant_state") or name.endswith(("qweight", "weight_packed")):
        return "quantised"
    return None


def _derived(model: nn.Module, in_force: dict[str, Switch]) -> Iterator[Part]:
    for prefix, module in model.named_modules():
        hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for name, buffer in module.named_buffers(recurse=False):
            raw = f"{prefix}.{name}" if prefix else name
            if name in hidden and not is_dormant(raw, in_force):
                yield derived(_unwrapped(raw, learns_prompts=PROMPTS in in_force), buffer)


def derived(name: str, buffer: torch.Tensor) -> Part:
    """A buffer that an implementation makes for itself."""
    reason = "made by this implementation, not read from a checkpoint"
    return Part(name=name, tensor=buffer.data, group="derived", reason=reason)


# -- shards -------------------------------------------------------------------------------


def _is_dtensor(tensor: object) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _shard(tensor: Any) -> tuple[torch.Tensor | None, Sequence[int], str | None]:
    """This process's piece of a DTensor, where it begins, and why that is not known.

    The piece is None where another process yields the same one.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.detach().to_local()
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, (), None
    for index, placement in zip(coordinate, placements, strict=True):
        if placement.is_replicate() and index:
            return None, (), None
    kinds = {type(placement).__name__ for placement in placements}
    if kinds <= {"Shard", "Replicate"}:
        shape, origin = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        if tuple(shape) == tuple(local.shape):
            return local, tuple(origin), None
    return local, (0,) * local.ndim, f"shards of kind {', '.join(sorted(kinds))}"
