"""From steps of a serving engine to rows of a tape.

A block of steps is one set of arrays: Python runs per fragment, not per token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.recorder import bitmaps
from rolltape.recorder.serving.batch import KINDS, Life, Step
from rolltape.recorder.serving.prefix import Owner, Prefix
from rolltape.recorder.serving.ranks import Rank, digest_row
from rolltape.recorder.session import Job
from rolltape.recorder.settings import Finding
from rolltape.store import TapeWriter, codecs
from rolltape.store.columns import ragged
from rolltape.store.distributions import distribution_columns, raw_semantics
from rolltape.store.kept import encode_kept
from rolltape.store.schema import SEMANTICS, SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

Lives = Mapping[int, Life]
_LOGPROBS = ("raw", "scaled", "processed")
#: Ids a position, on average, from which kept sets are not written as lists.
_LARGE_SETS = 1024


@dataclass(eq=False)
class Scribe:
    """Writes what one process of an engine did.

    Args:
        engine: its uuid.
        layers: model layer number of each column of `routes`; empty when there are none.
        k: experts a token.
        num_experts: experts that the router chooses from.
        gap: reason given where a layer showed no route.
        prefix: finds the routes of cached prefixes; None if the engine shares none.
        tokens: whether this process writes tokens, supports and schedule: in a pipeline each stage
            has its own layers, and only the last draws tokens.
        prompts: whether it writes the prompts, too; not so where a front end does.
        rank: where several processes do the same, which of them this is. All but the first write
            nothing but what it takes to compare them.
        lives: those that steps may speak of, by index.
    """

    engine: str
    layers: tuple[int, ...] = ()
    k: int = 0
    num_experts: int = 0
    gap: str = "not-captured"
    prefix: Prefix | None = None
    tokens: bool = True
    prompts: bool = True
    rank: Rank | None = None
    lives: dict[int, Life] = field(default_factory=dict)
    _born: set[int] = field(default_factory=set)
    _told: bool = False

    def meet(self, lives: Sequence[Life]) -> None:
        """Steps may speak of these from now on."""
        self.lives |= {life.index: life for life in lives}

    def forget(self, indices: Sequence[int]) -> None:
        """No later step speaks of these."""
        for index in indices:
            self.lives.pop(index, None)
            self._born.discard(index)
            if self.prefix is not None:
                self.prefix.forget(index)

    def lose(self) -> None:
        """Steps are missing: they may have filled any KV block."""
        if self.prefix is not None:
            self.prefix.lose()

    def write(self, writer: TapeWriter, steps: Sequence[Step]) -> None:
        """Write a block of steps.

        Args:
            writer: of the tape.
            steps: in the order in which they ran, with numpy arrays as `values`.
        """
        if self.rank is not None:
            row = digest_row(self.engine, self.rank, self.layers, steps)
            writer.append("events", {**row, "writer": writer.id})
            if self.rank.rank:
                return
        block = _Block.of(steps, self.lives)
        if self.tokens:
            if self.prompts:
                self._write_prompts(writer, block)
            drawn = _Drawn.of(steps, block, self.lives)
            if len(drawn.life):
                self._write_tokens(writer, drawn)
                self._write_supports(writer, steps, block, drawn)
                self._write_distributions(writer, steps, drawn)
                self._write_odd(writer, drawn)
        if self.layers:
            self._write_routes(writer, steps, block)
        if self.tokens:
            self._write_schedule(writer, steps, block)

    def _key(self, lives: Sequence[int] | np.ndarray) -> dict[str, Any]:
        some, inverse = np.unique(np.asarray(lives, np.int64), return_inverse=True)
        known = [self.lives[int(i)] for i in some]
        where = pa.array(inverse)
        return {
            "engine": self.engine,
            "request": pa.array([life.request for life in known], pa.string()).take(where),
            "sample": np.array([life.sample for life in known], np.int32)[inverse],
            "pass": 0,
        }

    # -- tokens ---------------------------------------------------------------------------

    def _write_prompts(self, writer: TapeWriter, block: _Block) -> None:
        new = [i for i in dict.fromkeys(block.life[block.wanted].tolist()) if i not in self._born]
        if new:
            self._born.update(new)
            prompts = [self.lives[i].prompt for i in new]
            writer.append(
                "tokens",
                {
                    **self._key(new),
                    "start": 0,
                    "n": [len(prompt) for prompt in prompts],
                    "ids": prompts,
                    "loss_mask": [np.zeros(len(prompt), bool) for prompt in prompts],
                },
            )

    def _write_tokens(self, writer: TapeWriter, drawn: _Drawn) -> None:
        sizes = drawn.sizes
        first = drawn.starts
        meanings: dict[tuple[int, int, str], dict[str, Any]] = {}
        for at in first.tolist():
            life = int(drawn.life[at])
            meanings[life, int(drawn.vocab[at]), drawn.source[at]] = self._meaning(
                self.lives[life], int(drawn.vocab[at]), drawn.source[at]
            )
        writer.append(
            "tokens",
            {
                **self._key(drawn.life[first]),
                "start": drawn.position[first],
                "n": sizes,
                "ids": ragged(drawn.token.astype(np.uint32), sizes, pa.uint32()),
                "loss_mask": ragged(np.ones(len(drawn.life), bool), sizes, pa.bool_()),
                **{
                    name: _nullable(values, there, sizes)
                    for name, (values, there) in drawn.logprobs.items()
                },
                "semantics": pa.array(
                    [
                        meanings[int(drawn.life[at]), int(drawn.vocab[at]), drawn.source[at]]
                        for at in first.tolist()
                    ],
                    type=SEMANTICS,
                ),
            },
        )

    @staticmethod
    def _meaning(life: Life, vocab: int, source: str) -> dict[str, Any]:
        return {
            "temperature": life.temperature,
            "edits": list(life.edits),
            "truncation": list(life.truncation),
            "vocab_size": vocab,
            "dtype": "float32",
            "source": source,
        }

    def _write_supports(
        self, writer: TapeWriter, steps: Sequence[Step], block: _Block, drawn: _Drawn
    ) -> None:
        counts, ids = _kept_sets(steps, block, drawn, self.lives)
        state = np.where(counts == drawn.vocab, SUPPORT_FULL, SUPPORT_EXPLICIT)
        state = np.where(counts < 0, SUPPORT_UNRECORDED, state)
        held = np.where(state == SUPPORT_EXPLICIT, counts, 0)
        each = np.add.reduceat(held, drawn.starts)
        ends = np.cumsum(each)
        large = each > _LARGE_SETS * drawn.sizes
        key = self._key(drawn.life[drawn.starts])
        for chosen, packed in ((np.flatnonzero(~large), False), (np.flatnonzero(large), True)):
            if not len(chosen):
                continue
            runs = [
                slice(int(drawn.starts[r]), int(drawn.starts[r] + drawn.sizes[r])) for r in chosen
            ]
            lists = [ids[int(ends[r] - each[r]) : int(ends[r])] for r in chosen]
            none = np.zeros(0, np.uint32)
            writer.append(
                "supports",
                {
                    "engine": self.engine,
                    "request": key["request"].take(pa.array(chosen)),
                    "sample": key["sample"][chosen],
                    "pass": 0,
                    "start": drawn.position[drawn.starts[chosen]],
                    "n": drawn.sizes[chosen],
                    "derived": False,
                    "state": [state[run].astype(np.uint8) for run in runs],
                    "counts": [held[run].astype(np.int32) for run in runs],
                    "ids": [none if packed else part for part in lists],
                    "encoding": ["kept" if packed else None] * len(chosen),
                    "data": [
                        encode_kept(held[run], part, vocab_size=int(drawn.vocab[run.start]))
                        if packed
                        else None
                        for run, part in zip(runs, lists, strict=True)
                    ],
                },
            )

    def _write_distributions(
        self, writer: TapeWriter, steps: Sequence[Step], drawn: _Drawn
    ) -> None:
        have = [i for i, step in enumerate(steps) if "tail" in step.values]
        if len(have) != len(steps):
            return
        rows = drawn.row
        parts = [
            np.concatenate([step.values[name] for step in steps])[rows]
            for name in ("top_ids", "top_logprobs", "tail")
        ]
        first = drawn.starts
        vocab = int(drawn.vocab[0])
        meaning = raw_semantics(vocab_size=vocab, dtype="float32", source="recomputed")
        writer.append(
            "distributions",
            {
                **self._key(drawn.life[first]),
                "start": drawn.position[first],
                "n": drawn.sizes,
                **distribution_columns(parts[0], parts[1], parts[2], drawn.sizes),
                "semantics": pa.repeat(pa.scalar(meaning, type=SEMANTICS), len(first)),
            },
        )

    def _write_odd(self, writer: TapeWriter, drawn: _Drawn) -> None:
        """Once: an engine that samples where it was asked for the argmax."""
        if self._told or not drawn.odd.any():
            return
        self._told = True
        first = int(np.flatnonzero(drawn.odd)[0])
        life = self.lives[int(drawn.life[first])]
        finding = Finding(
            code="RT409",
            message="a greedy request got a token that is not the most probable one",
            remedy="its kept set and processed logprob are not recorded there; if the engine"
            " verifies drafts, keep greedy and sampled requests out of one batch",
            detail={"token": int(drawn.token[first])},
        )
        writer.append(
            "events",
            {
                "engine": self.engine,
                "writer": writer.id,
                "t_ns": time.time_ns(),
                "kind": "finding",
                "request": life.request,
                "sample": life.sample,
                "start": int(drawn.position[first]),
                "n": 1,
                "detail": json.dumps(finding.as_detail()),
            },
        )

    # -- routes ---------------------------------------------------------------------------

    def _write_routes(self, writer: TapeWriter, steps: Sequence[Step], block: _Block) -> None:
        shape = (len(self.layers), self.k)
        hits = self._cached_prefixes(steps)
        ids, valid = self._routes_of(steps, block, shape)
        life = np.repeat(block.life, block.inputs)
        position = np.repeat(block.start, block.inputs) + _within(block.inputs)
        again = position < np.repeat(block.seen, block.inputs)
        version = np.repeat(block.version, block.inputs)
        step = np.repeat(block.step, block.inputs)
        # the order of steps is the order of positions, but for what was forwarded again
        order = np.argsort(life * 2 + again, kind="stable")
        life, position, again, version, step = (
            values[order] for values in (life, position, again, version, step)
        )
        cells: list[dict[str, Any]] = []
        lives: list[int] = []
        for run in _runs(life, position, again, version):
            one = int(life[run.start])
            part, there = ids[order[run]], valid[order[run]]
            if self.prefix is not None:
                self.prefix.history(one).pieces.append((int(position[run.start]), part, there))
            lives.append(one)
            cells.append(
                self._route_cell(
                    int(position[run.start]),
                    part,
                    there,
                    self.gap,
                    int(step[run.start]),
                    int(version[run.start]),
                )
            )
        for one, owners, n, number, version_ in hits:
            part, there = np.zeros((n, *shape), ids.dtype), np.zeros((n, shape[0]), bool)
            if self.prefix is not None:
                self.prefix.read(owners, part, there)
                self.prefix.history(one).pieces.insert(0, (0, part, there))
            lives.append(one)
            cells.append(self._route_cell(0, part, there, "cached", number, version_))
        if cells:
            writer.append(
                "routes",
                {
                    **self._key(lives),
                    **{name: [cell[name] for cell in cells] for name in cells[0]},
                    "role": "used",
                    "layers": [np.array(self.layers)] * len(cells),
                    "k": self.k,
                    "num_experts": self.num_experts,
                    "encoding": "plain",
                },
            )

    def _cached_prefixes(
        self, steps: Sequence[Step]
    ) -> list[tuple[int, list[Owner], int, int, int]]:
        """(life, owners, positions, step, version) of prefixes that were not forwarded.

        Who owns a block is asked in the order of the steps; the routes themselves are read later,
        because they may be those of the same block of steps.
        """
        hits: list[tuple[int, list[Owner], int, int, int]] = []
        for step in steps:
            rows = step.rows
            blocks = dict(rows.blocks)
            for row in np.flatnonzero(rows.cached).tolist():
                if not self.lives[int(rows.life[row])].wanted:
                    continue
                n = int(rows.cached[row])
                owners = [] if self.prefix is None else self.prefix.owners(n, blocks.get(row, []))
                hits.append((int(rows.life[row]), owners, n, step.number, step.version))
            if self.prefix is not None:
                for row, table in rows.blocks:
                    end = int(rows.start[row] + rows.n[row] - rows.drafted[row])
                    self.prefix.filled(int(rows.life[row]), int(rows.start[row]), end, table)
        return hits

    def _routes_of(
        self, steps: Sequence[Step], block: _Block, shape: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids [tokens, layers, k] and valid [tokens, layers], without rejected drafts."""
        parts = []
        for step in steps:
            n = int(step.rows.n.sum())
            routes = step.values.get("routes")
            here = np.full((n, *shape), -1, np.int16) if routes is None else routes[:n]
            parts.append(here)
        ids = np.concatenate(parts)
        if (block.inputs != block.n).any():
            ids = ids[_within(block.n) < np.repeat(block.inputs, block.n)]
        wide = ids.view(np.uint16) if self.num_experts > 1 << 15 else ids
        missing = ids[..., 0] == -1
        ids = wide.astype(codecs.route_dtype(self.num_experts))
        if missing.any():
            ids[missing] = 0
        return ids, ~missing

    def _route_cell(
        self, start: int, ids: np.ndarray, valid: np.ndarray, gap: str, step: int, version: int
    ) -> dict[str, Any]:
        missing = None if valid.all() else json.dumps(_holes(start, valid, self.layers, gap))
        return {
            "start": start,
            "n": len(ids),
            "step": step,
            "weight_version": version,
            "ids": codecs.encode_plain(ids, self.num_experts),
            "valid": codecs.encode_bits(valid),
            "missing": missing,
        }

    # -- schedule -------------------------------------------------------------------------

    def _write_schedule(self, writer: TapeWriter, steps: Sequence[Step], block: _Block) -> None:
        counts = np.array([int(step.rows.n.sum()) for step in steps])
        names = sorted({name for step in steps for name in step.columns})
        writer.append(
            "steps",
            {
                "engine": self.engine,
                "step": [step.number for step in steps],
                "kind": [_kind(step) for step in steps],
                "t_ns": [step.t_ns for step in steps],
                "rows": [len(step.rows) for step in steps],
                "tokens": counts,
                "padded_tokens": [
                    None if step.padded is None else max(step.padded - int(count), 0)
                    for step, count in zip(steps, counts, strict=True)
                ],
                "graph": [step.graph for step in steps],
                **{name: [step.columns.get(name) for step in steps] for name in names},
            },
        )
        kind = np.concatenate([step.rows.kinds() for step in steps])
        mine = np.flatnonzero(block.wanted)
        # a cached prefix has a row of its own: nothing ran for it
        every = np.concatenate([mine, np.flatnonzero(block.wanted & (block.cached > 0))])
        ran = np.arange(len(every)) < len(mine)
        drafts = ran & (block.drafted[every] > 0)
        writer.append(
            "forwards",
            {
                **self._key(block.life[every]),
                "step": block.step[every],
                "row": block.row[every],
                "start": np.where(ran, block.start[every], 0),
                "n": np.where(ran, block.inputs[every], block.cached[every]),
                "kind": pa.array(KINDS).take(
                    pa.array(np.where(ran, kind[every], KINDS.index("cached")))
                ),
                "drafted": pa.array(block.drafted[every], pa.int32(), mask=~drafts),
                "accepted": pa.array(
                    (block.inputs - block.n + block.drafted)[every], pa.int32(), mask=~drafts
                ),
                "weight_version": pa.array(block.version[every], pa.int64(), mask=~ran),
                "kv_source": pa.array(["own", "shared"]).take(
                    pa.array((block.cached[every] > 0).astype(np.int64))
                ),
            },
        )


