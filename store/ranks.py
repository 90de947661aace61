"""Ranks of chosen experts in lists that follow the router, and their range coder.

Per layer there is a list of all experts. A row of routes is written as the rank of each chosen
expert in it, not counting those of earlier slots. Then the scores of all experts fade by a
quarter, those of the chosen ones grow, by more in earlier slots, and the list is sorted by score;
ties go to what was chosen now, and among those to the earlier slot. A token that was not seen
before starts from the experts by how often the layer chose them, brought up to date every
`REFRESH` rows. In sets (`order` false) the rows are sorted by place, and a rank counts the experts
between two that were chosen.

The code here is plain Python on lists and `bytearray`; `rolltape.store.ranks_jit` does the same on
vectors with numba. A layer's rank bytes are range-coded (rANS: 12-bit shares, 32-bit states,
16-bit words) with four states that take the rows in turn.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

#: Rows of a layer after which the order that new tokens start from is brought up to date.
REFRESH = 64

MATCHES = 4  # tokens of context that a row and the one before it share: 0, 1, 2, 3 or more
SLOTS = 8  # slots beyond the eighth share contexts
BUCKETS = 8  # of the ranks already written in this row
CONTEXTS = MATCHES * SLOTS * BUCKETS
SHARES = 4096
ESCAPE = 255  # rank byte that stands for a rank among the escaped ones, which are 255 or more

#: Group of each context, by grain. Few tokens cannot pay for the frequencies of many contexts.
_SLOT, _BUCKET = np.divmod(np.arange(CONTEXTS) % (SLOTS * BUCKETS), BUCKETS)
GRAINS: tuple[np.ndarray, ...] = (
    np.arange(CONTEXTS),
    _SLOT * BUCKETS + _BUCKET,
    np.minimum(_SLOT, 1) * BUCKETS + _BUCKET,
    _BUCKET // 2,
    np.zeros(CONTEXTS, np.int64),
)

#: Cost of a rank byte by its share of 4096, in 2^-20 bits; integers, so that sums are exact.
_COST = np.rint((12 - np.log2(np.maximum(np.arange(SHARES + 1), 1))) * 2**20).astype(np.int64)

_START = 1 << 16  # of a rANS state
_STATES = 4


@dataclass(frozen=True)
class Rules:
    """What the coding of a block depends on.

    Attributes:
        experts: 1 to 65,535.
        k: slots, at least 1.
        order: whether the slot order is kept.
        gain: uint8 [k], what a choice adds to the score.
        slot: uint8 [k], context class of a slot.
        bucket: uint8 [256], context class of a rank.
    """

    experts: int
    k: int
    order: bool
    gain: np.ndarray = field(init=False)
    slot: np.ndarray = field(init=False)
    bucket: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        slots = np.arange(self.k)
        # the first slots hold the experts with the highest score; at most 48 / (1 - 3/4) fits uint8
        gain = (
            16 + 32 * (self.k - 1 - slots) // max(self.k - 1, 1) if self.order else 48 + 0 * slots
        )
        slot = slots if self.k <= SLOTS else slots * SLOTS // self.k
        bucket = np.array([min(rank.bit_length(), BUCKETS - 1) for rank in range(256)])
        object.__setattr__(self, "gain", gain.astype(np.uint8))
        object.__setattr__(self, "slot", slot.astype(np.uint8))
        object.__setattr__(self, "bucket", bucket.astype(np.uint8))

    @property
    def dtype(self) -> Any:
        """Dtype of ranks."""
        return np.uint8 if self.experts <= 256 else np.uint16


_COMPILED: list[ModuleType | None] = []


def compiled() -> ModuleType | None:
    """`rolltape.store.ranks_jit`, or None where numba is not installed."""
    if not _COMPILED:
        try:
            importlib.import_module("numba")
        except ImportError:
            _COMPILED.append(None)
        else:
            _COMPILED.append(importlib.import_module("rolltape.store.ranks_jit"))
    return _COMPILED[0]


class _List:
    """The experts of one layer in order, as plain Python keeps them."""

    def __init__(self, rules: Rules) -> None:
        self.experts = rules.experts
        self.gain = rules.gain.tolist()
        self.count = [0] * rules.experts
        self.usual = list(range(rules.experts))
        self.since = self.done = 0
        self.names = list(self.usual)
        self.low = bytearray(b"\xff" * rules.experts)  # 255 - score, so that it ascends

    def new_token(self) -> None:
        if self.since >= REFRESH or 2 * self.since >= self.done:
            self.since = 0
            self.usual.sort(key=self.count.__getitem__, reverse=True)
        self.names = list(self.usual)
        self.low = bytearray(b"\xff" * self.experts)

    def put_back(self, chosen: list[int], low: list[int]) -> None:
        """Experts that were taken out, in slot order, and what `self.low` said of them."""
        names, lows, count = self.names, self.low.translate(_FADE), self.count
        for j in range(len(chosen) - 1, -1, -1):
            name = chosen[j]
            grown = _FADE[low[j]] - self.gain[j]
            at = bisect_left(lows, grown)
            names.insert(at, name)
            lows.insert(at, grown)
            count[name] += 1
        self.low = lows
        self.since += 1
        self.done += 1


#: Fading, on 255 - score.
_FADE = bytes(low + (255 - low + 3) // 4 for low in range(256))


def to_ranks(
    rows: np.ndarray, kind: np.ndarray, match: np.ndarray, rules: Rules
) -> list[np.ndarray]:
    """Ranks of the rows of some layers.

    Args:
        rows: uint8 or uint16 [n, layers, k] experts, in the order of the turns.
        kind: uint8 [n, layers], 1 for a row to be coded, else it is skipped; becomes 2 for a row
            in which an expert repeats, which has no ranks.
        match: uint8 [n], tokens of context shared with the turn before, at most 3.
        rules: of the block.

    Returns:
        Per layer `rules.dtype` [coded rows * k].
    """
    k, answer = rules.k, []
    turns = match.tolist()
    for layer in range(rows.shape[1]):
        experts = _List(rules)
        out: list[int] = []
        for turn, row in enumerate(rows[:, layer].tolist()):
            if turns[turn] == 0:
                experts.new_token()
            if kind[turn, layer] != 1:
                continue
            if len(set(row)) < k:
                kind[turn, layer] = 2
                continue
            names, low = experts.names, experts.low
            if not rules.order:
                row.sort(key=names.index)
            lows, last = [], 0
            for name in row:
                at = names.index(name)
                del names[at]
                lows.append(low.pop(at))
                out.append(at - last)
                if not rules.order:
                    last = at
            experts.put_back(row, lows)
        answer.append(np.array(out, rules.dtype))
    return answer


def from_ranks(
    ranks: list[np.ndarray], kind: np.ndarray, match: np.ndarray, rows: np.ndarray, rules: Rules
) -> bool:
    """Inverse of `to_ranks`: fills the coded rows; returns whether all ranks were possible.

    Args:
        ranks: per layer `rules.dtype` [coded rows * k].
        kind: uint8 [n, layers], 1 for a coded row.
        match: uint8 [n].
        rows: uint8 or uint16 [n, layers, k], written in the order of the turns.
        rules: of the block.
    """
    k = rules.k
    turns = match.tolist()
    for layer, part in enumerate(ranks):
        experts = _List(rules)
        todo = iter(part.tolist())
        coded = (kind[:, layer] == 1).tolist()
        for turn in range(len(turns)):
            if turns[turn] == 0:
                experts.new_token()
            if not coded[turn]:
                continue
            names, low = experts.names, experts.low
            chosen, lows, at = [], [], 0
            for _ in range(k):
                at = next(todo) if rules.order else at + next(todo)
                if at >= len(names):
                    return False
                chosen.append(names.pop(at))
                lows.append(low.pop(at))
            rows[turn, layer] = chosen
            experts.put_back(chosen, lows)
    return True


def contexts(symbols: np.ndarray, match: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of rank bytes, and how often each byte is used in each.

    Args:
        symbols: uint8 [rows * k].
        match: uint8 [rows], of the coded rows.
        rules: of the block.

    Returns:
        uint8 [rows * k] below `CONTEXTS`, int64 [CONTEXTS, 256].
    """
    table = symbols.reshape(len(match), rules.k)
    where = np.empty(table.shape, np.uint8)
    high = np.zeros(len(match), np.uint8)
    for j in range(rules.k):
        part = table[:, j]
        where[:, j] = match * (SLOTS * BUCKETS) + rules.slot[j] * BUCKETS + rules.bucket[high]
        high = np.maximum(high, part) if rules.order else high + np.minimum(part, 255 - high)
    both = where.ravel().astype(np.uint16) << 8 | symbols
    total = np.bincount(both, minlength=CONTEXTS * 256).reshape(CONTEXTS, 256)
    return where.ravel(), total


