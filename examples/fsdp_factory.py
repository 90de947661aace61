"""A trainer's model for `rolltape replay --on`: transformers, sharded by FSDP2 over all ranks.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m rolltape replay runs/a -o runs/b \\
        --on fsdp_factory:factory

Every rank runs every batch, rank 0 writes the tape. On the CPU the ranks talk by gloo, on CUDA
devices by NCCL. Put your own wrapping in the place of `shard`, so that what is scored is what your
trainer runs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rolltape.replay.models import model_of


def factory(tape, *, device, dtype):
    """The model that the tape names, sharded."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = AutoModelForCausalLM.from_pretrained(model_of(tape), dtype=dtype)
    return shard(model.to(device))


def shard(model):
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
