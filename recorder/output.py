"""Where a recording goes: its name, and what may be removed to make room for it."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rolltape.store import TapeExistsError, UsageError, kind_of
from rolltape.store.places import LocalPlace, ObjectPlace
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.seal import DAMAGED
from rolltape.store.shards import COMPACTING, LIVE, TEMPORARY, is_locked, list_shards
from rolltape.store.tape import SEAL, TAPE_HEADER, open_folder

_TEMPLATE = re.compile(r"\{([^{}]*)\}|%q\{([^{}]*)\}|%([hp%])")


def default_output(command: Sequence[str], *, now: float | None = None) -> str:
    """`runs/<UTC time>-<command>-<6 hex>`."""
    stamp = _stamp(now)
    return f"runs/{stamp}-{short_name(command)}-{secrets.token_hex(3)}"


def short_name(command: Sequence[str]) -> str:
    """The word that tells a command apart: script or module for Python, else the program."""
    words = list(command)
    name = Path(words[0]).name if words else "job"
    if re.fullmatch(r"python[\d.]*", name):
        script = next((Path(w).stem for w in words if w.endswith(".py")), None)
        if "-m" in words[:-1]:
            script = words[words.index("-m") + 1]
        name = script or name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "job"


def expand(template: str, env: Mapping[str, str], *, now: float | None = None) -> str:
    """Fill `{host} {pid} {time} {env:VAR}` and, as nsys has them, `%h %p %q{VAR} %%`.

    Raises:
        UsageError: an unknown name, or a variable that is not set.
    """
    values: dict[str, Callable[[], str]] = {
        "host": platform.node,
        "pid": lambda: str(os.getpid()),
        "time": lambda: _stamp(now),
    }

    def fill(match: re.Match[str]) -> str:
        name, variable, letter = match.groups()
        if letter is not None:
            return {"h": platform.node(), "p": str(os.getpid()), "%": "%"}[str(letter)]
        if name is not None and not name.startswith("env:"):
            if name not in values:
                hint = "{host} {pid} {time} {env:VAR} %h %p %q{VAR}"
                raise UsageError(f"-o {template}: {{{name}}} does not exist", hint=hint)
            return values[name]()
        variable = name.removeprefix("env:") if name is not None else variable
        if variable not in env:
            raise UsageError(f"-o {template}: the variable {variable} is not set")
        return env[variable]

    return _TEMPLATE.sub(fill, template)


def prepare_output(
    place: LocalPlace | ObjectPlace, *, append: bool = False, overwrite: bool = False
) -> None:
    """Make sure that a recording may go to a place; with `overwrite`, remove the tape there.

    Raises:
        TapeExistsError: something is there, and neither option covers it.
        NotATapeError: `append` to something that is not a tape.
        UsageError: both options.
    """
    if append and overwrite:
        raise UsageError("--append and --overwrite exclude each other")
    if append:
        # raises unless it is a tape that we can read
        open_folder(place)
        return
    if not isinstance(place, LocalPlace):
        if overwrite:
            raise UsageError(
                f"--overwrite: {place} lies in an object store", hint="remove it there"
            )
        return  # making its header refuses to replace another
    tape = place.path
    if not tape.exists() or (tape.is_dir() and not any(tape.iterdir())):
        return
    if not overwrite:
        hint = "choose another -o, or remove it"
        if kind_of(tape) == "tape":
            hint = "--append records another part into it, --overwrite removes it"
        raise TapeExistsError(f"{tape} exists and is not empty", hint=hint)
    _remove_tape(tape.resolve())


def _remove_tape(tape: Path) -> None:
    if kind_of(tape) != "tape":
        raise TapeExistsError(f"{tape} is not a tape", hint="--overwrite only removes tapes")
    known = {TAPE_HEADER, SEAL, COMPACTING, DAMAGED, "procs", *TAPE_TABLES}
    for path in tape.iterdir():
        if path.name not in known and not TEMPORARY.fullmatch(path.name):
            raise TapeExistsError(
                f"{path} is not part of a tape", hint="--overwrite would remove it; move it away"
            )
        for shard in list_shards(path):
            if shard.name.endswith(LIVE) and is_locked(shard):
                raise TapeExistsError(
                    f"{tape} is being recorded: {shard.name} has a writer",
                    hint="wait for that job, or choose another -o",
                )
    shutil.rmtree(tape)


def _stamp(now: float | None) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