def prompt_job(engine: str, life: Life, logprobs: np.ndarray, vocab: int) -> Job:
    """A job for the logprobs of a prompt, where the caller had the engine score it.

    Args:
        engine: its uuid.
        life: whose prompt.
        logprobs: float32 [prompt_len - 1] of positions 1 and on; engines score prompts raw.
        vocab: width of the logits.
    """
    meaning = raw_semantics(vocab_size=vocab, dtype="float32", source="engine")
    row = {
        "engine": engine,
        "request": life.request,
        "sample": life.sample,
        "pass": 0,
        "start": 1,
        "n": len(logprobs),
        "ids": [life.prompt[1 : 1 + len(logprobs)]],
        "loss_mask": [np.zeros(len(logprobs), bool)],
        "raw": [np.asarray(logprobs, np.float32)],
        "semantics": pa.array([meaning], type=SEMANTICS),
    }
    return lambda writer: writer.append("tokens", row)


def _kind(step: Step) -> str:
    kinds = step.rows.kinds()
    if len(kinds) and np.isin(kinds, (1, 2)).all():
        return "decode"
    return "mixed" if np.isin(kinds, (1, 2)).any() else "prefill"


@dataclass(frozen=True)
class _Block:
    """All rows of several steps, int64 [rows]; names as in `Rows`.

    `wanted` says whether the life is recorded. `inputs` are the positions of a row that count:
    without rejected drafts, none of a life that is not. `token` is [rows, m].
    """

    life: np.ndarray
    wanted: np.ndarray
    start: np.ndarray
    n: np.ndarray
    drafted: np.ndarray
    seen: np.ndarray
    cached: np.ndarray
    step: np.ndarray
    row: np.ndarray
    version: np.ndarray
    token: np.ndarray
    inputs: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[Step], lives: Lives) -> _Block:
        sizes = np.array([len(step.rows) for step in steps])

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(step.rows, name) for step in steps])

        tokens = [_tokens(step) for step in steps]
        width = max(part.shape[1] for part in tokens)
        token = np.full((int(sizes.sum()), width), -1, np.int64)
        at = 0
        for part in tokens:
            token[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        life = joined("life")
        wanted = _of_lives(lives, life, lambda one: one.wanted)
        token[~joined("samples") | ~wanted] = -1
        n, drafted = joined("n"), joined("drafted")
        accepted = np.clip((token >= 0).sum(1) - 1, 0, drafted)
        return cls(
            life=life,
            wanted=wanted,
            start=joined("start"),
            n=n,
            drafted=drafted,
            seen=joined("seen"),
            cached=joined("cached"),
            step=np.repeat([step.number for step in steps], sizes),
            row=_within(sizes),
            version=np.repeat([step.version for step in steps], sizes),
            token=token,
            inputs=np.where(wanted, n - drafted + accepted, 0),
        )


def _tokens(step: Step) -> np.ndarray:
    token = step.values.get("token")
    if token is None:
        return np.full((len(step.rows), 1), -1, np.int64)
    values: np.ndarray = token
    return values.reshape(len(values), -1)


@dataclass(frozen=True)
class _Drawn:
    """Tokens that were drawn, sorted by life and position.

    Args:
        life: int64 of each token.
        position: int64.
        token: int64 ids.
        row: int64 row of the block that each was drawn from.
        column: which of the tokens of that row.
        vocab: int64 width of the logits.
        source: where the logprobs come from.
        logprobs: kind -> (float32 values, bool where there is one).
        starts: index of the first token of each run of positions of one life.
        sizes: tokens of each run.
        greedy: bool, where the token is the argmax.
        odd: bool, where it is not, and a greedy request should have drawn it.
    """

    life: np.ndarray
    position: np.ndarray
    token: np.ndarray
    row: np.ndarray
    column: np.ndarray
    vocab: np.ndarray
    source: list[str]
    logprobs: dict[str, tuple[np.ndarray, np.ndarray]]
    starts: np.ndarray
    sizes: np.ndarray
    greedy: np.ndarray
    odd: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[Step], block: _Block, lives: Lives) -> _Drawn:
        row, column = np.nonzero(block.token >= 0)
        life = block.life[row]
        position = (block.start + block.n - block.drafted)[row] + column
        order = np.lexsort((position, life))
        row, column, life, position = row[order], column[order], life[order], position[order]
        sizes = np.array([len(step.rows) for step in steps])
        which = np.repeat(np.arange(len(steps)), sizes)[row]
        logprobs = {}
        greedy = _of_lives(lives, life, lambda one: one.greedy)
        top, asked = _column(steps, "argmax", block.token.shape[1])
        other = asked[row, column] & (top[row, column] == 0) & greedy
        greedy &= ~other
        edited = _of_lives(lives, life, lambda one: bool(one.edits))
        for name in _LOGPROBS:
            values, there = _column(steps, name, block.token.shape[1])
            here, got = there[row, column], values[row, column]
            if name == "scaled":  # it was measured before any edit
                here &= ~edited
            if name == "processed":  # all mass on the argmax
                got, here = np.where(greedy, np.float32(0), got), (here & ~other) | greedy
            if here.any():
                logprobs[name] = (got, here)
        vocab = np.array([step.vocab for step in steps])[which]
        sources = [step.source for step in steps]
        runs = _runs(life, position, vocab)
        return cls(
            life=life,
            position=position,
            token=block.token[row, column],
            row=row,
            column=column,
            vocab=vocab,
            source=[sources[i] for i in which],
            logprobs=logprobs,
            starts=np.array([run.start for run in runs], np.int64),
            sizes=np.array([run.stop - run.start for run in runs], np.int64),
            greedy=greedy,
            odd=other & ~edited,
        )


