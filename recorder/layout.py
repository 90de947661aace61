"""What a `generate()` call needs to be laid out again, beside its rows and its settings.

Padding is not idle: the pad tokens of a prompt and those that a finished row goes on with run
through the MoE layers, and their number and choice of experts shape the kernels of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: Arguments of `_sample` that are recorded otherwise, or that `generate` makes itself.
_KNOWN = {
    "attention_mask",
    "cache",
    "cache_position",
    "generation_config",
    "logits_processor",
    "logits_to_keep",
    "past_key_values",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "use_cache",
}


def call_layout(kwargs: Mapping[str, Any], pad_left: np.ndarray) -> dict[str, Any]:
    """The part that holds for all rows of a call; JSON-able.

    Args:
        kwargs: of `_sample`, as `generate` prepared them.
        pad_left: padding columns of each row.

    Returns:
        `pad`: token of a row that has finished, or None; `finished`: `pad`, or `sampled` where
        nothing ends a row and it goes on with what is sampled; `inputs`: names of model inputs
        that are not recorded.
    """
    pad = getattr(kwargs["generation_config"], "_pad_token_tensor", None)
    ends = any(hasattr(criterion, "eos_token_id") for criterion in kwargs["stopping_criteria"])
    inputs = [
        name
        for name, value in sorted(kwargs.items())
        if name not in _KNOWN and value is not None and value is not False
        if name != "position_ids" or not _usual(value, pad_left)
    ]
    return {
        "pad": None if pad is None else int(pad),
        "finished": "pad" if ends else "sampled",
        "inputs": inputs,
    }


def _usual(position_ids: Any, pad_left: np.ndarray) -> bool:
    """Whether positions count from the first token of each row."""
    found = position_ids.detach().to("cpu", copy=True).numpy()
    if found.ndim != 2 or len(found) not in (1, len(pad_left)):
        return False
    expected = np.arange(found.shape[1]) - pad_left[:, None]
    return bool(((expected < 0) | (found == expected)).all())
