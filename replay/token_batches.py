"""Token ids laid out as forwards of a model, with the span of every sequence in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolltape.replay.taps import Span
from rolltape.store.errors import UsageError

Tokens = Mapping[str, Sequence[int] | np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Laid:
    """One forward: sequences padded on the right.

    Args:
        ids: int64 [rows, columns].
        mask: int64, same shape: 1 where there is a token.
        spans: of the sequences.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    spans: tuple[Span, ...]

    @property
    def columns(self) -> int:
        """Columns of the batch, padding included."""
        return int(self.ids.shape[1])

    def inputs(self, device: torch.device | str) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        ids, mask = self.ids.to(device), self.mask.to(device)
        return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def lay_out(sequences: Tokens, *, rows: int | None = None, tokens: int = 8192) -> list[Laid]:
    """Forwards of all sequences in their order.

    Args:
        sequences: name -> token ids.
        rows: sequences of one forward; None: as many as `tokens` allows, at least one.
        tokens: of one forward, padding included, where `rows` is None.

    Raises:
        UsageError: no tokens at all.
    """
    known = {name: np.asarray(ids, np.int64) for name, ids in sequences.items() if len(ids)}
    if not known:
        raise UsageError("no sequence with tokens")
    groups: list[dict[str, np.ndarray]] = [{}]
    for name, ids in known.items():
        group = groups[-1]
        width = max([len(ids), *map(len, group.values())])
        full = len(group) >= rows if rows else width * (len(group) + 1) > tokens
        if group and full:
            groups.append(group := {})
        group[name] = ids
    return [_laid(group) for group in groups]


def _laid(group: Mapping[str, np.ndarray]) -> Laid:
    shape = len(group), max(map(len, group.values()))
    ids, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for row, tokens in enumerate(group.values()):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
    spans = tuple(
        Span(key=name, row=row, column=0, n=len(tokens))
        for row, (name, tokens) in enumerate(group.items())
    )
    return Laid(ids=ids, mask=mask, spans=spans)
