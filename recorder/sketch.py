"""Sketches: 72 bytes that stand for a row of any width, so that two runs can be compared later.

A sketch of a row x in R^W is

* a hash: xxh3-64 of its float32 bytes. Equal rows have equal hashes; rows that differ have equal
  ones with probability 2^-64;
* K = 16 projections s_k = sum_i r_ki x_i, where the signs r_ki in {-1, +1} are fixed by a seed and
  the width, summed in float64 and kept in float32.

Projections are linear, so those of a difference d = b - a are the differences of the projections:

    ||d||^2  is estimated by  (1/K) sum_k (s_k(b) - s_k(a))^2

The signs are independent with mean 0 and variance 1, so that the estimate is unbiased. Its variance
is (2/K) (||d||^4 - sum_i d_i^4), at most (2/K) ||d||^4: a relative standard deviation of at most
sqrt(2/16) = 0.35 for a row, and smaller by sqrt(n) for a mean over n rows.

Rounding floor: each s_k is off by at most half a unit in the last place of float32, 2^-24 |s_k|, so
that of two rows of norm ||x|| differences below about 2^-24 ||x|| (6e-8, relative) cannot be seen.
tests/unit/test_sketch.py measures it. Whether the rows are equal, the hash says exactly.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash

from rolltape.store.codecs import SKETCH_PROJECTIONS

#: Changing it makes sketches of before incomparable: it belongs to the encoding `sketch1`.
SEED = 0x726F6C6C74617065


@lru_cache(maxsize=16)
def signs(width: int) -> np.ndarray:
    """The projections: float64 [width, K] of -1 and +1.

    They come from the raw stream of a Philox generator, which numpy keeps stable.
    """
    words = -(-width * SKETCH_PROJECTIONS // 64)
    raw = np.random.Philox(key=SEED).random_raw(words).astype("<u8")
    bits = np.unpackbits(raw.view("u1"), bitorder="little")[: width * SKETCH_PROJECTIONS]
    # row by row, so that a narrower row has the first signs of a wider one
    out: np.ndarray = 2.0 * bits.reshape(width, SKETCH_PROJECTIONS) - 1.0
    out.setflags(write=False)
    return out


def sketch(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash and projections of every row.

    Args:
        rows: float32 [n, width], bits as they were.

    Returns:
        uint64 [n] and float32 [n, K]. A row with a NaN or infinity has projections that are not
        finite either.
    """
    rows = np.ascontiguousarray(rows, "<f4")
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(row) for row in rows), np.uint64, len(rows))
    with np.errstate(invalid="ignore", over="ignore"):
        projected = rows.astype(np.float64) @ signs(rows.shape[1])
        return hashes, projected.astype(np.float32)


def squared_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Unbiased estimate of the squared L2 distance of rows from their projections.

    Args:
        a: float32 [n, K].
        b: float32 [n, K], of rows of the same width.

    Returns:
        float64 [n].
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = b.astype(np.float64) - a.astype(np.float64)
        squared: np.ndarray = np.square(difference).mean(1)
    return squared
