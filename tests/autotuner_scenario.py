"""What a serving job does to an AutoTuner: the same for the double and for the real ones.

The operator has an input of [tokens, 8] and a weight of [8, 4]; tokens are tuned in buckets of 4
and 16, rounded down. Only the timing is not real: `Fast` takes 0.25 ms with tactic (1, "b").
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltape import store
from rolltape.recorder import session as sessions
from rolltape.recorder import tactics
from rolltape.recorder.options import Options
from rolltape.recorder.tactics import autotuner

OP = "rolltape::matmul"
ENGINE = "e" * 32
FAST = (1, "b")


def bucket(tokens: int) -> int:
    return 16 if tokens >= 16 else 4


class Job:
    """An operator whose implementation an AutoTuner chooses, in a process that is recorded."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.folder = name, folder
        module = self.module = importlib.import_module(name)
        self.capturing = False
        monkeypatch.setattr(autotuner, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(module.AutoTuner, "_profile_single_kernel", _time)
        monkeypatch.setattr(module.AutoTuner, "_instance", None)

        class Slow(module.TunableRunner):  # type: ignore[name-defined]
            def get_valid_tactics(self, inputs: Any, profile: Any, **kwargs: Any) -> list[Any]:
                return [-1, 0]

            def unique_id(self) -> tuple[Any, ...]:
                return ("slow",)

            def forward(
                self, inputs: Any, *, tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
            ) -> Any:
                return inputs[0] @ inputs[1]

        class Fast(Slow):
            def get_valid_tactics(self, inputs: Any, profile: Any, **kwargs: Any) -> list[Any]:
                return [-1, (0, "a"), FAST]

            def unique_id(self) -> tuple[Any, ...]:
                return ("fast", 3)

        self.runners = [Slow(), Fast()]
        fields = inspect.signature(module.DynamicTensorSpec).parameters
        # TensorRT-LLM took one index before FlashInfer let several inputs share a dimension
        many = "tuple" in str(fields["input_idx"].annotation).lower()
        at: Any = (0,) if many or "flashinfer" in name else 0
        spec = module.DynamicTensorSpec(
            input_idx=at, dim_idx=at, gen_tuning_buckets=(4, 16), map_to_tuning_buckets=bucket
        )
        self.config = module.TuningConfig(dynamic_tensor_specs=(spec,))
        self.weight = torch.ones(8, 4)

    def call(self, tokens: int) -> Any:
        inputs = [torch.ones(tokens, 8), self.weight, None]
        tuner = self.module.AutoTuner.get()
        runner, tactic = tuner.choose_one(OP, self.runners, self.config, inputs)
        assert torch.equal(runner(inputs, tactic=tactic), torch.full((tokens, 4), 8.0))
        return type(runner).__name__, tactic

    def tune(self, tokens: int) -> Any:
        with self.module.autotune(True):
            return self.call(tokens)

    def record(self) -> None:
        self.tape = store.create_tape(self.folder, role="rollout")
        sessions.start(self.tape, Options(strict=True))

    def rows(self) -> list[dict[str, Any]]:
        sessions.stop()
        found = list(store.open(self.tape).rows("tactics"))
        assert {row["writer"] for row in found} == {found[0]["writer"]}
        assert all(json.loads(row["fingerprint"])["versions"]["torch"] for row in found)
        return [
            {**row, "key": json.loads(row["key"])} for row in found if row["source"] != "unrecorded"
        ]


def _time(self: Any, *args: Any, **kwargs: Any) -> float:
    runner = kwargs.get("runner", args[0] if args else None)
    tactic = kwargs["tactic"] if "tactic" in kwargs else args[2]
    return 0.25 if type(runner).__name__ == "Fast" and tactic == FAST else 0.75


def calls(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (r["key"]["shapes"][0], r["source"], r["implementation"], r["tactic"], r["graph"])
        for r in rows
        if "shapes" in r["key"]
    ]


def entries(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(
        (r["key"]["profile"][0], r["source"], r["implementation"], r["tactic"])
        for r in rows
        if "shapes" not in r["key"]
    )


def check_life(job: Job, *, timed: bool) -> None:
    """Fall back, tune, hit, miss, capture; all of it seen once."""
    job.record()
    undo = autotuner.observe(job.name, engine=ENGINE)
    assert autotuner.observe(job.name) is undo
    for _ in range(3):
        assert job.call(5) == ("Slow", -1)
    assert job.tune(5) == ("Fast", FAST)
    for tokens in (5, 6, 6, 40):
        assert job.call(tokens) == ("Fast", FAST)
    job.capturing = True
    job.call(6)
    with tactics.capturing("decode-6"):
        job.call(7)
        job.call(7)
    job.capturing = False
    undo()
    job.call(9)  # unseen

    rows = job.rows()
    fast = ("Fast", repr(FAST))
    assert calls(rows) == [
        ([5, 8], "fallback", "Slow", "-1", None),
        ([5, 8], "chosen", *fast, None),
        ([6, 8], "cached", *fast, None),
        ([40, 8], "cached", *fast, None),
        ([6, 8], "cached", *fast, "unnamed"),
        ([7, 8], "cached", *fast, "decode-6"),
    ]
    assert entries(rows) == [([4, 8], "chosen", *fast), ([16, 8], "chosen", *fast)]
    by_tokens = {r["key"]["shapes"][0][0]: r for r in rows if "shapes" in r["key"]}
    assert by_tokens[6]["key"]["profile"][0] == [4, 8]
    assert by_tokens[40]["key"]["profile"][0] == [16, 8]
    assert by_tokens[6]["key"]["dtypes"] == ["float32", "float32", None]
    assert {r["op"] for r in rows} == {OP}
    assert {r["engine"] for r in rows} == {ENGINE}
    tuned = {r["time_ms"] for r in rows if r["source"] != "fallback"}
    assert tuned == ({0.25} if timed else {None})


def check_late(job: Job) -> None:
    """Observed only after the warm-up: what the cache holds is written at the end."""
    job.tune(5)
    job.record()
    undo = autotuner.observe(job.name)
    try:
        job.call(5)
        rows = job.rows()
    finally:
        undo()
    fast = ("Fast", repr(FAST))
    assert calls(rows) == [([5, 8], "cached", *fast, None)]
    assert entries(rows) == [([4, 8], "cached", *fast), ([16, 8], "cached", *fast)]
    assert {r["engine"] for r in rows} == {""}


def check_inert(job: Job) -> None:
    """Without a session nothing is kept; with the observer gone nothing is left."""
    original = vars(job.module.AutoTuner)["choose_one"]
    undo = autotuner.observe(job.name)
    assert job.call(5) == ("Slow", -1)
    job.record()
    job.call(5)
    rows = job.rows()
    undo()
    assert calls(rows) == [([5, 8], "fallback", "Slow", "-1", None)]
    assert vars(job.module.AutoTuner)["choose_one"] is original
