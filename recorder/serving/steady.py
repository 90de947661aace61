"""Steps in which every request of the step before goes on by one token.

Most steps of a rollout are such, and the engine's thread is often what a rollout waits for. So of
such a step nothing is done there that can wait: one kernel leaves all that is wanted of it in a
piece of device memory, and a few references are kept. Many of them are copied to the host in one
go, and only then it is worked out which row was whose.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rolltape.recorder.serving.batch import Life, Roster, Step, Table, words_of
from rolltape.recorder.serving.device import Outlet

#: Steps are kept on the device up to this many, this many bytes, and this long.
MOST_STEPS = 128
MOST_BYTES = 32 << 20
SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Alike:
    """What is the same in all steps of a run.

    Args:
        lives: of each row.
        index: int64 [rows] their numbers.
        names: the engine's name of each life -> life.
        words: int32 words of the table of a step.
        layout: where its columns lie.
        facts: more arguments of `Step`.
    """

    lives: Sequence[Life]
    index: np.ndarray
    names: Mapping[str, Life]
    words: int
    layout: Mapping[str, tuple[int, str, tuple[int, ...]]]
    facts: Mapping[str, Any]


class Steady:
    """A run of steps on the device. `lock` is held whenever the run is touched or rows are placed.

    Args:
        roster: the lives that the steps speak of.
        outlet: to the host.
        device: where the tables are.
    """

    def __init__(self, roster: Roster, outlet: Outlet, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._roster, self._outlet, self._device = roster, outlet, device
        self._memory: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._alike: Alike | None = None
        self._key: object = None
        self._kept: list[tuple[int, int, np.ndarray, Any]] = []
        self._since = 0.0
        self._stream: Any = None

    def goes_on(self, key: object) -> bool:
        """Whether a step with this key continues the run, and there is room for it."""
        return key == self._key and len(self._kept) < len(self._slots)

    def begin(self, key: object, alike: Alike) -> None:
        """A new run; the one before has been drained."""
        self._key, self._alike = key, alike
        slots = max(1, min(MOST_STEPS, MOST_BYTES // (4 * alike.words)))
        if self._memory is None or len(self._memory) < slots * alike.words:
            # a tensor made in inference mode could not be written to outside of it
            with torch.inference_mode(False):
                size = slots * alike.words
                self._memory = torch.empty(size, dtype=torch.int32, device=self._device)
        used = self._memory[: slots * alike.words]
        self._slots = list(used.view(slots, alike.words).unbind())
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @property
    def layout(self) -> Mapping[str, tuple[int, str, tuple[int, ...]]]:
        """Where the columns of a table lie in this run."""
        return {} if self._alike is None else self._alike.layout

    @property
    def slot(self) -> torch.Tensor:
        """int32 [words]: where the table of the next step goes."""
        return self._slots[len(self._kept)]

    def add(self, number: int, t_ns: int, start: np.ndarray, cached: Any) -> None:
        """The table of a step has been written, or is being.

        Args:
            number: of the step.
            t_ns: when it was launched.
            start: int64 [rows] the position of each row.
            cached: what the scheduler says of the requests: `req_ids`, `new_block_ids`; or None.
        """
        if not self._kept:
            self._since = time.monotonic()
        self._kept.append((number, t_ns, start, cached))

    def waits(self) -> bool:
        """Whether there are steps that are old, or no room for more."""
        if not self._kept:
            return False
        full = len(self._kept) == len(self._slots)
        return full or time.monotonic() - self._since >= SECONDS

    def drain(self) -> tuple[list[Step], Exception | None]:
        """The steps so far, their tables on the way to the host.

        Returns:
            Steps, and why their tables could not be had: then they have none, and only say which
            rows were whose.
        """
        kept, self._kept = self._kept, []
        alike, memory = self._alike, self._memory
        if not kept or alike is None or memory is None:
            return [], None
        one = np.ones(len(alike.lives), np.int64)
        steps = []
        for number, t_ns, start, cached in kept:
            if cached is not None:
                follow_blocks(cached, alike.names)
            rows = self._roster.place(alike.lives, start, one, index=alike.index)
            steps.append(Step(number=number, t_ns=t_ns, rows=rows, values={}, **alike.facts))
        try:
            host, ready, held = self._copied(memory[: len(kept) * alike.words])
        except Exception as error:
            return steps, error
        parts = host.view(len(kept), alike.words).unbind()
        share = held // len(kept)
        whole = [
            replace(step, table=Table(data=part, layout=alike.layout), ready=ready, held=share)
            for step, part in zip(steps, parts, strict=True)
        ]
        return whole, None

    def _copied(self, tables: torch.Tensor) -> tuple[torch.Tensor, Any, int]:
        if self._stream is None:
            return self._outlet.copy(tables), *self._outlet.done()
        with torch.cuda.stream(self._stream):  # maybe in another thread than the engine's
            return self._outlet.copy(tables), *self._outlet.done()

    def release(self) -> None:
        """Give the memory back: the recording is over."""
        with self.lock:
            self._memory, self._alike, self._key = None, None, None
            self._slots, self._kept = [], []


def write_table(
    out: torch.Tensor,
    layout: Mapping[str, tuple[int, str, tuple[int, ...]]],
    values: Mapping[str, torch.Tensor],
) -> None:
    """What a kernel does, in plain torch: put the columns of a step into its table."""
    for name, (at, dtype, shape) in layout.items():
        size = int(np.prod(shape))
        column = out[at : at + words_of(dtype, size)].view(getattr(torch, dtype))
        column[:size].view(shape).copy_(values[name].reshape(shape))


def follow_blocks(cached: Any, lives: Mapping[str, Life | None]) -> None:
    """Which KV blocks the requests that go on have been given.

    Args:
        cached: `req_ids`, `new_block_ids`, `resumed_req_ids` of those that had run before.
        lives: by the engine's name; what is unknown is left out.
    """
    names, resumed = cached.req_ids, cached.resumed_req_ids
    # in most steps only a few get any
    for at in [at for at, blocks in enumerate(cached.new_block_ids) if blocks]:
        life = lives.get(names[at])
        if life is not None and names[at] not in resumed:
            life.blocks.extend(cached.new_block_ids[at][0])
    for name, blocks in zip(names, cached.new_block_ids, strict=False) if resumed else ():
        life = lives.get(name) if name in resumed else None
        if life is not None:
            life.blocks = list(blocks[0]) if blocks else []
