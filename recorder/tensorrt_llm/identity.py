"""Which engine a process belongs to, and how the options of a recording get to its workers.

Workers of an MPI pool receive only variables that begin with TLLM or TRTLLM, and receive them
after their interpreter has started. So every variable of a recording has a copy under `PREFIX`,
which is read once tensorrt_llm is imported; the id of the engine travels the same way. Ranks of
one mpirun or srun share their launch, from which each makes the same id.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import xxhash

from rolltape.store import new_uuid

#: In front of the copy of a variable, for example TLLM_ROLLTAPE_TAPE for ROLLTAPE_TAPE.
PREFIX = "TLLM_"
ENGINE_VARIABLE = "TLLM_ROLLTAPE_ENGINE"
#: Variables of the front end that decide numbers, as JSON, for the workers to compare with.
ENVIRONMENT_VARIABLE = "TLLM_ROLLTAPE_ENVIRONMENT"

#: What names one launch of several ranks, and what says how many there are.
_LAUNCHES = (
    (("PMIX_NAMESPACE",), "OMPI_COMM_WORLD_SIZE"),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_NTASKS"),
)

_own: set[str] = set()
_started = 0
_engines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def adopt(env: MutableMapping[str, str] | None = None) -> list[str]:
    """Give the copies of a recording's variables their own names, where those are not set.

    Returns:
        Names that were set.
    """
    env = os.environ if env is None else env
    names = []
    for name in [n for n in env if n.startswith(PREFIX + "ROLLTAPE_")]:
        plain = name.removeprefix(PREFIX)
        if plain not in env and name not in (ENGINE_VARIABLE, ENVIRONMENT_VARIABLE):
            env[plain] = env[name]
            names.append(plain)
    return names


def copies(env: Mapping[str, str]) -> dict[str, str]:
    """The copies of a recording's variables that pass to the workers of an MPI pool."""
    plain = {n: v for n, v in env.items() if n.startswith("ROLLTAPE_")}
    return {PREFIX + name: value for name, value in plain.items()}


def start_engine(executor: Any) -> str:
    """The id of the engine that an executor is the front end or a worker of.

    Called once it is being made. The front end makes the id and leaves it to the workers that it
    will start; a worker finds one that it did not make.
    """
    global _started
    found = _engines.get(executor)
    if found is not None:
        return found
    given = os.environ.get(ENGINE_VARIABLE)
    if given is not None and arrived():
        _engines[executor] = given
        return given
    engine = _of_launch(_started, os.environ) or new_uuid()
    _started += 1
    _own.add(engine)
    _engines[executor] = os.environ[ENGINE_VARIABLE] = engine
    return engine


def arrived() -> bool:
    """Whether a front end elsewhere has said which engine this process works for."""
    return os.environ.get(ENGINE_VARIABLE, next(iter(_own), "")) not in _own | {""}


def engine_of(executor: Any) -> str | None:
    """The id that `start_engine` gave to an executor."""
    return None if executor is None else _engines.get(executor)


def current_engine() -> str:
    """The id of the engine that this process is starting, or works for."""
    given = os.environ.get(ENGINE_VARIABLE)
    if given is None:  # a worker whose front end is not recorded, or did not reach it
        given = os.environ[ENGINE_VARIABLE] = _of_launch(_started, os.environ) or new_uuid()
    return given


def _of_launch(ordinal: int, env: Mapping[str, str]) -> str | None:
    """An id that all ranks of a launch make alike; None if this is no rank of several."""
    for names, size in _LAUNCHES:
        parts = [env.get(name) for name in names]
        if all(parts) and int(env.get(size) or 1) > 1:
            text = "/".join([env.get("ROLLTAPE_TAPE", ""), *(p or "" for p in parts), str(ordinal)])
            return xxhash.xxh3_128_hexdigest(text.encode())
    return None
