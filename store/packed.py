"""Packed routes: a block of up to 32k tokens that carries all it needs, token ids included.

A router mostly repeats what it chose the last times it saw the same token in the same context.
So the rows of a block are visited in the order of (token id, token before, the two before that),
which the token ids alone determine, and each chosen expert is written as its rank in a list that
follows the layer (`rolltape.store.ranks`). The ranks are range-coded with the frequencies that this
block has. Nothing is trained beforehand and nothing is carried from one block to another. Each
layer has a stream of its own, so layers are decoded alone, and by several threads.

Block, all integers little-endian, varints LEB128:

    0   "rtp"            magic
    3   version          1
    4   flags            bit 0: slot order kept, 1: validity present, 2: raw rows present
    5   grain            which contexts share frequencies, an index into `ranks.GRAINS`
    6   num_experts      uint16
    8   n                uint32, tokens
    12  layers           uint32
    16  k                uint32
    20  length           uint32, of the whole block
    24  section*         varint raw size, varint stored size, bytes (zstd if the sizes differ)
    ..  padding          zeros
    -8  checksum         xxh3-64 of everything before it

Sections: distinct token ids (uint32 deltas, 4 byte planes), index of each token in them (2 byte
planes), [validity bitmap over [layers, n]], [bitmap of raw rows], [raw rows, 2 byte planes],
frequencies of rank bytes (uint16 [groups, 256], 2 byte planes); then per layer [ranks >= 255, 2
byte planes, if there are more than 256 experts] and rANS words (uint16). A layer without coded rows
has no words. Raw rows are those in which an expert repeats, in the order of the bitmap.

Memory: a block has at least one byte per `MAX_IDS_PER_BYTE` ids (the encoder pads it), and every
size is compared with the block and the limits below before anything is allocated. Decoding needs at
most 16 bytes per id, so 64 KiB per byte of block, 8 MiB, and 1 MiB a thread; without numba 80 bytes
and 24 MiB.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from rolltape.store import ranks as plain_kernels
from rolltape.store.codecs import route_dtype
from rolltape.store.errors import DamagedShardError, SchemaError
from rolltape.store.ranks import (
    CONTEXTS,
    ESCAPE,
    GRAINS,
    SHARES,
    Rules,
    best_grain,
    compiled,
    share_table,
    symbol_table,
)

VERSION = 1
MAX_TOKENS = 32_768
MAX_IDS = 1 << 27
MAX_SIDE = 65_535  # layers, and slots
MAX_WORK = 1 << 38  # ids times experts: the most steps that a hostile block can cause
MAX_IDS_PER_BYTE = 4096

_MAGIC = b"rtp"
_HEADER = struct.Struct("<3sBBBHIIII")
_CHECKSUM = 8
_ORDER, _VALID, _RAW = 1, 2, 4
_BLOCK_IDS = 1 << 22  # ids of a block that is not worth making larger
_GROUP = 8  # layers that one kernel call works on in turn
_FEW = 1 << 15  # ids that are not worth a second thread

_T = TypeVar("_T")
_A = TypeVar("_A")


_ZSTD = pa.Codec("zstd")


@dataclass(frozen=True)
class PackedBlock:
    """What one block holds.

    Attributes:
        ids: uint8 or uint16 [n, layers, k]; rows that are not valid are 0. Sorted within a row
            when `order` is false.
        token_ids: uint32 [n].
        valid: bool [n, layers].
        num_experts: 1 to 65,535.
        order: whether the slot order is that of the engine.
    """

    ids: np.ndarray
    token_ids: np.ndarray
    valid: np.ndarray
    num_experts: int
    order: bool


def uses_numba() -> bool:
    """Whether blocks are coded by compiled kernels (the `numba` extra is installed)."""
    return compiled() is not None


def block_tokens(layers: int, k: int) -> int:
    """Tokens that a block should hold: at most 32,768, and about 4 million ids; at least 1."""
    return max(1, min(MAX_TOKENS, _BLOCK_IDS // max(1, layers * k)))


def default_threads(layers: int) -> int:
    """Threads that a large block is coded by unless another number is given; 1 without numba."""
    if not uses_numba():
        return 1
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        count = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min(count, layers))


def encode_block(
    ids: np.ndarray,
    token_ids: np.ndarray,
    valid: np.ndarray,
    *,
    num_experts: int,
    order: bool = True,
    threads: int | None = None,
) -> bytes:
    """Pack the routes of up to `MAX_TOKENS` tokens, exactly.

    Args:
        ids: uint8 or uint16 [n, layers, k] expert ids; rows that are not valid are ignored.
        token_ids: uint32 [n], the token whose forward chose them. Sequences may follow each other.
        valid: bool [n, layers], whether a row was recorded.
        num_experts: experts per layer.
        order: keep the slot order; else rows are sets and come back sorted.
        threads: at most so many, with numba; None is one per processor. The bytes are the same.

    Raises:
        SchemaError: shapes that do not fit, too many tokens or ids, ids at or above `num_experts`.
    """
    return _encode_block(ids, token_ids, valid, num_experts, order, threads, _kernels())


def decode_block(
    data: bytes | memoryview,
    *,
    layers: Sequence[int] | None = None,
    threads: int | None = None,
) -> PackedBlock:
    """Inverse of `encode_block`.

    Args:
        data: a block.
        layers: columns wanted, in this order; the others are not decoded. None is all.
        threads: at most so many, with numba; None is one per processor.

    Raises:
        DamagedShardError: the bytes are not those of a block that was written.
        SchemaError: they are of a version or a size that this reader refuses, or do not have one
            of the layers.
    """
    return _decode_block(memoryview(data), layers, threads, _kernels())


def _kernels() -> Any:
    return compiled() or plain_kernels


def _encode_block(
    ids: np.ndarray,
    token_ids: np.ndarray,
    valid: np.ndarray,
    num_experts: int,
    order: bool,
    threads: int | None,
    kernels: Any,
) -> bytes:
    dtype = route_dtype(num_experts)
    if ids.ndim != 3 or token_ids.shape != ids.shape[:1] or valid.shape != ids.shape[:2]:
        raise SchemaError(
            f"ids {list(ids.shape)}, token_ids {list(token_ids.shape)}, valid {list(valid.shape)}",
            hint="expected [n, layers, k], [n], [n, layers]",
        )
    n, layers, k = ids.shape
    count = _check_limits(n, layers, k, num_experts)
    if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 1 << 32:
        raise SchemaError("token_ids do not fit uint32")
    valid = valid.astype(bool, copy=False)
    if ids.size:
        seen = ids if valid.all() else ids[valid]
        if seen.size and (int(seen.min()) < 0 or int(seen.max()) >= num_experts):
            raise SchemaError(
                f"routes.ids has values {seen.min()}..{seen.max()}, num_experts is {num_experts}"
            )
    rows = np.ascontiguousarray(ids, dtype)
    distinct, index = np.unique(token_ids.astype("<u4"), return_inverse=True)
    visit, match = _visits(index)
    rules = Rules(num_experts, k, order)
    parallel = _threads(threads, layers, count, kernels)
    raw = np.zeros((layers, n), bool)
    coded: list[_Coded] = []
    if count and k and valid.any():
        groups = _groups(layers, num_experts, parallel)
        for found in _map(
            lambda group: _rank_layers(rows, valid, visit, match, group, rules, kernels),
            groups,
            parallel,
        ):
            coded += found
        for layer, part in enumerate(coded):
            raw[layer, visit[part.repeats]] = True

    flags = _ORDER * bool(order) | _VALID * (not valid.all()) | _RAW * bool(raw.any())
    parts = [
        _section(_planes(np.diff(distinct, prepend=np.uint32(0)))),
        _section(_planes(index.astype("<u2"))),
    ]
    if flags & _VALID:
        parts.append(_section(np.packbits(valid.T, bitorder="little").tobytes()))
    if flags & _RAW:
        repeated = rows.transpose(1, 0, 2)[raw]
        repeated = repeated if order else np.sort(repeated, axis=1)
        parts.append(_section(np.packbits(raw, bitorder="little").tobytes()))
        parts.append(_section(_planes(repeated.ravel().astype("<u2"))))
    total = sum((part.total for part in coded), np.zeros((CONTEXTS, 256), np.int64))
    grain, shared = best_grain(total)
    parts.append(_section(_planes(shared.ravel().astype("<u2"))))
    shares = share_table(shared[GRAINS[grain]])

    def stream(part: _Coded) -> bytes:
        words = np.zeros(0, np.uint16)
        if len(part.symbols):
            words = kernels.pack(part.symbols, part.where, k, shares)
        escaped = _section(_planes(part.rest.astype("<u2"))) if num_experts > 256 else b""
        return escaped + _section(words.astype("<u2").tobytes(), level=None)

    nothing = _section(b"") * (2 if num_experts > 256 else 1)
    parts += _map(stream, coded, parallel) if coded else [nothing] * layers
    body = b"".join(parts)
    padding = max(0, -(-count // MAX_IDS_PER_BYTE) - _HEADER.size - len(body) - _CHECKSUM)
    length = _HEADER.size + len(body) + padding + _CHECKSUM
    head = _HEADER.pack(_MAGIC, VERSION, flags, grain, num_experts, n, layers, k, length)
    block = head + body + bytes(padding)
    return block + struct.pack("<Q", xxhash.xxh3_64_intdigest(block))


@dataclass(frozen=True)
class _Coded:
    """Ranks of one layer: bytes, their contexts, those >= 255, uses; turns of raw rows."""

    symbols: np.ndarray
    where: np.ndarray
    rest: np.ndarray
    total: np.ndarray
    repeats: np.ndarray


def _rank_layers(
    rows: np.ndarray,  # [n, layers, k]
    valid: np.ndarray,  # [n, layers]
    visit: np.ndarray,
    match: np.ndarray,
    group: slice,
    rules: Rules,
    kernels: Any,
) -> list[_Coded]:
    kind = np.ascontiguousarray(valid[:, group][visit]).view(np.uint8)
    turns = _records(rows, group)[visit].view(rows.dtype).reshape(len(visit), -1, rules.k)
    found = []
    for i, ranks in enumerate(kernels.to_ranks(turns, kind, match, rules)):
        symbols, rest = ranks, ranks[:0]
        if rules.experts > 256:
            rest = ranks[ranks >= ESCAPE]
            symbols = np.minimum(ranks, ESCAPE).astype(np.uint8)
        column = kind[:, i]
        where, total = kernels.contexts(symbols, match[column == 1], rules)
        found.append(_Coded(symbols, where, rest, total, np.flatnonzero(column == 2)))
    return found


def _decode_block(
    data: bytes | memoryview,
    layers_wanted: Sequence[int] | None,
    threads: int | None,
    kernels: Any,
) -> PackedBlock:
    if len(data) < _HEADER.size + _CHECKSUM:
        raise DamagedShardError(f"routes block of {len(data)} bytes is cut off")
    magic, version, flags, grain, num_experts, n, layers, k, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedShardError("routes block does not begin with its magic bytes")
    if length != len(data):
        raise DamagedShardError(f"routes block has {len(data)} bytes, its header says {length}")
    end = len(data) - _CHECKSUM
    if xxhash.xxh3_64_intdigest(data[:end]) != struct.unpack_from("<Q", data, end)[0]:
        raise DamagedShardError("routes block does not match its checksum")
    if version != VERSION:
        raise SchemaError(f"routes block has version {version}", hint=f"this reads {VERSION}")
    if grain >= len(GRAINS) or flags & ~(_ORDER | _VALID | _RAW):
        raise SchemaError(f"routes block has unknown flags {flags:#x} or grain {grain}")
    dtype = route_dtype(num_experts)
    count = _check_limits(n, layers, k, num_experts)
    if count > MAX_IDS_PER_BYTE * length:
        raise SchemaError(f"routes block of {length} bytes claims {count} ids")
    order = bool(flags & _ORDER)
    wanted = list(range(layers)) if layers_wanted is None else list(layers_wanted)
    if wanted and not 0 <= min(wanted) <= max(wanted) < layers:
        raise SchemaError(
            f"columns {min(wanted)} to {max(wanted)} of a routes block of {layers} layers",
            hint="ask for columns 0 to layers - 1",
        )
    sections = _Sections(data, _HEADER.size, end)

    deltas = sections.planes("token ids", 4, most=n)
    distinct = np.cumsum(deltas, dtype=np.uint64)
    index = sections.planes("token index", 2, exactly=n).astype(np.int64)
    if n and (int(distinct[-1]) >= 1 << 32 if len(distinct) else True):
        raise DamagedShardError("routes block: token ids are out of range")
    if n and (int(index.max()) >= len(distinct) or (len(distinct) > 1 and not deltas[1:].all())):
        raise DamagedShardError("routes block: token index is out of range")
    token_ids = distinct.astype("<u4")[index]
    valid = np.ones((layers, n), bool)
    if flags & _VALID:
        valid = sections.bits("validity", layers, n)
    raw = np.zeros((layers, n), bool)
    values = np.zeros((0, k), np.uint16)
    if flags & _RAW:
        raw = sections.bits("raw rows", layers, n)
        if (raw & ~valid).any():
            raise DamagedShardError("routes block: raw rows are not valid rows")
        repeated = int(np.count_nonzero(raw))
        values = sections.planes("raw ids", 2, exactly=repeated * k).reshape(repeated, k)
        if values.size and int(values.max()) >= num_experts:
            raise DamagedShardError("routes block: raw ids are out of range")
    kind = valid & ~raw
    groups = int(GRAINS[grain].max()) + 1
    freq = sections.planes("frequencies", 2, exactly=groups * 256).reshape(groups, 256)
    if not np.isin(freq.sum(axis=1, dtype=np.int64), (0, SHARES)).all():
        raise DamagedShardError("routes block: frequencies do not add up")
    freq = freq[GRAINS[grain]]
    if k > num_experts and kind.any():
        raise DamagedShardError("routes block: more slots than experts")
    rows_coded = np.count_nonzero(kind, axis=1) if k else np.zeros(layers, np.int64)
    needed = set(wanted)
    streams: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for layer in range(layers):
        if layer in needed:
            streams[layer] = _stream(sections, int(rows_coded[layer]) * k, num_experts)
        else:
            sections.skip("a layer", 2 if num_experts > 256 else 1)
    if any(data[sections.at : end]):
        raise DamagedShardError("routes block: padding is not zero")

    ids: np.ndarray = np.zeros((n, len(wanted), k), dtype)
    if rows_coded[wanted].any():
        visit, match = _visits(index)
        rules = Rules(num_experts, k, order)
        tables = symbol_table(freq), share_table(freq)
        parallel = _threads(threads, len(wanted), ids.size, kernels)

        def work(group: slice) -> None:
            columns = wanted[group]
            kinds = np.ascontiguousarray(kind[columns][:, visit].T).view(np.uint8)
            found = []
            for i, column in enumerate(columns):
                words, rest = streams[column]
                found.append(
                    _layer_ranks(words, rest, match[kinds[:, i] == 1], rules, tables, kernels)
                )
            turns = np.zeros((n, len(columns), k), dtype)
            if not kernels.from_ranks(found, kinds, match, turns, rules):
                raise DamagedShardError("routes block: ranks are impossible")
            if not order:
                turns.sort(axis=2)
            _records(ids, group)[visit] = _records(turns, slice(None))

        _map(work, _groups(len(wanted), num_experts, parallel), parallel)
    if len(values):
        starts = np.cumsum(np.count_nonzero(raw, axis=1))
        for i, column in enumerate(wanted):
            here = raw[column]
            ids[here, i] = values[starts[column] - np.count_nonzero(here) : starts[column]]
    return PackedBlock(ids, token_ids, np.ascontiguousarray(valid[wanted].T), num_experts, order)


def _stream(sections: _Sections, coded: int, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Words and escaped ranks of the next layer, which has `coded` ids to decode."""
    rest = np.zeros(0, "<u2")
    if num_experts > 256:
        rest = sections.planes("escaped ranks", 2, most=coded)
        if len(rest) and int(rest.min()) < ESCAPE:
            raise DamagedShardError("routes block: a small rank is escaped")
    stream = sections.take("words", most=2 * coded + 16 if coded else 0)
    if len(stream) % 2:
        raise DamagedShardError(f"routes block: words has {len(stream)} bytes")
    return np.frombuffer(stream, "<u2"), rest


