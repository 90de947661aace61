"""Random tapes for the laws that reading must obey.

Rows come in any order, cut anywhere, overlapping or missing, from several writers. What they say,
joined slowly and plainly, is in `tests.reference`.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import Masked, codecs
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

ENGINE = "0a" * 16
LOGPROBS = ("raw", "scaled", "processed")
#: Values that only a comparison of bits tells apart, or that arithmetic spoils.
BITS = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC00001, 0xFFC12345, 1, 0x3F800000],
    np.uint32,
)
SEMANTICS: tuple[dict[str, Any] | None, ...] = (
    None,
    {
        "temperature": 0.7,
        "edits": ["repetition_penalty=1.1"],
        "truncation": ["top_k=2"],
        "vocab_size": 50,
        "dtype": "float32",
        "source": "engine",
    },
    {
        "temperature": None,
        "edits": None,
        "truncation": [],
        "vocab_size": None,
        "dtype": "bfloat16",
        "source": "recomputed",
    },
)


@dataclass(repr=False)
class Made:
    """Rows of one tape, in the order in which a reader meets them.

    Args:
        rows: (table, columns), written one after another; a writer each where `writers` says so.
        writers: number of the writer of each row.
        keys: of all sequences with a row in `sequences`, in the order they were opened.
    """

    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{len(self.rows)} rows of {len(self.keys)} sequences>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # all the rows would fill pages

    def of(self, table: str, key: Key | None = None) -> list[dict[str, Any]]:
        """Rows of a table, of one sequence or of all."""
        found = [columns for name, columns in self.rows if name == table]
        if key is None:
            return found
        return [r for r in found if (r["engine"], r["request"], r["sample"], r["pass"]) == key]

    def write(self, path: Path, *, sealed: bool = True) -> Path:
        """Write them with real writers whose names are in the order of their numbers."""
        root = store.create_tape(path, role="rollout")
        count = max(self.writers, default=0) + 1
        writers = sorted((store.TapeWriter(root) for _ in range(count)), key=lambda w: w.id)
        for (table, columns), number in zip(self.rows, self.writers, strict=True):
            writers[number].append(table, cells(table, columns))
        for writer in writers:
            writer.close()
        if sealed:
            store.seal(root)
        return root


_LISTS = {
    "tokens": ("ids", "loss_mask", *LOGPROBS, "semantics"),
    "routes": ("layers",),
    "supports": ("state", "counts", "ids"),
    "distributions": ("ids", "logprobs", "tail", "semantics"),
}


def cells(table: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A row as a writer takes it."""
    out = {name: v for name, v in columns.items() if not name.startswith("_")}
    for name in _LISTS.get(table, ()):
        out[name] = [out[name]]
    return out


