"""What executors of serving engines share: variables of the engine, names of origins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rolltape.store import Tape, TapeWriter
from rolltape.store import open as open_tape
from rolltape.store.keys import Key


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put them back as they were."""
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


def name_origins(tape: Tape, root: Path, origins: Mapping[Key, Key]) -> None:
    """Say which sequence each of a new tape runs again.

    Args:
        tape: the recording.
        root: of the new tape, which nobody writes any more.
        origins: key in the new tape -> key in `tape`.
    """
    rows = [(s, tape.sequence(origins[s.key])) for s in open_tape(root) if s.key in origins]
    if not rows:
        return
    with TapeWriter(root) as writer:
        writer.append(
            "sequences",
            {
                "engine": [s.key.engine for s, _ in rows],
                "request": [s.key.request for s, _ in rows],
                "sample": [s.key.sample for s, _ in rows],
                "pass": [s.key.scoring for s, _ in rows],
                "origin": [old.key.text for _, old in rows],
                "group": [old.info["group"] for _, old in rows],
                "prompt_len": [s.prompt_len for s, _ in rows],
                "finish": "open",
                "opened_ns": [s.info["opened_ns"] or time.time_ns() for s, _ in rows],
            },
        )
