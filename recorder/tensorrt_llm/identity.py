"""Which engine a process belongs to, and how the options of a recording get to its workers.

Workers of an MPI pool receive only variables that begin with TLLM or TRTLLM, and receive them
after their interpreter has started. So every variable of a recording has a copy behind `COPIES`,
which `inject/_rolltape_late` reads once tensorrt_llm is imported; the id of the engine travels the
same way. Ranks of one mpirun or srun share their launch, from which each makes the same id.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import xxhash

from rolltape.store import new_uuid

#: In front of the copy of a variable: TLLM_ROLLTAPE_TAPE for ROLLTAPE_TAPE. Also in `inject`.
COPIES = "TLLM_ROLLTAPE_"
#: Not behind `COPIES`: these have no original.
ENGINE_VARIABLE = "TRTLLM_ROLLTAPE_ENGINE"
#: Variables of the front end that decide numbers, as JSON, for the workers to compare with.
ENVIRONMENT_VARIABLE = "TRTLLM_ROLLTAPE_ENVIRONMENT"

#: What names one launch of several ranks, and what says how many there are.
_LAUNCHES = (
    (("PMIX_NAMESPACE",), "OMPI_COMM_WORLD_SIZE"),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_NTASKS"),
)

_own: set[str] = set()
_started = 0
_engines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class _Announced:
    """The engine whose executors this process is about to make, and which of them are to come."""

    engine = ""
    front = worker = False


def copies(env: Mapping[str, str]) -> dict[str, str]:
    """The copies of a recording's variables that pass to the workers of an MPI pool."""
    plain = {n: v for n, v in env.items() if n.startswith("ROLLTAPE_")}
    return {COPIES + name.removeprefix("ROLLTAPE_"): value for name, value in plain.items()}


def announce() -> str:
    """An `LLM` is about to be made: the id of its engine, left to the workers it will start.

    A pool takes its variables when it is made, which may be before there is any executor.
    """
    _Announced.engine = _new_engine()
    _Announced.front = _Announced.worker = True
    mine = copies(os.environ)
    for name in [n for n in os.environ if n.startswith(COPIES) and n not in mine]:
        del os.environ[name]  # of an earlier recording, as those are that change now
    os.environ.update(mine)
    return _Announced.engine


def start_engine(executor: Any) -> str:
    """The id of the engine that an executor is the front end or a worker of.

    Called once it is being made. One process may hold both, as rank 0 of an mpirun does; a worker
    elsewhere finds an id that it did not make.
    """
    found = _engines.get(executor)
    if found is not None:
        return found
    if is_worker(executor):
        if _Announced.worker:
            engine = _Announced.engine
        else:
            engine = os.environ[ENGINE_VARIABLE] if arrived() else _new_engine()
        _Announced.front = _Announced.worker = False
    else:
        engine = _Announced.engine if _Announced.front else _new_engine()
        _Announced.engine, _Announced.front, _Announced.worker = engine, False, True
    _engines[executor] = engine
    return engine


def is_worker(executor: Any) -> bool:
    """Whether an executor runs the model, rather than speaking to one that does."""
    return any(base.__name__ == "BaseWorker" for base in type(executor).__mro__)


def _new_engine() -> str:
    global _started
    engine = _of_launch(_started, os.environ) or new_uuid()
    _started += 1
    _own.add(engine)
    os.environ[ENGINE_VARIABLE] = engine
    return engine


def arrived() -> bool:
    """Whether a front end elsewhere has said which engine this process works for."""
    return os.environ.get(ENGINE_VARIABLE, "") not in _own | {""}


def engine_of(executor: Any) -> str | None:
    """The id that `start_engine` gave to an executor."""
    return None if executor is None else _engines.get(executor)


def current_engine() -> str:
    """The id of the engine that this process is starting, or works for."""
    # none: a worker whose front end is not recorded, or did not reach it
    return os.environ.get(ENGINE_VARIABLE) or _new_engine()


def _of_launch(ordinal: int, env: Mapping[str, str]) -> str | None:
    """An id that all ranks of a launch make alike; None if this is no rank of several."""
    for names, size in _LAUNCHES:
        parts = [env.get(name) for name in names]
        if all(parts) and int(env.get(size) or 1) > 1:
            text = "/".join([env.get("ROLLTAPE_TAPE", ""), *(p or "" for p in parts), str(ordinal)])
            return xxhash.xxh3_128_hexdigest(text.encode())
    return None
