"""Packed routes: a block of up to 32k tokens that carries all it needs, token ids included.

A router mostly repeats what it chose the last times it saw the same token in the same context.
So the rows of a block are visited in the order of (token id, token before, the two before that),
which the token ids alone determine, and per layer one list of experts is kept, sorted by a score
that grows with every choice and fades with age. Written is each chosen expert's rank in that list;
the ranks are range-coded with the frequencies that this block has. Nothing is
trained beforehand and nothing is carried from one block to another.

Block, all integers little-endian, varints LEB128:

    0   "rtp"            magic
    3   version          1
    4   flags            bit 0: slot order kept, 1: validity present, 2: raw rows present
    5   grain            which contexts share frequencies, an index into `GRAINS`
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
ranks >= 255 (2 byte planes), frequencies of rank bytes (uint16 [groups, 256], 2 byte planes),
rANS words (uint16).

Memory: a block has at least one byte per `MAX_IDS_PER_BYTE` ids (the encoder pads it), and every
size is compared with the block and the limits below before anything is allocated. Decoding needs at
most 16 bytes per id, so 64 KiB per byte of block, and 8 MiB; without numba 80 bytes and 24 MiB.
"""

from __future__ import annotations

import importlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from rolltape.store.codecs import route_dtype
from rolltape.store.errors import DamagedShardError, SchemaError

VERSION = 1
MAX_TOKENS = 32_768
MAX_IDS = 1 << 27
MAX_SIDE = 65_535  # layers, and slots
MAX_WORK = 1 << 36  # ids times experts: the most steps that a hostile block can cause
MAX_IDS_PER_BYTE = 4096

_MAGIC = b"rtp"
_HEADER = struct.Struct("<3sBBBHIIII")
_CHECKSUM = 8
_ORDER, _VALID, _RAW = 1, 2, 4

_BUCKETS = 8  # of the ranks already written in this row
_SLOTS = 8  # slots beyond the eighth share contexts
_MATCHES = 4  # tokens of context that this row and the one before it share: 0, 1, 2, 3 or more
CONTEXTS = _MATCHES * _SLOTS * _BUCKETS
_ESCAPE = 255  # rank byte that stands for a rank among the escaped ones, which are 255 or more

#: Group of each context, by grain. Few tokens cannot pay for the frequencies of many contexts.
_SLOT, _BUCKET = np.divmod(np.arange(CONTEXTS) % (_SLOTS * _BUCKETS), _BUCKETS)
GRAINS: tuple[np.ndarray, ...] = (
    np.arange(CONTEXTS),
    _SLOT * _BUCKETS + _BUCKET,
    np.minimum(_SLOT, 1) * _BUCKETS + _BUCKET,
    _BUCKET // 2,
    np.zeros(CONTEXTS, np.int64),
)


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


# The kernels are written for flat indexables: numba compiles them for arrays, and without numba
# they run on lists, which Python indexes faster than arrays. Both do the same integer arithmetic.


