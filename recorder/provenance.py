"""Where a recording comes from: command, code version, machine. Secrets are masked."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import rolltape

MASK = "***"
_GIT_SECONDS = 2.0
_LONGEST_ARGUMENT = 2_000

_LIBRARIES = (
    "torch",
    "transformers",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "flash-attn",
    "flashinfer-python",
    "triton",
    "numpy",
    "pyarrow",
)

#: Environment variables that are kept by name: they change numbers, kernels or placement.
_NAMES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "HF_HUB_OFFLINE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "NVIDIA_TF32_OVERRIDE",
        "PYTHONHASHSEED",
        "RANK",
        "SLURM_JOB_ID",
        "SLURM_PROCID",
        "TOKENIZERS_PARALLELISM",
        "TRANSFORMERS_OFFLINE",
        "WORLD_SIZE",
    }
)
_PREFIXES = (
    "CUDA_VISIBLE_DEVICES",
    "FLASHINFER_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "ROLLTAPE_",
    "SGLANG_",
    "TLLM_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "TRTLLM_",
    "VLLM_",
)
_SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|STORAGE_OPTIONS", re.IGNORECASE)

#: A name whose last word is one of these holds a secret: --hf-token, wandb.api_key, apiKey.
#: `--max-tokens` and `--tokenizer` do not.
_WORD = (
    r"(?:api)?(?:token|key|secret|password|passwd|passphrase|pwd|credentials?|auth|authorization"
    r"|signature|sig)"
)
#: Names of settings that hold environment variables: env_overrides, extra_env, envVars.
_ENVIRONMENT = re.compile(r"(?:^|[_.-])env(?:$|[_.-]|iron|vars)", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SECRET_NAME = re.compile(rf"(?:^|.*[-_.+:\s]){_WORD}$", re.IGNORECASE | re.DOTALL)
_NAMED = rf"(?:[^=&;:\"'\s]{{0,60}}[-_.])?{_WORD}"
_IN_JSON = re.compile(rf"""(["']{_NAMED}["']\s*:\s*)("[^"]*"|'[^']*')""", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""(?<![A-Za-z0-9])({_NAMED}\s?=\s?)("[^"]*"|'[^']*'|[^&;#,)\s"']+)""", re.IGNORECASE
)
_IN_HEADER = re.compile(rf"^({_NAMED}:\s+)\S.*", re.IGNORECASE)
_USER_IN_URL = re.compile(r"\b([a-z][a-z0-9+.\-]{0,20}://)[^/@\s\"']+@", re.IGNORECASE)
_SCHEME = re.compile(r"\b(bearer|basic)\s+[^\s\"']+", re.IGNORECASE)
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|xox[a-z]-[A-Za-z0-9\-]{10,}|AKIA[0-9A-Z]{16})"
)


def provenance(
    argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Facts about a run, for `tape.json`. JSON-able.

    Args:
        argv: the recorded command.
        cwd: where it runs; by default here.
        env: its environment; by default ours. Only variables of an allow-list are kept.
    """
    cwd = Path.cwd() if cwd is None else cwd
    return {
        "argv": mask_argv(argv),
        "cwd": str(cwd),
        "git": git_state(cwd),
        "host": platform.node(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "gpu": nvidia_state(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "rolltape": rolltape.__version__,
        "libraries": library_versions(),
        "env": allowed_environment(os.environ if env is None else env),
    }


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--token X`, `api_key=X`, URLs, headers, JSON."""
    out: list[str] = []
    masked_next = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        if masked_next and not argument.startswith("-"):
            out.append(MASK)
            masked_next = False
            continue
        masked_next = not equals and name.startswith("-") and _is_secret_name(name)
        if equals and value and _is_secret_name(name):
            out.append(f"{name}={MASK}")
        else:
            out.append(_masked(argument))
    return out


def mask_text(text: str) -> str:
    """Text without credentials in URLs, query strings, headers and JSON, and without known keys."""
    text = _USER_IN_URL.sub(rf"\1{MASK}@", text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    text = _IN_JSON.sub(rf'\1"{MASK}"', text)
    text = _IN_HEADER.sub(rf"\1{MASK}", text)
    text = _SCHEME.sub(rf"\1 {MASK}", text)
    return _KNOWN_SHAPES.sub(MASK, text)


def mask_settings(value: Any, name: str = "") -> Any:
    """Settings without their secrets, masked by name as the command line is, at any depth.

    Of environment variables, whatever holds them, only those of the allow-list keep their values.

    Args:
        value: JSON-able.
        name: that it goes by.
    """
    if value is None or isinstance(value, bool):
        return value
    # ids of tokens and sizes of keys are numbers
    if _is_secret_name(name) and not isinstance(value, int | float):
        return MASK
    if isinstance(value, Mapping):
        if _ENVIRONMENT.search(name):
            plain = {str(n): v if isinstance(v, str) else str(v) for n, v in value.items()}
            return dict.fromkeys(plain, MASK) | allowed_environment(plain)
        return {n: mask_settings(v, str(n)) for n, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask_settings(one) for one in value]
    return mask_text(value) if isinstance(value, str) else value


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.match(_CAMEL.sub("_", name[-100:])))


def _masked(argument: str) -> str:
    # cut last, so that no secret loses the end by which it is known
    text = mask_text(argument[: 4 * _LONGEST_ARGUMENT])
    cut = len(argument) - _LONGEST_ARGUMENT
    return text if cut <= 0 else f"{text[:_LONGEST_ARGUMENT]}... ({cut} more characters)"


def allowed_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that change numbers, kernels or placement; secrets among them masked."""
    kept = {}
    for name in sorted(env):
        if name in _NAMES:
            kept[name] = mask_text(env[name])
        elif name.startswith("TLLM_ROLLTAPE_"):  # a copy of a variable that is there already
            continue
        elif name.startswith(_PREFIXES):
            kept[name] = MASK if _SECRET_VARIABLE.search(name) else mask_text(env[name])
    if "ROLLTAPE_TAPE" in kept:  # the query of a URL may hold keys
        kept["ROLLTAPE_TAPE"] = kept["ROLLTAPE_TAPE"].partition("?")[0]
    return kept


def library_versions() -> dict[str, str]:
    """Installed versions of what computes, by distribution name; nothing is imported."""
    found = {"rolltape": rolltape.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path, *, timeout: float = _GIT_SECONDS) -> dict[str, Any] | None:
    """`sha` and `dirty` (tracked files changed) of the repository that holds `folder`.

    Returns:
        None outside a repository, without git, or when git takes longer than `timeout` seconds;
        `dirty` is None when only that could not be found out in time.
    """
    sha = _git(folder, "rev-parse", "HEAD", timeout=timeout)
    if not sha:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", timeout=timeout)
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *args: str, timeout: float) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        done = subprocess.run(
            # a file system monitor is a program that the repository names
            [git, "-c", "core.fsmonitor=false", *args],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def nvidia_state(root: Path = Path("/proc/driver/nvidia")) -> dict[str, Any] | None:
    """Driver version and GPU models as the kernel driver names them; None without one."""
    try:
        version = (root / "version").read_text(errors="replace")
        cards = sorted((root / "gpus").glob("*/information"))
        texts = [card.read_text(errors="replace") for card in cards]
    except OSError:
        return None
    driver = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", version)
    models = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    return {"driver": driver[0] if driver else None, "gpus": [m[1] for m in models if m]}
