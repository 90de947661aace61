"""Named arrays as safetensors bytes: what a browser or a notebook reads without a copy.

Layout: 8 bytes header length (little-endian), JSON header padded with spaces to a multiple of 8,
then the buffers, widest dtype first so that each one is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

_DTYPES = {"|u1": "U8", "<u2": "U16", "<u4": "U32", "<i4": "I32", "<i8": "I64", "<f4": "F32"}


def encode(arrays: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]) -> bytes:
    """The file content for some arrays.

    Args:
        arrays: name -> array; dtypes u1, u2, u4, i4, i8 or f4.
        metadata: strings for `__metadata__`.

    Raises:
        KeyError: an array of another dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    buffers: list[bytes] = []
    end = 0
    for name in sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n)):
        array = np.ascontiguousarray(arrays[name])
        dtype = array.dtype.newbyteorder("<")
        data = array.astype(dtype, copy=False).tobytes()
        header[name] = {
            "dtype": _DTYPES[dtype.str],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(data)],
        }
        buffers.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *buffers])
