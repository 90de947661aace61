"""What to record and how: the options of one recording, also as environment variables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.store.errors import UsageError

TAPE_VARIABLE = "ROLLTAPE_TAPE"
#: Options of the object store as JSON; it may hold keys, so it is never shown.
STORAGE_VARIABLE = "ROLLTAPE_STORAGE_OPTIONS"
#: Variables that are there only where something was chosen: one of an earlier choice has to go.
OPTIONAL_VARIABLES = (
    "ROLLTAPE_SAMPLE_RATE",
    "ROLLTAPE_STEPS",
    "ROLLTAPE_COMMIT_LOG",
    STORAGE_VARIABLE,
)
LEVELS = ("tokens", "routing", "layers")
ON_FULL = ("drop", "block")
_STEPS = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a recording.

    Args:
        level: `tokens` records ids, logprobs, supports and schedule; `routing` adds routes;
            `layers` adds the output of every decoder layer for the first `layers` sequences.
        layers: number of sequences for which layer outputs are kept.
        sketches: number of sequences for which sketches of layer outputs are kept, whatever the
            level: see `rolltape.recorder.sketch`.
        on_full: what to do when the queue is full: `drop` the block and record the gap, or
            `block` the job until there is room.
        queue_mb: bound of the queue in MiB.
        fsync: survive power loss, not only the death of the process.
        strict: let faults of the recorder reach the job.
        top_logprobs: keep the so many most probable tokens of every position, with the mass of
            all others; 0 for none.
        profile_kernels: profile the first forwards of the so many first batch shapes, for the names
            of their kernels; 0 for none. Slows these forwards down.
        sample_rate: share of the groups (all samples of a prompt) that is recorded, in (0, 1].
        steps: "A:B": record what engine steps A to B - 1 do; either may be left out, "" is all.
        commit_log: file that gets a line for each committed row with positions; "" for none.
        max_bytes: stop recording when the tape has this size; 0 for no limit.
        storage_options: of the object store, see `rolltape.store.places.place_of`.
    """

    level: str = "routing"
    layers: int = 0
    sketches: int = 0
    on_full: str = "drop"
    queue_mb: int = 256
    fsync: bool = False
    strict: bool = False
    top_logprobs: int = 0
    profile_kernels: int = 0
    sample_rate: float = 1.0
    steps: str = ""
    commit_log: str = ""
    max_bytes: int = 0
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r} does not exist", hint=" | ".join(LEVELS))
        if self.on_full not in ON_FULL:
            raise UsageError(f"on_full {self.on_full!r} does not exist", hint=" | ".join(ON_FULL))
        if self.layers < 0 or self.sketches < 0 or self.queue_mb < 1:
            raise UsageError("layers and sketches must be >= 0 and queue_mb >= 1")
        if self.max_bytes < 0:
            raise UsageError("max_bytes must be >= 0")
        if self.top_logprobs < 0:
            raise UsageError(f"top_logprobs is {self.top_logprobs}", hint="0 for none")
        if self.profile_kernels < 0:
            raise UsageError(f"profile_kernels is {self.profile_kernels}", hint="0 for none")
        if not 0 < self.sample_rate <= 1:
            raise UsageError(f"sample_rate is {self.sample_rate}", hint="above 0, at most 1")
        first, end = self.step_range
        if end is not None and end <= first:
            raise UsageError(f"steps {self.steps!r} is empty", hint="A:B with A below B")

    @property
    def routes(self) -> bool:
        """Whether routes are wanted."""
        return self.level != "tokens"

    @property
    def step_range(self) -> tuple[int, int | None]:
        """First step that is recorded, and the one behind the last; None for no end.

        Raises:
            UsageError: `steps` is not of the form A:B.
        """
        match = _STEPS.fullmatch(self.steps or ":")
        if match is None:
            raise UsageError(f"steps {self.steps!r}: not A:B", hint="for example 10:20, 10: or :20")
        return int(match[1] or 0), int(match[2]) if match[2] else None

    def environment(self, tape: str) -> dict[str, str]:
        """The variables that carry these options to the processes of a job.

        Args:
            tape: absolute path, or URL.
        """
        variables = {
            TAPE_VARIABLE: tape,
            "ROLLTAPE_LEVEL": self.level,
            "ROLLTAPE_LAYERS": str(self.layers),
            "ROLLTAPE_SKETCHES": str(self.sketches),
            "ROLLTAPE_ON_FULL": self.on_full,
            "ROLLTAPE_QUEUE_MB": str(self.queue_mb),
            "ROLLTAPE_FSYNC": str(int(self.fsync)),
            "ROLLTAPE_STRICT": str(int(self.strict)),
            "ROLLTAPE_TOP_LOGPROBS": str(self.top_logprobs),
            "ROLLTAPE_PROFILE_KERNELS": str(self.profile_kernels),
            "ROLLTAPE_MAX_BYTES": str(self.max_bytes),
        }
        if self.sample_rate < 1:
            variables["ROLLTAPE_SAMPLE_RATE"] = repr(self.sample_rate)
        if self.steps:
            variables["ROLLTAPE_STEPS"] = self.steps
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
                sketches=int(env.get("ROLLTAPE_SKETCHES", cls.sketches)),
                on_full=env.get("ROLLTAPE_ON_FULL", cls.on_full),
                queue_mb=int(env.get("ROLLTAPE_QUEUE_MB", cls.queue_mb)),
                fsync=env.get("ROLLTAPE_FSYNC", "0") == "1",
                strict=env.get("ROLLTAPE_STRICT", "0") == "1",
                top_logprobs=int(env.get("ROLLTAPE_TOP_LOGPROBS", cls.top_logprobs)),
                profile_kernels=int(env.get("ROLLTAPE_PROFILE_KERNELS", cls.profile_kernels)),
                sample_rate=float(env.get("ROLLTAPE_SAMPLE_RATE", cls.sample_rate)),
                steps=env.get("ROLLTAPE_STEPS", cls.steps),
                commit_log=env.get("ROLLTAPE_COMMIT_LOG", cls.commit_log),
                max_bytes=int(env.get("ROLLTAPE_MAX_BYTES", cls.max_bytes)),
                storage_options=json.loads(env.get(STORAGE_VARIABLE, "{}")),
            )
        except ValueError as error:
            raise UsageError(
                f"a ROLLTAPE_* variable is not a number, or not JSON: {error}"
            ) from error
