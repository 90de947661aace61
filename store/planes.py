"""Float32 columns that zstd can use: the bytes of like weight side by side.

The order of the values is that of `codecs.encode_floats`: one run of n per trailing index. The
whole is then split into four byte planes, from the least significant byte of every value to the
most significant. Sign and most of the exponent are then one plane of few different bytes; zstd of
the IPC file finds that, which it cannot with mantissa bytes in between. Bits are kept, also those
of NaNs. No compression happens here.
"""

from __future__ import annotations

import numpy as np

from rolltape.store.errors import SchemaError

_WIDTH = 4


def encode_split(values: np.ndarray) -> bytes:
    """Float32 array [n, ...] to 4 byte planes over the whole array; bits kept."""
    array = np.asarray(values, dtype="<f4")
    flat = np.ascontiguousarray(np.moveaxis(array, 0, -1)).reshape(-1)
    return flat.view("u1").reshape(-1, _WIDTH).T.tobytes()


def decode_split(data: bytes | memoryview, shape: tuple[int, ...], *, field: str) -> np.ndarray:
    """Inverse of `encode_split` for an array of `shape` [n, ...]; takes twice the data in memory.

    Raises:
        SchemaError: the bytes are not of that shape.
    """
    count = 1
    for side in shape:
        count *= side
    if min(shape, default=0) < 0 or not shape or len(data) != _WIDTH * count:
        raise SchemaError(f"{field} has {len(data)} bytes, its shape needs {_WIDTH * count}")
    planes = np.frombuffer(data, dtype="u1").reshape(_WIDTH, count)
    flat = np.ascontiguousarray(planes.T).view("<f4").reshape(*shape[1:], shape[0])
    return np.ascontiguousarray(np.moveaxis(flat, -1, 0))
