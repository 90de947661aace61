"""Which sequences the tapes of `viewer_tape.py` hold, when they ran, and every value in them.

Not a benchmark. Every value is a function of its place (a hash of sequence, position and layer), so
nothing has to be held in memory, and both tapes and the report agree.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rolltape.store import Key

ENGINES = ("a1f0c29b" * 4, "a2d4e6f8" * 4)
TRAINER = "b37d11c5" * 4
ROWS, BLOCK, CHUNK, GROUP = 256, 128, 2048, 8
EXPERTS, K, VOCABULARY = 128, 8, 151_936
T0 = 1_780_000_000_000_000_000
KINDS = ("prefill", "decode", "recompute", "cached")
PREFILL, DECODE, RECOMPUTE, CACHED = range(4)

# -- values, each a function of its place ---------------------------------------------------


def mixed(index: np.ndarray, salt: int) -> np.ndarray:
    """uint64: splitmix64 of an index, another one for every salt."""
    start = (salt * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(index: np.ndarray, salt: int) -> np.ndarray:
    """float64 in (0, 1)."""
    return ((mixed(index, salt) >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)


def token_ids(index: np.ndarray) -> np.ndarray:
    """uint32, frequent ones more often."""
    return (VOCABULARY * uniform(index, 1) ** 3).astype(np.uint32)


def logprobs(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 of both sides: four in nine tokens bit-equal, a few far apart, a very few NaN."""
    size = -np.log(uniform(index, 2))
    a = (-0.3 * size * size).astype(np.float32)
    hashed = mixed(index, 3)
    size = 10.0 ** (6 * uniform(index, 4) - 7)
    sign = np.where(hashed & np.uint64(1), 1.0, -1.0)
    b = np.minimum(a + np.where(hashed % np.uint64(9) < 4, 0.0, size * sign), 0).astype(np.float32)
    a[hashed % np.uint64(4_000_037) == 0] = np.nan
    return a, b


@dataclass(frozen=True)
class Choices:
    """Routes of some positions [n], [layers]: ids uint8 [n, layers, k] of both sides."""

    a: np.ndarray
    b: np.ndarray
    flipped: np.ndarray
    swapped: np.ndarray
    margin: np.ndarray


def choices(index: np.ndarray, layers: int, *, sides: str = "ab") -> Choices:
    """Each layer flips a little more often than the one before it, and flips have small margins."""
    hashed = mixed(index[:, None] * 1024 + np.arange(layers), 5)
    first = (hashed & np.uint64(127)).astype(np.uint8)
    stride = (((hashed >> np.uint64(8)) & np.uint64(31)) * np.uint64(2) + np.uint64(1)).astype("u1")
    a = (first[..., None] + stride[..., None] * np.arange(K, dtype=np.uint8)) & 127
    rate = (65536 * 0.02 * (np.arange(layers) + 1) / layers).astype(np.uint64)
    flipped = ((hashed >> np.uint64(16)) & np.uint64(0xFFFF)) < rate
    swapped = (((hashed >> np.uint64(32)) & np.uint64(0xFFFF)) < 1300) & ~flipped
    part = ((hashed >> np.uint64(40)) & np.uint64(0xFFFF)).astype(np.float32) / 65536
    margin = np.where(flipped, 0.003 * part, 0.02 + 0.3 * part).astype(np.float32)
    b = a
    if "b" in sides:
        b = a.copy()
        b[..., K - 1] = np.where(flipped, (first + stride * np.uint8(K)) & 127, a[..., K - 1])
        b[..., 0] = np.where(swapped, a[..., 1], a[..., 0])
        b[..., 1] = np.where(swapped, a[..., 0], a[..., 1])
    return Choices(a, b, flipped, swapped, margin)


