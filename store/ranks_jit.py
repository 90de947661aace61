# mypy: allow-untyped-decorators
"""The kernels of `rolltape.store.ranks`, compiled by numba; importing this needs numba.

State is kept by expert, not by place, in blocks of 64 lanes: `place[layer, block, lane]` is the
expert's place in the list, `score` its score. So a whole row is put in order by comparing all
lanes with a few numbers, without a branch, where a sorted list would move entries one by one. The
layers of a group take turns, so that the processor works on one while another waits for memory.

`slots` is a tuple of length k where k is small: then its length is known when it is compiled, and
the loops over slots are unrolled inside those over lanes.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from rolltape.store.ranks import CONTEXTS, REFRESH, Rules

numba: Any = importlib.import_module("numba")  # optional, and untyped
_ir: Any = importlib.import_module("llvmlite.ir")
_extending: Any = importlib.import_module("numba.extending")

LANES = 64
_UNROLLED = 16  # slots

# numba's cache on disk follows changes of this file only, so what is compiled in stands here
_REFRESH = 64
assert _REFRESH == REFRESH


def _jit(function: Any) -> Any:
    """Compile when first called; kept on disk where numba finds a folder that it may write."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": neither the package nor the cache is writable
        return numba.njit(**options)(function)


@_extending.intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _equal_lanes(typing: Any, array: Any, layer: Any, block: Any, value: Any) -> Any:
    """Bit mask of the lanes of array[layer, block] that equal the value."""
    del typing, layer, block, value
    signature = numba.types.uint64(array, numba.types.intp, numba.types.intp, array.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        blocks = builder.extract_value(struct.shape, 1)
        index = builder.add(builder.mul(args[1], blocks), args[2])
        start = builder.mul(index, _ir.Constant(index.type, LANES))
        vector = _ir.VectorType(context.get_value_type(array.dtype), LANES)
        where = builder.bitcast(builder.gep(struct.data, [start]), vector.as_pointer())
        zero = _ir.Constant(_ir.IntType(32), 0)
        undefined = _ir.Constant(vector, _ir.Undefined)
        single = builder.insert_element(undefined, args[3], zero)
        lanes = _ir.Constant(_ir.VectorType(_ir.IntType(32), LANES), [0] * LANES)
        wanted = builder.shuffle_vector(single, undefined, lanes)
        equal = builder.icmp_unsigned("==", builder.load(where, align=1), wanted)
        return builder.bitcast(equal, _ir.IntType(LANES))

    return signature, generate


@_extending.intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _first_bit(typing: Any, mask: Any) -> Any:
    """Index of the lowest bit that is set; 64 if none is."""
    del typing, mask
    signature = numba.types.uint64(numba.types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], _ir.Constant(_ir.IntType(1), 0))

    return signature, generate


@_jit
def _find(place: Any, layer: Any, p: Any) -> Any:
    """The expert at place p of the layer's list."""
    expert = np.uint64(0)
    for block in range(place.shape[1]):
        mask = _equal_lanes(place, layer, block, p)
        here = np.uint64(block * LANES) + _first_bit(mask)
        expert |= here if mask != 0 else np.uint64(0)
    return expert


@_jit
def _begin(flat_place: Any, flat_usual: Any, flat_score: Any, top: Any, count: Any) -> None:
    """A new layer: the list is that of the expert numbers."""
    for layer in range(flat_usual.shape[0]):
        for e in range(flat_usual.shape[1]):
            flat_usual[layer, e] = e
            flat_place[layer, e] = e
            flat_score[layer, e] = 0
        for e in range(top.shape[1]):
            top[layer, e] = e
            count[layer, e] = 0


