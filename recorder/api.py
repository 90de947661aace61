"""`with rolltape.record("runs/a"): model.generate(...)`: recording from inside a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltape.recorder import session
from rolltape.recorder.options import Options
from rolltape.recorder.provenance import provenance
from rolltape.store import UsageError, create_tape, seal


@contextmanager
def record(path: str | os.PathLike[str], **options: object) -> Iterator[Path]:
    """Record what this process generates into a new tape, and seal it at the end.

    Args:
        path: folder of the new tape; must not exist, or be empty.
        options: fields of `rolltape.recorder.options.Options`: level, layers, on_full,
            queue_mb, fsync, strict.

    Yields:
        The path of the tape.

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
    root = create_tape(path, role="rollout", provenance=provenance(sys.argv))
    from rolltape.recorder import transformers

    session.start(root, chosen)
    bound = transformers.bind()
    status = "error"
    try:
        yield root
        status = "ok"
    finally:
        session.stop()
        if bound:
            transformers.unbind()
        seal(root, status={"api": status})
