"""What is kept of the distribution that a token was drawn from, whatever the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rolltape.recorder.serving.batch import words_of

#: Kept sets up to this size travel as lists of ids, larger ones as bitmaps.
MOST_LISTED = 256


def measure(
    *,
    token: torch.Tensor,
    raw: torch.Tensor | None,
    masked: torch.Tensor | None,
    temperature: torch.Tensor | None,
    top_k: int,
) -> dict[str, torch.Tensor]:
    """Logprobs of the drawn tokens and the kept sets of their rows, in plain torch.

    Args:
        token: integers [rows] or [rows, 1], the token drawn in each row.
        raw: [rows, V] logits as the model gave them; None if their logprobs are known already.
        masked: [rows, V] logits after truncation, -inf outside the kept set; None if nothing was
            cut.
        temperature: float32 [rows] what logits are divided by; None if all are 1.
        top_k: most ids that truncation keeps in any row; 0 if that is not bounded.

    Returns:
        Tensors as in `rolltape.recorder.serving.batch.Step.values`. `raw` is
        log_softmax(raw)[token], `scaled` log_softmax(raw / temperature)[token], `processed`
        log_softmax(masked)[token], all in float32.
    """
    most = most_listed(top_k)
    found = _plain(token.reshape(len(token), -1)[:, :1].long(), raw, masked, temperature, most)
    if masked is not None and not most:
        found["bitmap"] = pack(masked)
    return found


def most_listed(top_k: int) -> int:
    """Ids of the list of a kept set; 0 where it is a bitmap.

    Args:
        top_k: most ids that truncation keeps in any row; 0 if that is not bounded.
    """
    # a tie at the threshold may let in a few more
    return -(-(top_k + 16) // 32) * 32 if 0 < top_k <= MOST_LISTED else 0


def device_measure(device: torch.device) -> Any:
    """`rolltape.recorder.serving.kernels.measure` for a device that it runs on, else None."""
    if device.type != "cuda":
        return None
    try:
        from rolltape.recorder.serving.kernels import measure as kernel
    except ImportError:  # no Triton
        return None
    return kernel


#: Columns of a table in front of the lists: float32, but token and kept_n.
COLUMNS = ("raw", "scaled", "processed", "own", "token", "kept_n")


@functools.lru_cache(maxsize=4096)
def table_layout(
    rows: int,
    *,
    most: int,
    raw: bool,
    scaled: bool,
    masked: bool,
    own: str | None,
    routes: tuple[int, int] | None = None,
) -> tuple[int, Mapping[str, tuple[int, str, tuple[int, ...]]]]:
    """Where the columns of a step lie in its table, as a kernel writes them.

    Args:
        rows: of the step.
        most: ids of a kept set, 0 for no lists.
        raw: whether there are logprobs of the logits of the model,
        scaled: and of those divided by temperatures,
        masked: and of those that were cut, with the size of the kept set.
        own: column that the engine computed itself.
        routes: (layers, k) if there is one token a row whose routes are wanted.

    Returns:
        int32 words of the table; name -> (first word, dtype, shape).
    """
    there = {"raw": raw, "scaled": scaled, "processed": masked, "token": True, "kept_n": masked}
    found: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    for number, name in enumerate(COLUMNS):
        if there.get(name):
            exact = name in ("token", "kept_n")
            shape = (rows, 1) if name == "token" else (rows,)
            found[name] = number * rows, "int32" if exact else "float32", shape
    if own is not None:
        found[own] = COLUMNS.index("own") * rows, "float32", (rows,)
    words = len(COLUMNS) * rows
    if most:
        found["kept"] = words, "int32", (rows, most)
        words += rows * most
    if routes is not None:
        found["routes"] = words, "int16", (rows, *routes)
        words += words_of("int16", rows * routes[0] * routes[1])
    return words, found


def measure_verified(
    *, token: torch.Tensor, raw: torch.Tensor, drafted: np.ndarray, temperature: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Logprobs of the tokens that a verification of drafts drew; the host does not wait.

    Args:
        token: integers [rows, m], -1 behind the accepted ones.
        raw: [sum of (drafted + 1), V] logits as the model gave them: those of the first row, with
            the place behind its last draft, then those of the next.
        drafted: int64 [rows], on the host.
        temperature: float32 [rows]; None if all are 1.

    Returns:
        `raw`, and with temperatures `scaled`: float32 [rows, m]; `argmax` bool [rows, m]: whether
        no logit is greater. Anything where token is -1.
    """
    sizes = drafted + 1
    first = np.cumsum(sizes) - sizes
    places = np.minimum(first[:, None] + np.arange(token.shape[1]), len(raw) - 1)
    at = torch.from_numpy(places).to(raw.device, non_blocking=True)
    chosen = token.clamp(min=0).long()
    found = {
        "raw": raw.log_softmax(-1, dtype=torch.float32)[at, chosen],
        "argmax": raw[at, chosen] == raw.max(-1).values[at],
    }
    if temperature is not None:
        owner = torch.from_numpy(np.repeat(np.arange(len(drafted)), sizes))
        scale = temperature[owner.to(raw.device, non_blocking=True)]
        found["scaled"] = (raw.float() / scale[:, None]).log_softmax(-1)[at, chosen]
    return found


def _plain(
    token: torch.Tensor,
    raw: torch.Tensor | None,
    masked: torch.Tensor | None,
    temperature: torch.Tensor | None,
    most: int,
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    if raw is not None:
        found["raw"] = _of(raw, token)
        if temperature is not None:
            found["scaled"] = _of(raw.float() / temperature[:, None], token)
    if masked is not None:
        found["processed"] = _of(masked, token)
        if most:
            kept = masked > -torch.inf
            found["kept_n"] = kept.sum(-1, dtype=torch.int32)
            width = masked.shape[-1]
            column = torch.arange(width, dtype=torch.int32, device=masked.device)
            # the ids that are kept in front, ascending, and the others behind
            first = torch.where(kept, column, width).sort(-1).values[:, :most]
            lists = torch.zeros((len(masked), most), dtype=torch.int32, device=masked.device)
            lists[:, : first.shape[1]] = torch.where(first < width, first, 0)
            found["kept"] = lists
    return found


def _of(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """float32 [rows] log_softmax(logits)[token]."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, token)[:, 0]


def pack(masked: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, ceil(V / 8)] bitmap of what is above -inf, bit 0 first."""
    kept = masked > -torch.inf
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=masked.device)
    return (kept.view(len(kept), -1, 8) * weights).sum(-1, dtype=torch.uint8)
