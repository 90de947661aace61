"""What the front end of TensorRT-LLM returns, as rows of a tape; pure functions.

Logprobs come as a list of dicts (token id -> Logprob) or as a list of floats. The sampled token
is not the first entry of its dict when the engine sorts by rank, so values are looked up by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Finish reasons of the engine -> those of a tape.
FINISH = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "timeout": "abort",
    # those of a response
    "END_ID": "stop",
    "STOP_WORDS": "stop",
    "LENGTH": "length",
    "CANCELLED": "abort",
    "TIMED_OUT": "abort",
}
ROUTES = "routed_experts"


def finish_of(reason: Any, *, done: bool, failed: bool) -> str:
    """The `finish` of a sequence.

    Args:
        reason: `CompletionOutput.finish_reason`, or the name of the one of a response.
        done: whether the engine says that nothing more will come.
        failed: whether it answered with an error.
    """
    if failed:
        return "error"
    if reason in (None, "NOT_FINISHED"):
        return "abort" if done else "open"
    return FINISH.get(str(reason), "error")


def token_logprobs(
    entries: Sequence[Any] | None, tokens: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The logprob of each token, float32, and bool where there is one.

    Args:
        entries: one for each token, in either format; may be longer (the engine may have gone on)
            or shorter (the rest is missing). A token that its dict lacks is missing.
        tokens: sampled ids.
    """
    values = np.full(len(tokens), np.nan, np.float32)
    there = np.zeros(len(tokens), bool)
    for at, (entry, token) in enumerate(zip(entries or (), tokens, strict=False)):
        found = entry.get(token) if isinstance(entry, dict) else entry
        if found is None:
            continue
        values[at] = getattr(found, "logprob", found)
        there[at] = True
    return values, there


def prompt_logprobs(
    entries: Sequence[Any] | None, prompt: Sequence[int], cached: int = 0
) -> tuple[np.ndarray, np.ndarray] | None:
    """Logprobs of prompt positions 1 and on; None if they cannot be placed.

    Entry i scores token i + 1; the last one scores the first generated token. With a reused prefix
    only the end is there, and paired with the wrong tokens without a word, so all of them are
    refused where positions are `cached`, and anything but one entry a prompt token.
    """
    if not entries or cached or len(entries) not in (len(prompt), len(prompt) - 1):
        return None
    values, there = token_logprobs(entries[: len(prompt) - 1], prompt[1:])
    if isinstance(entries[0], dict) and not there.any():
        return None  # a version that scores the input token, or only the most probable ones
    return values, there


def routes_of(output: Any) -> np.ndarray | None:
    """The engine's own routes of an output: integers [positions, layers, k], -1 missing.

    Raises:
        ValueError: they have another shape.
    """
    found = getattr(output, ROUTES, None)
    if found is None:
        channel = getattr(output, "additional_generation_outputs", None) or {}
        found = channel.get(ROUTES)
    if found is None:
        return None
    ids = np.asarray(found.numpy() if hasattr(found, "numpy") else found)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{ROUTES} has shape {ids.shape} and dtype {ids.dtype}, not [n, layers, k]"
        )
    return ids


def route_rows(ids: np.ndarray, length: int) -> tuple[np.ndarray, str | None]:
    """Routes of the positions of a sequence of `length` tokens, and what is wrong with them.

    The engine may have run the last token as well, or one after the end; those are cut off. Rows
    with an id twice, or all zero throughout, are no routes of anybody.
    """
    ids = ids[: max(length - 1, 0)]
    if len(ids) < length - 1:
        return ids, f"{len(ids)} rows of {length - 1} positions"
    if ids.size and not ids.any():
        return ids[:0], "all ids are 0: the capture was not bound"
    valid = (ids >= 0).all(-1)
    ordered = np.sort(ids, -1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]).any(-1) & valid).any()
    return (ids[:0], "an expert stands twice in one row") if twice else (ids, None)


def additional_names(output: Any) -> list[str]:
    """Names of what else came through the additional outputs."""
    channel = getattr(output, "additional_generation_outputs", None) or {}
    return sorted(name for name in channel if name != ROUTES)
