"""Steps in which every request goes on by one token, on a fake engine: the rest is the recorder."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import rolltape  # noqa: E402
from rolltape import store  # noqa: E402
from rolltape.recorder.options import Options  # noqa: E402
from rolltape.recorder.serving.batch import Life, Step  # noqa: E402
from rolltape.recorder.session import Session  # noqa: E402
from rolltape.recorder.vllm import record  # noqa: E402
from rolltape.recorder.vllm.facts import Moe  # noqa: E402

VOCAB, BLOCK = 50, 4


class Router:
    capture_fn: Any = None

    def set_capture_fn(self, capture_fn: Any) -> None:
        self.capture_fn = capture_fn


class Runner:
    """What holds the recorder."""


class Engine:
    """Runs steps that a test lays out; an expert of a position follows from its request and place.

    Args:
        tape: folder of the tape.
        quiet: whether steps may stay on the device.
    """

    def __init__(self, tape: Path, *, quiet: bool = True, **options: Any) -> None:
        store.create_tape(tape, role="rollout")
        self.ended, self.prompts = False, dict[str, int]()
        self.tape, self.session = tape, Session(tape, Options(**options))
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1),
            cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=BLOCK),
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
            instance_id="fake",
        )
        model = torch.nn.Linear(1, 1)
        model.load_weights = lambda *_: None
        self.runner: Any = Runner()
        self.runner.vllm_config, self.runner.device = config, torch.device("cpu")
        self.runner.max_num_tokens, self.runner.get_model = 64, lambda: model
        self.recorder = record.recorder_of(self.session, self.runner)
        self.recorder._stale = False
        self.recorder._may_be_quiet = quiet

    def step(
        self,
        rows: list[tuple[str, int, int]],
        *,
        new: dict[str, tuple[list[int], list[int], int]] | None = None,
        blocks: dict[str, list[int]] | None = None,
        resumed: set[str] | None = None,
        finished: list[str] | None = None,
        fault: str | None = None,
        drawn: list[int] | None = None,
    ) -> None:
        """One step.

        Args:
            rows: (name, first position, tokens) in row order.
            new: name -> (prompt, KV blocks, positions that came with them).
            blocks: KV blocks that requests which go on are given.
            resumed: those that come back, with all of their blocks.
            finished: names that are over.
            fault: hook that raises.
            drawn: tokens, by row.
        """
        new, blocks = new or {}, blocks or {}
        self.prompts |= {name: len(prompt) for name, (prompt, _, _) in new.items()}
        old = [name for name, _, _ in rows if name not in new]
        params = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        scheduled = SimpleNamespace(
            total_num_scheduled_tokens=sum(n for _, _, n in rows),
            num_scheduled_tokens={name: n for name, _, n in rows},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, sampling_params=params, prompt_token_ids=prompt,
                    block_ids=[list(own)], num_computed_tokens=cached,
                ) for name, (prompt, own, cached) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, resumed_req_ids=resumed or set(),
                new_block_ids=[[blocks[name]] if name in blocks else None for name in old],
            ),
            finished_req_ids=set(finished or ()), scheduled_spec_decode_tokens={},
            preempted_req_ids=set(),
        )  # fmt: skip
        recorder = self.recorder
        recorder.guard("vllm.schedule", recorder.schedule, scheduled)
        if not recorder.going:
            return

        def hook(name: str, call: Callable[[], None]) -> None:
            def raises() -> None:
                if fault == name:
                    raise RuntimeError("injected")
                call()

            recorder.guard(f"vllm.{name}", raises)

        start, n = (np.array([row[i] for row in rows]) for i in (1, 2))
        hook("rows", lambda: recorder.launch([name for name, _, _ in rows], start, n, None))
        experts = [
            expert(name, p) for name, first, count in rows for p in range(first, first + count)
        ]
        assert recorder._buffer is not None
        recorder._buffer.ids[: len(experts)] = torch.tensor(experts, dtype=torch.int16)[
            :, None, None
        ]
        if not recorder.going:
            return
        hook("routes", recorder.take_routes)
        logits = torch.linspace(0, 1, len(rows) * VOCAB).view(len(rows), VOCAB)
        hook("logits", lambda: recorder.before_sampling(logits, True))
        token = torch.tensor([[t] for t in drawn or [7] * len(rows)])

        def sampled() -> None:
            recorder.sampled(token, None, torch.ones(len(rows)), None, None)
            recorder.finish()

        hook("tokens", sampled)

    def end(self) -> Any:
        """Close the recording, once; its tape."""
        if not self.ended:
            self.ended = True
            self.session.flush()
            self.session.drain()
            self.recorder.blocks.close()
            self.session.close()
            with store.TapeWriter(self.tape) as writer:  # as the front end does
                for name, size in self.prompts.items():
                    key = {"engine": "ab" * 16, "request": name, "sample": 0, "pass": 0}
                    row = {**key, "prompt_len": size, "finish": "open"}
                    writer.append("sequences", {k: [v] for k, v in row.items()})
        return rolltape.open(self.tape)


def expert(name: str, position: int) -> int:
    return (sum(map(ord, name)) * 31 + position * 7) % 128


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = Moe(layers=(1, 3), routers=(Router(), Router()), k=1, num_experts=128)
    facts = {"process": "worker", "effective": {}, "columns": {"cache": "paged"}}
    monkeypatch.setattr(record, "engine_of", lambda _: "ab" * 16)
    monkeypatch.setattr(record, "find_moe", lambda *_: moe)
    monkeypatch.setattr(record, "worker_facts", lambda *_: (dict(facts), {}))
    monkeypatch.setattr(record, "_tensor_ranks", lambda: (0, 1))
    monkeypatch.setattr(record, "_graph", lambda: None)
    monkeypatch.setattr(record.tactics, "observe_all", lambda _: None)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    it = Engine(tmp_path / "tape")
    yield it
    it.end()


def decode(engine: Engine, name: str, first: int, end: int, **how: Any) -> None:
    """Steps of one request alone; it gets a KV block when it needs one: number 100 + position."""
    for position in range(first, end):
        blocks = {name: [100 + position]} if position % BLOCK == 0 else {}
        fault = how.get("fault") if position == how.get("at") else None
        engine.step([(name, position, 1)], blocks=blocks, fault=fault)


def start(engine: Engine, name: str = "a-0", tokens: int = 5) -> None:
    prompt = list(range(tokens))
    engine.step([(name, 0, tokens)], new={name: (prompt, [10, 11], 0)})


def shared(engine: Engine, upto: int) -> Any:
    """End `a`; `b` comes with its first KV blocks. Its sequence."""
    own = [10, 11, *range(108, 100 + upto, BLOCK)]
    prompt = list(range(upto + 2))
    engine.step([("b-0", upto, 2)], new={"b-0": (prompt, [*own, 999], upto)}, finished=["a-0"])
    (sequence,) = [s for s in engine.end() if s.key.request == "b-0"]
    return sequence.routes()


def out_of_memory(_: Any) -> Any:
    raise RuntimeError("out of memory")


def gaps(tape: Any) -> list[dict[str, Any]]:
    return [json.loads(row["detail"]) for row in tape.rows("events") if row["kind"] == "gap"]


def test_quiet_steps_say_what_loud_ones_say(tmp_path: Path) -> None:
    found = []
    for quiet in (True, False):
        engine = Engine(tmp_path / str(quiet), quiet=quiet)
        kept: list[int] = []
        steady: Any = engine.recorder._steady
        add = steady.add

        def count(*args: Any, kept: Any = kept, add: Any = add) -> None:
            kept.append(args[0])
            add(*args)

        steady.add = count
        rng = random.Random(1)
        place: dict[str, int] = {}
        blocks: dict[str, int] = {}
        ended: list[str] = []
        for number in range(120):
            new, given, resumed = {}, {}, set()
            if number % 17 == 0 and len(place) < 4:
                name = f"r{number}-0"
                size = rng.randint(1, 9)
                place[name] = 0
                blocks[name] = -(-size // BLOCK)
                own = [1000 * number + i for i in range(blocks[name])]
                new[name] = (list(range(size)), own, 0)
            rows = []
            for name in place:
                if name in new:
                    rows.append((name, 0, len(new[name][0])))
                    continue
                if rng.random() < 0.02:  # preempted: all of it again
                    n = place[name] + 1
                    blocks[name] = -(-n // BLOCK)
                    given[name] = [5000 + 100 * number + i for i in range(blocks[name])]
                    resumed.add(name)
                    rows.append((name, 0, n))
                    continue
                if place[name] // BLOCK >= blocks[name]:
                    given[name] = [9000 + 100 * number + len(rows)]
                    blocks[name] += 1
                rows.append((name, place[name], 1))
            if rng.random() < 0.1:
                rng.shuffle(rows)
            drawn = [rng.randrange(VOCAB) for _ in rows]
            engine.step(rows, new=new, blocks=given, resumed=resumed, finished=ended, drawn=drawn)
            for name, first, n in rows:
                place[name] = first + n
            ended = [name for name in place if rng.random() < 0.01]
            for name in ended:
                del place[name]
            if rng.random() < 0.05:
                engine.session.flush()
        tape = engine.end()
        assert not engine.session.faults
        assert (len(kept) > 50) == quiet
        columns = ["step", "row", "request", "start", "n", "kind", "kv_source"]
        forwards = sorted(map(str, tape.table("forwards").select(columns).to_pylist()))
        steps = tape.table("steps").drop_columns(["t_ns"]).to_pylist()
        values = {
            s.key.request: (
                s.tokens.values.tolist(), s.logprob("raw").values.tolist(),
                s.routes().ids.tolist(), s.routes().valid.tolist(), s.step.values.tolist(),
            )
            for s in tape
        }  # fmt: skip
        found.append((forwards, sorted(map(str, steps)), values))
    assert found[0] == found[1]
    assert len(found[0][2]) > 4


def test_a_fault_in_a_quiet_step_leaves_the_routes_of_its_prefix_where_they_were(
    engine: Engine,
) -> None:
    start(engine)
    decode(engine, "a-0", 5, 22, fault="tokens", at=8)
    routes = shared(engine, 20)
    for position in range(20):
        if routes.valid[position].all():
            assert routes.ids[position, 0, 0] == expert("a-0", position), position
    assert routes.valid[:8].all() and not routes.valid[8].any()


def test_steps_that_cannot_be_copied_are_a_gap_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(engine)
    decode(engine, "a-0", 5, 20)

    with monkeypatch.context() as patch:
        patch.setattr(engine.recorder._outlet, "copy", out_of_memory)
        engine.recorder.blocks.collect()
    routes = shared(engine, 20)
    assert not routes.valid[5:20].any() and routes.valid[:4].all()  # whole blocks are shared
    tape = rolltape.open(engine.tape)
    assert {"steps": [1, 15]} in gaps(tape)
    assert engine.session.faults == {"steady": 1}
    steps = tape.table("forwards").column("step").to_pylist()
    assert steps and not {*range(1, 16)} & set(steps)


def test_no_fault_reaches_the_job_when_the_device_is_full(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(engine)
    decode(engine, "a-0", 5, 8)

    with monkeypatch.context() as patch:
        patch.setattr(engine.recorder._outlet, "copy", out_of_memory)
        decode(engine, "a-0", 8, 10, fault="tokens", at=9)
    decode(engine, "a-0", 10, 12)
    tape = engine.end()
    assert {10, 11} & set(tape.table("forwards").column("start").to_pylist())


def test_quiet_steps_of_an_idle_engine_get_to_disk(engine: Engine) -> None:
    start(engine)
    decode(engine, "a-0", 5, 8)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if rolltape.open(engine.tape).table("forwards").num_rows == 4:
            return
        time.sleep(0.1)
    pytest.fail("they did not")


def test_a_full_queue_that_blocks_lets_the_writer_make_room(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "tape", on_full="block", queue_mb=8)
    recorder = engine.recorder
    life = recorder.roster.add(Life("q", 0, np.arange(4, dtype=np.uint32)))
    rng = random.Random(1)

    def work() -> None:
        for i in range(60):
            rows = recorder.roster.place([life], np.array([i]), np.array([1]))
            size = rng.randint(1, 7) << 20
            recorder.blocks.add(Step(number=i, t_ns=0, rows=rows, version=0, values={}, held=size))
            recorder.blocks.flush()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    engine.end()


def test_recordings_of_one_engine_do_not_keep_each_other(tmp_path: Path) -> None:
    import gc
    import weakref

    first = Engine(tmp_path / "a")
    start(first)
    decode(first, "a-0", 5, 9)
    first.end()
    old = weakref.ref(first.recorder)
    runner = first.runner
    store.create_tape(tmp_path / "b", role="rollout")
    session = Session(tmp_path / "b", Options())
    first.recorder = record.recorder_of(session, runner)
    gc.collect()
    assert old() is None
    runner.get_model().load_weights()  # asks for the recorder there is now
    assert first.recorder._stale
    session.close()
