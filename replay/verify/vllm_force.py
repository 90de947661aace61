"""What the determinism suite does inside of a vLLM engine: it forces tokens and looks at sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rolltape.recorder.patches import Patches
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
        self._runner = core.model_executor.driver_worker.worker.model_runner
        #: Prompt and response by the id that the engine uses inside; others are free.
        self.tokens: dict[str, np.ndarray] = {}
        self._patches = Patches()
        from vllm.v1.sample.sampler import Sampler

        self._patches.around(Sampler, "sample", self._sample)

    @property
    def model(self) -> Any:
        """What the engine runs."""
        return self._runner.get_model()

    def close(self) -> None:
        """Undo the patch."""
        self._patches.undo()

    def _rows(self) -> list[tuple[str, int, int]]:
        """(id inside, first position, tokens) of each row of the step that runs."""
        recorder: Any = self._runner._rolltape
        rows = recorder.rows
        if rows is None:
            return []
        spans = zip(rows.start.tolist(), rows.n.tolist(), strict=True)
        return [(life.request, *span) for life, span in zip(recorder.lives, spans, strict=True)]

    def _sample(self, wrapped: Any, sampler: Any, args: Any, kwargs: Any) -> Any:
        sampled, *rest = wrapped(*args, **kwargs)
        if not self.tokens:
            return (sampled, *rest)
        rows = self._rows()
        if len(rows) != len(sampled):
            raise RuntimeError("the rows of this step are not known: tokens cannot be forced")
        forced = np.full(len(rows), -1, np.int64)
        for i, (name, start, n) in enumerate(rows):
            tokens = self.tokens.get(name)
            if tokens is not None and start + n < len(tokens):
                forced[i] = tokens[start + n]
        values = torch.from_numpy(forced).to(sampled.device, sampled.dtype)
        values = values.reshape(sampled.shape)
        return (torch.where(values >= 0, values, sampled), *rest)

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
            rows = self._rows()
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