def _encode_ranks(
    ids: Any,  # [n * layers * k]
    kind: Any,  # [layers * n] 1: to be coded, else skipped; becomes 2 if an expert repeats
    visit: Any,  # [n] row visited at each turn
    match: Any,  # [n] context shared with the turn before, 0 to 3
    weight: Any,  # [k] extra weight of a slot, in 1/256
    slot: Any,  # [k] context class of a slot
    bucket: Any,  # [256] context class of a rank
    out: Any,  # [valid rows * k] rank bytes in turn order
    where: Any,  # [valid rows * k] their contexts
    rest: Any,  # [valid rows * k, or 0 if there are at most 256 experts] ranks >= 255
    total: Any,  # [CONTEXTS * 256] uses of each byte in each context
    keys: Any,  # [experts] score << 16 | expert, descending by score
    place: Any,  # [experts] index in keys
    count: Any,  # [experts] uses of the expert by the layer
    top: Any,  # [experts] experts by count
    at: Any,  # [k] indices of this row's experts in keys
    at_slot: Any,  # [k] and their slots, while both are sorted by index
    ranks: Any,  # [k]
    layers: int,
    ordered: int,
) -> int:
    """Fill `out`, `where`, `rest` and `total`; returns how many of `rest` were used."""
    n = len(visit)
    k = len(weight)
    experts = len(keys)
    o = 0
    escaped = 0
    for layer in range(layers):
        for e in range(experts):
            count[e] = 0
            top[e] = e
        step = 256
        for turn in range(n):
            m = match[turn]
            if m == 0:
                # a token not seen yet starts from what the layer likes in general
                for p in range(1, experts):
                    e = top[p]
                    c = count[e]
                    q = p
                    while q > 0 and count[top[q - 1]] < c:
                        top[q] = top[q - 1]
                        q -= 1
                    top[q] = e
                for p in range(experts):
                    keys[p] = top[p]
                    place[top[p]] = p
                step = 256
            row = visit[turn]
            if kind[layer * n + row] != 1:
                continue
            base = (row * layers + layer) * k
            repeat = False
            for j in range(k):
                p = place[ids[base + j]]
                q = j
                while q > 0 and at[q - 1] > p:
                    at[q] = at[q - 1]
                    at_slot[q] = at_slot[q - 1]
                    q -= 1
                if q > 0 and at[q - 1] == p:
                    repeat = True
                at[q] = p
                at_slot[q] = j
                ranks[j] = p - q  # does not count the experts of earlier slots
            if repeat:
                kind[layer * n + row] = 2
                continue
            if ordered == 0:
                last = -1
                for j in range(k):
                    ranks[j] = at[j] - last - 1
                    last = at[j]
            high = 0
            for j in range(k):
                rank = ranks[j]
                c = (m * 8 + slot[j]) * 8 + bucket[high]
                if rank >= 255:
                    if experts > 256:
                        rest[escaped] = rank
                        escaped += 1
                    rank = 255
                out[o] = rank
                where[o] = c
                total[c * 256 + rank] += 1
                o += 1
                high = max(high, rank) if ordered == 1 else min(at[j] - j, 255)
            for j in range(k):
                # ascending, so that moving one forward leaves the later indices as they are
                p = at[j]
                key = keys[p]
                e = key & 65535
                count[e] += 1
                key += (step + ((step * weight[at_slot[j]]) >> 8)) << 16
                score = key >> 16
                while p > 0 and (keys[p - 1] >> 16) <= score:
                    keys[p] = keys[p - 1]
                    place[keys[p] & 65535] = p
                    p -= 1
                keys[p] = key
                place[e] = p
            step += step >> 2
            if step > 268435456:
                for p in range(experts):
                    key = keys[p]
                    keys[p] = ((key >> 36) << 16) | (key & 65535)
                step >>= 20
    return escaped


def _code_ranks(
    out: Any,  # [m] rank bytes in turn order
    where: Any,  # [m] their contexts
    freq: Any,  # [CONTEXTS * 256] of 4096
    base: Any,  # [CONTEXTS * 256] sum of freq before
    words: Any,  # [m + 2] out, filled from the end
) -> int:
    """Range-code (rANS, 32-bit state, 16-bit words) from the last rank to the first.

    Returns:
        Index of the first word used in `words`.
    """
    w = len(words)
    x = 65536
    for i in range(len(out) - 1, -1, -1):
        c = where[i] * 256 + out[i]
        f = freq[c]
        if x >= f << 20:
            w -= 1
            words[w] = x & 65535
            x >>= 16
        q = x // f
        x = (q << 12) + (x - q * f) + base[c]
    w -= 2
    words[w] = x & 65535
    words[w + 1] = x >> 16
    return w


