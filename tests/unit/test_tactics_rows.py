"""Rows of tactics: what nobody can see, kernels of a profile, graphs, and the import hook."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from rolltape.recorder.tactics import capturing, unrecorded
from rolltape.recorder.tactics.kernels import kernel_rows
from rolltape.recorder.tactics.rows import fingerprint, graph_key, is_capturing
from rolltape.recorder.tactics.targets import TARGETS
from rolltape.recorder.targets import check

pytestmark = pytest.mark.engine


def seen_by(monkeypatch: pytest.MonkeyPatch, *modules: str) -> set[str]:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    rows = unrecorded.unrecorded()
    assert all(row.source == "unrecorded" and row.reason for row in rows)
    return {str(row.implementation) for row in rows}


def test_only_choices_of_this_process_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    plain = seen_by(monkeypatch)
    assert "torch" in plain
    assert ("oneDNN" in plain) == torch.backends.mkldnn.is_available()
    assert not plain & {"cuBLAS/cuBLASLt", "cuDNN", "NCCL", "DeepGEMM", "TunableOp"}
    assert seen_by(monkeypatch, "deep_gemm") - plain == {"DeepGEMM"}


def test_a_process_that_used_the_device_lists_its_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    found = seen_by(monkeypatch)
    assert {"cuBLAS/cuBLASLt", "cuDNN"} <= found
    assert not found & {"oneDNN", "MKL"}


def test_settings_that_steer_a_choice_stand_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    (row,) = [r for r in unrecorded.unrecorded() if r.implementation == "DeepGEMM"]
    assert row.key == {"settings": {"DG_JIT_DEBUG": "1"}}


def test_a_graph_is_named_by_who_captures_it() -> None:
    assert graph_key(False) is None
    assert graph_key(True) == "unnamed"
    with capturing("outer"):
        with capturing("inner"):
            assert graph_key(True) == "inner"
        assert graph_key(True) == "outer"
        assert graph_key(False) is None
    assert graph_key(True) == "unnamed"


def test_asking_about_the_device_does_not_start_it() -> None:
    before = torch.cuda.is_initialized()
    assert is_capturing() is False
    assert "versions" in fingerprint()
    assert torch.cuda.is_initialized() == before


class Event:
    """An event of the profiler, as `torch.profiler.profile.events()` gives it."""

    def __init__(self, name: str, *children: Event, kernels: Any = (), device: str = "CPU") -> None:
        self.name, self.cpu_children, self.kernels = name, list(children), list(kernels)
        self.device_type = f"DeviceType.{device}"
        self.cpu_parent: Event | None = None
        self.input_shapes = [[2, 3]]
        self.cpu_time_total = self.device_time_total = 1000.0
        for child in children:
            child.cpu_parent = self


def named(*events: Event) -> list[tuple[str, str | None, float | None]]:
    return [(r.op, r.implementation, r.time_ms) for r in kernel_rows(events, {"rows": 2})]


def test_on_a_device_the_kernel_is_named_with_the_operator_that_launched_it() -> None:
    kernel = types.SimpleNamespace(name="sm90_gemm", duration=2000.0)
    mm = Event("aten::mm", kernels=[kernel, kernel])
    root = Event("aten::linear", mm)
    on_device = [Event("sm90_gemm", device="CUDA"), Event("triton_fused_3", device="CUDA")]
    assert named(root, mm, *on_device) == [
        ("aten::mm", "sm90_gemm", 2.0),
        ("(no operator)", "triton_fused_3", 1.0),
    ]


def test_on_the_cpu_the_innermost_operator_that_computes_is_named() -> None:
    addmm = Event("aten::addmm", Event("aten::copy_"))
    linear = Event("aten::linear", Event("aten::t"), addmm)
    assert named(Event("Module", linear), Event("aten::view"), linear) == [
        ("aten::linear", "aten::addmm", 1.0)
    ]


def test_a_real_profile_names_what_computes() -> None:
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        torch.nn.functional.linear(torch.ones(4, 8), torch.ones(3, 8), torch.ones(3))
    rows = list(kernel_rows(profile.events(), {"rows": 4}))
    (row,) = [r for r in rows if r.op == "aten::linear"]
    assert row.implementation not in ("aten::linear", "aten::t", "aten::copy_")
    assert row.key == {"rows": 4, "shapes": [[4, 8], [3, 8], [3]]}


def test_loading_the_observers_loads_neither_torch_nor_the_store() -> None:
    code = (
        "import sys, rolltape.recorder.tactics.bind as b; b.bind();"
        "print(*sorted({'torch', 'pyarrow', 'numpy', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_targets_that_are_installed_bind(target: Any) -> None:
    found = check(target)
    if found.state == "missing" and found.detail.startswith("no module"):
        pytest.skip(found.detail)
    assert found.state == "bound", found.detail