@_jit
def _new_token(
    place: Any,
    score: Any,
    usual: Any,
    flat_usual: Any,
    top: Any,
    count: Any,
    since: Any,
    layer: Any,
) -> None:
    """A token not seen yet starts from what the layer likes in general."""
    done = since[layer, 1]
    if since[layer, 0] >= _REFRESH or 2 * since[layer, 0] >= done:
        since[layer, 0] = 0
        for p in range(1, top.shape[1]):
            e = top[layer, p]
            c = count[layer, e]
            q = p
            while q > 0 and count[layer, top[layer, q - 1]] < c:
                top[layer, q] = top[layer, q - 1]
                q -= 1
            top[layer, q] = e
        for p in range(top.shape[1]):
            flat_usual[layer, top[layer, p]] = p
    for block in range(place.shape[1]):
        for lane in range(LANES):
            place[layer, block, lane] = usual[layer, block, lane]
            score[layer, block, lane] = 0


@_jit
def _update(
    place: Any,
    score: Any,
    flat_place: Any,
    flat_score: Any,
    count: Any,
    since: Any,
    slots: Any,
    gain: Any,
    live: Any,
    chosen: Any,
    at: Any,
    ahead: Any,
    new: Any,
) -> None:
    """All scores fade, those of the experts chosen at places `at` grow, and places follow.

    Ties go to what was chosen now, and among those to the earlier slot. Each phase goes through
    all layers before the next begins: a processor stalls where it reads as a vector what it has
    only just written in pieces.
    """
    k = len(slots)
    layers = len(live)
    for layer in range(layers):
        if live[layer]:
            for j in range(k):
                c = chosen[layer, j]
                s = flat_score[layer, c]
                new[layer, j] = (s - ((s + 3) >> 2) + gain[j]) * k + k - 1 - j
                flat_score[layer, c] = 0
                count[layer, c] += 1
            since[layer, 0] += 1
            since[layer, 1] += 1
    for layer in range(layers):
        if live[layer]:
            for block in range(place.shape[1]):
                for lane in range(LANES):
                    p = place[layer, block, lane]
                    left = p  # place among those not chosen
                    for j in range(k):
                        left = place.dtype.type(left - place.dtype.type(p > at[layer, j]))
                    place[layer, block, lane] = left
                for lane in range(LANES):
                    s = score[layer, block, lane]
                    score[layer, block, lane] = np.uint8(s - ((s + 3) >> 2))
    for layer in range(layers):
        if live[layer]:
            for j in range(k):
                s = np.uint8(new[layer, j] // k)
                higher = np.int64(0)
                for block in range(place.shape[1]):
                    some = np.uint8(0)
                    for lane in range(LANES):
                        some = np.uint8(some + np.uint8(score[layer, block, lane] > s))
                    higher += some
                ahead[layer, j] = higher
    for layer in range(layers):
        if live[layer]:
            for block in range(place.shape[1]):
                for lane in range(LANES):
                    p = place[layer, block, lane]
                    moved = p
                    for j in range(k):
                        moved = place.dtype.type(moved + place.dtype.type(p >= ahead[layer, j]))
                    place[layer, block, lane] = moved
    for layer in range(layers):
        if live[layer]:
            for j in range(k):
                s = new[layer, j]
                p = np.int64(ahead[layer, j])
                for i in range(k):
                    p += new[layer, i] > s
                c = chosen[layer, j]
                flat_place[layer, c] = p
                flat_score[layer, c] = np.uint8(s // k)


@_jit
def _to_ranks(
    rows: Any,  # [n, layers, k] experts in turn order
    kind: Any,  # [n, layers] 1: to be coded; becomes 2 if an expert repeats
    match: Any,  # [n]
    gain: Any,  # [k]
    slots: Any,
    ordered: Any,
    ranks: Any,  # [layers, n * k] out
    done: Any,  # [layers] out: how many of `ranks` were used
    place: Any,
    score: Any,
    usual: Any,
    top: Any,
    count: Any,
    since: Any,
    live: Any,
    chosen: Any,
    at: Any,
    ahead: Any,
    new: Any,
) -> None:
    k = len(slots)
    layers = top.shape[0]
    flat_place = place.reshape(layers, place.shape[1] * LANES)
    flat_score = score.reshape(layers, place.shape[1] * LANES)
    flat_usual = usual.reshape(layers, place.shape[1] * LANES)
    _begin(flat_place, flat_usual, flat_score, top, count)
    for row in range(len(match)):
        if match[row] == 0:
            for layer in range(layers):
                _new_token(place, score, usual, flat_usual, top, count, since, layer)
        for layer in range(layers):
            live[layer] = kind[row, layer] == 1
            if not live[layer]:
                continue
            for j in range(k):
                c = rows[row, layer, j]
                chosen[layer, j] = c
                at[layer, j] = flat_place[layer, c]
            repeat = False
            for j in range(k):
                for i in range(j):
                    repeat |= at[layer, i] == at[layer, j]
            if repeat:
                kind[row, layer] = 2
                live[layer] = False
                continue
            o = done[layer]
            done[layer] = o + k
            if ordered:
                for j in range(k):
                    p = at[layer, j]
                    rank = np.int64(p)
                    for i in range(j):
                        rank -= at[layer, i] < p
                    ranks[layer, o + j] = rank
            else:
                for j in range(1, k):
                    p = at[layer, j]
                    c = chosen[layer, j]
                    i = j
                    while i > 0 and at[layer, i - 1] > p:
                        at[layer, i] = at[layer, i - 1]
                        chosen[layer, i] = chosen[layer, i - 1]
                        i -= 1
                    at[layer, i] = p
                    chosen[layer, i] = c
                last = np.int64(-1)
                for j in range(k):
                    ranks[layer, o + j] = np.int64(at[layer, j]) - last - 1
                    last = np.int64(at[layer, j])
        _update(
            place, score, flat_place, flat_score, count, since, slots, gain, live, chosen, at,
            ahead, new,
        )  # fmt: skip


@_jit
def _from_ranks(
    ranks: Any,  # of one layer after another
    kind: Any,  # [n, layers] 1: coded
    match: Any,  # [n]
    gain: Any,  # [k]
    slots: Any,
    ordered: Any,
    rows: Any,  # [n, layers, k] out, in turn order
    done: Any,  # [layers] where in `ranks` the layer begins
    place: Any,
    score: Any,
    usual: Any,
    top: Any,
    count: Any,
    since: Any,
    live: Any,
    chosen: Any,
    at: Any,
    ahead: Any,
    new: Any,
) -> bool:
    """Returns whether all ranks were possible."""
    k = len(slots)
    layers, experts = top.shape
    flat_place = place.reshape(layers, place.shape[1] * LANES)
    flat_score = score.reshape(layers, place.shape[1] * LANES)
    flat_usual = usual.reshape(layers, place.shape[1] * LANES)
    _begin(flat_place, flat_usual, flat_score, top, count)
    for row in range(len(match)):
        if match[row] == 0:
            for layer in range(layers):
                _new_token(place, score, usual, flat_usual, top, count, since, layer)
        for layer in range(layers):
            live[layer] = kind[row, layer] == 1
            if not live[layer]:
                continue
            o = done[layer]
            done[layer] = o + k
            bad = False
            if ordered:
                for j in range(k):
                    p = np.int64(ranks[o + j])
                    bad |= p >= experts - j
                    for i in range(j - 1, -1, -1):
                        # the rank does not count the experts of earlier slots: step over those
                        p += p >= ranks[o + i]
                    at[layer, j] = p
            else:
                p = np.int64(-1)
                for j in range(k):
                    p += np.int64(ranks[o + j]) + 1
                    bad |= p >= experts
                    at[layer, j] = p
            if bad:
                return False
        for layer in range(layers):
            if live[layer]:
                for j in range(k):
                    chosen[layer, j] = _find(place, layer, at[layer, j])
        for layer in range(layers):
            if live[layer]:
                for j in range(k):
                    rows[row, layer, j] = chosen[layer, j]
        _update(
            place, score, flat_place, flat_score, count, since, slots, gain, live, chosen, at,
            ahead, new,
        )  # fmt: skip
    return True


@_jit
def _count(
    symbols: Any, match: Any, slot: Any, bucket: Any, ordered: Any, where: Any, total: Any
) -> None:
    k = len(slot)
    o = 0
    for row in range(len(match)):
        high = np.int64(0)
        for j in range(k):
            c = (np.int64(match[row]) * 8 + slot[j]) * 8 + bucket[high]
            s = np.int64(symbols[o])
            where[o] = c
            total[c, s] += 1
            high = max(high, s) if ordered else min(high + s, np.int64(255))
            o += 1


@_jit
def _push(x: Any, w: Any, words: Any, c: Any, shares: Any) -> Any:
    both = shares[c]  # share << 16 | start
    f = np.uint64(both >> 16)
    words[w - 1] = np.uint16(x & np.uint64(65535))
    full = x >= f << np.uint64(20)
    w -= full
    x = x >> np.uint64(16) if full else x
    q = x // f
    return (q << np.uint64(12)) + (x - q * f) + np.uint64(both & 65535), w


@_jit
def _pack(symbols: Any, where: Any, k: Any, shares: Any, words: Any) -> Any:
    """Fill `words` from the end; returns the index of the first that is used."""
    rows = len(symbols) // k
    a = b = c = d = np.uint64(65536)
    w = len(words)
    begin = (rows - 1) // 4 * 4
    for row in range(begin, -1, -4):
        left = rows - row
        for j in range(k - 1, -1, -1):
            o = row * k + j
            if left > 3:
                i = o + 3 * k
                d, w = _push(d, w, words, np.int64(where[i]) * 256 + symbols[i], shares)
            if left > 2:
                i = o + 2 * k
                c, w = _push(c, w, words, np.int64(where[i]) * 256 + symbols[i], shares)
            if left > 1:
                i = o + k
                b, w = _push(b, w, words, np.int64(where[i]) * 256 + symbols[i], shares)
            a, w = _push(a, w, words, np.int64(where[o]) * 256 + symbols[o], shares)
    w -= 8
    for i, x in enumerate((a, b, c, d)):
        words[w + 2 * i] = np.uint16(x & np.uint64(65535))
        words[w + 2 * i + 1] = np.uint16(x >> np.uint64(16))
    return w


@_jit
def _pull(x: Any, w: Any, words: Any, c: Any, symbol: Any, shares: Any) -> Any:
    low = x & np.uint64(4095)
    s = np.uint64(symbol[c * np.uint64(4096) + low])
    both = shares[c * np.uint64(256) + s]  # share << 16 | start
    x = np.uint64(both >> 16) * (x >> np.uint64(12)) + low - np.uint64(both & 65535)
    empty = x < np.uint64(65536)
    more = x << np.uint64(16) | np.uint64(words[w])
    return s, more if empty else x, w + np.uint64(empty)


@_jit
def _unpack(
    words: Any,  # 4 * k spare ones at the end
    length: Any,  # words without those
    match: Any,  # [rows]
    slot: Any,
    bucket: Any,
    ordered: Any,
    symbol: Any,
    shares: Any,
    out: Any,  # [rows * k]
) -> bool:
    k = len(slot)
    rows = len(match)
    a = np.uint64(words[0]) | np.uint64(words[1]) << np.uint64(16)
    b = np.uint64(words[2]) | np.uint64(words[3]) << np.uint64(16)
    c = np.uint64(words[4]) | np.uint64(words[5]) << np.uint64(16)
    d = np.uint64(words[6]) | np.uint64(words[7]) << np.uint64(16)
    w = np.uint64(8)
    for row in range(0, rows, 4):
        left = rows - row
        ha = hb = hc = hd = np.uint64(0)
        ma = np.uint64(match[row]) * np.uint64(64)
        mb = np.uint64(match[row + 1]) * np.uint64(64) if left > 1 else np.uint64(0)
        mc = np.uint64(match[row + 2]) * np.uint64(64) if left > 2 else np.uint64(0)
        md = np.uint64(match[row + 3]) * np.uint64(64) if left > 3 else np.uint64(0)
        for j in range(k):
            o = row * k + j
            t = np.uint64(slot[j]) * np.uint64(8)
            s, a, w = _pull(a, w, words, ma + t + np.uint64(bucket[ha]), symbol, shares)
            out[o] = s
            ha = max(ha, s) if ordered else min(ha + s, np.uint64(255))
            if left > 1:
                s, b, w = _pull(b, w, words, mb + t + np.uint64(bucket[hb]), symbol, shares)
                out[o + k] = s
                hb = max(hb, s) if ordered else min(hb + s, np.uint64(255))
            if left > 2:
                s, c, w = _pull(c, w, words, mc + t + np.uint64(bucket[hc]), symbol, shares)
                out[o + 2 * k] = s
                hc = max(hc, s) if ordered else min(hc + s, np.uint64(255))
            if left > 3:
                s, d, w = _pull(d, w, words, md + t + np.uint64(bucket[hd]), symbol, shares)
                out[o + 3 * k] = s
                hd = max(hd, s) if ordered else min(hd + s, np.uint64(255))
        if w > np.uint64(length):
            return False
    full = np.uint64(65536)
    return bool(w == np.uint64(length) and a == full and b == full and c == full and d == full)


def _scratch(layers: int, rules: Rules) -> tuple[Any, list[np.ndarray]]:
    """Slots, and the arrays from `place` on that the kernels work in."""
    kind, k, experts = rules.dtype, rules.k, rules.experts
    shape = (layers, -(-experts // LANES), LANES)
    slots: Any = (0,) * k if k <= _UNROLLED else rules.gain
    return slots, [
        np.zeros(shape, kind),
        np.zeros(shape, np.uint8),
        np.zeros(shape, kind),
        np.zeros((layers, experts), np.uint16),
        np.zeros((layers, experts), np.uint32),
        np.zeros((layers, 2), np.int64),
        np.zeros(layers, np.bool_),
        *(np.zeros((layers, k), kind) for _ in range(3)),
        np.zeros((layers, k), np.int32),
    ]


def to_ranks(
    rows: np.ndarray, kind: np.ndarray, match: np.ndarray, rules: Rules
) -> list[np.ndarray]:
    """See `rolltape.store.ranks.to_ranks`."""
    n, layers, k = rows.shape
    ranks = np.empty((layers, n * k), rules.dtype)
    done = np.zeros(layers, np.int64)
    slots, scratch = _scratch(layers, rules)
    _to_ranks(rows, kind, match, rules.gain, slots, rules.order, ranks, done, *scratch)
    return [ranks[layer, : done[layer]] for layer in range(layers)]


def from_ranks(
    ranks: list[np.ndarray], kind: np.ndarray, match: np.ndarray, rows: np.ndarray, rules: Rules
) -> bool:
    """See `rolltape.store.ranks.from_ranks`."""
    starts = np.cumsum([0, *(len(part) for part in ranks[:-1])])
    slots, scratch = _scratch(len(ranks), rules)
    flat = np.concatenate(ranks)
    return bool(
        _from_ranks(flat, kind, match, rules.gain, slots, rules.order, rows, starts, *scratch)
    )


def contexts(symbols: np.ndarray, match: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """See `rolltape.store.ranks.contexts`."""
    where = np.empty(len(symbols), np.uint8)
    total = np.zeros((CONTEXTS, 256), np.int64)
    _count(symbols, match, rules.slot, rules.bucket, rules.order, where, total)
    return where, total


def pack(symbols: np.ndarray, where: np.ndarray, k: int, shares: np.ndarray) -> np.ndarray:
    """See `rolltape.store.ranks.pack`."""
    words = np.empty(len(symbols) + 9, np.uint16)  # one spare: a word is written before it counts
    first: int = _pack(symbols, where, k, shares, words)
    return words[first:]


def unpack(
    words: np.ndarray, match: np.ndarray, rules: Rules, symbol: np.ndarray, shares: np.ndarray
) -> np.ndarray | None:
    """See `rolltape.store.ranks.unpack`."""
    if len(words) < 8:
        return None
    padded = np.concatenate([words, np.zeros(4 * rules.k, np.uint16)])
    out = np.empty(len(match) * rules.k, np.uint8)
    fits = _unpack(
        padded, len(words), match, rules.slot, rules.bucket, rules.order, symbol, shares, out
    )
    return out if fits else None
