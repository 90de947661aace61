"""Sequences laid out as model inputs: padded or packed, and their routes laid out beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rolltape.replay.forcing import ForcedRoutes
from rolltape.store import Routes, UsageError
from rolltape.store import Sequence as TapeSequence

Layout = Literal["padded", "packed"]

#: Positions that the separation check of a packed batch looks at, and how much nearer to alone
#: than to run-on they have to be.
_CHECKED_POSITIONS = 16
_SEPARATION = 0.1


@dataclass(frozen=True)
class Placed:
    """Where a sequence lies in a batch: tokens at [row, column : column + length]."""

    sequence: TapeSequence
    row: int
    column: int

    @property
    def span(self) -> tuple[int, slice]:
        """Index of its tokens in a [B, S, ...] tensor."""
        return self.row, slice(self.column, self.column + self.sequence.length)


@dataclass(frozen=True)
class Batch:
    """One forward.

    Args:
        placed: its sequences.
        rows: B.
        columns: S, padding included.
        layout: `padded`: one sequence a row, padded on the right, with an attention mask;
            `packed`: one row, sequences one after the other, position ids restarting.
    """

    placed: tuple[Placed, ...]
    rows: int
    columns: int
    layout: Layout

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(p.sequence.length for p in self.placed)

    @property
    def padded(self) -> int:
        """Padding tokens."""
        return self.rows * self.columns - self.tokens

    def inputs(self, device: torch.device | str) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        ids = torch.zeros(self.rows, self.columns, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        positions = torch.zeros_like(ids)
        for p in self.placed:
            ids[p.span] = torch.from_numpy(p.sequence.tokens.values.astype(np.int64))
            mask[p.span] = 1
            positions[p.span] = torch.arange(p.sequence.length)
        out: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
        if self.layout == "packed":
            # without a mask the model tells the sequences apart by their positions
            return {**out, "attention_mask": None, "position_ids": positions.to(device)}
        return {**out, "attention_mask": mask.to(device)}

    def routes(self, routes: Iterable[Routes | None]) -> ForcedRoutes:
        """Routes of its sequences, in the order of `placed`."""
        at = [(p.row, p.column) for p in self.placed]
        return place_routes(routes, at, shape=(self.rows, self.columns))


def make_batches(
    sequences: Iterable[TapeSequence], *, tokens_per_batch: int, layout: Layout
) -> list[Batch]:
    """Batches of at most `tokens_per_batch` tokens, padding included, longest sequences first.

    A sequence that is longer than that gets a batch of its own. Empty ones are left out.
    """
    if tokens_per_batch < 1:
        raise UsageError(f"tokens_per_batch is {tokens_per_batch}", hint="at least 1")
    ordered = sorted((s for s in sequences if s.length), key=lambda s: -s.length)
    groups: list[list[TapeSequence]] = []
    used = 0
    for sequence in ordered:
        cost = groups[-1][0].length if groups and layout == "padded" else sequence.length
        if not groups or used + cost > tokens_per_batch:
            groups.append([])
            used, cost = 0, sequence.length
        groups[-1].append(sequence)
        used += cost
    return [_batch(group, layout) for group in groups]


def _batch(group: list[TapeSequence], layout: Layout) -> Batch:
    if layout == "padded":
        placed = tuple(Placed(s, row, 0) for row, s in enumerate(group))
        return Batch(placed, len(group), group[0].length, layout)
    ends = np.cumsum([s.length for s in group])
    placed = tuple(Placed(s, 0, int(end) - s.length) for s, end in zip(group, ends, strict=True))
    return Batch(placed, 1, int(ends[-1]), layout)


def place_routes(
    routes: Iterable[Routes | None],
    at: Sequence[tuple[int, int]],
    *,
    shape: tuple[int, int],
) -> ForcedRoutes:
    """Routes of whole sequences, laid out as the batch that a model gets.

    Args:
        routes: one a sequence, row p for token p; None where nothing was recorded.
        at: (row, column) of the first token of each sequence in the batch. With padding on the
            left the column is the width of the padding; in a packed row it is the offset.
        shape: (B, S) of the batch, padding included.

    Returns:
        ids [B, S, layers, k]; not valid on padding and where nothing was recorded, so that the
        live choice stays there. Weights only if every sequence has them.

    Raises:
        UsageError: no routes at all, routes of different models, a sequence that does not fit,
            or two at one place.
    """
    given = list(routes)
    present = [r for r in given if r is not None]
    if not present:
        raise UsageError("none of the sequences of the batch has routes")
    first = present[0]
    k = first.ids.shape[2]
    size = (*shape, len(first.layers))
    ids = np.zeros((*size, k), first.ids.dtype)
    valid = np.zeros(size, bool)
    taken = np.zeros(shape, bool)
    weights = None
    if all(r.weights is not None for r in present):
        weights = np.zeros((*size, k), np.float32)
    for entry, (row, column) in zip(given, at, strict=True):
        if entry is None:
            continue
        if (entry.layers, entry.num_experts, entry.ids.shape[2]) != (
            first.layers,
            first.num_experts,
            k,
        ):
            raise UsageError("the batch has routes of different models")
        length = len(entry.ids)
        span = (row, slice(column, column + length))
        if not 0 <= row < shape[0] or column < 0 or column + length > shape[1]:
            raise UsageError(
                f"{length} tokens at row {row}, column {column} do not fit a batch of {list(shape)}"
            )
        if taken[span].any():
            raise UsageError(f"two sequences lie at row {row}, column {column}")
        taken[span] = True
        ids[span] = entry.ids
        valid[span] = entry.valid
        if weights is not None and entry.weights is not None:
            weights[span] = entry.weights
    return ForcedRoutes(
        layers=first.layers,
        ids=torch.from_numpy(ids),
        valid=torch.from_numpy(valid),
        weights=None if weights is None else torch.from_numpy(weights),
        num_experts=first.num_experts,
    )


def check_separation(model: nn.Module, batch: Batch, device: torch.device | str) -> None:
    """Prove on one packed batch that the model keeps packed sequences apart.

    The second sequence is run alone, in the pack, and as the continuation of the first one. In
    the pack it has to be as alone, by a distance that is measured and not assumed.

    Raises:
        UsageError: the model mixes them.
    """
    a, b = batch.placed[0].sequence, batch.placed[1].sequence
    pack = _batch([a, b], "packed")
    n = min(_CHECKED_POSITIONS, b.length)

    def logprobs(inputs: dict[str, Any], column: int) -> torch.Tensor:
        logits = model(**inputs).logits[0, column : column + n]
        return torch.log_softmax(logits.float(), dim=-1)

    inputs = pack.inputs(device)
    alone = logprobs(_batch([b], "packed").inputs(device), 0)
    packed = logprobs(inputs, a.length)
    run_on = logprobs({"input_ids": inputs["input_ids"], "use_cache": False}, a.length)
    apart = float((packed - alone).abs().mean())
    mixed = float((run_on - alone).abs().mean())
    if not apart <= _SEPARATION * mixed:
        raise UsageError(
            "layout packed: this model does not keep packed sequences apart: a packed one is "
            f"{apart:.3g} nat from the same one alone, {mixed:.3g} nat when it runs on after "
            "another",
            hint="--layout padded",
        )
