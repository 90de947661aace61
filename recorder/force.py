"""Tokens that a recorded `generate()` call is made to choose, for re-execution.

The force stands behind the last probe of the recorder: what is recorded of a step was computed
from the model's own logits by the processors of the call, and only the choice is not free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rolltape.store.errors import ForcingError

if TYPE_CHECKING:
    import torch

#: Where nothing is forced: the model chooses.
LIVE = -1


@dataclass
class Force:
    """What one call is forced to.

    Args:
        tokens: int64 [rows, steps]; `LIVE` where the choice is free.
        origins: per row the key (`Key.text`) of the sequence that it replays.
        taken: whether a call took it.
    """

    tokens: np.ndarray
    origins: tuple[str, ...]
    taken: bool = False


@dataclass
class ForcedChoice:
    """A logits processor that leaves one token of each forced row.

    Args:
        force: what to force.
        width: columns of the padded prompts.
    """

    force: Force
    width: int
    _tokens: torch.Tensor | None = field(default=None, repr=False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [rows, V] with 0 at the forced token and -inf elsewhere.

        Raises:
            ForcingError: the call has other rows, or runs past the last forced step.
        """
        import torch

        step = input_ids.shape[1] - self.width
        rows, steps = self.force.tokens.shape
        if len(scores) != rows or not 0 <= step < steps:
            raise ForcingError(
                f"tokens of {rows} rows and {steps} steps forced on step {step} of a call of "
                f"{len(scores)} rows"
            )
        if self._tokens is None:
            self._tokens = torch.from_numpy(self.force.tokens).to(scores.device)
        token = self._tokens[:, step : step + 1]
        only = torch.full_like(scores, -torch.inf).scatter_(1, token.clamp(min=0), 0.0)
        return torch.where(token == LIVE, scores, only)
