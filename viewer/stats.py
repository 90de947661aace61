"""What recorded distributions say of a position: entropy, rank of the token, how far B is from A.

A tape holds the k most probable tokens of a position and the mass of all others, so entropy and KL
are lower bounds: all other tokens are taken as one.
"""

from __future__ import annotations

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.distributions import Distributions, compare_distributions
from rolltape.store.errors import UsageError
from rolltape.store.sequences import Sequence
from rolltape.viewer.library import Pair

#: `rank` of a token that is not among the k best, and where no distribution was recorded.
BELOW, NO_RANK = 0xFFFE, 0xFFFF
#: Arrays of a window that are made only when they are asked for. `entropy`, `kl` f32 in nats and
#: `topk_overlap` f32, a share: NaN where absent. `rank` u16, 1 is the most probable token.
STATS = ("entropy_a", "entropy_b", "rank_a", "rank_b", "kl", "topk_overlap")


def stats_there(pair: Pair, name: str) -> list[str]:
    """Those that the tapes have of a sequence, at some position."""
    sides = [_records(s) for s in (pair.find(name), pair.partner(name))]
    found = [
        f"{n}_{s}" for n in ("entropy", "rank") for s, has in zip("ab", sides, strict=True) if has
    ]
    return found + (["kl", "topk_overlap"] if all(sides) else [])


def _records(sequence: Sequence | None) -> bool:
    return sequence is not None and bool(sequence.tape.index.find("distributions", sequence.key))


def stats(
    pair: Pair, name: str, ids: Masked, start: int, end: int
) -> tuple[dict[str, np.ndarray], str]:
    """All of `STATS` at positions [start, end), and why `kl` cannot be said where both are there.

    Args:
        pair: where it lies.
        name: id on side A.
        ids: token ids of those positions.
        start: first position.
        end: one behind the last.
    """
    n = end - start
    sides = [_distributions(s, start, end) for s in (pair.find(name), pair.partner(name))]
    found: dict[str, np.ndarray] = {}
    for side, given in zip("ab", sides, strict=True):
        found[f"entropy_{side}"] = np.full(n, np.nan, np.float32)
        found[f"rank_{side}"] = np.full(n, NO_RANK, np.uint16)
        if given is not None:
            m = len(given)
            found[f"entropy_{side}"][:m] = _entropy(given)
            found[f"rank_{side}"][:m] = _rank(given, ids[:m])
    found["kl"] = np.full(n, np.nan, np.float32)
    found["topk_overlap"] = np.full(n, np.nan, np.float32)
    a, b = sides
    why = ""
    if a is not None and b is not None:
        try:
            both = compare_distributions(a, b)
        except UsageError as error:
            return found, str(error)
        m = len(both.valid)
        found["kl"][:m] = np.where(both.valid, both.kl_lower, np.nan)
        found["topk_overlap"][:m] = np.where(both.valid, both.overlap, np.nan)
    return found, why


def _distributions(sequence: Sequence | None, start: int, end: int) -> Distributions | None:
    if sequence is None or start >= min(end, sequence.length):
        return None
    return sequence.window(start, min(end, sequence.length)).distributions()


def _entropy(given: Distributions) -> np.ndarray:
    """float32 [n], nats."""
    logs = np.concatenate([given.logprobs, given.tail[:, None]], axis=1).astype(np.float64)
    terms = np.where(np.isneginf(logs), 0.0, np.exp(logs) * np.where(np.isneginf(logs), 0, logs))
    return np.where(given.valid, -terms.sum(1) + 0.0, np.nan).astype(np.float32)


def _rank(given: Distributions, ids: Masked) -> np.ndarray:
    """uint16 [n]."""
    same = given.ids == ids.values.astype(np.uint32)[:, None]
    rank = np.where(same.any(1), same.argmax(1) + 1, BELOW)
    return np.where(given.valid & ids.valid, rank, NO_RANK).astype(np.uint16)
