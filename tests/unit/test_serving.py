"""Steps of a serving engine become sequences: rows are attributed by absolute position only."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import rolltape  # noqa: E402
from rolltape import store  # noqa: E402
from rolltape.recorder.serving.batch import Life, Roster, Step, Table  # noqa: E402
from rolltape.recorder.serving.device import (  # noqa: E402
    SLAB_BYTES,
    Outlet,
    RouteBuffer,
    Slabs,
)
from rolltape.recorder.serving.distribution import measure, measure_verified  # noqa: E402
from rolltape.recorder.serving.prefix import Prefix  # noqa: E402
from rolltape.recorder.serving.scribe import Scribe  # noqa: E402
from rolltape.recorder.serving.wire import pack, travelling, unpack  # noqa: E402

ENGINE = "ab" * 16
LAYERS, K, EXPERTS, VOCAB = (1, 3), 2, 8, 100


class Engine:
    """Says what it did: routes of a position depend on (life, position, how often it ran)."""

    def __init__(self, tmp_path: Path, *, block_size: int = 4) -> None:
        self.tape = tmp_path / "tape"
        store.create_tape(self.tape, role="rollout", provenance={})
        self.roster = Roster(block_size)
        self.scribe = Scribe(
            engine=ENGINE,
            layers=LAYERS,
            k=K,
            num_experts=EXPERTS,
            prefix=Prefix(block_size) if block_size else None,
        )
        self.steps: list[Step] = []
        self.ran: dict[tuple[int, int], int] = {}

    def life(self, name: str, n: int, blocks: list[int], **how: Any) -> Life:
        prompt = (np.arange(n) + 10).astype(np.uint32)
        return self.roster.add(Life(name, 0, prompt, blocks=blocks, **how))

    def route(self, life: Life, position: int, time: int = 1) -> list[list[int]]:
        base = life.index * 3 + position + 5 * time
        return [[(base + layer) % EXPERTS, (base + layer + 4) % EXPERTS] for layer in LAYERS]

    def step(self, *rows: tuple[Life, int, int], tokens: Any = None, drafted: Any = None) -> None:
        lives = [life for life, _, _ in rows]
        placed = self.roster.place(
            lives,
            np.array([start for _, start, _ in rows]),
            np.array([n for _, _, n in rows]),
            drafted,
        )
        routes = []
        for life, start, n in rows:
            for position in range(start, start + n):
                time = self.ran[life.index, position] = self.ran.get((life.index, position), 0) + 1
                routes.append(self.route(life, position, time))
        number = len(self.steps)
        if tokens is None:
            tokens = [[50 + number] for _ in rows]
        values = {
            "token": torch.tensor(tokens),
            "raw": torch.full((len(rows),), -float(number) - 1),
            "routes": torch.tensor(routes, dtype=torch.int16),
        }
        self.steps.append(
            Step(number=number, t_ns=number, rows=placed, version=0, values=values, vocab=VOCAB)
        )

    def write(self, *blocks: slice) -> Any:
        with store.TapeWriter(self.tape) as writer:
            for block in blocks or (slice(None),):
                self.scribe.meet(travelling(self.roster.take_new()))
                self.scribe.write(
                    writer, unpack(pickle.loads(pickle.dumps(pack(self.steps[block]))))
                )
            for life in self.roster.lives.values():
                writer.append(
                    "sequences",
                    {
                        "engine": ENGINE,
                        "request": life.request,
                        "sample": 0,
                        "pass": 0,
                        "prompt_len": len(life.prompt),
                        "finish": "open",
                    },
                )
        return {s.key.request: s for s in rolltape.open(self.tape)}

    def check(self, sequence: Any, life: Life, upto: int) -> None:
        routes = sequence.routes()
        want = np.array([self.route(life, p) for p in range(upto)])
        assert routes.valid[:upto].all()
        assert (routes.ids[:upto] == want).all()


@pytest.mark.parametrize("cut", [[slice(None)], [slice(0, 1), slice(1, 3), slice(3, None)]])
def test_chunks_that_do_not_divide_the_prompt(tmp_path: Path, cut: list[slice]) -> None:
    engine = Engine(tmp_path)
    a, b = engine.life("a", 7, [1, 2, 3]), engine.life("b", 2, [4, 5])
    engine.step((a, 0, 3))
    engine.step((b, 0, 2), (a, 3, 3))  # the order of rows is the engine's
    engine.step((a, 6, 1), (b, 2, 1))
    engine.step((b, 3, 1), (a, 7, 1))
    found = engine.write(*cut)
    assert found["a"].tokens.values.tolist() == [*a.prompt, 52, 53]
    assert found["b"].tokens.values.tolist() == [*b.prompt, 51, 52, 53]
    assert found["a"].logprob("raw").values[7:].tolist() == [-3.0, -4.0]
    engine.check(found["a"], a, 8)
    engine.check(found["b"], b, 4)


def test_what_is_forwarded_again_stands_apart(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    a = engine.life("a", 3, [1, 2])
    engine.step((a, 0, 3))
    engine.step((a, 3, 1))
    engine.step((a, 0, 5))  # preempted, and everything known is run again
    engine.step((a, 5, 1))
    found = engine.write()["a"]
    assert found.tokens.values.tolist() == [*a.prompt, 50, 51, 52, 53]
    engine.check(found, a, 6)  # the first forward is the record
    kinds = found.forwards.column("kind").to_pylist()
    assert kinds == ["prefill", "decode", "recompute", "decode"]
    again = found.routes(again=1)
    assert (again.ids[:4] == [engine.route(a, p, 2) for p in range(4)]).all()


def test_a_cached_prefix_has_the_routes_of_who_ran_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    a = engine.life("a", 9, [1, 2, 3])
    engine.step((a, 0, 9))
    b = engine.life("b", 9, [1, 2, 7])  # shares two blocks of four positions
    engine.step((b, 8, 1), (a, 9, 1))
    found = engine.write()["b"]
    routes = found.routes()
    want = [engine.route(a, p) for p in range(8)] + [engine.route(b, 8)]
    assert routes.valid[:9].all()
    assert (routes.ids[:9] == want).all()
    assert found.forwards.column("kind").to_pylist().count("cached") == 1


def test_a_prefix_of_unknown_blocks_is_missing_with_the_reason(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    b = engine.life("b", 6, [8, 9])
    engine.step((b, 4, 2))
    routes = engine.write()["b"].routes()
    assert not routes.valid[:4].any()
    assert routes.valid[4:6].all()
    assert routes.missing == ((0, 4, None, "cached"),)


def test_who_filled_a_block_is_unknown_once_steps_are_lost(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    a = engine.life("a", 5, [1, 2])
    engine.step((a, 0, 5))
    b = engine.life("b", 6, [1, 3])
    engine.step((b, 4, 2))
    lost = engine.scribe
    with store.TapeWriter(engine.tape) as writer:
        lost.meet(travelling(engine.roster.take_new()))
        lost.write(writer, unpack(pack(engine.steps[:1])))
        lost.lose()
        lost.write(writer, unpack(pack(engine.steps[1:])))
        for life in (a, b):
            row = {"engine": ENGINE, "request": life.request, "sample": 0, "pass": 0}
            writer.append("sequences", {**row, "prompt_len": len(life.prompt), "finish": "open"})
    found = {s.key.request: s for s in rolltape.open(engine.tape)}
    engine.check(found["a"], a, 5)
    routes = found["b"].routes()
    assert not routes.valid[:4].any() and routes.missing == ((0, 4, None, "cached"),)


def test_rejected_drafts_are_no_rows(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    a = engine.life("a", 3, [1, 2, 3])
    engine.step((a, 0, 3))
    engine.step((a, 3, 4), tokens=[[60, 61, -1, -1]], drafted=np.array([3]))
    engine.step((a, 5, 1))
    found = engine.write()["a"]
    assert found.tokens.values.tolist() == [*a.prompt, 50, 60, 61, 52]
    row = found.forwards.to_pylist()[1]
    assert (row["kind"], row["n"], row["drafted"], row["accepted"]) == ("verify", 2, 3, 1)
    assert found.routes().ids[5].tolist() == engine.route(a, 5, 2)


def test_requests_that_are_not_wanted_leave_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    a, b = engine.life("a", 3, [1]), engine.life("b", 3, [2], wanted=False)
    engine.step((b, 0, 3), (a, 0, 3))
    engine.step((a, 3, 1), (b, 3, 1))
    found = engine.write()
    engine.check(found["a"], a, 4)
    assert found["b"].routes() is None
    assert not found["b"].tokens.valid.any()
    assert {row["request"] for row in rolltape.open(engine.tape).rows("forwards")} == {"a"}


def test_kept_sets_of_greedy_cut_and_free_rows(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    cut = engine.life("cut", 2, [1], truncation=("top_k=3",), top_k=3)
    greedy = engine.life("greedy", 2, [2], greedy=True, truncation=("greedy",))
    free = engine.life("free", 2, [3])
    logits = torch.randn(3, VOCAB)
    masked = logits.clone()
    masked[0][masked[0] < masked[0].topk(3).values[-1]] = -torch.inf
    token = masked.argmax(-1)
    engine.step((cut, 0, 2), (greedy, 0, 2), (free, 0, 2), tokens=token[:, None].tolist())
    values = measure(token=token, raw=logits, masked=masked, temperature=None, top_k=3)
    engine.steps[0].values.update(values)
    found = engine.write()
    sets = {name: sequence.supports() for name, sequence in found.items()}
    want = set(logits[0].topk(3).indices.tolist())
    assert set(sets["cut"].at(2).tolist()) == want
    assert sets["greedy"].at(2).tolist() == [int(token[1])]
    assert sets["free"].at(2) is None  # all of it
    assert found["greedy"].logprob("processed").values[2] == 0
    torch.testing.assert_close(
        torch.from_numpy(found["cut"].logprob("processed").values[2:3].copy()),
        masked[0].log_softmax(-1)[token[0]][None],
    )


def test_the_route_buffer_is_empty_between_steps() -> None:
    buffer = RouteBuffer(8, 1, 2, torch.device("cpu"))
    buffer.hook(0)(torch.tensor([[1, 2], [3, 4]]))
    outlet = Outlet(torch.device("cpu"))
    host = buffer.leave(3, outlet)
    assert outlet.done() == (None, 0)
    assert host[:, 0].tolist() == [[1, 2], [3, 4], [-1, -1]]
    assert (buffer.take(8) == -1).all()


@pytest.mark.parametrize("block_size", [0, 4])
def test_rows_are_placed_the_same_with_kept_indices(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    quick, slow = Roster(block_size), Roster(block_size)
    for roster in (quick, slow):
        for i in range(6):
            roster.add(Life(f"r{i}", 0, np.arange(3 + i, dtype=np.uint32), blocks=[i]))
    done = [0] * 6
    known: dict[tuple[int, ...], np.ndarray] = {}
    rows = [0, 1, 2]
    for _ in range(300):
        if rng.random() < 0.2:
            rows = rng.permutation(6)[: rng.integers(1, 7)].tolist()
        if rng.random() < 0.05:  # preempted: from the start again
            done[rows[0]] = 0
        lives = [quick.lives[i] for i in rows]
        index = known.setdefault(tuple(rows), np.array(rows))
        start = np.array([done[i] for i in rows])
        prompts = np.array([3 + i for i in rows])
        left = np.maximum(prompts - start, 1)
        n = np.where(rng.random(len(rows)) < 0.8, left, 1)
        a = quick.place(lives, start, n, index=index)
        b = slow.place([slow.lives[i] for i in rows], start, n)
        for name in ("life", "start", "n", "drafted", "samples", "prompt", "seen", "cached"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist(), name
        assert a.blocks == b.blocks
        for i, more in zip(rows, n.tolist(), strict=True):
            done[i] += more


def test_columns_of_a_table_arrive_like_values(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    life = engine.life("a", 2, [1])
    engine.step((life, 0, 2))
    (step,) = engine.steps
    words = torch.tensor([np.float32(-1.5).view(np.int32), 7, 3, 1, 4], dtype=torch.int32)
    layout = {
        "raw": (0, "float32", (1,)), "token": (1, "int32", (1, 1)),
        "kept_n": (2, "int32", (1,)), "kept": (3, "int32", (1, 2)),
    }  # fmt: skip
    one = replace(step, values={}, table=Table(data=words, layout=layout), cut=False)
    (got,) = unpack(pickle.loads(pickle.dumps(pack([one]))))
    assert {name: values.tolist() for name, values in got.values.items()} == {
        "raw": [-1.5], "scaled": [-1.5], "processed": [-1.5],
        "token": [[7]], "kept_n": [3], "kept": [[1, 4]],
    }  # fmt: skip
    assert one.nbytes >= words.nbytes
    cut = replace(one, cut=True)
    assert "processed" not in unpack(pack([cut]))[0].values


def test_a_second_recording_of_an_engine_reads_the_buffer_that_its_graphs_write_to() -> None:
    from types import SimpleNamespace

    from rolltape.recorder.vllm.facts import Moe
    from rolltape.recorder.vllm.record import Recorder

    class Router:
        capture_fn: Any = None

        def set_capture_fn(self, capture_fn: Any) -> None:
            self.capture_fn = capture_fn

    router: Any = Router()
    moe = Moe(layers=(1,), routers=(router,), k=2, num_experts=4)
    runner, recorder = SimpleNamespace(), SimpleNamespace(device=torch.device("cpu"))
    first: Any = Recorder._bind_routers(recorder, moe, runner)
    first.hook(0)(torch.tensor([[1, 2]]))  # as a step does that nobody records
    second = Recorder._bind_routers(recorder, moe, runner)
    assert second is first and (first.take(1) == -1).all()


def test_accepted_drafts_have_logprobs_of_their_own_rows() -> None:
    torch.manual_seed(0)
    drafted = np.array([2, 0, 3])
    raw, temperature = torch.randn(8, VOCAB), torch.tensor([0.5, 1.0, 2.0])
    token = torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1], [1, 2, 3, 4]])
    found = measure_verified(token=token, raw=raw, drafted=drafted, temperature=temperature)
    first = 0
    for row, (n, ids) in enumerate(zip(drafted.tolist(), token.tolist(), strict=True)):
        for column, one in enumerate(ids):
            if one >= 0:
                logits = raw[first + column].double()
                for name, scale in (("raw", 1.0), ("scaled", float(temperature[row]))):
                    want = (logits / scale).log_softmax(-1)[one]
                    assert found[name][row, column].item() == pytest.approx(want.item(), abs=1e-5)
                assert found["argmax"][row, column] == (logits.argmax() == one)
        first += n + 1


def test_a_greedy_request_that_was_sampled_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    life = engine.life("a", 3, [], greedy=True, truncation=("greedy",))
    engine.step((life, 0, 3))
    engine.step((life, 3, 3), tokens=[[5, 6, -1]], drafted=np.array([2]))
    engine.steps[1].values["argmax"] = torch.tensor([[True, False, False]])
    engine.steps[1].values["processed"] = torch.tensor([[-1.0, -2.0, -3.0]])
    (sequence,) = engine.write().values()
    assert sequence.tokens.values[3:].tolist() == [50, 5, 6]
    processed, supports = sequence.logprob("processed"), sequence.supports()
    assert processed.valid[3:].tolist() == [True, True, False]
    assert [supports.at(p) is None for p in (3, 4, 5)] == [False, False, True]
    events = rolltape.open(engine.tape).rows("events")
    (event,) = (row for row in events if row["kind"] == "finding")
    assert (event["request"], event["start"]) == ("a", 5) and "RT409" in event["detail"]


def test_what_copies_hold_is_counted_with_what_they_leave_unused() -> None:
    rng, slabs = np.random.default_rng(0), Slabs(pinned=False)
    queue: deque[tuple[Any, int]] = deque()
    sizes = [5, 3 << 20, 3 << 20, 9 << 20, *rng.integers(1, 3 << 20, 200).tolist()]
    for size in sizes:
        slabs.taken = 0
        room = slabs.room(size)
        assert len(room) == size and room.data_ptr() % 64 == 0
        queue.append((room, slabs.taken))
        if len(queue) > 20:
            queue.popleft()
        storages = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r, _ in queue}
        held, counted = sum(storages.values()), sum(taken for _, taken in queue)
        assert held - 2 * SLAB_BYTES <= counted <= held + SLAB_BYTES


def test_a_step_counts_what_it_keeps_from_being_freed(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.step((engine.life("a", 3, []), 0, 3))
    (step,) = engine.steps
    assert replace(step, held=5 << 20).nbytes >= 5 << 20
    assert replace(step, held=1).nbytes == step.nbytes > 1
