"""Steps of a serving engine as its hooks see them: which request had which positions in which row.

Rows are attributed by absolute position only. What a row means is decided on the host when its step
is launched, so that a block of steps that is dropped later does not change what the next one means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Life:
    """One sample of one request while it lives in an engine.

    Args:
        request: request id, without the number of the sample.
        sample: index among the samples of that request.
        prompt: uint32 [prompt_len] token ids.
        greedy: argmax instead of sampling.
        temperature: what logits are divided by; None when unknown.
        edits: what changes logits before truncation, in the order applied.
        truncation: what cuts the vocabulary, in the order applied; `greedy` for argmax.
        top_k: most ids that truncation keeps; 0 when it is not bounded.
        wanted: whether it is recorded at all.
        blocks: numbers of its KV blocks, by position. Replaced, not changed, when the engine gives
            it others after a preemption.
        index: number in its roster; given by `Roster.add`.
    """

    request: str
    sample: int
    prompt: np.ndarray
    greedy: bool = False
    temperature: float | None = 1.0
    edits: tuple[str, ...] = ()
    truncation: tuple[str, ...] = ()
    top_k: int = 0
    wanted: bool = True
    blocks: list[int] = field(default_factory=list)
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The requests of one step, in batch order; dummies are left out. Arrays are int64 [rows].

    Args:
        life: index of the life of each row.
        start: first position of its input.
        n: positions, drafted tokens included.
        drafted: how many of them, at the end, are drafted tokens to be verified.
        samples: bool; whether the token drawn from it counts, not so for an unfinished prompt.
        prompt: prompt tokens of the life.
        seen: positions below it had been forwarded before: this is a recompute of them.
        cached: positions below `start` that came with the KV blocks of another request; told in
            the first row of a life only.
        blocks: (row, KV blocks of its life at that time) of the rows that completed a block or
            have cached positions.
    """

    life: np.ndarray
    start: np.ndarray
    n: np.ndarray
    drafted: np.ndarray
    samples: np.ndarray
    prompt: np.ndarray
    seen: np.ndarray
    cached: np.ndarray
    blocks: tuple[tuple[int, list[int]], ...] = ()

    def __len__(self) -> int:
        return len(self.life)

    def kinds(self) -> np.ndarray:
        """Index into `KINDS` of each row."""
        kind = np.where(self.start < self.prompt, 0, 1)
        kind = np.where(self.drafted > 0, 2, kind)
        return np.where(self.start < self.seen, 3, kind)


KINDS = ("prefill", "decode", "verify", "recompute", "cached")


class Roster:
    """The lives of one engine process and how far each has come.

    Args:
        block_size: tokens of a KV block, 0 if prefixes are not shared.
    """

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.lives: dict[int, Life] = {}
        self._new: list[Life] = []
        self._next = 0
        # by index of the life: prompt tokens, tokens known, positions forwarded
        self._facts = np.zeros((3, 256), np.int64)

    def add(self, life: Life) -> Life:
        """Give a life its number."""
        if self._next == self._facts.shape[1]:
            self._facts = np.concatenate([self._facts, np.zeros_like(self._facts)], 1)
        life.index = self._next
        self._next += 1
        self.lives[life.index] = life
        self._new.append(life)
        self._facts[:, life.index] = len(life.prompt), len(life.prompt), 0
        return life

    def take_new(self) -> list[Life]:
        """Lives that were added since this was last asked."""
        new, self._new = self._new, []
        return new

    def forget(self, life: Life) -> None:
        """The life is over."""
        self.lives.pop(life.index, None)

    def place(
        self,
        lives: Sequence[Life],
        start: np.ndarray,
        n: np.ndarray,
        drafted: np.ndarray | None = None,
        *,
        index: np.ndarray | None = None,
    ) -> Rows:
        """The rows of the step that is being launched; moves the lives on.

        Args:
            lives: of each row, in batch order.
            start: int64 [rows] first position of its input, as the engine says.
            n: int64 [rows] positions, drafted tokens included.
            drafted: int64 [rows]; None for none.
            index: `indices(lives)`, if the caller has kept it from a step with the same lives.
        """
        if index is None:
            index = indices(lives)
        start, n = np.asarray(start, np.int64), np.asarray(n, np.int64)
        drafted = np.zeros_like(n) if drafted is None else np.asarray(drafted, np.int64)
        prompt, known, seen = self._facts[:, index]
        end = start + n - drafted
        samples = end >= known
        self._facts[1, index] = np.where(samples, end + 1, known)
        self._facts[2, index] = np.maximum(seen, end)
        cached = np.where(seen == 0, start, 0)
        used: tuple[tuple[int, list[int]], ...] = ()
        if self.block_size:
            full = start // self.block_size < end // self.block_size
            used = tuple(
                (row, lives[row].blocks) for row in np.flatnonzero(full | (cached > 0)).tolist()
            )
        return Rows(
            life=index,
            start=start,
            n=n,
            drafted=drafted,
            samples=samples,
            prompt=prompt,
            seen=seen,
            cached=cached,
            blocks=used,
        )