def _decode_ranks(
    ids: Any,  # [n * layers * k] out
    kind: Any,  # [layers * n], 1: coded, else skipped
    visit: Any,  # [n] row visited at each turn
    match: Any,  # [n] context shared with the turn before, 0 to 3
    weight: Any,  # [k]
    slot: Any,  # [k]
    bucket: Any,  # [256]
    words: Any,  # rANS words
    symbol: Any,  # [CONTEXTS * 4096] rank byte of each share of a context
    freq: Any,  # [CONTEXTS * 256]
    base: Any,  # [CONTEXTS * 256]
    rest: Any,  # ranks >= 255
    keys: Any,  # [experts]
    place: Any,  # [experts] not used
    count: Any,  # [experts]
    top: Any,  # [experts]
    at: Any,  # [k]
    at_slot: Any,  # [k]
    ranks: Any,  # [k] not used
    layers: int,
    ordered: int,
) -> int:
    """Fill `ids`; returns how many of `rest` were used, or -1 if the ranks are impossible."""
    n = len(visit)
    k = len(weight)
    experts = len(keys)
    escaped = 0
    if len(words) < 2:
        return -1
    x = (words[0] & 65535) | ((words[1] & 65535) << 16)
    w = 2
    for layer in range(layers):
        for e in range(experts):
            count[e] = 0
            top[e] = e
        step = 256
        for turn in range(n):
            m = match[turn]
            if m == 0:
                for p in range(1, experts):
                    e = top[p]
                    c = count[e]
                    q = p
                    while q > 0 and count[top[q - 1]] < c:
                        top[q] = top[q - 1]
                        q -= 1
                    top[q] = e
                for p in range(experts):
                    keys[p] = top[p]
                step = 256
            row = visit[turn]
            if kind[layer * n + row] != 1:
                continue
            first = (row * layers + layer) * k
            high = 0
            last = -1
            for j in range(k):
                c = (m * 8 + slot[j]) * 8 + bucket[high]
                low = x & 4095
                p = symbol[c * 4096 + low]
                s = c * 256 + p
                f = freq[s]
                if f == 0:
                    return -1
                x = f * (x >> 12) + low - base[s]
                if x < 65536:
                    if w >= len(words):
                        return -1
                    x = (x << 16) | (words[w] & 65535)
                    w += 1
                if ordered == 1:
                    high = max(high, p)
                if p == 255 and experts > 256:
                    if escaped >= len(rest):
                        return -1
                    p = rest[escaped]
                    escaped += 1
                if ordered == 1:
                    if p >= experts - j:
                        return -1
                    # the rank does not count the experts of earlier slots: step over those
                    q = 0
                    for i in range(j):
                        q += at[i] <= p + i
                    p += q
                    for i in range(j, q, -1):
                        at[i] = at[i - 1]
                        at_slot[i] = at_slot[i - 1]
                    at[q] = p
                    at_slot[q] = j
                else:
                    p += last + 1
                    if p >= experts:
                        return -1
                    at[j] = p
                    at_slot[j] = j
                    last = p
                    high = min(p - j, 255)
                ids[first + j] = keys[p] & 65535
            for j in range(k):
                p = at[j]
                key = keys[p]
                count[key & 65535] += 1
                key += (step + ((step * weight[at_slot[j]]) >> 8)) << 16
                score = key >> 16
                while p > 0 and (keys[p - 1] >> 16) <= score:
                    keys[p] = keys[p - 1]
                    p -= 1
                keys[p] = key
            step += step >> 2
            if step > 268435456:
                for p in range(experts):
                    key = keys[p]
                    keys[p] = ((key >> 36) << 16) | (key & 65535)
                step >>= 20
    if x != 65536 or w != len(words):
        return -1
    return escaped


def _compiled() -> tuple[Any, Any, Any] | None:
    """The kernels through numba, or None where it is not installed."""
    try:
        numba: Any = importlib.import_module("numba")  # optional, and untyped
    except ImportError:
        return None
    # not cached on disk: that needs a writable installation, and compiling takes seconds once
    jit = numba.njit(nogil=True)
    return jit(_encode_ranks), jit(_code_ranks), jit(_decode_ranks)


