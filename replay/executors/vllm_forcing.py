"""Forces the tokens of a vLLM engine in this process: what is sampled becomes what is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np

from rolltape.recorder.patches import Patches


class Forcing:
    """A patch of the sampler. All that is measured of a step follows from the forced token.

    Args:
        runner: the first model runner of an engine that is being recorded: its recorder knows
            which row is whose.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.sample.sampler import Sampler

        self.runner = runner
        #: int64 prompt and response by the id that the engine uses inside; others are free.
        self.tokens: dict[str, np.ndarray] = {}
        #: Rows of the last step with forced tokens.
        self.spans: list[tuple[str, int, int]] = []
        self._patches = Patches()
        self._patches.around(Sampler, "sample", self._sample)

    def close(self) -> None:
        """Undo the patch."""
        self._patches.undo()

    def rows(self) -> list[tuple[str, int, int]]:
        """(id inside, first position, tokens) of each row of the step that runs; else none."""
        recorder: Any = getattr(self.runner, "_rolltape", None)
        return [] if recorder is None else list(recorder.spans())

    def _sample(self, wrapped: Any, sampler: Any, args: Any, kwargs: Any) -> Any:
        sampled, *rest = wrapped(*args, **kwargs)
        if not self.tokens:
            return (sampled, *rest)
        import torch

        rows = self.spans = self.rows()
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
