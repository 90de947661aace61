"""Parts of the vLLM adapter that can be looked at without vLLM."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rolltape
from rolltape import store
from rolltape.recorder import session
from rolltape.recorder.inject import _rolltape_hook
from rolltape.recorder.options import Options
from rolltape.recorder.tactics.rows import graph_key
from rolltape.recorder.vllm import compiled, graphs
from rolltape.recorder.vllm.arguments import read_arguments
from rolltape.recorder.vllm.identity import engine_of


class Backend(enum.StrEnum):
    FLASH = "flash"


@dataclass
class Arguments:
    """Fields of every kind that `EngineArgs` has."""

    model: str = "small"
    dtype: str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    backend: Any = None
    device_ids: list[int] | None = None
    overrides: dict[str, int] = field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    hf_token: str | None = None
    model_loader_extra_config: Any = None


def test_arguments_that_are_not_the_defaults_were_asked_for() -> None:
    given = Arguments(
        model="large",
        dtype="half",
        max_model_len=-1,
        enforce_eager=True,
        enable_prefix_caching=False,
        backend=Backend.FLASH,
        device_ids=[0],
        overrides={"a": 1},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        hf_token="secret",
        model_loader_extra_config="secret",
    )
    assert read_arguments(given) == {
        "model": "large",
        "dtype": "float16",
        "max_model_len": "auto",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "backend": "flash",
        "speculation": "ngram",
    }
    assert read_arguments(Arguments()) == {}


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts a recording with options; ends it after the test."""
    monkeypatch.delenv("ROLLTAPE_TAPE", raising=False)

    def begin(**options: Any) -> None:
        tape = tmp_path / "tape"
        store.create_tape(tape, role="rollout")
        session.start(tape, Options(**options))

    yield begin
    session.stop()


def key(*args: Any, **kwargs: Any) -> str:
    return str(compiled._around_hash(lambda *a, **k: "0123456789", None, args, kwargs))


def test_compiled_code_has_a_key_of_its_own_where_routes_are_recorded(recording: Any) -> None:
    assert key() == "0123456789"
    recording()
    assert key() != "0123456789" and len(key()) == 10 and key() == key()
    assert key(include_version=False) == "0123456789"  # what tuners found stays what it is


def test_compiled_code_is_shared_where_they_are_not(recording: Any) -> None:
    recording(level="tokens")
    assert key() == "0123456789"


class VllmConfig:
    """What is patched of it."""

    def __post_init__(self) -> None:
        self.made = True

    def compute_hash(self) -> str:
        return "0123456789"


def test_the_configuration_is_as_before_after_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.config", "vllm.config.vllm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.config.vllm"], "VllmConfig", VllmConfig, raising=False)
    hooks = {"vllm.config.vllm": _rolltape_hook.HOOKS["vllm.config.vllm"]}
    monkeypatch.setattr(_rolltape_hook, "HOOKS", hooks)
    before = {name: id(value) for name, value in vars(VllmConfig).items()}  # a patch is equal
    for number in range(2):  # and it is patched again by the next one
        with rolltape.record(tmp_path / str(number)):
            config = VllmConfig()
            config.__post_init__()
            assert config.made and len(engine_of(config)) == 32
            assert config.compute_hash() != "0123456789"
        assert {name: id(value) for name, value in vars(VllmConfig).items()} == before


FULL, NONE = SimpleNamespace(name="FULL"), SimpleNamespace(name="NONE")


def test_choices_during_a_capture_carry_the_key_of_the_graph(recording: Any) -> None:
    recording()
    seen = []

    def dummy(tokens: int, **how: Any) -> None:
        seen.append(graph_key(True))

    graphs.around_dummy(dummy, None, (8,), {"cudagraph_runtime_mode": NONE})
    graphs.around_dummy(dummy, None, (8,), {"cudagraph_runtime_mode": FULL})

    def create(desc: Any, warmup: bool) -> Any:
        return lambda mode: seen.append(graph_key(True))

    def capture(create: Any) -> None:
        create(SimpleNamespace(cg_mode=FULL, num_tokens=64), warmup=True)(NONE)

    graphs.around_capture(capture, None, (create,), {})
    assert seen == ["unnamed", "full:8", "full:64"]
