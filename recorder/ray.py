"""Takes the recording along to the workers of a Ray cluster.

Where the job starts Ray itself the workers inherit its environment, and there is nothing to do.
Where it joins a cluster that runs already they do not: then the switches go with the job's runtime
environment, added to what the job says there. Ray hands them to every worker of that job, on every
node, before its Python starts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rolltape.recorder.targets import Target, parameters_of

# Ray's own processes import this too: nothing but the standard library

_MODULE = "ray._private.worker"
TARGETS: tuple[Target, ...] = (
    Target(
        module=_MODULE,
        symbol="init",
        parameters=("address", "runtime_env", "job_config"),
        gives="processes",
        instead="workers of a cluster that runs already are not recorded, see docs/injection.md",
    ),
    Target(
        module="ray._private.services",
        symbol="canonicalize_bootstrap_address",
        parameters=("addr", "temp_dir"),
        gives="processes",
        instead="the runtime environment is set even where the job starts Ray itself",
    ),
    Target(
        module=_MODULE,
        symbol="global_worker",
        gives="lifecycle",
        instead="an actor that is killed loses what it recorded in its last second",
    ),
)

_TAPE = "ROLLTAPE_TAPE"
_INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
#: vLLM copies variables with these prefixes to its Ray workers.
_VLLM = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_PREFIX = "ROLLTAPE_"
#: Set where PYTHONPATH was put together by Ray, see `_rolltape_hook`.
JOINED = "ROLLTAPE_JOINED_PATH"
#: Only of this machine: heartbeats of a tape in an object store.
_LOCAL = ("ROLLTAPE_PROCS",)
#: Ray's variable with what `ray job submit` was given.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_original: Any = None


def bind() -> bool:
    """Wrap `ray.init`; called once Ray's worker module has been executed.

    Returns:
        Whether it was not wrapped before.
    """
    global _original
    module = sys.modules[_MODULE]
    init = getattr(module, "init", None)
    if _original is not None or init is None or "runtime_env" not in parameters_of(init):
        return False
    _original = init

    # a plain function under its own name: a task that mentions ray.init is pickled by that name
    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            kwargs = _with_switches(args, kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"rolltape: ray.init: {what} (workers may go unrecorded)\n")
        return init(*args, **kwargs)

    _set(init, wrapper)
    return True


def unbind() -> None:
    """Undo `bind`."""
    global _original
    module = sys.modules.get(_MODULE)
    if _original is not None and module is not None:
        _set(module.init, _original)
    _original = None


def _set(old: Any, new: Any) -> None:
    # `ray` itself has taken the name by then, unless it is just being imported
    for name in (_MODULE, "ray"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "init", None) is old:
            module.init = new  # type: ignore[attr-defined]


def in_worker() -> bool:
    """Whether this process is a worker of Ray, which may be killed at any time."""
    module: Any = sys.modules.get(_MODULE)
    mode = getattr(getattr(module, "global_worker", None), "mode", None)
    return mode is not None and mode == getattr(module, "WORKER_MODE", 1)


def switches(env: Mapping[str, str]) -> dict[str, str]:
    """What a worker needs to record into the tape of this process; empty if there is none.

    Args:
        env: environment of this process.
    """
    if not env.get(_TAPE):
        return {}
    found = {k: v for k, v in env.items() if k.startswith(_PREFIX) and k not in _LOCAL}
    prefixes = [p for p in env.get(_VLLM, "").split(",") if p]
    found[_VLLM] = ",".join(dict.fromkeys([*prefixes, _PREFIX]))
    return found


def runtime_env(given: Any, env: Mapping[str, str]) -> dict[str, Any]:
    """A runtime environment with our switches in its `env_vars`; what it says already stays.

    Args:
        given: mapping, or None.
        env: environment of this process.
    """
    added = switches(env)
    submitted = json.loads(env.get(_SUBMITTED, "{}")).get("runtime_env") or {}
    taken = submitted.get("env_vars", {})  # Ray refuses a variable that both of them set
    result = dict(given or {})
    variables = dict(result.get("env_vars") or {})
    if added and "PYTHONPATH" not in taken:
        # Ray fills in the variable on the worker's machine
        rest = variables.get("PYTHONPATH", "${PYTHONPATH}")
        added |= {"PYTHONPATH": f"{_INJECT}{os.pathsep}{rest}", JOINED: "1"}
        variables.pop("PYTHONPATH", None)
    variables = {**{k: v for k, v in added.items() if k not in taken}, **variables}
    return {**result, "env_vars": variables} if variables else result


def _with_switches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not os.environ.get(_TAPE) or _starts_ray(args, kwargs):
        return kwargs
    given = kwargs.get("runtime_env")
    config = kwargs.get("job_config")
    if not given and config is not None:  # what `init` is given would replace that
        given = config.runtime_env
    return {**kwargs, "runtime_env": runtime_env(given, os.environ)}


def _starts_ray(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    address = args[0] if args else kwargs.get("address")
    if isinstance(address, str) and "://" in address:
        return False
    services = sys.modules.get("ray._private.services")
    find = getattr(services, "canonicalize_bootstrap_address", None)
    if find is None or not {"addr", "temp_dir"} <= parameters_of(find):
        return False
    try:
        return find(address, temp_dir=kwargs.get("_temp_dir")) is None
    except Exception:  # a wrong address: `ray.init` will say so
        return False
