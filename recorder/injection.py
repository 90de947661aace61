"""How the recorder gets into the processes of a job: PYTHONPATH, or a `.pth` file for the run."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolltape.store.errors import RolltapeError

#: The folder that goes in front of PYTHONPATH.
INJECT = Path(__file__).absolute().parent / "inject"

#: Variables in which a job may list the plugins that an engine loads.
_PLUGIN_LISTS = ("VLLM_PLUGINS", "SGLANG_PLUGINS")
_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
_FIND_SITE = """
import os, site, sys
for folder in site.getsitepackages():
    if folder in sys.path and os.access(folder, os.W_OK):
        print(folder)
        break
"""


class InjectionError(RolltapeError):
    """The import hook cannot be put where the job would load it."""


def prepended(pythonpath: str | None) -> str:
    """PYTHONPATH with the inject folder in front, once."""
    entries = [e for e in (pythonpath or "").split(os.pathsep) if pythonpath]
    if entries[:1] == [str(INJECT)]:
        return os.pathsep.join(entries)
    return os.pathsep.join([str(INJECT), *entries])


def with_our_plugin(env: Mapping[str, str]) -> dict[str, str]:
    """The lists of allowed plugins that a job has set, each with ours in it."""
    lists = {}
    for name in _PLUGIN_LISTS:
        allowed = [word.strip() for word in env.get(name, "").split(",") if word.strip()]
        if allowed and "rolltape" not in allowed:
            lists[name] = ",".join([*allowed, "rolltape"])
    return lists


def interpreter_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The Python that a command will run: itself, the one of its `#!` line, or that on PATH.

    Raises:
        InjectionError: there is none.
    """
    path = env.get("PATH")
    program = shutil.which(command[0], path=path)
    if program is not None:
        if _PYTHON.fullmatch(Path(program).name):
            return program
        words = _shebang(program)
        if words and Path(words[0]).name == "env":
            words = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
        if words and _PYTHON.fullmatch(Path(words[0]).name):
            found = shutil.which(words[0], path=path)
            if found is not None:
                return found
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    if found is None:
        raise InjectionError(
            f"--inject pth: no Python interpreter found for {command[0]!r}",
            hint="put one on PATH, or use --inject sitecustomize",
        )
    return found


def _shebang(program: str) -> list[str]:
    with open(program, "rb") as file:
        first = file.readline(512)
    return os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []


@contextmanager
def pth_file(interpreter: str) -> Iterator[Path]:
    """A `.pth` in the site-packages of an interpreter that loads the hook, removed at the end.

    In a process without ROLLTAPE_TAPE it only waits (`pth_line`), so other jobs of that environment
    do not notice it, nor would they if it stayed behind because we were killed.

    Raises:
        InjectionError: the interpreter does not run, or has no site-packages we may write to.
    """
    file = site_packages(interpreter) / f"rolltape-{os.getpid()}-{secrets.token_hex(3)}.pth"
    temporary = file.with_suffix(".tmp")
    try:
        try:
            temporary.write_text(pth_line(), encoding="ascii")
            os.replace(temporary, file)
        except OSError as error:
            raise InjectionError(f"{file}: {error.strerror}") from error
        yield file
    finally:
        for left in (temporary, file):
            left.unlink(missing_ok=True)


def pth_line() -> str:
    """What stands in a `.pth` that loads the hook.

    Without a recording the hook waits for an engine whose workers are told of one only later.
    """
    # One line, executed by site.py inside one of its functions: it binds no name but `os`, `sys`.
    folder = ascii(str(INJECT))
    return (
        f"import os, sys; os.path.isdir({folder}) and (sys.path.insert(0, {folder}), "
        f"__import__('_rolltape_hook').start() if os.environ.get('ROLLTAPE_TAPE') "
        f"else __import__('_rolltape_late').wait(), sys.path.remove({folder}))\n"
    )


def site_packages(interpreter: str) -> Path:
    """A folder of an interpreter whose `.pth` files it reads, and that we may write to.

    Raises:
        InjectionError: the interpreter does not run, or has none.
    """
    # -I, because the folder must be one that a process started with -I reads as well
    try:
        done = subprocess.run(
            [interpreter, "-I", "-c", _FIND_SITE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InjectionError(f"--inject pth: {interpreter} does not run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InjectionError(f"--inject pth: {interpreter} -I fails: {last}")
    folder = done.stdout.strip()
    if not folder:
        raise InjectionError(
            f"--inject pth: no site-packages of {interpreter} can be written to",
            hint="use a virtual environment, or --inject sitecustomize",
        )
    return Path(folder)
