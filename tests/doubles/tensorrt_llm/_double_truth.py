"""What the double really did, noted where it is computed.

Nothing in here comes from what a recorder can see: rows and positions are those of the tensors
that the model ran on, experts those that the matrix products used, logprobs and kept sets those
of the logits that a token was drawn from, and the weights are known by their contents.
"""

from __future__ import annotations

import os
import pickle
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

#: File that a worker leaves its log in when it stops; a name that pools pass on.
FILE_VARIABLE = "TLLM_DOUBLE_TRUTH"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request in one forward: positions [start, start + n)."""

    request: int
    client: int | None
    sample: int
    start: int
    n: int
    dummy: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward.

    Args:
        number: counts forwards, those of a warm-up included.
        rows: in the order of the flat batch, padding included.
        routes: int64 [tokens, MoE layers, experts a token], of all rows.
        graph: key of the graph that ran; None if eager.
        weights: number of the contents of the weights, see `Truth.generation`.
        warmup: whether the engine said that it warms up.
    """

    number: int
    rows: tuple[Row, ...]
    routes: torch.Tensor
    graph: tuple[Any, ...] | None
    weights: int
    warmup: bool

    @property
    def tokens(self) -> int:
        """Size of the flat batch, padding included."""
        return sum(row.n for row in self.rows)


@dataclass(kw_only=True)
class Draw:
    """One token that was drawn.

    Args:
        position: of the token itself in prompt and response.
        raw: its logprob at temperature 1 over the whole vocabulary, of the logits as processors
            and min_tokens left them.
        processed: after temperature and truncation, over the kept set.
        kept: the token ids that could have been drawn, ascending.
        step: number of the forward.
        applied: whether the request took it; not so after its end.
    """

    request: int
    client: int | None
    sample: int
    position: int
    token: int
    raw: float
    processed: float
    kept: tuple[int, ...]
    step: int
    weights: int
    applied: bool = False


@dataclass
class Truth:
    """The log of a process."""

    steps: list[Step] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    _contents: dict[int, int] = field(default_factory=dict)

    def generation(self, model: Any) -> int:
        """Number of the contents of a model's weights: 0 for the first ones that were seen."""
        total = 0
        for name, tensor in model.state_dict().items():
            total = zlib.crc32(name.encode(), total)
            total = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy(), total)
        return self._contents.setdefault(total, len(self._contents))

    def served(self) -> list[Step]:
        """Steps that were no warm-up."""
        return [step for step in self.steps if not step.warmup]

    def routes(self, client: int, sample: int = 0) -> dict[int, list[tuple[int, torch.Tensor]]]:
        """Position -> (step, experts [layers, k]) of each forward over it, oldest first."""
        found: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for step in self.served():
            at = 0
            for row in step.rows:
                if not row.dummy and (row.client, row.sample) == (client, sample):
                    for i in range(row.n):
                        entry = (step.number, step.routes[at + i])
                        found.setdefault(row.start + i, []).append(entry)
                at += row.n
        return found

    def drawn(self, client: int, sample: int = 0) -> list[Draw]:
        """Tokens that a sequence took, in order."""
        mine = [d for d in self.draws if (d.client, d.sample) == (client, sample) and d.applied]
        return sorted(mine, key=lambda draw: draw.position)

    def clear(self) -> None:
        """Forget all but the numbers of the weights."""
        self.steps.clear()
        self.draws.clear()
        self.events.clear()

    def save(self) -> None:
        """Leave the log in the file that `FILE_VARIABLE` names, if it does."""
        path = os.environ.get(FILE_VARIABLE)
        if path:
            with open(path, "wb") as file:
                pickle.dump(self, file)


#: The log of this process.
TRUTH = Truth()
