"""A vLLM model's weights as pieces of the checkpoint's tensors.

Recognised by structure: what a layer says of its own sizes and ranks. A tensor is yielded under the
checkpoint's names only if all of it is accounted for; else it is marked with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rolltape.recorder.canonical import (
    Region,
    contiguous,
    down,
    expert_names,
    gate_up,
    group_of,
    has_fused_experts,
    place,
    whole,
)
from rolltape.recorder.digest import Part

#: What a layer was fused from, where the model does not say it.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
#: Families whose names and shapes were compared with their checkpoint, and what vLLM renames.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "deepseek_v3": (),
    "glm4_moe": (),
    "gpt_oss": ((".attn.", ".self_attn."), (".embedding.", ".embed_tokens.")),
    "llama": (),
    "mistral": (),
    "mixtral": (),
    "olmoe": (),
    "qwen2": (),
    "qwen2_moe": (),
    "qwen3": (),
    "qwen3_moe": (),
}
#: Methods that leave a weight as the checkpoint has it.
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
#: Layers whose parameters every rank holds whole.
_REPLICATED = ("RMSNorm", "GemmaRMSNorm", "LayerNorm", "Linear", "GateLinear")
#: MoE kernels that take w13 and w2 as they were loaded, and one that wants up above gate.
_AS_LOADED, _SWAPPED = ("TRITON", "BATCHED_TRITON"), ("FLASHINFER_CUTLASS",)

Found = list[Region] | str


def parts_of_vllm(model: nn.Module, *, tp_rank: int = 0, tp_size: int = 1) -> Iterator[Part]:
    """Pieces of a vLLM model in one worker.

    Args:
        model: of the worker, after loading.
        tp_rank: rank and size of tensor parallelism, for layers that do not say theirs. What all
            ranks hold alike is yielded by rank 0 only.
        tp_size: see `tp_rank`.
    """
    reader = _Reader(model, tp_rank, tp_size)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for last, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen:  # tied
                continue
            seen.add(id(tensor))
            yield from reader.parts(path, module, last, tensor)
        for last, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{last}" if path else last
            if group_of(name) == "derived" or last in module._non_persistent_buffers_set:
                if tp_rank == 0:
                    yield _marked(name, buffer, "made by the engine", group="derived")
            else:
                yield from reader.parts(path, module, last, buffer)
        for last in ("lora_a_stacked", "lora_b_stacked"):
            slots = getattr(module, last, ())
            for index, slot in enumerate((slots,) if torch.is_tensor(slots) else slots or ()):
                yield _marked(f"{path}.{last}.{index}", slot, "slots of the engine", group="lora")


def _marked(name: str, tensor: torch.Tensor, reason: str, *, group: str | None = None) -> Part:
    return Part(name=name, tensor=tensor.data, group=group or group_of(name), reason=reason)


class _Reader:
    def __init__(self, model: nn.Module, tp_rank: int, tp_size: int) -> None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.family: str | None = getattr(text, "model_type", None)
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        self.fused = {**_FUSED, **(getattr(model, "packed_modules_mapping", None) or {})}
        self.rank, self.size = tp_rank, tp_size
        self.dtype = next((p.dtype for p in model.parameters()), None)

    def parts(self, path: str, module: Any, last: str, tensor: torch.Tensor) -> Iterator[Part]:
        path = ".".join(p for p in path.split(".") if p not in ("base_layer", "routed_experts"))
        for new, old in _NAMES.get(self.family or "", ()):
            path = f"{path}.".replace(new, old)[:-1]
        name = f"{path}.{last}" if path else last
        if self.tied and name.endswith("lm_head.weight"):  # a copy, of another pipeline rank
            return
        problem = self._problem(module, last, tensor, group_of(name))
        regions = problem or self._regions(path, module, last, tensor)
        if isinstance(regions, str):
            yield _marked(name, tensor, regions)
            return
        for region in regions:
            yield from place(region, tensor, group=group_of(region.name))

    def _problem(self, module: Any, last: str, tensor: torch.Tensor, group: str) -> str | None:
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if self.family not in _NAMES:
            return f"what vLLM makes of the checkpoint of a {self.family} is not known"
        if method is not None and kind not in _PLAIN:
            return f"held by {kind}, not as the checkpoint has it"
        if getattr(tensor, "is_shuffled", False):
            return "shuffled for a kernel"
        if tensor.numel() == 0:
            return "repacked by the CPU kernels, which keep only their own copy"
        heavy = last in ("weight", "bias") or last.startswith(("w13_", "w2_"))
        if heavy and tensor.dtype != self.dtype and not group.endswith((".router", "norm")):
            return f"held as {tensor.dtype}, the model as {self.dtype}"
        return None

    def _regions(self, path: str, module: Any, last: str, tensor: torch.Tensor) -> Found:
        name = f"{path}.{last}" if path else last
        if last.startswith(("w13_", "w2_")):
            return self._experts(path, module, last, tensor.shape)
        rank = int(getattr(module, "tp_rank", self.rank))
        size = int(getattr(module, "tp_size", self.size))
        if size == 1 and self.rank:  # a layer that takes no part: every rank holds all of it
            return []
        if hasattr(module, "shard_indices"):
            return _vocabulary(name, module.shard_indices, tensor.shape)
        own = path.rpartition(".")[2]
        names = self.fused.get(own)
        if names and hasattr(module, "output_size") and last in ("weight", "bias"):
            prefix = path[: -len(own)]
            if list(names) == [own] and size == 1:
                return [whole(name, tensor.shape)]
            blocks = _blocks(module, names, rank, size)
            return _stacked([f"{prefix}{n}.{last}" for n in names], blocks, tensor.shape)
        if hasattr(module, "output_size") and last in ("weight", "bias"):
            return _linear(name, module, tensor.shape, rank, size)
        if self.size == 1:
            return [whole(name, tensor.shape)]
        if last == "sinks":  # one value a head
            return [_slice(name, tensor.shape, self.rank * tensor.shape[0])]
        known = type(module).__name__ in _REPLICATED or last == "e_score_correction_bias"
        if not known:
            return f"how {type(module).__name__} is sharded is not known"
        return [whole(name, tensor.shape)] if self.rank == 0 else []

    def _experts(self, path: str, module: Any, last: str, shape: Sequence[int]) -> Found:
        swapped, problem = _moe_layout(module)
        if problem:
            return problem
        parallel = _parallel(module)
        if parallel is None and self.size > 1:
            return "how the experts are sharded is not known"
        rank, size = (0, 1) if parallel is None else (parallel.tp_rank, parallel.tp_size)
        if getattr(parallel, "enable_eplb", False):
            return "experts are moved while the engine runs (EPLB)"
        experts = _numbers(module, shape[0])
        if has_fused_experts(self.family):
            return _fused_experts(path, last, shape, experts, rank, size)
        known = expert_names(self.family)
        if known is None or len(shape) != 3:
            return f"experts of {self.family}: where they lie in the checkpoint is not known"
        _, gate, up, projection = known
        if last == "w13_weight":
            order = (up, gate) if swapped else (gate, up)
            return list(gate_up(path, order, experts, shape, row=rank * (shape[1] // 2)))
        if last == "w2_weight":
            column, columns = rank * shape[2], size * shape[2]
            return [down(path, projection, experts, shape, column=column, columns=columns)]
        return f"{last} has no known counterpart in a checkpoint"


# -- linear layers and embeddings ---------------------------------------------------------


def _vocabulary(name: str, indices: Any, shape: Sequence[int]) -> Found:
    rows = indices.org_vocab_end_index - indices.org_vocab_start_index
    if indices.added_vocab_end_index > indices.added_vocab_start_index:
        return "with rows that an adapter added to the vocabulary"
    strides = contiguous(shape)
    first = indices.org_vocab_start_index * strides[0]
    return [
        Region(
            name=name,
            start=(0,) * len(shape),
            stop=(rows, *shape[1:]),  # the rest is padding
            strides=strides,
            offset=first,
        )
    ]


def _slice(name: str, shape: Sequence[int], row: int) -> Region:
    strides = contiguous(shape)
    start = (0,) * len(shape)
    return Region(
        name=name, start=start, stop=tuple(shape), strides=strides, offset=row * strides[0]
    )


def _linear(name: str, module: Any, shape: Sequence[int], rank: int, size: int) -> Found:
    full = (int(module.output_size), int(module.input_size))[: len(shape)]
    if tuple(shape) == full:
        return [whole(name, shape)] if rank == 0 else []
    if (shape[0] * size, *shape[1:]) == full:
        return [_slice(name, shape, rank * shape[0])]
    if len(shape) == 2 and (shape[0], shape[1] * size) == full:
        return [
            Region(
                name=name,
                start=(0, 0),
                stop=tuple(shape),
                strides=(full[1], 1),
                offset=rank * shape[1],
            )
        ]
    return f"{tuple(shape)} is no shard of {full} for {size} ranks"


def _blocks(module: Any, names: Sequence[str], rank: int, size: int) -> list[tuple[int, int, bool]]:
    """(rows here, first row in the checkpoint's tensor, whether this rank yields it) of each."""
    if hasattr(module, "num_kv_head_replicas"):
        copies = int(module.num_kv_head_replicas)
        q = int(module.num_heads) * int(module.head_size)
        k = int(module.num_kv_heads) * int(module.head_size)
        v = int(module.num_kv_heads) * int(getattr(module, "v_head_size", module.head_size))
        shared = rank // copies
        mine = rank % copies == 0
        return [(q, rank * q, True), (k, shared * k, mine), (v, shared * v, mine)]
    rows = [int(n) // size for n in module.output_sizes]
    return [(n, rank * n, True) for n in rows]


def _stacked(
    names: Sequence[str], blocks: Sequence[tuple[int, int, bool]], shape: Sequence[int]
) -> Found:
    if len(names) != len(blocks) or sum(rows for rows, _, _ in blocks) != shape[0]:
        return f"{shape[0]} rows are not those of {', '.join(n.split('.')[-2] for n in names)}"
    strides = contiguous(shape)
    zero = (0,) * (len(shape) - 1)
    out, at = [], 0
    for name, (rows, first, mine) in zip(names, blocks, strict=True):
        if mine:
            out.append(
                Region(
                    name=name,
                    start=(at, *zero),
                    stop=(at + rows, *shape[1:]),
                    strides=strides,
                    offset=first * strides[0],
                )
            )
        at += rows
    return out


# -- experts ------------------------------------------------------------------------------


def _moe_layout(module: Any) -> tuple[bool, str | None]:
    """Whether up lies above gate, and why the layout is not known."""
    method: Any = getattr(module, "quant_method", None)
    backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
    config = getattr(module, "moe_config", None)
    for size in ("intermediate_size_per_partition", "hidden_dim"):
        have = getattr(config, size, None)
        if have != getattr(config, f"{size}_unpadded", have):
            return False, "padded for a kernel"
    if hasattr(method, "moe_kernel") and method.moe_kernel is None:
        return False, None  # loaded, and nothing done to it yet
    if backend in _AS_LOADED or backend in _SWAPPED:
        return backend in _SWAPPED, None
    return False, f"repacked for the MoE kernel {backend or 'of this version'}"


def _parallel(module: Any) -> Any:
    config = getattr(module, "moe_config", module)
    return getattr(config, "moe_parallel_config", None)


def _numbers(module: Any, count: int) -> list[int]:
    """Number of each expert that is here."""
    table = getattr(module, "_expert_map", getattr(module, "expert_map", None))
    if table is None:
        return list(range(count))
    here = {local: number for number, local in enumerate(table.tolist()) if local >= 0}
    return [here[local] for local in range(count)]


def _fused_experts(
    path: str, last: str, shape: Sequence[int], experts: list[int], rank: int, size: int
) -> Found:
    """GPT-OSS: [E, hidden, 2 I] and [E, I, hidden] in the checkpoint, transposed here."""
    if experts != list(range(experts[0], experts[0] + len(experts))):
        return "experts that do not follow each other, of a tensor that holds all of them"
    zero, stop, first = (0,) * len(shape), tuple(shape), experts[0]
    if last in ("w2_bias", "w13_bias"):
        mine = last == "w13_bias" or rank == 0
        width = shape[1] * size if last == "w13_bias" else shape[1]
        name = f"{path}.{'gate_up_proj_bias' if last == 'w13_bias' else 'down_proj_bias'}"
        column = rank * shape[1] if last == "w13_bias" else 0
        region = Region(
            name=name, start=zero, stop=stop, strides=(width, 1), offset=first * width + column
        )
        return [region] if mine else []
    if last == "w13_weight":
        _, rows, hidden = shape
        each = hidden * rows * size
        return [
            Region(
                name=f"{path}.gate_up_proj",
                start=zero,
                stop=stop,
                strides=(each, 1, rows * size),
                offset=first * each + rank * rows,
            )
        ]
    if last == "w2_weight":
        _, hidden, columns = shape
        each = columns * size * hidden
        return [
            Region(
                name=f"{path}.down_proj",
                start=zero,
                stop=stop,
                strides=(each, 1, hidden),
                offset=first * each + rank * columns * hidden,
            )
        ]
    return f"{last} has no known counterpart in a checkpoint"
