"""One forward on two tensor-parallel ranks: gloo on the CPU, NCCL on GPUs.

    python -m torch.distributed.run --nproc-per-node 2 -m rolltape.replay.verify.tensor_parallel \\
        IN.npz OUT.npz
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltape.replay.verify.cases import NotApplicableError
from rolltape.replay.verify.rank_sites import SiteRows, merge_ranks, watching
from rolltape.replay.verify.teacher import Computed, Rows, teacher_forced
from rolltape.store.errors import UsageError

RANKS = 2
_SECONDS = 600


def two_ranks(model: str, rows: Rows, *, dtype: str, device: str, folder: Path) -> Computed:
    """What two ranks compute for rows; for the arguments see `two_ranks_sites`."""
    return _read(_run(model, rows, dtype=dtype, device=device, folder=folder))


def two_ranks_sites(
    model: str, rows: Rows, row: int, *, dtype: str, device: str, folder: Path
) -> tuple[SiteRows, list[dict[str, Any]]]:
    """The sites of one row on two ranks, merged, and the replicas that disagree.

    Args:
        model: path of the checkpoint.
        rows: to run.
        row: whose sites.
        dtype: as torch prints it.
        device: type of device.
        folder: for what goes there and back; made.

    Raises:
        NotApplicableError: the model has no plan, something is not installed, there are too few
            devices, or the ranks failed.
    """
    found = _run(model, rows, row, dtype=dtype, device=device, folder=folder)
    kept: dict[str, Any] = torch.load(found.with_suffix(".sites"), weights_only=True)
    if kept["reason"] is not None:
        raise NotApplicableError(kept["reason"])
    return kept["sites"], kept["replicas"]


def _run(model: str, rows: Rows, row: int = -1, *, dtype: str, device: str, folder: Path) -> Path:
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicableError("transformers splits a model with accelerate, not installed here")
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        raise NotApplicableError(f"{RANKS} ranks need {RANKS} GPUs, here is one")
    folder.mkdir()
    given, found = folder / "in.npz", folder / "out.npz"
    facts: dict[str, Any] = {"model": os.path.abspath(model) if Path(model).is_dir() else model}
    facts |= {"dtype": dtype.removeprefix("torch."), "device": device, "row": row}
    arrays: dict[str, Any] = {"ids": rows.ids, "pad_left": rows.pad_left, "steps": rows.steps}
    np.savez(given, **arrays, **facts)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", __name__, str(given), str(found)]
    # a rank has the threads of this process: another number would be another kernel
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotApplicableError(f"two ranks did not end within {_SECONDS} s") from error
    if done.returncode or not found.exists():
        raise NotApplicableError(f"two ranks failed: {_reason(done.stderr)}")
    return found


def _reason(text: str) -> str:
    errors = [line.split("]: ")[-1] for line in text.splitlines() if "Error: " in line]
    return errors[0].strip() if errors else "no reason was given"


def _read(path: Path) -> Computed:
    with np.load(path) as file:
        layers = file["layers"].tolist()
        routes = {layer: (file[f"ids{layer}"], file[f"weights{layer}"]) for layer in layers}
        return file["logprobs"], routes


def _split(parameter: Any) -> bool:
    local = getattr(parameter, "to_local", None)
    return local is not None and local().shape != parameter.shape


def _main(given: str, found: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    with np.load(given) as file:
        rows = Rows(ids=file["ids"], pad_left=file["pad_left"], steps=int(file["steps"]))
        name, dtype, row = str(file["model"]), str(file["dtype"]), int(file["row"])
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=RANKS),
    ).eval()
    if not any(_split(parameter) for parameter in model.parameters()):
        raise RuntimeError("this model has no plan for tensor parallelism: nothing was split")
    logprobs, routes = teacher_forced(model, rows) if row < 0 else _watched(model, rows, row, found)
    if torch.distributed.get_rank() == 0:
        arrays: dict[str, Any] = {f"ids{layer}": ids for layer, (ids, _) in routes.items()}
        arrays |= {f"weights{layer}": weights for layer, (_, weights) in routes.items()}
        np.savez(found, logprobs=logprobs, layers=np.array(sorted(routes), np.int64), **arrays)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _watched(model: Any, rows: Rows, row: int, found: str) -> Computed:
    with watching(model, rows, row) as own:
        computed = teacher_forced(model, rows)
    ranks: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(ranks, own)
    if torch.distributed.get_rank() == 0:
        kept: dict[str, Any] = {"sites": {}, "replicas": [], "reason": None}
        try:
            kept["sites"], kept["replicas"] = merge_ranks(model, ranks)
        except UsageError as error:
            kept["reason"] = f"the ranks do not fit: {error}"
        torch.save(kept, Path(found).with_suffix(".sites"))
    return computed


if __name__ == "__main__":
    _main(*sys.argv[1:])