def pack(symbols: np.ndarray, where: np.ndarray, k: int, shares: np.ndarray) -> np.ndarray:
    """Range-code the rank bytes of one layer, from the last to the first.

    Args:
        symbols: uint8 [rows * k].
        where: uint8 [rows * k], from `contexts`.
        k: slots.
        shares: uint32 [CONTEXTS * 256], from `share_table`.

    Returns:
        uint16 words: the four states, then what they pull.
    """
    words: list[int] = []
    states = [_START] * _STATES
    both = shares[where.astype(np.int64) * 256 + symbols].tolist()
    rows = len(symbols) // k
    for first in range((rows - 1) // _STATES * _STATES, -1, -_STATES):
        here = min(_STATES, rows - first)
        for j in range(k - 1, -1, -1):
            for i in range(here - 1, -1, -1):
                share = both[(first + i) * k + j]
                f, x = share >> 16, states[i]
                if x >= f << 20:
                    words.append(x & 65535)
                    x >>= 16
                q = x // f
                states[i] = (q << 12) + x - q * f + (share & 65535)
    for x in reversed(states):
        words += [x >> 16, x & 65535]
    return np.array(words[::-1], np.uint16)


def unpack(
    words: np.ndarray, match: np.ndarray, rules: Rules, symbol: np.ndarray, shares: np.ndarray
) -> np.ndarray | None:
    """Inverse of `pack`: uint8 [rows * k], or None if the words do not fit.

    Args:
        words: uint16.
        match: uint8 [rows], of the coded rows.
        rules: of the block.
        symbol: uint8 [CONTEXTS * SHARES], from `symbol_table`.
        shares: uint32 [CONTEXTS * 256], from `share_table`.
    """
    if len(words) < 2 * _STATES:
        return None
    k, order = rules.k, rules.order
    todo = words.tolist()
    states = [todo[2 * i] | todo[2 * i + 1] << 16 for i in range(_STATES)]
    w = 2 * _STATES
    table = shares.tolist()
    symbols = symbol.tobytes()
    slot = (rules.slot.astype(int) * BUCKETS).tolist()
    bucket = rules.bucket.tolist()
    starts = (match.astype(int) * (SLOTS * BUCKETS)).tolist()
    out = bytearray(len(match) * k)
    for first in range(0, len(match), _STATES):
        here = min(_STATES, len(match) - first)
        high = [0] * here
        for j in range(k):
            for i in range(here):
                c = starts[first + i] + slot[j] + bucket[high[i]]
                x = states[i]
                low = x & 4095
                s = symbols[c * SHARES + low]
                share = table[c * 256 + s]
                x = (share >> 16) * (x >> 12) + low - (share & 65535)
                if x < _START:
                    if w >= len(todo):
                        return None
                    x = x << 16 | todo[w]
                    w += 1
                states[i] = x
                out[(first + i) * k + j] = s
                high[i] = max(high[i], s) if order else min(high[i] + s, 255)
    if w != len(todo) or states != [_START] * _STATES:
        return None
    return np.frombuffer(bytes(out), np.uint8)


def share_table(freq: np.ndarray) -> np.ndarray:
    """Share << 16 | start of each byte: uint32 [CONTEXTS * 256] from [CONTEXTS, 256]."""
    base = np.cumsum(freq, axis=1) - freq
    shares: np.ndarray = freq.astype(np.uint32) << 16 | base.astype(np.uint32)
    return shares.ravel()


def symbol_table(freq: np.ndarray) -> np.ndarray:
    """Byte of each share of each context, 0 in a context without any: uint8 [CONTEXTS * SHARES]."""
    symbol = np.zeros((CONTEXTS, SHARES), np.uint8)
    used = freq.any(axis=1)
    byte = np.tile(np.arange(256, dtype=np.uint8), int(used.sum()))
    symbol[used] = np.repeat(byte, freq[used].ravel()).reshape(-1, SHARES)
    return symbol.ravel()


def best_grain(total: np.ndarray) -> tuple[int, np.ndarray]:
    """Grain that makes ranks and frequencies smallest, and its frequencies int64 [groups, 256].

    Args:
        total: int64 [CONTEXTS, 256] uses of each rank byte.
    """
    best: tuple[int, int, np.ndarray] | None = None
    for grain, group in enumerate(GRAINS):
        merged = np.zeros((int(group.max()) + 1, 256), np.int64)
        np.add.at(merged, group, total)
        freq = _frequencies(merged)
        bits = int((merged * _COST[freq]).sum()) >> 20
        # about a byte for each frequency; not what zstd makes of them, which a version may change
        size = int(np.count_nonzero(freq)) + bits // 8
        if best is None or size < best[0]:
            best = size, grain, freq
    assert best is not None
    return best[1], best[2]


def _frequencies(total: np.ndarray) -> np.ndarray:
    """Counts int64 [groups, 256] to shares of 4096; what occurs has at least 1."""
    sums = total.sum(axis=1, keepdims=True)
    freq = np.where(total > 0, np.maximum(total * 4096 // np.maximum(sums, 1), 1), 0)
    for c in np.flatnonzero(sums[:, 0]):
        row = freq[c]
        over = int(row.sum()) - 4096
        while over:
            i = int(row.argmax())
            change = min(over, int(row[i]) // 2) if over > 0 else over
            row[i] -= change
            over -= change
    return freq