def _layer_ranks(
    words: np.ndarray,
    rest: np.ndarray,
    match: np.ndarray,
    rules: Rules,
    tables: tuple[np.ndarray, np.ndarray],
    kernels: Any,
) -> np.ndarray:
    """Ranks of the coded rows of one layer."""
    symbols: np.ndarray | None = np.zeros(0, np.uint8)
    if len(match):
        symbols = kernels.unpack(words, match, rules, *tables)
    if symbols is None:
        raise DamagedShardError("routes block: ranks are impossible")
    if rules.experts <= 256:
        return symbols
    ranks = symbols.astype(np.uint16)
    escaped = np.flatnonzero(symbols == ESCAPE)
    if len(escaped) != len(rest):
        raise DamagedShardError("routes block: ranks are impossible")
    ranks[escaped] = rest
    return ranks


def _threads(threads: int | None, layers: int, ids: int, kernels: Any) -> int:
    """How many to use; plain Python gains nothing from a second one."""
    if kernels is plain_kernels or ids < _FEW:
        return 1
    return default_threads(layers) if threads is None else max(1, min(threads, layers))


def _records(rows: np.ndarray, group: slice) -> np.ndarray:
    """Some columns of contiguous [n, layers, k] as [n] single values, which numpy moves faster."""
    n, layers, k = rows.shape
    start, stop, _ = group.indices(layers)
    part = rows.reshape(n, layers * k)[:, start * k : stop * k]
    return part.view(f"V{part.shape[1] * rows.itemsize}")[:, 0]


