"""Small valid tapes, written with the real `TapeWriter`, and everything in them open to change.

A test makes random content, changes copies of it, and writes both sides:

    samples = random_samples(4)
    a = write_tape(tmp_path / "a", samples)
    samples[0].processed.values[12] += 0.5
    b = write_tape(tmp_path / "b", samples, replays=a)
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.recorder.sketch import sketch
from rolltape.store import Tape, TapeWriter, codecs, create_tape, seal, token_digest
from rolltape.store import open as open_tape
from rolltape.store.columns import Masked
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

ENGINE_A, ENGINE_B = "a1" * 16, "b2" * 16


@dataclass
class RouteBlock:
    """Routes of one role: ids [T, layers, k], valid [T, layers], optional weights and margin."""

    layers: tuple[int, ...]
    experts: int
    ids: np.ndarray
    valid: np.ndarray
    weights: np.ndarray | None = None
    margin: np.ndarray | None = None
    missing: list[list[Any]] = field(default_factory=list)


@dataclass
class Sample:
    """One sequence, every column over all T positions."""

    request: str
    sample: int
    group: str | None
    prompt_len: int
    ids: np.ndarray
    loss_mask: Masked
    raw: Masked
    scaled: Masked
    processed: Masked
    semantics: dict[str, Any]
    finish: str = "stop"
    scoring: int = 0
    origin: str | None = None
    scored_for: str | None = None  # by a trainer
    version: np.ndarray | None = None  # weight version that scored token p; None: no forwards
    used: RouteBlock | None = None
    live: RouteBlock | None = None
    kept: list[np.ndarray | None] | None = None  # None at a position: full
    activations: dict[str, np.ndarray] = field(default_factory=dict)
    sketched: frozenset[str] = frozenset()  # sites of which sketches are written, no tensors

    @property
    def length(self) -> int:
        return len(self.ids)


def random_samples(
    n: int = 4,
    *,
    seed: int = 0,
    prompt: int = 6,
    response: int | Items[int] = 24,
    group_size: int = 2,
    vocab: int = 1000,
    temperature: float = 0.7,
    truncation: Items[str] = ("top_p=0.9",),
    layers: tuple[int, ...] = (1, 2, 3),
    experts: int = 16,
    k: int = 4,
    sites: tuple[str, ...] = (),
) -> list[Sample]:
    """Sequences as an engine with truncated sampling writes them."""
    rng = np.random.default_rng(seed)
    lengths = [response] * n if isinstance(response, int) else list(response)
    prompts = {i // group_size: rng.integers(0, vocab, prompt) for i in range(n)}
    samples = []
    for i in range(n):
        group = i // group_size
        new = rng.integers(0, vocab, lengths[i])
        ids = np.concatenate([prompts[group], new]).astype(np.uint32)
        total = len(ids)
        raw = -rng.exponential(2.0, total).astype(np.float32)
        scored = np.arange(total) >= prompt
        columns = {
            "raw": raw,
            "scaled": (raw * 0.9).astype(np.float32),
            "processed": (raw * 0.8).astype(np.float32),
        }
        samples.append(
            Sample(
                request=f"0-{group}",
                sample=i % group_size,
                group=f"prompt-{group}",
                prompt_len=prompt,
                ids=ids,
                loss_mask=Masked(scored.copy(), np.ones(total, bool)),
                semantics={
                    "temperature": temperature,
                    "edits": [],
                    "truncation": list(truncation),
                    "vocab_size": vocab,
                    "dtype": "float32",
                    "source": "engine",
                },
                version=np.zeros(total, np.int64),
                used=random_routes(rng, total, layers, experts, k) if layers else None,
                kept=[_kept_set(rng, vocab, token) if p >= prompt else None
                      for p, token in enumerate(ids)],
                activations={s: rng.normal(size=(total, 8)).astype(np.float32) for s in sites},
                **{name: Masked(values, scored.copy()) for name, values in columns.items()},
            )
        )  # fmt: skip
    return samples


def random_routes(
    rng: np.random.Generator, total: int, layers: tuple[int, ...], experts: int, k: int
) -> RouteBlock:
    """Routes with distinct experts, weights falling from slot to slot, no row for the last."""
    scores = rng.normal(size=(total, len(layers), experts))
    order = np.argsort(-scores, -1)
    ordered = np.take_along_axis(scores, order, -1)
    weights = np.exp(ordered[..., :k])
    valid = np.ones((total, len(layers)), bool)
    valid[-1:] = False
    return RouteBlock(
        layers=layers,
        experts=experts,
        ids=order[..., :k].astype(np.int64),
        valid=valid,
        weights=(weights / weights.sum(-1, keepdims=True)).astype(np.float32),
        margin=(ordered[..., k - 1] - ordered[..., k]).astype(np.float32),
        missing=[[total - 1, 1, None, "last"]],
    )


def _kept_set(rng: np.random.Generator, vocab: int, token: int) -> np.ndarray:
    extra = rng.integers(0, vocab, int(rng.integers(1, 9)))
    return np.unique(np.append(extra, token)).astype(np.uint32)


def write_tape(
    path: Path,
    samples: Items[Sample],
    *,
    engine: str | None = None,
    role: str = "rollout",
    replays: Tape | None = None,
    fragment: int = 10,
    sealed: bool = True,
    facts: dict[str, Any] | None = None,
    digests: dict[int, int] | None = None,
    adapters: dict[int, int] | None = None,
) -> Tape:
    """Write the samples in fragments of `fragment` positions and open the tape.

    Args:
        path: new folder.
        samples: content.
        engine: engine uuid; by default one for recordings and another for replays.
        role: of tape and engine.
        replays: the tape that this one replays; sequences then carry the keys of its sequences
            of the same request and sample, unless they have an `origin` already.
        fragment: positions a fragment.
        sealed: whether to seal it.
        facts: columns of the `engines` row to override.
        digests: weight version -> digest of the whole model.
        adapters: weight version -> digest of its adapter.
    """
    engine = engine or (ENGINE_A if replays is None else ENGINE_B)
    create_tape(path, role=role, parent=replays.uuid if replays is not None else None)
    with TapeWriter(path) as writer:
        first = samples[0].used if samples else None
        writer.append(
            "engines",
            {
                "engine": engine,
                "writer": writer.id,
                "role": role,
                "adapter": "double",
                "model_type": "double",
                "model_fingerprint": "f" * 32,
                "vocab_size": 1000,
                "moe_layers": [list(first.layers) if first else []],
                "num_experts": first.experts if first else None,
                "experts_per_token": first.ids.shape[2] if first else None,
                "dtype": "bfloat16",
                "device": "cpu",
                "effective": json.dumps({"attention": "sdpa"}),
                **(facts or {}),
            },
        )
        whole = {0: 7} if digests is None else digests
        rows = [("", *row) for row in whole.items()]
        rows += [("lora", *row) for row in (adapters or {}).items()]
        for group, version, digest in rows:
            writer.append(
                "weights",
                {
                    "engine": engine,
                    "version": version,
                    "state": "complete",
                    "group": group,
                    "digest": [np.uint64(digest)],
                    "tensors": 1,
                    "elements": 10,
                },
            )
        for index, sample in enumerate(samples):
            _write_sequence(writer, engine, sample, index, replays)
            for start in range(0, sample.length, fragment):
                _write_span(writer, engine, sample, slice(start, start + fragment))
    if sealed:
        seal(path)
    return open_tape(path)


def _key(engine: str, sample: Sample) -> dict[str, Any]:
    return {
        "engine": engine,
        "request": sample.request,
        "sample": sample.sample,
        "pass": sample.scoring,
    }


def _write_sequence(
    writer: TapeWriter, engine: str, sample: Sample, index: int, replays: Tape | None
) -> None:
    is_open = sample.finish == "open"
    origin = sample.origin
    if origin is None and replays is not None:
        parents = {(k.request, k.sample): k.text for k in list(replays.keys())}
        origin = parents.get((sample.request, sample.sample))
    writer.append(
        "sequences",
        {
            **_key(engine, sample),
            "group": sample.group,
            "origin": origin,
            "prompt_len": sample.prompt_len,
            "length": None if is_open else sample.length,
            "digest": None if is_open else token_digest(sample.prompt_len, sample.ids),
            "finish": sample.finish,
            "sampling": json.dumps({"temperature": sample.semantics["temperature"]}),
            "opened_ns": index,
            "closed_ns": None if is_open else index + 1,
        },
    )
    if sample.scored_for is not None:
        fact = {"name": "scoring", "text": sample.scored_for, "t_ns": 1}
        writer.append("annotations", {**_key(engine, sample), **fact})


def _write_span(writer: TapeWriter, engine: str, sample: Sample, span: slice) -> None:
    n = len(sample.ids[span])
    where = {**_key(engine, sample), "start": span.start, "n": n}
    writer.append(
        "tokens",
        {
            **where,
            "ids": [sample.ids[span]],
            "loss_mask": [sample.loss_mask[span]],
            "raw": [sample.raw[span]],
            "scaled": [sample.scaled[span]],
            "processed": [sample.processed[span]],
            "semantics": [sample.semantics],
        },
    )
    for role, block in (("used", sample.used), ("live", sample.live)):
        if block is not None:
            writer.append("routes", {**where, "role": role, **_route_columns(block, span)})
    if sample.kept is not None:
        kept = sample.kept[span]
        # a prompt position has no kept set; a response position without one was not truncated
        state = [
            SUPPORT_UNRECORDED
            if span.start + i < sample.prompt_len
            else SUPPORT_FULL if ids is None else SUPPORT_EXPLICIT
            for i, ids in enumerate(kept)
        ]  # fmt: skip
        sets = [ids for ids, s in zip(kept, state, strict=True) if s == SUPPORT_EXPLICIT]
        writer.append(
            "supports",
            {
                **where,
                "derived": False,
                "state": [np.array(state, np.uint8)],
                "counts": [np.array([
                    0 if s != SUPPORT_EXPLICIT else len(ids)
                    for ids, s in zip(kept, state, strict=True)
                ], np.int32)],
                "ids": [np.concatenate(sets) if sets else np.zeros(0, np.uint32)],
            },
        )  # fmt: skip
    for site, values in sample.activations.items():
        sketched = site in sample.sketched
        writer.append(
            "activations",
            {
                **where,
                "site": site,
                "dtype": "float32",
                "width": values.shape[1],
                "encoding": codecs.SKETCH if sketched else None,
                "data": codecs.encode_sketch(*sketch(values[span]))
                if sketched
                else codecs.encode_floats(values[span]),
            },
        )
    if sample.version is not None:
        _write_forwards(writer, engine, sample, span)


def _write_forwards(writer: TapeWriter, engine: str, sample: Sample, span: slice) -> None:
    """One decode step a token; the step that scored token p had token p - 1 as input."""
    assert sample.version is not None
    scored = range(max(span.start, sample.prompt_len), span.start + len(sample.ids[span]))
    if not scored:
        return
    first = [p == sample.prompt_len for p in scored]
    writer.append(
        "forwards",
        {
            **_key(engine, sample),
            "step": list(scored),
            "row": 0,
            "start": [0 if f else p - 1 for p, f in zip(scored, first, strict=True)],
            "n": [p if f else 1 for p, f in zip(scored, first, strict=True)],
            "kind": ["prefill" if f else "decode" for f in first],
            "weight_version": [int(sample.version[p]) for p in scored],
            "kv_source": "own",
        },
    )


def _route_columns(block: RouteBlock, span: slice) -> dict[str, Any]:
    ids = block.ids[span]
    return {
        "layers": [list(block.layers)],
        "k": ids.shape[2],
        "num_experts": block.experts,
        "encoding": "plain",
        "ids": codecs.encode_plain(ids, block.experts),
        "weights": None if block.weights is None else codecs.encode_floats(block.weights[span]),
        "margin": None if block.margin is None else codecs.encode_floats(block.margin[span]),
        "valid": codecs.encode_bits(block.valid[span]),
        "missing": json.dumps(block.missing) if span.start == 0 else None,
    }


def key_of(tape: Tape, index: int) -> Key:
    """Key of the sequence opened as number `index`."""
    return sorted(tape, key=lambda s: s.info["opened_ns"])[index].key
