"""Choices that no interface shows: rows that say so, for what this process has loaded.

Without them a tape would look complete where it is not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rolltape.recorder.tactics.rows import Tactic


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A choice made out of sight.

    Args:
        op: what is chosen.
        implementation: library that chooses.
        reason: why it is not on the tape, and what would pin it or show it.
        applies: given torch (None if it is not loaded), whether this process makes that choice.
        settings: environment variables that steer it; those that are set go into the row's key.
    """

    op: str
    implementation: str
    reason: str
    applies: Callable[[Any], bool]
    settings: tuple[str, ...] = ()


def _loaded(*modules: str) -> bool:
    return any(module in sys.modules for module in modules)


def _cuda(torch: Any) -> bool:
    # not `is_available`, which asks the driver: only a process that used the device chose for it
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())


def _nvidia(torch: Any) -> bool:
    return _cuda(torch) and torch.version.cuda is not None


def _cpu(torch: Any) -> bool:
    return torch is not None and not _cuda(torch)


def _distributed(torch: Any, backend: str) -> bool:
    if torch is None or not _loaded("torch.distributed"):
        return False
    dist = torch.distributed
    return bool(
        dist.is_available()
        and dist.is_initialized()
        and backend in str(dist.get_backend())
        and dist.get_world_size() > 1
    )


def _tunable(torch: Any) -> bool:
    tunable = getattr(torch.cuda, "tunable", None) if _cuda(torch) else None
    return tunable is not None and bool(tunable.is_enabled())


UNSEEN = (
    Unseen(
        op="gemm",
        implementation="cuBLAS/cuBLASLt",
        reason="the library picks an algorithm by its own heuristics for every shape, workspace "
        "and version, and has no call that tells which; kernel names show with --profile-kernels",
        applies=_nvidia,
        settings=("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "CUBLASLT_LOG_LEVEL"),
    ),
    Unseen(
        op="gemm",
        implementation="hipBLASLt/rocBLAS",
        reason="the library picks a solution by its own heuristics for every shape, and PyTorch "
        "does not pass on which; kernel names show with --profile-kernels",
        applies=lambda torch: _cuda(torch) and torch.version.hip is not None,
    ),
    Unseen(
        op="scaled_dot_product_attention",
        implementation="torch",
        reason="which of the enabled backends runs is decided in each call and not reported; "
        "kernel names show with --profile-kernels",
        applies=lambda torch: torch is not None,
    ),
    Unseen(
        op="attention, convolution",
        implementation="cuDNN",
        reason="cuDNN picks an execution plan by its heuristics; the plan is not reported",
        applies=_nvidia,
    ),
    Unseen(
        op="attention",
        implementation="FlashAttention",
        reason="tile sizes and the number of KV splits follow from shapes and the device inside "
        "of the library",
        applies=lambda torch: _loaded("flash_attn", "flash_attn_interface", "vllm.vllm_flash_attn"),
    ),
    Unseen(
        op="attention",
        implementation="TensorRT-LLM FMHA",
        reason="the FMHA library picks a kernel inside of the attention operator",
        applies=lambda torch: _loaded("tensorrt_llm"),
    ),
    Unseen(
        op="attention",
        implementation="FlashInfer plan",
        reason="attention wrappers plan KV splits and tile sizes from the batch; plans are not "
        "entries of the AutoTuner",
        applies=lambda torch: _loaded("flashinfer.decode", "flashinfer.prefill"),
    ),
    Unseen(
        op="all-reduce",
        implementation="TensorRT-LLM",
        reason="strategy AUTO looks a kernel up by message size and ranks; with the tuner on, "
        "candidates that are not bit-equivalent are ranked by time",
        applies=lambda torch: _loaded("tensorrt_llm._torch.distributed"),
        settings=("TLLM_DISABLE_ALLREDUCE_AUTOTUNE", "FORCE_DETERMINISTIC"),
    ),
    Unseen(
        op="collectives",
        implementation="NCCL",
        reason="algorithm, protocol and channels follow from size and topology; NCCL only logs "
        "them (NCCL_DEBUG=INFO), and NCCL_ALGO and NCCL_PROTO pin them",
        applies=lambda torch: _distributed(torch, "nccl"),
        settings=("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"),
    ),
    Unseen(
        op="collectives",
        implementation="Gloo",
        reason="the reduction algorithm follows from size and ranks and is not reported",
        applies=lambda torch: _distributed(torch, "gloo"),
    ),
    Unseen(
        op="all-reduce",
        implementation="vLLM custom all-reduce",
        reason="one-shot, two-shot or NCCL is decided by message size in each call",
        applies=lambda torch: (
            _cuda(torch) and _loaded("vllm.distributed.device_communicators.custom_all_reduce")
        ),
    ),
    Unseen(
        op="gemm",
        implementation="DeepGEMM",
        reason="its JIT picks block sizes, stages and multicast by a heuristic for every shape",
        applies=lambda torch: _loaded("deep_gemm"),
        settings=("DG_JIT_DEBUG", "DG_PRINT_CONFIGS"),
    ),
    Unseen(
        op="generated kernels",
        implementation="Inductor",
        reason="the launch configuration of each generated Triton kernel is chosen when it first "
        "runs and kept in Inductor's cache folder; only choices between operators are recorded",
        applies=lambda torch: _cuda(torch) and _loaded("torch._inductor.runtime.triton_heuristics"),
        settings=("TORCHINDUCTOR_CACHE_DIR",),
    ),
    Unseen(
        op="gemm",
        implementation="TunableOp",
        reason="PyTorch writes its results to a file of its own (PYTORCH_TUNABLEOP_FILENAME)",
        applies=_tunable,
        settings=("PYTORCH_TUNABLEOP_FILENAME",),
    ),
    Unseen(
        op="gemm, reorder",
        implementation="oneDNN",
        reason="the library dispatches by shape, instruction set and threads; ONEDNN_VERBOSE=1 "
        "prints what ran, ONEDNN_MAX_CPU_ISA limits it",
        applies=lambda torch: _cpu(torch) and bool(torch.backends.mkldnn.is_available()),
        settings=("ONEDNN_MAX_CPU_ISA", "ONEDNN_VERBOSE", "OMP_NUM_THREADS"),
    ),
    Unseen(
        op="gemm",
        implementation="MKL",
        reason="the library dispatches by shape, instruction set and threads; MKL_CBWR pins the "
        "code path",
        applies=lambda torch: _cpu(torch) and bool(torch.backends.mkl.is_available()),
        settings=("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"),
    ),
)


def unrecorded() -> list[Tactic]:
    """A row for each choice that this process makes and that is not on the tape."""
    return list(_rows(sys.modules.get("torch")))


def _rows(torch: Any) -> Iterator[Tactic]:
    for unseen in UNSEEN:
        if unseen.applies(torch):
            settings = {name: os.environ[name] for name in unseen.settings if name in os.environ}
            yield Tactic(
                tuner=unseen.implementation,
                op=unseen.op,
                key={"settings": settings},
                source="unrecorded",
                implementation=unseen.implementation,
                reason=unseen.reason,
            )
