"""What the TensorRT-LLM adapter says of sampling parameters, against the real class of a checkout.

    ROLLTAPE_TRTLLM_SOURCE=DIR pytest tests/unit/test_tensorrt_llm_source.py

The autotuner of the same checkout is run by tests/integration/test_tactics_real.py.
"""

from __future__ import annotations

import enum
import importlib.util
import itertools
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolltape.recorder.tensorrt_llm.sampling import resolve

SOURCE = "ROLLTAPE_TRTLLM_SOURCE"
#: Where the class has been, the newest place first.
PLACES = ("tensorrt_llm.executor.params.sampling", "tensorrt_llm.sampling_params")
GRID = {
    "temperature": (None, 0.0, 0.7, 1.0),
    "top_k": (None, 0, 1, 50),
    "top_p": (None, 0.0, 0.9, 1.0),
    "min_p": (None, 0.0, 0.1, 1.0),
    "top_p_decay": (None, 0.5, 1.0),
    "use_beam_search": (False, True),
}


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the checkout, with stand-ins for what needs the compiled library."""
    checkout = os.environ.get(SOURCE)
    if not checkout:
        pytest.skip(f"{SOURCE} names no checkout of TensorRT-LLM")
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    quiet = SimpleNamespace(**dict.fromkeys(("info", "debug", "warning"), lambda *a, **k: None))
    stand_ins: dict[str, dict[str, Any]] = {
        "strenum": {"StrEnum": enum.StrEnum},
        "tensorrt_llm": {"__path__": []},
        "tensorrt_llm.bindings": {"executor": types.ModuleType("executor")},
        "tensorrt_llm.logger": {"logger": quiet},
    }
    for name, symbols in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(symbols)
        monkeypatch.setitem(sys.modules, name, module)
    for name in PLACES:
        path = Path(checkout, *name.split(".")).with_suffix(".py")
        if path.is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            return module
    pytest.skip(f"{checkout} has neither of {', '.join(PLACES)}")


def _all(real: Any) -> Any:
    """(values, object) of every combination that the class takes."""
    for row in itertools.product(*GRID.values()):
        values = dict(zip(GRID, row, strict=True))
        try:
            yield values, real.SamplingParams(**values)
        except ValueError:
            continue  # the engine refuses it


def test_greedy_is_what_the_engine_calls_greedy(real: Any) -> None:
    found = [(values, params._greedy_decoding) for values, params in _all(real)]
    assert len(found) > 500 and {greedy for _, greedy in found} == {True, False}
    wrong = [v for v, p in _all(real) if resolve(p).greedy is not p._greedy_decoding]
    assert wrong == []


def test_the_adapters_own_rule_is_the_one_of_the_newest_engine(real: Any) -> None:
    if not hasattr(real.SamplingParams, "params_imply_greedy_decoding"):
        pytest.skip("an older rule: the engine's own property is asked there")
    wrong = [v for v, p in _all(real) if resolve(SimpleNamespace(**v)).greedy != p._greedy_decoding]
    assert wrong == []


def test_fields_have_the_names_that_the_adapter_reads(real: Any) -> None:
    fields = set(real.SamplingParams.__dataclass_fields__)
    read: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> None:
            read.add(name)

    resolve(Watched())
    later = {"logprobs_mode"} - fields
    assert read - fields - {"_greedy_decoding"} == later, "read, and never there"


def test_defaults_of_the_model_and_modes_of_logprobs(real: Any) -> None:
    kind = real.SamplingParams
    if not hasattr(kind, "_apply_generation_config_defaults"):
        pytest.skip("a version that takes no defaults from the model")
    params = kind(logprobs=True, logprobs_mode="processed")
    assert resolve(params).greedy and resolve(params).processed and params.logprobs == 0
    params._apply_generation_config_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    how = resolve(params)
    assert (how.greedy, how.temperature) == (False, 0.6)
    assert how.truncation == ("top_k=20", "top_p=0.95")
    assert not resolve(kind(logprobs_mode=real.LogprobMode.RAW)).processed
