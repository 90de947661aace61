"""Kept sets of one request in one batch of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SamplingMaskChunk:
    """int32 lengths and token ids, float32 logprobs of the drawn tokens or of all kept ones."""

    lengths: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray

    def to_lists(self, support_logprobs: bool) -> tuple[list[list[int]], list[Any]]:
        """As the real one."""
        cuts = np.cumsum(self.lengths)[:-1]
        masks = [part.tolist() for part in np.split(self.token_ids, cuts)]
        if not support_logprobs:
            return masks, self.logprobs.tolist()
        return masks, [part.tolist() for part in np.split(self.logprobs, cuts)]