#: The kernels as they stand.
_PYTHON: tuple[Any, Any, Any] = (_encode_ranks, _code_ranks, _decode_ranks)

_KERNELS: list[tuple[Any, Any, Any] | None] = []


def uses_numba() -> bool:
    """Whether blocks are coded by compiled kernels (the `numba` extra is installed)."""
    return _kernels() is not None


def _kernels() -> tuple[Any, Any, Any] | None:
    if not _KERNELS:
        _KERNELS.append(_compiled())
    return _KERNELS[0]


def encode_block(
    ids: np.ndarray,
    token_ids: np.ndarray,
    valid: np.ndarray,
    *,
    num_experts: int,
    order: bool = True,
) -> bytes:
    """Pack the routes of up to `MAX_TOKENS` tokens, exactly.

    Args:
        ids: uint8 or uint16 [n, layers, k] expert ids; rows that are not valid are ignored.
        token_ids: uint32 [n], the token whose forward chose them. Sequences may follow each other.
        valid: bool [n, layers], whether a row was recorded.
        num_experts: experts per layer.
        order: keep the slot order; else rows are sets and come back sorted.

    Raises:
        SchemaError: shapes that do not fit, too many tokens or ids, ids at or above `num_experts`.
    """
    return _encode_block(ids, token_ids, valid, num_experts, order, _kernels())


def decode_block(data: bytes) -> PackedBlock:
    """Inverse of `encode_block`.

    Raises:
        DamagedShardError: the bytes are not those of a block that was written.
        SchemaError: they are of a version or a size that this reader refuses.
    """
    return _decode_block(data, _kernels())


