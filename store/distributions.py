"""The most probable tokens of each position with the mass of all others, and how two such differ.

The table `distributions` says for position p how probable the candidates for token p were: the k
best ids with their logprobs, and in `tail` the log of the mass that all other ids share. Recorder
and replay write the *raw* distribution (T = 1, full vocabulary, no edits), which both an engine
and a trainer can compute from their logits alone, whatever the sampler did; each row says so in
its semantics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.columns import Masked, ragged
from rolltape.store.errors import SchemaError, UsageError


@dataclass(frozen=True)
class Distributions:
    """Top-k distributions of one sequence over all its T positions.

    Args:
        valid: bool [T]; false where none was recorded, the other arrays mean nothing there.
        ids: uint32 [T, k] token ids, best first, distinct within a position.
        logprobs: float32 [T, k], natural logs; -inf is a probability of 0.
        tail: float32 [T], log of the mass of all other ids; -inf when nothing is left.
        semantics: (start, n, what the logprobs mean or None) of every recorded span, by start.
    """

    valid: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    tail: np.ndarray
    semantics: tuple[tuple[int, int, Mapping[str, Any] | None], ...] = ()

    def __len__(self) -> int:
        return len(self.valid)

    @property
    def k(self) -> int:
        """Ids a position."""
        return int(self.ids.shape[1])

    @classmethod
    def empty(cls, length: int, k: int) -> Distributions:
        """Nothing valid yet."""
        return cls(
            valid=np.zeros(length, bool),
            ids=np.zeros((length, k), np.uint32),
            logprobs=np.zeros((length, k), np.float32),
            tail=np.zeros(length, np.float32),
        )


def raw_semantics(*, vocab_size: int, dtype: str, source: str) -> dict[str, Any]:
    """The `semantics` cell of a raw distribution.

    Args:
        vocab_size: width of the logits, padding included.
        dtype: of the log-softmax.
        source: engine or recomputed.
    """
    return {
        "temperature": 1.0,
        "edits": [],
        "truncation": [],
        "vocab_size": vocab_size,
        "dtype": dtype,
        "source": source,
    }


def distribution_columns(
    ids: np.ndarray, logprobs: np.ndarray, tail: np.ndarray, lengths: np.ndarray
) -> dict[str, Any]:
    """Columns `k`, `ids`, `logprobs`, `tail` of several rows of the table.

    Args:
        ids: integers [N, k], the positions of all rows one after another.
        logprobs: float32 [N, k].
        tail: float32 [N].
        lengths: positions of each row; N in all.
    """
    k = int(ids.shape[1])
    sizes = np.asarray(lengths, np.int64)
    return {
        "k": np.full(len(sizes), k, np.int32),
        "ids": ragged(ids.reshape(-1).astype(np.uint32, copy=False), sizes * k, pa.uint32()),
        "logprobs": ragged(logprobs.reshape(-1), sizes * k, pa.float32()),
        "tail": ragged(tail, sizes, pa.float32()),
    }


def join_distributions(rows: Sequence[Mapping[str, Any]], length: int, name: str) -> Distributions:
    """One sequence's distributions from its fragments; where they overlap the first one counts.

    Args:
        rows: of the table, list columns as arrays or `Masked` (`Tape.fragments`).
        length: positions T of the sequence; what reaches beyond them is cut.
        name: of the sequence, for errors.

    Raises:
        SchemaError: a row whose lists do not fit its n and k, that begins before position 0, has
            another k than the first one, or ids that are not distinct and best first.
    """
    out = Distributions.empty(length, int(rows[0]["k"]) if rows else 0)
    spans: list[tuple[int, int, Mapping[str, Any] | None]] = []
    for row in rows:
        start, n, k = int(row["start"]), int(row["n"]), int(row["k"])
        where = f"distributions of {name} at {start}"
        if k != out.k or k < 1:
            raise SchemaError(f"{where}: k is {k}, of the first fragment {out.k}")
        if start < 0 or n < 0:
            raise SchemaError(f"{where}: {n} positions from there")
        ids, logprobs, tail = (_masked(row[column]) for column in ("ids", "logprobs", "tail"))
        if (len(ids), len(logprobs), len(tail)) != (n * k, n * k, n):
            raise SchemaError(f"{where}: ids, logprobs and tail do not fit n = {n} and k = {k}")
        table, values = ids.values.reshape(n, k), logprobs.values.reshape(n, k)
        valid = (ids.valid & logprobs.valid).reshape(n, k).all(1) & tail.valid
        _check_order(table[valid], values[valid], where)
        inside = max(0, min(n, length - start))
        span = slice(start, start + inside)
        fresh = valid[:inside] & ~out.valid[span]
        out.ids[span][fresh] = table[:inside][fresh]
        out.logprobs[span][fresh] = values[:inside][fresh]
        out.tail[span][fresh] = tail.values[:inside][fresh]
        out.valid[span] |= fresh
        if inside or not n:
            spans.append((start, inside, row["semantics"]))
    spans.sort(key=lambda span: span[:2])
    return Distributions(out.valid, out.ids, out.logprobs, out.tail, tuple(spans))


def _masked(cell: np.ndarray | Masked) -> Masked:
    return cell if isinstance(cell, Masked) else Masked.full(np.asarray(cell))


def _check_order(ids: np.ndarray, logprobs: np.ndarray, where: str) -> None:
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise SchemaError(f"{where}: distributions.ids has an id twice at one position")
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():  # a NaN is kept, it has no place in an order
        raise SchemaError(f"{where}: distributions.logprobs is not best first")


@dataclass(frozen=True)
class Comparison:
    """How the distributions a and b of the same positions differ; arrays [n].

    Args:
        valid: both sides hold a distribution; the other arrays mean nothing elsewhere.
        common: int64, ids that are among the best of both.
        overlap: float64, `common` as a share of the smaller k.
        kl_lower: float64, KL(a || b) in nats is at least this. inf: b rules out what a does not.
        kl_upper: float64, and at most this; see `compare_distributions` about `floor`.
        tv_lower: float64, the total variation distance is at least this.
        tv_upper: float64, and at most this.
    """

    valid: np.ndarray
    common: np.ndarray
    overlap: np.ndarray
    kl_lower: np.ndarray
    kl_upper: np.ndarray
    tv_lower: np.ndarray
    tv_upper: np.ndarray


def compare_distributions(
    a: Distributions, b: Distributions, *, floor: float = -np.inf
) -> Comparison:
    r"""Bounds of KL(a || b) and of the total variation distance, per position.

    Known of a are its k best ids A and their tail mass a_t, of b likewise B and b_t. An id that
    only one side names is part of the other one's tail. With C = A & B, the masses
    a_o = a(A \ B) and b_o = b(B \ A), and S the sum over C of a log(a / b):

    * kl_lower = S + (a_o + a_t) log((a_o + a_t) / (b_o + b_t)): everything outside C lumped into
      one outcome, by the log sum inequality (Cover and Thomas, Elements of Information Theory,
      2nd ed., theorem 2.7.1). That is attained if b_t and a_t have room for it, which is when
      a_o b_o <= a_t b_t. If they have not, the least is where the unnamed ids have no mass:
      S + a_o log(a_o / b_t) + a_t log(a_t / b_o).
    * kl_upper = S + sum over A \ B of a (log a - floor) + a_t (log min(a_t, least of A) - floor):
      b gives each of those ids at least exp(floor), and a none that it does not name more than
      its tail or the least that it names.
    * tv = 1/2 sum |a - b|, from below by the triangle inequality over the same parts, from above
      with a and b disjoint wherever only one of them is known.

    The values are of the distributions as stored: rounding to float32 moves KL by about 1e-7, and
    kl_lower is never below 0.

    Args:
        a: of one side.
        b: of the other; k may differ. Positions that only the longer one has are left out.
        floor: log of a probability that b is known to give every id at least. A tape does not
            say it. With the default kl_upper is inf unless nothing of a lies outside C.

    Raises:
        UsageError: the two do not mean the same: temperature, edits or truncation differ.
    """
    if _meaning(a) != _meaning(b):
        raise UsageError(
            f"distributions under {_meaning(a)} and under {_meaning(b)} cannot be compared",
            hint="(temperature, edits, truncation) must be the same",
        )
    n = min(len(a), len(b))
    log_a, log_b = (d.logprobs[:n].astype(np.float64) for d in (a, b))
    tail_a, tail_b = (d.tail[:n].astype(np.float64) for d in (a, b))
    valid = a.valid[:n] & b.valid[:n]
    _, at_a, at_b = np.intersect1d(
        _outcomes(a, valid), _outcomes(b, valid), assume_unique=True, return_indices=True
    )
    shared_a, shared_b = np.zeros(log_a.shape, bool), np.zeros(log_b.shape, bool)
    shared_a.flat[at_a] = shared_b.flat[at_b] = True
    other = np.full(log_a.shape, -np.inf)  # log b of the ids of a
    other.flat[at_a] = log_b.flat[at_b]

    common = shared_a.sum(1)
    only_a = _log_sum(np.where(shared_a, -np.inf, log_a))
    only_b = _log_sum(np.where(shared_b, -np.inf, log_b))
    rest_a, rest_b = np.logaddexp(only_a, tail_a), np.logaddexp(only_b, tail_b)
    with np.errstate(over="ignore"):  # inf is a value here
        inside = np.where(shared_a, _relative(log_a, other), 0.0).sum(1)
        lumped = _relative(rest_a, rest_b)
        apart = _relative(only_a, tail_b) + _relative(tail_a, only_b)
        room = only_a + only_b <= tail_a + tail_b
        named = np.where(shared_a, 0.0, _relative(log_a, np.asarray(floor))).sum(1)
        cap = np.minimum(tail_a, log_a.min(1, initial=0.0))
        unnamed = _weighted(tail_a, cap, np.asarray(floor))
    p_a, p_b = np.exp(log_a), np.exp(other)
    near = np.where(shared_a, np.abs(p_a - p_b), 0.0).sum(1)
    a_o, b_o, a_t, b_t = np.exp(only_a), np.exp(only_b), np.exp(tail_a), np.exp(tail_b)
    crowded = np.maximum(a_o - b_t, 0) + np.maximum(b_o - a_t, 0)
    apart_tv = np.maximum(np.abs(a_o + a_t - b_o - b_t), crowded)
    return Comparison(
        valid=valid,
        common=common,
        overlap=common / max(1, min(a.k, b.k)),
        kl_lower=np.maximum(inside + np.where(room, lumped, apart), 0.0),
        kl_upper=np.maximum(inside + named + unnamed, 0.0),
        tv_lower=(near + apart_tv) / 2,
        tv_upper=np.minimum((near + a_o + a_t + b_o + b_t) / 2, 1.0),
    )


def _meaning(distributions: Distributions) -> set[Any]:
    return {
        None
        if semantics is None
        else (
            semantics["temperature"],
            *(
                None if semantics[name] is None else tuple(semantics[name])
                for name in ("edits", "truncation")
            ),
        )
        for _, _, semantics in distributions.semantics
    }


def _outcomes(distributions: Distributions, valid: np.ndarray) -> np.ndarray:
    """(position, id) as one uint64 [n, k], all distinct, also where nothing is valid."""
    ids = np.where(valid[:, None], distributions.ids[: len(valid)], np.arange(distributions.k))
    positions = np.arange(len(valid), dtype=np.uint64)[:, None]
    outcomes: np.ndarray = (positions << np.uint64(32)) | ids.astype(np.uint64)
    return outcomes


def _log_sum(logs: np.ndarray) -> np.ndarray:
    """Log of the sum of exponentials over the last axis; of nothing it is -inf."""
    total: np.ndarray = np.logaddexp.reduce(logs, axis=-1, initial=-np.inf)
    return total


def _relative(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """p log(p / q) from the logs; 0 where p is 0, inf where only q is."""
    return _weighted(log_p, log_p, log_q)


def _weighted(log_p: np.ndarray, log_r: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """p log(r / q) from the logs; 0 where p is 0."""
    with np.errstate(invalid="ignore"):  # of two infinities, where p is 0
        value = np.exp(log_p) * (log_r - log_q)
    return np.where(log_p == -np.inf, 0.0, value)
