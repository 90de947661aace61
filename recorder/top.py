"""The most probable tokens of a distribution and the mass of all others, on its own device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltape.store.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_top(k: int, vocab_size: int) -> int:
    """`k`, which must be from 0 to the number of tokens.

    Raises:
        UsageError: it is not.
    """
    if not 0 <= k <= vocab_size:
        raise UsageError(
            f"top_logprobs is {k}, the vocabulary has {vocab_size} tokens",
            hint=f"at most {vocab_size}",
        )
    return k


def top_logprobs(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best of every row, and the log of the mass of the others.

    The tail is the logsumexp of the others: 1 minus the mass of the k has no correct digit left
    where they hold nearly everything, which in a trained model is the usual case.

    Args:
        logprobs: [n, V], a log-softmax; left as it is.
        k: at most V.

    Returns:
        (ids int64 [n, k], logprobs [n, k], tail [n]), best first; the tail is -inf when nothing
        is left. Nothing here makes the host wait for the device.
    """
    values, ids = logprobs.topk(k, dim=-1)
    return ids, values, logprobs.scatter(-1, ids, -float("inf")).logsumexp(-1)