def _encode_block(
    ids: np.ndarray,
    token_ids: np.ndarray,
    valid: np.ndarray,
    num_experts: int,
    order: bool,
    kernels: tuple[Any, Any, Any] | None,
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
    rows = np.ascontiguousarray(ids.astype(dtype, copy=False))
    allowed = int(np.count_nonzero(valid)) * k
    kind: Any = np.ascontiguousarray(valid.T).ravel().view("u1").copy()
    out: Any = np.zeros(allowed, "u1")
    where: Any = np.zeros(allowed, "<u2")
    rest: Any = np.zeros(allowed if num_experts > 256 else 0, "<u2")
    total: Any = np.zeros(CONTEXTS * 256, np.int64)
    state = _state(k, num_experts)
    distinct, index = np.unique(token_ids.astype("<u4"), return_inverse=True)
    fixed = [*_visits(index), *_tables(k, order)]
    flat: Any = rows.ravel()
    if kernels is None:
        flat, *fixed = (a.tolist() for a in (flat, *fixed))
        kind, out, where, rest, total = (a.tolist() for a in (kind, out, where, rest, total))
        state = [a.tolist() for a in state]
    encode, code, _ = kernels or _PYTHON
    escaped = 0
    if allowed:
        escaped = encode(flat, kind, *fixed, out, where, rest, total, *state, layers, int(order))
    raw = (np.asarray(kind, "u1") == 2).reshape(layers, n).T
    coded = (allowed // max(k, 1) - int(np.count_nonzero(raw))) * k

    flags = _ORDER * bool(order) | _VALID * (not valid.all()) | _RAW * bool(raw.any())
    parts = [
        _section(_planes(np.diff(distinct, prepend=np.uint32(0)))),
        _section(_planes(index.astype("<u2"))),
    ]
    if flags & _VALID:
        parts.append(_section(np.packbits(valid.T, bitorder="little").tobytes()))
    if flags & _RAW:
        repeated = rows[raw] if order else np.sort(rows[raw], axis=1)
        parts.append(_section(np.packbits(raw.T, bitorder="little").tobytes()))
        parts.append(_section(_planes(repeated.ravel().astype("<u2"))))
    grain, shared = _best_grain(np.asarray(total, np.int64).reshape(CONTEXTS, 256))
    freq = shared[GRAINS[grain]]
    base = np.cumsum(freq, axis=1) - freq
    words: Any = np.zeros(coded + 2, "<u2")
    share: list[Any] = [freq.ravel(), base.ravel()]
    if kernels is None:
        words, *share = (a.tolist() for a in (words, *share))
    first = code(out[:coded], where[:coded], *share, words)
    parts += [
        _section(_planes(np.asarray(rest[:escaped], "<u2"))),
        _section(_planes(shared.ravel().astype("<u2"))),
        _section(np.asarray(words[first:], "<u2").tobytes(), level=None),
    ]
    body = b"".join(parts)
    padding = max(0, -(-count // MAX_IDS_PER_BYTE) - _HEADER.size - len(body) - _CHECKSUM)
    length = _HEADER.size + len(body) + padding + _CHECKSUM
    head = _HEADER.pack(_MAGIC, VERSION, flags, grain, num_experts, n, layers, k, length)
    block = head + body + bytes(padding)
    return block + struct.pack("<Q", xxhash.xxh3_64_intdigest(block))


def _decode_block(data: bytes, kernels: tuple[Any, Any, Any] | None) -> PackedBlock:
    if len(data) < _HEADER.size + _CHECKSUM:
        raise DamagedShardError(f"routes block of {len(data)} bytes is cut off")
    magic, version, flags, grain, num_experts, n, layers, k, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedShardError("routes block does not begin with its magic bytes")
    if length != len(data):
        raise DamagedShardError(f"routes block has {len(data)} bytes, its header says {length}")
    end = len(data) - _CHECKSUM
    if xxhash.xxh3_64_intdigest(memoryview(data)[:end]) != struct.unpack_from("<Q", data, end)[0]:
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
    ids: Any = np.zeros((n, layers, k), dtype)
    kind = valid
    if flags & _RAW:
        raw = sections.bits("raw rows", layers, n)
        if (raw & ~valid).any():
            raise DamagedShardError("routes block: raw rows are not valid rows")
        repeated = int(np.count_nonzero(raw))
        values = sections.planes("raw ids", 2, exactly=repeated * k)
        if values.size and int(values.max()) >= num_experts:
            raise DamagedShardError("routes block: raw ids are out of range")
        ids[raw.T] = values.reshape(repeated, k)
        kind = valid & ~raw
    coded = int(np.count_nonzero(kind)) * k
    rest: Any = sections.planes("escaped ranks", 2, most=coded)
    groups = int(GRAINS[grain].max()) + 1
    freq = sections.planes("frequencies", 2, exactly=groups * 256).reshape(groups, 256)
    freq = freq[GRAINS[grain]]
    sums = freq.sum(axis=1, dtype=np.int64)
    if not np.isin(sums, (0, 4096)).all():
        raise DamagedShardError("routes block: frequencies do not add up")
    base = np.cumsum(freq, axis=1, dtype=np.int64) - freq
    if len(rest) and int(rest.min()) < _ESCAPE:
        raise DamagedShardError("routes block: a small rank is escaped")
    stream = sections.take("words", most=2 * coded + 4)
    if len(stream) % 2:
        raise DamagedShardError(f"routes block: words has {len(stream)} bytes")
    words: Any = np.frombuffer(stream, "<u2")
    if any(data[sections.at : end]):
        raise DamagedShardError("routes block: padding is not zero")
    if coded and k > num_experts:
        raise DamagedShardError("routes block: more slots than experts")

    symbol: Any = np.zeros((CONTEXTS, 4096), "u1")
    symbol[sums > 0] = np.repeat(
        np.tile(np.arange(256, dtype="u1"), CONTEXTS), freq.ravel()
    ).reshape(-1, 4096)
    state = _state(k, num_experts)
    fixed = [np.ascontiguousarray(kind).ravel().view("u1"), *_visits(index), *_tables(k, order)]
    share = [symbol.ravel(), freq.astype("<u2").ravel(), base.astype("<u2").ravel(), rest]
    flat: Any = ids.reshape(-1)
    if kernels is None:
        flat, words, *state = (a.tolist() for a in (flat, words, *state))
        fixed, share = [a.tolist() for a in fixed], [a.tolist() for a in share]
    _, _, decode = kernels or _PYTHON
    if coded:
        used = decode(flat, *fixed, words, *share, *state, layers, int(order))
        if used != len(rest):
            raise DamagedShardError("routes block: ranks are impossible")
    if kernels is None:
        ids = np.array(flat, dtype).reshape(n, layers, k)
    if not order:
        ids.sort(axis=2)
    return PackedBlock(ids, token_ids, np.ascontiguousarray(valid.T), num_experts, order)


class _Sections:
    """Reads the sections of a block one after another; every size is checked before use."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end
        self.zstd = zstandard.ZstdDecompressor()

    def take(self, name: str, *, most: int) -> bytes:
        """Bytes of the next section, at most `most` of them."""
        size, stored = self._varint(name), self._varint(name)
        if size > most or stored > self.end - self.at or stored > size:
            raise DamagedShardError(f"routes block: {name} claims {size} bytes in {stored}")
        part = self.data[self.at : self.at + stored]
        self.at += stored
        if stored == size:
            return part
        try:
            # zstandard allocates what the frame says, whatever limit it is given
            if zstandard.frame_content_size(part) != size:
                raise DamagedShardError(f"routes block: {name} is not of the size it claims")
            got = self.zstd.decompress(part, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedShardError(f"routes block: {name}: {error}") from error
        if len(got) != size:
            raise DamagedShardError(f"routes block: {name} is not of the size it claims")
        return got

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
    part = zstandard.ZstdCompressor(level=level).compress(raw) if level is not None else raw
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


def _state(k: int, num_experts: int) -> list[Any]:
    """Scratch arrays of the kernels: keys, place, count, top, at, at_slot, ranks.

    Indices are unsigned and narrow, which spares numba the test for negative ones.
    """
    kinds = (np.int64, np.uint16, np.int64, np.uint16)
    return [np.zeros(num_experts, kind) for kind in kinds] + [
        np.zeros(k, np.uint16) for _ in range(3)
    ]


def _tables(k: int, order: bool) -> list[np.ndarray]:
    """Extra weight of each slot in 1/256, context class of each slot and of each rank."""
    slots = np.arange(k)
    # the first slots hold the experts with the highest score
    weight = 512 * (k - 1 - slots) // max(k - 1, 1) if order else 0 * slots
    kind = slots if k <= _SLOTS else slots * _SLOTS // k
    bucket = np.array([min(rank.bit_length(), _BUCKETS - 1) for rank in range(256)])
    return [weight.astype(np.uint16), kind.astype(np.uint8), bucket.astype(np.uint8)]


def _best_grain(total: np.ndarray) -> tuple[int, np.ndarray]:
    """Grain that makes ranks and frequencies smallest, and its frequencies int64 [groups, 256].

    Args:
        total: int64 [CONTEXTS, 256] uses of each rank byte.
    """
    best: tuple[float, int, np.ndarray] | None = None
    for grain, group in enumerate(GRAINS):
        merged = np.zeros((int(group.max()) + 1, 256), np.int64)
        np.add.at(merged, group, total)
        freq = _frequencies(merged)
        bits = merged * (12 - np.log2(np.maximum(freq, 1)))
        # about a byte for each frequency; not what zstd makes of them, which a version may change
        size = np.count_nonzero(freq) + float(bits.sum()) / 8
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