def _column(steps: Sequence[Step], name: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs [rows, width] of the tokens of every row of the block, and where there is one."""
    n = sum(len(step.rows) for step in steps)
    values, there = np.zeros((n, width), np.float32), np.zeros((n, width), bool)
    at = 0
    for step in steps:
        measured = step.values.get(name)
        if measured is not None:
            part = measured.reshape(len(step.rows), -1)
            values[at : at + len(part), : part.shape[1]] = part
            there[at : at + len(part), : part.shape[1]] = True
        at += len(step.rows)
    return values, there


def _kept_sets(
    steps: Sequence[Step], block: _Block, drawn: _Drawn, lives: Lives
) -> tuple[np.ndarray, np.ndarray]:
    """The kept set of every drawn token.

    Returns:
        int64 sizes, the width of the logits for all of it and -1 where it was not recorded; and
        uint32 ids of the explicit sets, one after another.
    """
    greedy = drawn.greedy
    free = _of_lives(lives, drawn.life, lambda one: not one.truncation and not one.edits)
    width = max([s.values["kept"].shape[1] for s in steps if "kept" in s.values], default=0)
    counts = np.full(len(block.life), -1, np.int64)
    lists = np.zeros((len(block.life), width), np.uint32)
    large: dict[int, np.ndarray] = {}
    at = 0
    for step in steps:
        rows = slice(at, at + len(step.rows))
        if "kept" in step.values:
            counts[rows] = step.values["kept_n"]
            part = step.values["kept"]
            lists[rows, : part.shape[1]] = part
            over = (counts[rows] > part.shape[1]) & (counts[rows] != step.vocab)
            counts[rows] = np.where(over, -1, counts[rows])  # more than there was room for
        elif "bitmap" in step.values:
            bitmap = step.values["bitmap"]
            sizes = bitmaps.set_sizes(bitmap[None])[:, 0]
            counts[rows] = sizes
            for i in np.flatnonzero(sizes != step.vocab).tolist():
                large[at + i] = bitmaps.set_ids(bitmap[i : i + 1])
        at += len(step.rows)
    mine = np.where(drawn.column == 0, counts[drawn.row], -1)
    mine = np.where(free & (mine < 0), drawn.vocab, mine)
    mine = np.where(greedy, 1, mine)
    held = np.where(mine == drawn.vocab, 0, np.maximum(mine, 0))
    if large:
        ids = [
            drawn.token[i : i + 1].astype(np.uint32)
            if greedy[i]
            else large.get(int(drawn.row[i]), lists[drawn.row[i], : held[i]])[: held[i]]
            for i in range(len(mine))
        ]
        return mine, np.concatenate(ids) if ids else np.zeros(0, np.uint32)
    taken = lists[drawn.row] if width else np.zeros((len(mine), 1), np.uint32)
    taken[greedy, 0] = drawn.token[greedy]
    return mine, taken[np.arange(taken.shape[1]) < held[:, None]]


def _of_lives(lives: Lives, life: np.ndarray, ask: Any) -> np.ndarray:
    """A bool of each life, asked once a life."""
    some, inverse = np.unique(life, return_inverse=True)
    answers = np.array([ask(lives[int(i)]) for i in some], bool)
    of_each: np.ndarray = answers[inverse]
    return of_each


def _within(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ... inside each of several ranges of the given sizes."""
    ends = np.cumsum(sizes)
    place: np.ndarray = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
    return place


def _runs(life: np.ndarray, position: np.ndarray, *same: np.ndarray) -> list[slice]:
    """Where consecutive positions of one life begin and end, `same` not changing in between."""
    if not len(life):
        return []
    new = (np.diff(life) != 0) | (np.diff(position) != 1)
    for values in same:
        new |= np.diff(values.astype(np.int64)) != 0
    edges = np.concatenate([[0], np.flatnonzero(new) + 1, [len(life)]])
    return [slice(a, b) for a, b in pairwise(edges.tolist())]


def _holes(start: int, valid: np.ndarray, layers: tuple[int, ...], reason: str) -> list[list[Any]]:
    """[position, n, layer or None, reason] of what is missing: whole positions, then layers."""
    none: np.ndarray = ~np.asarray(valid.any(1))
    holes: list[list[Any]] = [[start + a, b - a, None, reason] for a, b in _stretches(none)]
    for column, layer in enumerate(layers):
        gone = ~valid[:, column] & ~none
        holes += [[start + a, b - a, layer, reason] for a, b in _stretches(gone)]
    return holes


def _stretches(flags: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _nullable(values: np.ndarray, there: np.ndarray, sizes: np.ndarray) -> pa.ListArray:
    """List column with nulls; the bits of the values are kept."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    mask = None if there.all() else ~there
    flat = pa.array(values, type=pa.float32(), mask=mask, from_pandas=False)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)
