"""`with rolltape.record("runs/a"): model.generate(...)`: recording from inside a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import OPTIONAL_VARIABLES, TAPE_VARIABLE, Options
from rolltape.recorder.provenance import provenance
from rolltape.store import UsageError, create_tape, seal
from rolltape.store.places import ObjectPlace, place_of
from rolltape.store.tape import open_folder

#: In front of the names of our variables, and of their copies for the workers of an MPI pool.
_PREFIX = "ROLLTAPE_"
_COPIES = ("TLLM_ROLLTAPE_", "TRTLLM_ROLLTAPE_")
#: A worker that goes on after the block has written its first rows by then.
_WAIT_SECONDS = 1.0


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
        UsageError: an option does not exist, or this process records already: in another `record`,
            or because `rolltape record` has started it.

    Example:
        >>> with rolltape.record("runs/a") as tape:  # doctest: +SKIP
        ...     model.generate(**inputs, do_sample=True)
    """
    if session.active() is not None:
        raise UsageError("this process records already", hint="one recording at a time")
    # hooks may be waiting for an engine, and would be taken out at the end
    if tape := os.environ.get(TAPE_VARIABLE):
        raise UsageError(
            f"{TAPE_VARIABLE} says that this process is recorded already, into "
            f"{tape.partition('?')[0]}",
            hint="one recording at a time; unset it if that recording is over",
        )
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
        _find_unreached(path, chosen)
        seal(path, status={"api": status}, storage_options=chosen.storage_options)
    if not open_folder(place_of(path, chosen.storage_options)).count("sequences"):
        session.warn(
            f"nothing was recorded into {os.fspath(path)}: no supported engine generated in the "
            "block; an engine with processes of its own has to be made inside of it"
        )


def _find_unreached(path: str | os.PathLike[str], options: Options) -> None:
    if not {"tensorrt_llm", "vllm"} & sys.modules.keys():
        return
    from rolltape.recorder.reached import find_unreached

    try:
        place = place_of(path, options.storage_options)
        for text in find_unreached(place, wait_s=_WAIT_SECONDS):
            session.warn(text)
    except Exception as error:  # the tape is sealed all the same
        session.warn(f"workers were not looked for: {type(error).__name__}: {error}")


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile; afterwards all are as before.

    An option that is not chosen is not theirs either, and what an engine leaves for its workers is
    gone: the workers of a later one would take it for theirs.
    """
    before = _ours()
    for name in before:
        if name in OPTIONAL_VARIABLES or name.startswith(_COPIES):
            del os.environ[name]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in _ours():
            os.environ.pop(name, None)
        os.environ.update(before)


def _ours() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n.startswith((_PREFIX, *_COPIES))}