def indices(lives: Sequence[Life]) -> np.ndarray:
    """int64 [lives] their numbers."""
    return np.array([life.index for life in lives], np.int64)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of one step in one piece of memory, as a device left it.

    Args:
        data: int32, contiguous: a host tensor, or an array in the process that writes it.
        layout: name -> (first element, dtype, shape); columns may lie over each other.
    """

    data: Any
    layout: Mapping[str, tuple[int, str, tuple[int, ...]]]

    def arrays(self) -> dict[str, np.ndarray]:
        """The columns by name."""
        words = self.data if isinstance(self.data, np.ndarray) else self.data.numpy()
        found = {}
        for name, (at, dtype, shape) in self.layout.items():
            size = int(np.prod(shape))
            column = words[at : at + words_of(dtype, size)].view(dtype)
            found[name] = column[:size].reshape(shape)
        return found


def words_of(dtype: str, size: int) -> int:
    """int32 words that so many numbers take."""
    return -(-size * np.dtype(dtype).itemsize // 4)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an engine, and the tensors that it left.

    Args:
        number: of the step, counted in this process.
        t_ns: when it was launched.
        rows: what ran.
        version: weight version in force.
        values: torch tensors on the host, or on their way there until `ready` (numpy arrays in the
            process that writes them):
            `token` [rows, 1 or more], -1 where none was drawn;
            `raw`, `scaled`, `processed` float32 of the first token of each row [rows], or of all
            of them [rows, m];
            `argmax` bool [rows, m] whether no logit is greater than that of the token; where it is
            absent a greedy request is taken at its word;
            `kept_n` int32 [rows], `kept` int32 [rows, most] ascending: the kept sets, or
            `bitmap` uint8 [rows, ceil(V / 8)] where they may be large;
            `routes` int16 [tokens, layers, k] in row order, -1 where nothing was captured;
            `top_ids`, `top_logprobs` [rows, k], `tail` [rows].
        vocab: width of the logits.
        source: `engine` if logprobs are the engine's own numbers, else `recomputed`.
        padded: tokens of the batch, padding included; None when unknown.
        graph: key of the CUDA graph that ran; None for an eager step.
        columns: more columns of the `steps` table.
        ready: something with `synchronize()` to wait for, or None.
        held: bytes of memory that `values` keep from being freed, where that is more than theirs.
        table: more of `values`, in one piece.
        cut: whether truncation or edits leave out ids in any row. A column that is not given is
            `scaled` = `raw`, and if nothing is left out `processed` = `scaled`; None: it is absent.
    """

    number: int
    t_ns: int
    rows: Rows
    version: int
    values: dict[str, Any]
    vocab: int = 0
    source: str = "recomputed"
    padded: int | None = None
    graph: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    ready: Any = None
    held: int = 0
    table: Table | None = None
    cut: bool | None = None

    @property
    def nbytes(self) -> int:
        """About what it holds."""
        tensors = sum(int(v.nbytes) for v in self.values.values())
        tensors += 0 if self.table is None else int(self.table.data.nbytes)
        return max(tensors, self.held) + 80 * len(self.rows)
