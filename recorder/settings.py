"""Settings that decide bits: asked for, in force, and what to do where the two differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.recorder.session import Session

#: The known flags as the launcher had them, as JSON.
LAUNCH_VARIABLE = "ROLLTAPE_LAUNCH_ENV"

_SWITCH = ("0", "1")
#: Environment variable -> the values that what reads it accepts; None: any.
FLAGS: dict[str, tuple[str, ...] | None] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "CUDA_LAUNCH_BLOCKING": _SWITCH,
    "FLASH_ATTENTION_DETERMINISTIC": _SWITCH,
    "FORCE_ALL_REDUCE_DETERMINISTIC": _SWITCH,
    "FORCE_ATTENTION_KERNEL_DETERMINISTIC": _SWITCH,
    "FORCE_DETERMINISTIC": _SWITCH,
    "FORCE_MOE_KERNEL_DETERMINISTIC": _SWITCH,
    "MKL_CBWR": None,
    "MKL_NUM_THREADS": None,
    "NCCL_ALGO": None,
    "NCCL_MAX_NCHANNELS": None,
    "NCCL_MIN_NCHANNELS": None,
    "NCCL_NVLS_ENABLE": None,
    "NCCL_PROTO": None,
    "NVIDIA_TF32_OVERRIDE": _SWITCH,
    "OMP_NUM_THREADS": None,
    "PYTHONHASHSEED": None,
    "SGLANG_RETURN_ORIGINAL_LOGPROB": None,
    "TLLM_AUTOTUNER_CACHE_PATH": None,
    "TLLM_DISABLE_ALLREDUCE_AUTOTUNE": _SWITCH,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _SWITCH,
    "TRTLLM_MOE_DISABLE_FINALIZE_FUSION": _SWITCH,
    "VLLM_BATCH_INVARIANT": _SWITCH,
}

#: Values that leave the choice to the engine.
_OPEN = ("", "auto", "default", "none")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A setting that is not what was asked for.

    Args:
        code: stable, see docs/settings.md.
        message: what is the case.
        remedy: what to do about it.
        detail: JSON-able values.
    """

    code: str
    message: str
    remedy: str
    detail: dict[str, Any] = field(default_factory=dict)

    def as_detail(self) -> dict[str, Any]:
        """The `detail` of an event of kind `finding`."""
        named = {"code": self.code, "message": self.message, "remedy": self.remedy}
        return {**named, **self.detail}


def known_flags(env: Mapping[str, str]) -> dict[str, str]:
    """The flags of `FLAGS` that are set."""
    return {name: env[name] for name in FLAGS if name in env}


def launch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What tells the processes of a job which flags its launcher had; nothing if it had none."""
    flags = known_flags(env)
    return {LAUNCH_VARIABLE: json.dumps(flags)} if flags else {}


def launch_environment(env: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The flags as the launcher had them; None if that is not known."""
    try:
        flags = json.loads(env.get(LAUNCH_VARIABLE, ""))
    except ValueError:
        return None
    return {str(k): str(v) for k, v in flags.items()} if isinstance(flags, dict) else None


def process_settings() -> dict[str, Any]:
    """`environment` and `torch` as this process has them; torch only if it has been imported."""
    torch_settings: dict[str, Any] = {}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch_settings = {
            "threads": torch.get_num_threads(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return {"environment": known_flags(os.environ), "torch": torch_settings}


def findings(
    requested: Mapping[str, Any],
    effective: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    launched: Mapping[str, str] | None = None,
) -> list[Finding]:
    """What is not as it was asked for.

    Args:
        requested: settings of the engine by name, as the job gave them.
        effective: by the same names, as the engine resolved them; others are ignored.
        environment: variables of this process.
        launched: flags as the launcher had them.
    """
    env = environment or {}
    found = [_refused(name, env[name]) for name in FLAGS if not _accepted(name, env.get(name))]
    for name, wanted in sorted((launched or {}).items()):
        have = env.get(name)
        if have is None:
            found.append(
                Finding(
                    code="RT402",
                    message=f"{name}={wanted} of the launcher did not reach this process",
                    remedy="pass it on in the way that the launcher of the workers has for that",
                    detail={"name": name, "requested": wanted, "effective": None},
                )
            )
        elif have != wanted:
            found.append(
                Finding(
                    code="RT403",
                    message=f"{name} was {wanted} in the launcher and is {have} in this process",
                    remedy="find what sets it between the launcher and the worker",
                    detail={"name": name, "requested": wanted, "effective": have},
                )
            )
    for name in sorted(requested.keys() & effective.keys()):
        if _asks(requested[name]) and not _same(requested[name], effective[name]):
            found.append(
                Finding(
                    code="RT404",
                    message=f"{name}: {requested[name]} was asked for, {effective[name]} is used",
                    remedy="ask for a value that the engine supports here, or accept its choice",
                    detail={
                        "name": name,
                        "requested": requested[name],
                        "effective": effective[name],
                    },
                )
            )
    return found


def _accepted(name: str, value: str | None) -> bool:
    values = FLAGS[name]
    return value is None or values is None or value in values


def _refused(name: str, value: str) -> Finding:
    values = FLAGS[name] or ()
    return Finding(
        code="RT401",
        message=f"{name}={value} is not a value that it takes: it may be ignored",
        remedy=f"set it to {' or '.join(values)}",
        detail={"name": name, "requested": value, "accepted": list(values)},
    )


def _asks(value: Any) -> bool:
    return value is not None and str(value).lower() not in _OPEN


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or _plain(a) == _plain(b)


def _plain(value: Any) -> str:
    return str(value).lower().removeprefix("torch.")


def record_settings(
    session: Session, engine: str, requested: Mapping[str, Any], effective: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the findings of this process, and add its flags to both sides.

    Args:
        session: that records.
        engine: uuid of the engine.
        requested: see `findings`.
        effective: see `findings`.

    Returns:
        (requested, effective) for the `engines` row; flags are named `env.NAME`.
    """
    launched, process = launch_environment(), process_settings()
    env = process["environment"]
    for finding in findings(requested, effective, env, launched=launched):
        session.event("finding", engine=engine, detail=finding.as_detail())
    return (
        {**requested, **{f"env.{name}": value for name, value in (launched or {}).items()}},
        {**process["torch"], **effective, **{f"env.{name}": v for name, v in env.items()}},
    )