@st.composite
def tapes(draw: st.DrawFn, *, experts: int | None = None) -> Made:
    """Any small tape. The numbers come from one seed, the shape from hypothesis."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = Made()
    count = draw(st.integers(1, 4))
    length = prompt = 0
    model = _Model(
        experts=experts or draw(st.sampled_from([1, 2, 8, 256, 257, 65_535])),
        layers=draw(st.sampled_from([(), (0,), (1, 3, 4), (7, 2)])),
        k=draw(st.integers(1, 10)),
        routed=draw(st.booleans()) or draw(st.booleans()),
        overlap=draw(st.booleans()),
        vocab=draw(st.sampled_from([5, 50, 3000])),
    )
    made.rows.append(("engines", _engine(model)))
    for i in range(count):
        key = Key(ENGINE, f"0-{i // 2}", i % 2, draw(st.sampled_from([0, 0, 1])) if i else 0)
        share = i % 2 == 1 and draw(st.booleans())
        if not share:
            length = draw(st.sampled_from([0, 1, 2, 3, 9, 24]))
            prompt = draw(st.integers(0, length))
        life = draw(st.sampled_from(["closed", "closed", "open", "orphan"])) if i else "closed"
        short = draw(st.sampled_from([0, 0, 0, 1, 4]))  # an engine that ran on behind the end
        _sequence(made, rng, key, max(prompt, length - short), prompt, life, i)
        _content(made, rng, key, (length, prompt, life), model, share=share)
    made.rows.append(("steps", {"engine": ENGINE, "step": 0, "kind": "decode"}))
    made.rows.append(
        (
            "weights",
            {"engine": ENGINE, "version": 1, "state": "dirty", "digest": [np.uint64(2**63)]},
        )
    )
    writers = draw(st.integers(1, 3))
    numbers = np.sort(rng.integers(0, writers, len(made.rows)))
    # readers take writer after writer, so what was drawn first is what is met first
    made.writers = [int(n) for n in numbers]
    return made


@dataclass(frozen=True)
class _Model:
    experts: int
    layers: tuple[int, ...]
    k: int
    routed: bool
    overlap: bool
    vocab: int


def _engine(model: _Model) -> dict[str, Any]:
    return {
        "engine": ENGINE,
        "writer": "f" * 32,
        "role": "rollout",
        "adapter": "double",
        "vocab_size": model.vocab,
        "moe_layers": [list(model.layers)],
        "num_experts": model.experts,
        "experts_per_token": model.k,
    }


def _key(key: Key) -> dict[str, Any]:
    return {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": key.scoring}


def _sequence(
    made: Made, rng: np.random.Generator, key: Key, length: int, prompt: int, life: str, i: int
) -> None:
    if life == "orphan":
        return
    made.keys.append(key)
    row = {
        **_key(key),
        "group": f"g{i // 2}" if i != 2 else None,
        "prompt_len": prompt,
        "sampling": '{"top_k": 2}',
        "opened_ns": i + 1,
    }
    if rng.random() < 0.5 or life == "open":
        made.rows.append(("sequences", {**row, "finish": "open", "length": None}))
    if life == "closed":
        finish = str(rng.choice(["stop", "length", "abort"]))
        closed = {**row, "finish": finish, "length": length, "closed_ns": 100 + i}
        made.rows.append(("sequences", closed))


def _content(
    made: Made,
    rng: np.random.Generator,
    key: Key,
    size: tuple[int, int, str],
    model: _Model,
    *,
    share: bool,
) -> None:
    length, prompt, life = size
    for start, n in _cuts(rng, length, model.overlap):
        made.rows.append(("tokens", _tokens(rng, key, start, n, prompt)))
    if share:
        _share(made, key, "tokens")
    if life == "open":  # nothing may reach behind the last token that is known
        length = max([prompt, *(r["start"] + r["n"] for r in made.of("tokens", key))])
    for role in ("used", "live"):
        if not model.routed or (role == "live" and rng.random() < 0.6):
            continue
        for start, n in _cuts(rng, max(length - 1, 0), model.overlap):
            made.rows.append(("routes", _routes(rng, key, start, n, role, model)))
    if share and life != "open":
        _share(made, key, "routes")
    if rng.random() < 0.7:
        derived = bool(rng.random() < 0.3)
        for start, n in _cuts(rng, length, model.overlap):
            mixed = derived ^ bool(rng.random() < 0.1)
            made.rows.append(("supports", _supports(rng, key, start, n, mixed, model.vocab)))
    if rng.random() < 0.5:
        k = int(rng.integers(1, 4))
        for start, n in _cuts(rng, length, model.overlap):
            made.rows.append(("distributions", _distributions(rng, key, start, n, k)))
    if rng.random() < 0.5:
        for start, n in _cuts(rng, length, model.overlap):
            data = _bits(rng, n * 3).reshape(n, 3)
            cell = codecs.encode_floats(data)
            what = {"site": "norm", "dtype": "bfloat16", "width": 3, "data": cell, "_data": data}
            made.rows.append(("activations", {**_key(key), "start": start, "n": n, **what}))
    for t, name in enumerate(rng.choice(["reward", "filter", "note"], rng.integers(0, 4))):
        number = None if name == "filter" else float(rng.choice([1.5, -0.0, np.inf, np.nan]))
        text = "too long" if name == "filter" else None
        said = {"name": str(name), "number": number, "text": text, "t_ns": t}
        made.rows.append(("annotations", {**_key(key), **said}))
    _forwards(made, rng, key, length, prompt)
    if rng.random() < 0.3:
        made.rows.append(
            (
                "events",
                {
                    "engine": key.engine,
                    "writer": "f" * 32,
                    "t_ns": 1,
                    "kind": "gap",
                    "request": key.request,
                    "sample": key.sample,
                },
            )
        )


def _cuts(rng: np.random.Generator, length: int, overlap: bool) -> list[tuple[int, int]]:
    """Spans in any order; some are missing, with `overlap` some reach into others."""
    edges = np.unique([0, length, *rng.integers(0, length + 1, rng.integers(0, 5))])
    spans = [(int(a), int(b - a)) for a, b in itertools.pairwise(edges)]
    spans = [span for span in spans if rng.random() < 0.85]
    if rng.random() < 0.1:
        spans.append((length, 0))
    if overlap and length:
        start = int(rng.integers(0, length))
        spans.append((start, int(rng.integers(1, length - start + 1))))
    return [spans[i] for i in rng.permutation(len(spans))] if overlap else spans


def _bits(rng: np.random.Generator, n: int) -> np.ndarray:
    wild = rng.integers(0, 2**32, n, np.uint32)
    return np.where(rng.random(n) < 0.5, rng.choice(BITS, n), wild).astype(np.uint32).view("<f4")


def _masked(rng: np.random.Generator, values: np.ndarray) -> Masked | np.ndarray:
    return values if rng.random() < 0.4 else Masked(values, rng.random(len(values)) < 0.7)


def _tokens(rng: np.random.Generator, key: Key, start: int, n: int, prompt: int) -> dict[str, Any]:
    mask = np.arange(start, start + n) >= prompt
    row = {
        **_key(key),
        "start": start,
        "n": n,
        "ids": None if rng.random() < 0.05 else rng.integers(0, 2**32, n, np.uint32),
        "loss_mask": None if rng.random() < 0.2 else _masked(rng, mask),
        "semantics": SEMANTICS[int(rng.integers(0, 3))],
    }
    for name in LOGPROBS:
        row[name] = None if rng.random() < 0.4 else _masked(rng, _bits(rng, n))
    return row


def _routes(
    rng: np.random.Generator, key: Key, start: int, n: int, role: str, model: _Model
) -> dict[str, Any]:
    layers = list(model.layers)
    if rng.random() < 0.1:  # of one stage of a pipeline
        layers = [layer for layer in layers if rng.random() < 0.5]
    shape = (n, len(layers), model.k)
    ids = rng.integers(0, model.experts, shape)
    if rng.random() < 0.7 and model.k <= model.experts <= 256:
        ids = np.argsort(rng.random((*shape[:2], model.experts)), axis=2)[..., : model.k]
    valid = np.ones(shape[:2], bool) if rng.random() < 0.5 else rng.random(shape[:2]) < 0.7
    weights = _bits(rng, int(np.prod(shape))).reshape(shape) if rng.random() < 0.5 else None
    margin = _bits(rng, n * shape[1]).reshape(shape[:2]) if rng.random() < 0.3 else None
    missing = None
    if rng.random() < 0.3:
        missing = json.dumps([[start, n, None, "cached"], [start + n, 1, 3, "last"]])
    return {
        **_key(key),
        "start": start,
        "n": n,
        "role": role,
        "step": int(rng.integers(0, 9)),
        "weight_version": int(rng.integers(0, 2)),
        "layers": layers,
        "k": model.k,
        "num_experts": model.experts,
        "encoding": "plain",
        "ids": codecs.encode_plain(ids, model.experts),
        "weights": None if weights is None else codecs.encode_floats(weights),
        "margin": None if margin is None else codecs.encode_floats(margin),
        "valid": codecs.encode_bits(valid),
        "missing": missing,
        "_ids": ids,
        "_valid": valid,
        "_weights": weights,
        "_margin": margin,
    }


def _share(made: Made, key: Key, table: str) -> None:
    """Give a sequence the rows of the sample before it."""
    theirs = made.of(table, key._replace(sample=0, scoring=0))
    mine = made.of(table, key)
    if theirs:
        made.rows = [row for row in made.rows if not any(row[1] is r for r in mine)]
        made.rows += [(table, {**row, **_key(key)}) for row in theirs]


def _supports(
    rng: np.random.Generator, key: Key, start: int, n: int, derived: bool, vocab: int
) -> dict[str, Any]:
    states = [SUPPORT_FULL, SUPPORT_EXPLICIT, SUPPORT_UNRECORDED]
    state = rng.choice(states, n).astype(np.uint8)
    sizes = rng.choice([0, 1, 2, vocab // 2, vocab - 1, vocab], n)
    counts = np.where(state == SUPPORT_EXPLICIT, sizes, 0)
    sets = [np.sort(rng.permutation(vocab)[:count]) for count in counts]
    if rng.random() < 0.1:
        sets = [ids[::-1] for ids in sets]  # in order of probability, as some engine may give them
    return {
        **_key(key),
        "start": start,
        "n": n,
        "derived": derived,
        "state": state,
        "counts": counts.astype(np.int32),
        "ids": np.concatenate([*sets, np.zeros(0)]).astype(np.uint32),
        "_sets": sets,
    }


def _distributions(
    rng: np.random.Generator, key: Key, start: int, n: int, k: int
) -> dict[str, Any]:
    ids = np.stack([rng.permutation(40)[:k] for _ in range(n)] or [np.zeros(k)]).astype(np.uint32)
    values = -np.sort(rng.exponential(2.0, (n, k)), axis=1).astype(np.float32)
    tail = _masked(rng, _bits(rng, n))
    return {
        **_key(key),
        "start": start,
        "n": n,
        "k": k,
        "ids": ids[:n].reshape(-1),
        "logprobs": values.reshape(-1),
        "tail": tail,
        "semantics": SEMANTICS[int(rng.integers(0, 3))],
    }


def _forwards(made: Made, rng: np.random.Generator, key: Key, length: int, prompt: int) -> None:
    """A prefill, a decode a token, and sometimes a preemption that runs all of it again."""
    if not length or rng.random() < 0.3:
        return
    spans = [(0, prompt, "prefill")] if prompt else []
    for p in range(prompt, length - 1):
        spans.append((p, 1, "decode"))
        if rng.random() < 0.1:
            spans.append((0, p + 1, "recompute"))
    if rng.random() < 0.2:
        spans.append((0, length, "dummy"))
    version = 0
    for step, (start, n, kind) in enumerate(spans):
        version += int(rng.random() < 0.2)
        row = {
            **_key(key),
            "step": step,
            "row": 0,
            "start": start,
            "n": n,
            "kind": kind,
            "weight_version": None if rng.random() < 0.1 else version,
        }
        made.rows.append(("forwards", row))
