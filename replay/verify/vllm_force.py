"""What the determinism suite does inside of a vLLM engine: it forces tokens and looks at sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rolltape.replay.executors.vllm_forcing import Forcing
from rolltape.replay.sites import sites_of
from rolltape.replay.taps import attached
from rolltape.replay.verify.first_site import Trace, digests
from rolltape.store.errors import UsageError


class Inside:
    """An engine in this process that is being recorded.

    Args:
        engine: `LLMEngine` with its core in this process.

    What is sampled becomes what is wanted; all that is measured follows from it.
    """

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self._forcing = Forcing(core.model_executor.driver_worker.worker.model_runner)

    @property
    def tokens(self) -> dict[str, np.ndarray]:
        """Prompt and response by the id that the engine uses inside; others are free."""
        return self._forcing.tokens

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """(id inside, first position, tokens) of each row of the last step that drew tokens."""
        return self._forcing.spans

    @spans.setter
    def spans(self, spans: list[tuple[str, int, int]]) -> None:
        self._forcing.spans = spans

    @property
    def model(self) -> Any:
        """What the engine runs."""
        return self._forcing.runner.get_model()

    def close(self) -> None:
        """Undo the patch."""
        self._forcing.close()

    @contextmanager
    def tracing(self, wanted: dict[str, str]) -> Iterator[Trace]:
        """Hash the rows of every site of some requests while the engine runs eager.

        Args:
            wanted: name of a sequence by the id inside; may be filled meanwhile.

        Raises:
            UsageError: no map of sites for this model.
        """
        trace: Trace = {}
        rows: list[tuple[str, int, int]] = []
        forward = -1

        def before(*_: Any) -> None:
            nonlocal forward, rows
            rows = self._forcing.rows()
            forward += any(name in wanted for name, _, _ in rows)

        def look(site: str, values: torch.Tensor) -> None:
            at = 0
            for index, (name, start, n) in enumerate(rows):
                first, positions = at, range(start, start + n)
                at += n
                if site == "logits":  # of the last token of each row
                    first, positions = index, range(start + n - 1, start + n)
                if name not in wanted or first + len(positions) > len(values):
                    continue
                found = digests(values[first : first + len(positions)])
                for position, digest in zip(positions, found, strict=True):
                    trace.setdefault((wanted[name], position, site), (digest, forward))

        handle = self.model.register_forward_pre_hook(before)
        try:
            places = sites_of(self.model, "vllm")
            with attached(self.model, places, look):
                yield trace
        finally:
            handle.remove()


def check_eager(effective: Any) -> None:
    """Hooks are passed by an eager engine alone.

    Raises:
        UsageError: it is none.
    """
    if not effective.get("enforce_eager"):
        raise UsageError("graphs and compiled code pass no hook")
