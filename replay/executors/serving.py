"""What executors of serving engines share: hooks, variables, weights, names of origins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltape.recorder.digest import GroupDigest
from rolltape.recorder.inject import _rolltape_hook
from rolltape.replay.executors.protocol import Changes, NotRunError
from rolltape.replay.versions import (
    as_version,
    check_known,
    check_version,
    checkpoint_of,
    versions_of,
)
from rolltape.store import ModelMismatchError, Tape, TapeWriter, UsageError
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


@contextmanager
def hooks() -> Iterator[None]:
    """Have the recorder's hooks in the engine, and take all of them out again."""
    try:
        _rolltape_hook.watch(_rolltape_hook.HOOKS)
        yield
    finally:
        _rolltape_hook.unwatch(_rolltape_hook.HOOKS)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that an engine is run again with, all of it.

    Args:
        path: of the checkpoint; None is what the tape names.
        version: that they have to be; None: another checkpoint on purpose.
        named: somebody said that the checkpoint is that version: anything else is an error.
    """

    path: str | None
    version: int | None
    named: bool

    def check(self, tape: Tape, engine: str, loaded: Sequence[GroupDigest], name: str) -> list[str]:
        """What of the weights that were loaded is not those of the recording, or not known.

        Raises:
            ModelMismatchError: they are not the version that they were said to be.
        """
        if self.version is None:
            return []
        if not self.named and self.version not in versions_of(tape, engine):
            return ["the tape has no digest of the weights: they were not compared"]
        try:
            return check_version(tape, engine, self.version, loaded, name)
        except ModelMismatchError as error:
            if self.named:
                raise
            return [str(error.args[0])]


def weights_of(
    tape: Tape, engine: str, changes: Changes, checkpoints: Mapping[int, str], model: Any
) -> Weights:
    """Which weights an engine is run again with.

    Raises:
        NotRunError: several versions made its tokens, and `changes` does not choose one.
        UsageError: the tape has no such version, or two models are given.
    """
    path = checkpoint_of(changes.weights, checkpoints, model)
    if changes.weights is not None:
        version = as_version(changes.weights)
        if version is not None:
            check_known(tape, [version], [engine])
        return Weights(path=path, version=version, named=True)
    check_known(tape, checkpoints)
    rows = (r["weight_version"] for r in tape.rows("forwards") if r["engine"] == engine)
    used = sorted({version for version in rows if version is not None})
    if len(used) > 1:
        raise NotRunError(
            f"its weights were updated while it ran, from version {used[0]} to {used[-1]}; "
            "--switch weights=VERSION runs all of it with one of them"
        )
    version = used[0] if used else 0
    named = version in checkpoints
    return Weights(path=checkpoints.get(version, path), version=version, named=named)


def check_prefix_cache(changes: Changes, in_force: Sequence[bool | None]) -> None:
    """Whether there is a prefix cache to switch off.

    Args:
        changes: made on purpose.
        in_force: whether each recorded engine had one; None where that is not known.

    Raises:
        UsageError: no engine had one: the switch would change nothing.
    """
    if not changes.prefix_cache and all(value is False for value in in_force):
        raise UsageError("switch prefix_cache=off: the recording had no prefix cache")


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
