"""The observers of tuners on the real ones: FlashInfer, TensorRT-LLM's source, Triton, Inductor."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.recorder import session as sessions
from rolltape.recorder.tactics import autotuner
from tests import autotuner_scenario as scenario
from tests.autotuner_scenario import Job

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "ROLLTAPE_TRTLLM_SOURCE"


def _flashinfer() -> str:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    with warnings.catch_warnings():  # of what it imports
        warnings.simplefilter("ignore")
        importlib.import_module("flashinfer.autotuner")
    return "flashinfer.autotuner"


def _tensorrt_llm() -> str:
    """The autotuner of a checkout, with stand-ins for what needs the compiled library."""
    checkout = os.environ.get(SOURCE)
    if not checkout:
        pytest.skip(f"{SOURCE} names no checkout of TensorRT-LLM")
    path = Path(checkout) / "tensorrt_llm" / "_torch" / "autotuner.py"
    quiet = types.SimpleNamespace(
        **{name: lambda *a, **k: None for name in ("info", "debug", "warning", "error")},
        warning_once=lambda *a, **k: None,
    )
    stand_ins: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"__version__": "checkout", "__path__": []},
        "tensorrt_llm.bindings": {"__path__": []},
        "tensorrt_llm.bindings.internal": {"__path__": []},
        "tensorrt_llm.bindings.internal.runtime": {"delay_kernel": None},
        "tensorrt_llm.logger": {"logger": quiet},
    }
    for name, symbols in stand_ins.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(symbols)
    name = "tensorrt_llm._torch.autotuner"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


@pytest.fixture(params=[_flashinfer, _tensorrt_llm])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    import torch

    before = dict(sys.modules)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "none")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (0, 0))
    # asked by the newest FlashInfer before it measures; a build without CUDA raises
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield Job(request.param(), tmp_path / "tape", monkeypatch)
    sessions.stop()
    for observer in list(autotuner._observers.values()):
        observer.undo()
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "tensorrt_llm":
            del sys.modules[name]


def test_its_choices_are_seen_once(job: Job) -> None:
    # in its cache, or beside it
    keeps_times = hasattr(job.module, "AutoTunerProfilingCache") or hasattr(
        job.module.AutoTuner.get(), "_profiling_cache_selections"
    )
    scenario.check_life(job, timed=keeps_times)


def test_its_cache_is_written_at_the_end(job: Job) -> None:
    scenario.check_late(job)


def test_it_is_left_as_it_was(job: Job) -> None:
    scenario.check_inert(job)


# -- in a recorded process, found by the import hook --------------------------------------

TRITON = """
import torch, triton, triton.language as tl

def bench(call, quantiles):
    call()
    bench.n += 1
    return [0.5 / bench.n, 0.4, 0.6]
bench.n = 0

@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"],
                 do_bench=bench)
@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

for n in (40, 40, 50, 40):
    x, y = torch.zeros(n), torch.empty(n)
    add_one[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    assert (y == 1).all()
"""

INDUCTOR = """
import torch, torch._inductor.config as config
config.max_autotune = True
config.max_autotune_gemm_backends = "ATEN,CPP"
config.freezing = True
layer = torch.nn.Linear(64, 128).eval()
with torch.no_grad():
    x = torch.randn(32, 64)
    compiled = torch.compile(layer)
    assert torch.allclose(compiled(x), layer(x), atol=1e-4)
    compiled(x)
"""


def _recorded(code: str, folder: Path, **env: str) -> list[dict[str, Any]]:
    (folder / "job.py").write_text(code)
    tape = folder / "tape"
    command = [sys.executable, "-m", "rolltape", "record", "-q", "-o", str(tape), "--strict", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(folder / "job.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    rows = [{**row, "key": json.loads(row["key"])} for row in store.open(tape).rows("tactics")]
    errors = [e for e in store.open(tape).rows("events") if e["kind"] == "hook_error"]
    assert not errors
    assert "Traceback" not in done.stderr
    assert {row["source"] for row in rows} >= {"unrecorded"}
    return [row for row in rows if row["source"] != "unrecorded"]


def test_triton_says_which_configuration_it_keeps_for_which_key(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    first, second = _recorded(TRITON, tmp_path, TRITON_INTERPRET="1")
    for row, n, time in ((first, 40, 0.25), (second, 50, 0.125)):
        assert (row["tuner"], row["op"], row["source"]) == ("triton", "add_one", "chosen")
        assert row["key"]["arguments"] == {"n": n}
        assert row["key"]["dtypes"] == ["torch.float32", "torch.float32"]
        assert "BLOCK: 32" in row["tactic"]
        assert row["time_ms"] == time
        assert (row["engine"], row["graph"]) == ("", None)


def test_inductor_says_which_implementation_it_compiles(tmp_path: Path) -> None:
    (row,) = _recorded(INDUCTOR, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert (row["tuner"], row["source"]) == ("inductor", "chosen")
    assert row["key"]["inputs"][0]["shape"] == [32, 64]
    assert row["key"]["inputs"][0]["dtype"] == "float32"
    assert row["key"]["candidates"] == 2
    assert row["time_ms"] > 0
    assert not row["implementation"][-1].isdigit()


def test_kernels_of_transformers_are_named_for_the_first_shapes(tmp_path: Path) -> None:
    import torch
    import transformers

    import rolltape
    from tests.integration.conftest import TINY_MOE

    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE)
    ids = torch.randint(5, 200, (2, 7), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": ids * 0 + 1}
    plain = model.generate(ids, **how)
    with rolltape.record(tmp_path / "tape", profile_kernels=2, strict=True):
        recorded = model.generate(ids, **how)
        model.generate(ids[:, :3], **{**how, "attention_mask": ids[:, :3] * 0 + 1})
    assert torch.equal(plain, recorded)
    tape = store.open(tmp_path / "tape")
    rows = [r for r in tape.rows("tactics") if r["source"] == "profiled"]
    shapes = {(k["rows"], k["columns"], k["phase"]) for k in (json.loads(r["key"]) for r in rows)}
    assert shapes == {(2, 7, "prefill"), (2, 1, "decode")}
    kernels = {(r["op"], r["implementation"]) for r in rows}
    assert any(op == "aten::linear" and "mm" in kernel for op, kernel in kernels)
    assert any("attention" in kernel for _, kernel in kernels)
    (engine,) = tape.rows("engines")
    assert {r["engine"] for r in tape.rows("tactics")} == {engine["engine"]}
    assert {r["tuner"] for r in rows} == {"torch"}
