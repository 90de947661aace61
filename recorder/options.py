"""What to record and how: the options of one recording, also as environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.store.errors import UsageError

TAPE_VARIABLE = "ROLLTAPE_TAPE"
#: Options of the object store as JSON; it may hold keys, so it is never shown.
STORAGE_VARIABLE = "ROLLTAPE_STORAGE_OPTIONS"
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
        top_logprobs: keep the so many most probable tokens of every position, with the mass of
            all others; 0 for none.
        commit_log: file that gets a line for each committed row with positions; "" for none.
        max_bytes: stop recording when the tape has this size; 0 for no limit.
        storage_options: of the object store, see `rolltape.store.places.place_of`.
    """

    level: str = "routing"
    layers: int = 0
    on_full: str = "drop"
    queue_mb: int = 256
    fsync: bool = False
    strict: bool = False
    top_logprobs: int = 0
    commit_log: str = ""
    max_bytes: int = 0
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r} does not exist", hint=" | ".join(LEVELS))
        if self.on_full not in ON_FULL:
            raise UsageError(f"on_full {self.on_full!r} does not exist", hint=" | ".join(ON_FULL))
        if self.layers < 0 or self.queue_mb < 1:
            raise UsageError("layers must be >= 0 and queue_mb >= 1")
        if self.max_bytes < 0:
            raise UsageError("max_bytes must be >= 0")
        if self.top_logprobs < 0:
            raise UsageError(f"top_logprobs is {self.top_logprobs}", hint="0 for none")

    @property
    def routes(self) -> bool:
        """Whether routes are wanted."""
        return self.level != "tokens"

    def environment(self, tape: str) -> dict[str, str]:
        """The variables that carry these options to the processes of a job.

        Args:
            tape: absolute path, or URL.
        """
        variables = {
            TAPE_VARIABLE: tape,
            "ROLLTAPE_LEVEL": self.level,
            "ROLLTAPE_LAYERS": str(self.layers),
            "ROLLTAPE_ON_FULL": self.on_full,
            "ROLLTAPE_QUEUE_MB": str(self.queue_mb),
            "ROLLTAPE_FSYNC": str(int(self.fsync)),
            "ROLLTAPE_STRICT": str(int(self.strict)),
            "ROLLTAPE_TOP_LOGPROBS": str(self.top_logprobs),
            "ROLLTAPE_MAX_BYTES": str(self.max_bytes),
        }
        if self.commit_log:
            variables["ROLLTAPE_COMMIT_LOG"] = self.commit_log
        if self.storage_options:
            variables[STORAGE_VARIABLE] = json.dumps(dict(self.storage_options))
        return variables

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
                top_logprobs=int(env.get("ROLLTAPE_TOP_LOGPROBS", cls.top_logprobs)),
                commit_log=env.get("ROLLTAPE_COMMIT_LOG", cls.commit_log),
                max_bytes=int(env.get("ROLLTAPE_MAX_BYTES", cls.max_bytes)),
                storage_options=json.loads(env.get(STORAGE_VARIABLE, "{}")),
            )
        except ValueError as error:
            raise UsageError(
                f"a ROLLTAPE_* variable is not a number, or not JSON: {error}"
            ) from error