# -- which sequences there are --------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Arrays over the sequences, in the order in which they are opened.

    Args:
        layers: MoE layers, which are all layers.
        prompt: int64 prompt tokens.
        length: int64 prompt and response.
        offset: int64, index of their first token among all tokens.
        cached: int64 prompt tokens that the prefix cache has.
        preempted: int64, tokens drawn before a preemption; 0 is none.
        finish: index into `FINISH`.
        dense: bool, has routes and errors of layers.
    """

    layers: int
    prompt: np.ndarray
    length: np.ndarray
    offset: np.ndarray
    cached: np.ndarray
    preempted: np.ndarray
    finish: np.ndarray
    dense: np.ndarray

    FINISH = ("stop", "length", "abort", "open")

    def __len__(self) -> int:
        return len(self.prompt)

    def engine(self, i: int) -> int:
        return i // GROUP % len(ENGINES)

    def key(self, i: int, *, trainer: bool = False) -> Key:
        engine = TRAINER if trainer else ENGINES[self.engine(i)]
        return Key(engine, f"step-{i // (128 * GROUP)}-{i // GROUP}", i % GROUP)

    def group(self, i: int) -> str:
        return f"prompt-{i // GROUP}"

    def scored(self) -> np.ndarray:
        """Sequences that the trainer sees: those that ended by themselves."""
        return np.flatnonzero(self.finish < 2)

    def mask(self, i: int) -> np.ndarray:
        """bool [T]: the loss counts the response, but for what a tool said in every tenth."""
        out = np.arange(self.length[i]) >= self.prompt[i]
        if i % 10 == 0:
            out[self.prompt[i] + 50 : self.prompt[i] + 90] = False
        return out

    def tokens(self, i: int) -> np.ndarray:
        """int64 [T]: indices of the tokens among all tokens."""
        return self.offset[i] + np.arange(self.length[i])


def make_plan(tokens: int, sequences: int, layers: int, dense: int) -> Plan:
    """Lengths of a long-tailed kind that add up to about `tokens`."""
    rng = np.random.default_rng(11)
    mean = tokens / sequences
    prompts = np.repeat(rng.lognormal(0, 0.6, -(-sequences // GROUP)), GROUP)[:sequences]
    prompt = np.clip(prompts / prompts.mean() * 0.15 * mean, 4, 6000).astype(np.int64)
    shape = rng.lognormal(0, 0.9, sequences)
    response = np.zeros(sequences, np.int64)
    scale = 0.85 * mean / shape.mean()
    for _ in range(4):  # what the longest lose goes to the others
        response = np.clip(shape * scale, 2, 16_384).astype(np.int64)
        scale *= (tokens - prompt.sum()) / response.sum()
    length = prompt + response
    finish = np.where(rng.random(sequences) < 0.12, 1, 0)
    finish[rng.random(sequences) < 0.01] = 2
    finish[-max(1, sequences // 1000) :] = 3
    preempted = np.where(rng.random(sequences) < 0.01, response // 2, 0)
    cached = np.where(np.arange(sequences) % GROUP, prompt // 16 * 16, 0)
    cached = np.where(cached == prompt, cached - 16, cached).clip(0)
    scored = np.flatnonzero(finish < 2)
    chosen = np.zeros(sequences, bool)
    chosen[scored[np.linspace(0, len(scored) - 1, min(dense, len(scored))).astype(int)]] = True
    offset = np.cumsum(length) - length
    return Plan(layers, prompt, length, offset, cached, preempted, finish, chosen)


# -- the schedule of one engine -------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Forwards of one sequence in steps that follow each other; decoding goes on by a token each.

    Arrays over runs, sorted by first step: `sequence`, `slot`, `first` step, `steps`, `start`
    position, `n` positions, `kind`.
    """

    sequence: np.ndarray
    slot: np.ndarray
    first: np.ndarray
    steps: np.ndarray
    start: np.ndarray
    n: np.ndarray
    kind: np.ndarray


def schedule(plan: Plan, engine: int) -> Runs:
    """Every row takes the next sequence when its last one is done."""
    free = [(slot // 4, slot) for slot in range(ROWS)]
    found: list[tuple[int, ...]] = []
    for i in range(len(plan)):
        if plan.engine(i) != engine:
            continue
        step, slot = heapq.heappop(free)
        prompt, drawn = int(plan.prompt[i]), int(plan.length[i] - plan.prompt[i])
        at = int(plan.cached[i])
        if at:
            found.append((i, slot, step, 1, 0, at, CACHED))
        while at < prompt:
            n = min(CHUNK, prompt - at)
            found.append((i, slot, step, 1, at, n, PREFILL))
            at, step = at + n, step + 1
        cut = int(plan.preempted[i])
        if cut:
            found.append((i, slot, step, cut, prompt, 1, DECODE))
            step += cut + 20
            found.append((i, slot, step, 1, 0, prompt + cut + 1, RECOMPUTE))
            step, prompt, drawn = step + 1, prompt + cut + 1, drawn - cut - 1
        if drawn > 1:
            found.append((i, slot, step, drawn - 1, prompt, 1, DECODE))
            step += drawn - 1
        heapq.heappush(free, (step, slot))
    columns = np.array(found, np.int64)
    return Runs(*columns[np.argsort(columns[:, 2], kind="stable")].T)


@dataclass(frozen=True)
class Forwards:
    """All forwards of some steps, by step and row: int64 arrays."""

    sequence: np.ndarray
    step: np.ndarray
    row: np.ndarray
    start: np.ndarray
    n: np.ndarray
    kind: np.ndarray


def blocks(runs: Runs) -> Iterator[tuple[int, int, Forwards]]:
    """(first step, one behind the last, forwards) of every block of steps."""
    end, live, taken = runs.first + runs.steps, np.zeros(0, np.int64), 0
    for low in range(0, int(end.max()), BLOCK):
        high = min(low + BLOCK, int(end.max()))
        more = int(np.searchsorted(runs.first, high))
        live = np.append(live[end[live] > low], np.arange(taken, more))
        taken = more
        begin = np.maximum(runs.first[live], low)
        count = np.minimum(end[live], high) - begin
        run = np.repeat(live, count)
        step = np.arange(len(run)) - np.repeat(np.cumsum(count) - count - begin, count)
        kind = runs.kind[run]
        start = runs.start[run] + np.where(kind == DECODE, step - runs.first[run], 0)
        ran = kind != CACHED
        order = np.lexsort((~ran, runs.slot[run], step))
        run, step, kind, start, ran = (x[order] for x in (run, step, kind, start, ran))
        # a cached prefix shares the row of the forward that goes on from it
        number = np.cumsum(ran) - ran
        row = number - number[np.searchsorted(step, step)] - (~ran).astype(int)
        yield low, high, Forwards(runs.sequence[run], step, row, start, runs.n[run], kind)
