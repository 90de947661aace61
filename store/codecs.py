"""Plain encodings of the dense columns: pure functions between a numpy array and bytes.

One plane per (slot, layer), so that the IPC buffer compression (zstd) sees like beside like. What
`compact` writes is in rolltape.store.packed, .planes and .kept.
"""

from __future__ import annotations

import numpy as np

from rolltape.store.errors import SchemaError

MAX_EXPERTS = 65_535

#: Projections of a sketch, see `rolltape.recorder.sketch`.
SKETCH_PROJECTIONS = 16
SKETCH = "sketch1"


def route_dtype(num_experts: int) -> np.dtype:
    """Narrowest little-endian unsigned dtype that holds ids 0..num_experts-1.

    Raises:
        SchemaError: more than 65,535 experts.
    """
    if not 0 < num_experts <= MAX_EXPERTS:
        raise SchemaError(f"num_experts is {num_experts}", hint=f"1 to {MAX_EXPERTS} are supported")
    return np.dtype("u1") if num_experts <= 256 else np.dtype("<u2")


def encode_plain(ids: np.ndarray, num_experts: int) -> bytes:
    """Expert ids [n, layers, k] to bytes, exactly, slot order kept: [k, layers, n].

    Raises:
        SchemaError: another shape, or ids at or above `num_experts`.
    """
    return np.ascontiguousarray(_checked(ids, num_experts).transpose(2, 1, 0)).tobytes()


def _checked(ids: np.ndarray, num_experts: int) -> np.ndarray:
    dtype = route_dtype(num_experts)
    if ids.ndim != 3:
        raise SchemaError(f"routes.ids has shape {list(ids.shape)}", hint="expected [n, layers, k]")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_experts):
        raise SchemaError(
            f"routes.ids has values {ids.min()}..{ids.max()}, num_experts is {num_experts}",
            hint="missing rows belong in the validity bitmap, not in a special id",
        )
    return ids.astype(dtype, copy=False)


def encode_rows(ids: np.ndarray, num_experts: int) -> bytes:
    """Expert ids [n, layers, k] to bytes as they are: a reader need not put them in order.

    Raises:
        SchemaError: another shape, or ids at or above `num_experts`.
    """
    return np.ascontiguousarray(_checked(ids, num_experts)).tobytes()


def decode_rows(
    data: bytes | memoryview, shape: tuple[int, int, int], num_experts: int
) -> np.ndarray:
    """Inverse of `encode_rows`, without a copy.

    Args:
        data: the bytes.
        shape: (n, layers, k).
        num_experts: experts a layer.

    Returns:
        uint8 or uint16 [n, layers, k], not to be written to.

    Raises:
        SchemaError: the bytes are not of that shape, or hold an id at or above `num_experts`.
    """
    dtype = route_dtype(num_experts)
    _check_shape(data, shape, dtype)
    ids = np.frombuffer(data, dtype=dtype).reshape(shape)
    _check_ids(ids, num_experts)
    return ids


def decode_plain(
    data: bytes | memoryview,
    n: int,
    layers: int,
    k: int,
    num_experts: int,
    columns: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Inverse of `encode_plain`.

    Args:
        data: the bytes.
        n: rows.
        layers: layers that were encoded.
        k: slots.
        num_experts: experts a layer.
        columns: indices of the layers that are wanted; None is all.

    Returns:
        uint8 or uint16 [n, layers or len(columns), k].

    Raises:
        SchemaError: the bytes are not of that shape, or hold an id at or above `num_experts`.
    """
    dtype = route_dtype(num_experts)
    _check_shape(data, (n, layers, k), dtype)
    planes = np.frombuffer(data, dtype=dtype).reshape(k, layers, n)
    if columns is not None:
        planes = planes[:, list(columns)]
    _check_ids(planes, num_experts)
    return np.ascontiguousarray(planes.transpose(2, 1, 0))


def _check_shape(data: bytes | memoryview, shape: tuple[int, int, int], dtype: np.dtype) -> None:
    n, layers, k = shape
    if min(shape) < 0:
        raise SchemaError(f"routes.ids of shape {list(shape)}")
    _check_size("routes.ids", data, n * layers * k * dtype.itemsize)


def _check_ids(ids: np.ndarray, num_experts: int) -> None:
    # 256 experts fill a byte: no id can be too large then
    if num_experts <= np.iinfo(ids.dtype).max and ids.size and int(ids.max()) >= num_experts:
        raise SchemaError(f"routes.ids has id {int(ids.max())}, num_experts is {num_experts}")


def encode_floats(values: np.ndarray) -> bytes:
    """Float32 array [n, ...] to bytes; one plane per trailing index, bits kept."""
    array = np.asarray(values, dtype="<f4")
    return np.ascontiguousarray(np.moveaxis(array, 0, -1)).tobytes()


def decode_floats(data: bytes, shape: tuple[int, ...], *, field: str) -> np.ndarray:
    """Inverse of `encode_floats` for an array of `shape` [n, ...].

    Raises:
        SchemaError: the bytes are not of that shape.
    """
    _check_size(field, data, 4 * int(np.prod(shape, dtype=np.int64)))
    planes = np.frombuffer(data, dtype="<f4").reshape(*shape[1:], shape[0])
    return np.ascontiguousarray(np.moveaxis(planes, -1, 0))


def encode_sketch(hashes: np.ndarray, projections: np.ndarray) -> bytes:
    """uint64 hashes [n] and float32 projections [n, K] of a span of rows: hashes come first."""
    return np.asarray(hashes, "<u8").tobytes() + encode_floats(projections)


def decode_sketch(data: bytes, n: int, *, field: str) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `encode_sketch`.

    Raises:
        SchemaError: the bytes are not those of n rows.
    """
    _check_size(field, data, n * (8 + 4 * SKETCH_PROJECTIONS))
    hashes = np.frombuffer(data[: 8 * n], "<u8")
    return hashes, decode_floats(data[8 * n :], (n, SKETCH_PROJECTIONS), field=field)


def encode_bits(valid: np.ndarray) -> bytes | None:
    """Boolean array to a little-endian bitmap; None when all are true."""
    return None if valid.all() else np.packbits(valid.ravel(), bitorder="little").tobytes()


def decode_bits(data: bytes | None, shape: tuple[int, ...], *, field: str) -> np.ndarray:
    """Inverse of `encode_bits`."""
    if data is None:
        return np.ones(shape, dtype=bool)
    count = int(np.prod(shape, dtype=np.int64))
    _check_size(field, data, (count + 7) // 8)
    bits = np.unpackbits(np.frombuffer(data, dtype="u1"), count=count, bitorder="little")
    return bits.astype(bool).reshape(shape)


def _check_size(field: str, data: bytes | memoryview, expected: int) -> None:
    if len(data) != expected:
        raise SchemaError(f"{field} has {len(data)} bytes, its shape needs {expected}")