def _groups(layers: int, num_experts: int, threads: int) -> list[slice]:
    """Columns that go through the kernels together; the state of a group stays below 1 MiB."""
    most = max(1, min(_GROUP, -(-layers // threads), MAX_SIDE // num_experts))
    return [slice(i, min(i + most, layers)) for i in range(0, layers, most)]


def _map(work: Callable[[_A], _T], parts: Sequence[_A], threads: int) -> list[_T]:
    """Results of `work` in the order of the parts."""
    if threads == 1 or len(parts) < 2:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads, thread_name_prefix="rolltape-routes") as pool:
        return list(pool.map(work, parts))


class _Sections:
    """Reads the sections of a block one after another; every size is checked before use."""

    def __init__(self, data: bytes | memoryview, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def take(self, name: str, *, most: int) -> bytes | memoryview:
        """Bytes of the next section, at most `most` of them."""
        size, stored = self._varint(name), self._varint(name)
        if size > most or stored > self.end - self.at or stored > size:
            raise DamagedShardError(f"routes block: {name} claims {size} bytes in {stored}")
        part = self.data[self.at : self.at + stored]
        self.at += stored
        if stored == size:
            return part
        try:
            # allocates `size`, and refuses frames of another size
            got: bytes = _ZSTD.decompress(part, decompressed_size=size, asbytes=True)
        except (OSError, pa.ArrowException) as error:
            raise DamagedShardError(f"routes block: {name}: {error}") from error
        return got

    def skip(self, name: str, count: int) -> None:
        """Leave out `count` sections."""
        for _ in range(count):
            size, stored = self._varint(name), self._varint(name)
            if stored > self.end - self.at or stored > size:
                raise DamagedShardError(f"routes block: {name} claims {size} bytes in {stored}")
            self.at += stored

    def planes(
        self, name: str, width: int, *, most: int | None = None, exactly: int | None = None
    ) -> np.ndarray:
        """Unsigned integers of `width` bytes, stored as byte planes."""
        limit = exactly if exactly is not None else most or 0
        part = self.take(name, most=limit * width)
        count, odd = divmod(len(part), width)
        if odd or (exactly is not None and count != exactly):
            raise DamagedShardError(f"routes block: {name} has {len(part)} bytes")
        planes = np.frombuffer(part, "u1").reshape(width, count)
        return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count)

    def bits(self, name: str, layers: int, n: int) -> np.ndarray:
        """Boolean [layers, n] from a bitmap."""
        part = self.take(name, most=(layers * n + 7) // 8)
        if len(part) != (layers * n + 7) // 8:
            raise DamagedShardError(f"routes block: {name} has {len(part)} bytes")
        bits = np.unpackbits(np.frombuffer(part, "u1"), count=layers * n, bitorder="little")
        return bits.view(bool).reshape(layers, n)

    def _varint(self, name: str) -> int:
        value = 0
        for shift in range(0, 35, 7):
            if self.at >= self.end:
                break
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DamagedShardError(f"routes block: size of {name} is not a number")


def _check_limits(n: int, layers: int, k: int, num_experts: int) -> int:
    """Number of ids, or of rows if rows are empty, after comparing the shape with the limits."""
    count = n * layers * max(k, 1)
    if n > MAX_TOKENS or max(layers, k) > MAX_SIDE or count > MAX_IDS:
        raise SchemaError(
            f"routes block of {n} tokens, {layers} layers, {k} slots",
            hint=f"at most {MAX_TOKENS} tokens, {MAX_SIDE} layers or slots and {MAX_IDS} ids fit",
        )
    if count * num_experts > MAX_WORK:
        raise SchemaError(
            f"routes block of {count} ids for {num_experts} experts would take too long",
            hint=f"their product is at most {MAX_WORK}: put fewer tokens into a block",
        )
    return count


def _section(raw: bytes, *, level: int | None = 9) -> bytes:
    part = raw
    if raw and level is not None:
        part = pa.Codec("zstd", compression_level=level).compress(raw, asbytes=True)
    if len(part) >= len(raw):
        part = raw
    return _varint(len(raw)) + _varint(len(part)) + part


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _planes(values: np.ndarray) -> bytes:
    """Byte planes of little-endian unsigned integers [n], lowest first."""
    width = values.dtype.itemsize
    return np.ascontiguousarray(values).view("u1").reshape(-1, width).T.tobytes()


def _visits(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turns of the rows, and how much context each shares with the one before.

    Args:
        index: int64 [n] token of each row, as its index among the distinct ones.

    Returns:
        uint16 [n] row of each turn, uint8 [n] 0 to 3.
    """
    token = index.astype(np.uint64) + np.uint64(1)  # 0: there is no token before
    key = token
    for back in (1, 2, 3):
        before = np.zeros_like(token)
        before[back:] = token[:-back]
        key = key << np.uint64(16) | before
    visit = np.argsort(key, kind="stable")
    key = key[visit]
    match = np.zeros(len(key), np.int64)
    for shift in (48, 32, 16):
        part = key >> np.uint64(shift)
        match[1:] += part[1:] == part[:-1]
    return visit.astype(np.uint16), match.astype(np.uint8)
