"""Runs a tape of vLLM again.

vllm_reexecute_job.py TAPE OUT MODEL RESULT [EDITED ...]
vllm_reexecute_job.py --alternatives TAPE FOLDER MODEL RESULT MODEL-WITH-A-CHANGE

RESULT gets what `reexecute` answers, and what the same execution is to each edited recording; or
what it answers with switches: {"error": ...} where it refuses. `left` is what a run left behind.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

from rolltape import store
from rolltape.recorder.inject import _rolltape_hook
from rolltape.replay.executors import vllm as executor
from rolltape.replay.reexecute import reexecute
from rolltape.replay.reproduction import reproduction
from rolltape.store import RolltapeError


def main(tape: str, out: str, model: str, result: str, *edited: str) -> None:
    seen: list[Any] = []
    run = executor.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(run(*args, **kwargs))
        return seen[-1]

    setattr(executor, "run", watched)  # noqa: B010
    found = {"itself": reexecute(tape, out, on="vllm", model=model)}
    for path in edited:
        other = reproduction(store.open(path), store.open(out), execution=seen[0])
        found[Path(path).name] = other
    Path(result).write_text(json.dumps(found, default=str))


def alternatives(tape: str, folder: str, model: str, result: str, changed: str) -> None:
    run = partial(reexecute, tape, on="vllm")
    other = {"checkpoints": [f"0={changed}"]}
    asked: dict[str, dict[str, Any]] = {
        "few": {"model": model, "switches": ["chunk=8"]},
        "chunk": {"model": model, "switches": ["chunk=32"]},
        "uncached": {"model": model, "switches": ["prefix_cache=off"]},
        "version": {"model": model, "switches": ["weights=0"]},
        "wrong": {**other, "switches": ["weights=0"]},
        "unknown": {"model": model, "switches": ["weights=1"]},
    }
    found: dict[str, Any] = {}
    for name, options in asked.items():
        try:
            found[name] = run(out=Path(folder, name), **options)
        except RolltapeError as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["left"] = left_behind()
    Path(result).write_text(json.dumps(found, default=str))


def left_behind() -> list[str]:
    """Patches, hooks and variables that are still there."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.sampler import Sampler

    left = [name for name in _rolltape_hook._finder.pending if name in _rolltape_hook.HOOKS]
    for name in {target.partition(":")[0] for target in _rolltape_hook.HOOKS.values()}:
        module = sys.modules.get(name)
        if getattr(module, "_patches", None) or getattr(module, "_installed", None):
            left.append(name)
    for owner, attribute in ((Scheduler, "schedule"), (Sampler, "sample")):
        if hasattr(vars(owner)[attribute], "__wrapped__"):
            left.append(f"{owner.__name__}.{attribute}")
    return left + [name for name in executor.IN_PROCESS if name in os.environ]


if __name__ == "__main__":
    if sys.argv[1] == "--alternatives":
        alternatives(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
