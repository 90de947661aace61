"""`with rolltape.record("runs/a"): model.generate(...)`: recording from inside a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import Options
from rolltape.recorder.provenance import provenance
from rolltape.store import UsageError, create_tape, seal
from rolltape.store.places import ObjectPlace


@contextmanager
def record(
    path: str | os.PathLike[str], *, role: str = "rollout", **options: object
) -> Iterator[Path | ObjectPlace]:
    """Record what this process generates or scores into a new tape, and seal it at the end.

    Engines that start processes of their own (vLLM) are recorded whole if they are made inside of
    the block, and ended in it: the tape is sealed at its end.

    Args:
        path: folder of the new tape, or URL in an object store; must not exist, or be empty.
        role: what the tape is of: rollout, or trainer where only `rolltape.trainer` is called.
        options: fields of `rolltape.recorder.options.Options`: level, layers, on_full,
            queue_mb, fsync, strict, top_logprobs, profile_kernels, commit_log, max_bytes,
            storage_options.

    Yields:
        The path of the tape, or its place in the object store; `rolltape.open` takes both.

    Raises:
        TapeExistsError: there is something at `path` already.
        UsageError: an option does not exist, or this process records already.

    Example:
        >>> with rolltape.record("runs/a") as tape:  # doctest: +SKIP
        ...     model.generate(**inputs, do_sample=True)
    """
    if session.active() is not None:
        raise UsageError("this process records already", hint="one recording at a time")
    try:
        chosen = Options(**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(f"record(): {error}") from error
    root = create_tape(
        path,
        role=role,
        provenance=provenance(sys.argv),
        storage_options=chosen.storage_options,
    )
    session.start(path, chosen)
    status = "error"
    try:
        with _variables(chosen.environment(_absolute(path))):
            _rolltape_hook.watch(_rolltape_hook.HOOKS)
            yield root
        status = "ok"
    finally:
        session.stop()
        _rolltape_hook.unwatch(_rolltape_hook.HOOKS)
        seal(path, status={"api": status}, storage_options=chosen.storage_options)


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
