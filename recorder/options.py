"""What to record and how: the options of one recording, also as environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolltape.store.errors import UsageError

TAPE_VARIABLE = "ROLLTAPE_TAPE"
LEVELS = ("tokens", "routing", "layers")
ON_FULL = ("drop", "block")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a recording.

    Args:
        level: `tokens` records ids, logprobs, supports and schedule; `routing` adds routes;
            `layers` adds the output of every decoder layer for the first `layers` sequences.
        layers: number of sequences for which layer outputs are kept.
        on_full: what to do when the queue is full: `drop` the block and record the gap, or
            `block` the job until there is room.
        queue_mb: bound of the queue in MiB.
        fsync: survive power loss, not only the death of the process.
        strict: let faults of the recorder reach the job.
    """

    level: str = "routing"
    layers: int = 0
    on_full: str = "drop"
    queue_mb: int = 256
    fsync: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r} does not exist", hint=" | ".join(LEVELS))
        if self.on_full not in ON_FULL:
            raise UsageError(f"on_full {self.on_full!r} does not exist", hint=" | ".join(ON_FULL))
        if self.layers < 0 or self.queue_mb < 1:
            raise UsageError("layers must be >= 0 and queue_mb >= 1")

    @property
    def routes(self) -> bool:
        """Whether routes are wanted."""
        return self.level != "tokens"

    def environment(self, tape: Path) -> dict[str, str]:
        """The variables that carry these options to the processes of a job."""
        return {
            TAPE_VARIABLE: str(tape.absolute()),
            "ROLLTAPE_LEVEL": self.level,
            "ROLLTAPE_LAYERS": str(self.layers),
            "ROLLTAPE_ON_FULL": self.on_full,
            "ROLLTAPE_QUEUE_MB": str(self.queue_mb),
            "ROLLTAPE_FSYNC": str(int(self.fsync)),
            "ROLLTAPE_STRICT": str(int(self.strict)),
        }

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Options:
        """Inverse of `environment`.

        Raises:
            UsageError: a variable has a value that does not exist.
        """
        try:
            return cls(
                level=env.get("ROLLTAPE_LEVEL", cls.level),
                layers=int(env.get("ROLLTAPE_LAYERS", cls.layers)),
                on_full=env.get("ROLLTAPE_ON_FULL", cls.on_full),
                queue_mb=int(env.get("ROLLTAPE_QUEUE_MB", cls.queue_mb)),
                fsync=env.get("ROLLTAPE_FSYNC", "0") == "1",
                strict=env.get("ROLLTAPE_STRICT", "0") == "1",
            )
        except ValueError as error:
            raise UsageError(f"a ROLLTAPE_* variable is not a number: {error}") from error
