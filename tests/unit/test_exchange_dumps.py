"""Files of other frameworks are read, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest

from rolltape.store import SchemaError, UsageError
from rolltape.store.exchange.dumps import load_torch, read_jsonl

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine


class Runs:
    """Pickles into a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def saved(tmp_path, value):
    path = tmp_path / "dump.pt"
    torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", ["system", "eval", "open", "import", "numpy"])
def test_a_hostile_dump_is_refused_by_name_and_not_run(tmp_path, kind):
    trace = tmp_path / "ran"
    call = {
        "system": Runs(os.system, f"touch {trace}"),
        "eval": Runs(eval, f"open({str(trace)!r}, 'w')"),
        "open": Runs(open, str(trace), "w"),
        "import": Runs(getattr, Runs(__import__, "os"), "sep"),
        "numpy": Runs(np.save, str(trace), np.zeros(1)),
    }[kind]
    path = saved(tmp_path, {"rollout_id": 0, "samples": [{"tokens": [1], "metadata": {"x": call}}]})
    with pytest.raises(SchemaError) as caught:
        load_torch(path)
    message = str(caught.value)
    assert str(path) in message and "refused" in message and "\n" not in message
    named = {"system": "system", "eval": "eval", "open": "open", "import": "getattr"}
    assert named.get(kind, "save") in message.partition("refers to")[2]
    assert not trace.exists()


def test_a_hostile_array_inside_a_known_class_is_not_run(tmp_path):
    trace = tmp_path / "ran"
    values = np.array([1, Runs(os.system, f"touch {trace}")], dtype=object)
    with pytest.raises(SchemaError, match=r"system"):
        load_torch(saved(tmp_path, {"a": values}))
    assert not trace.exists()


@pytest.mark.parametrize("content", ["pickle", "text", "empty", "cut"])
def test_a_file_that_torch_did_not_save_is_refused(tmp_path, content):
    path = tmp_path / "dump.pt"
    trace = tmp_path / "ran"
    whole = saved(tmp_path, {"a": torch.arange(1000)}).read_bytes()
    path.write_bytes(
        {
            "pickle": pickle.dumps({"a": Runs(os.system, f"touch {trace}")}),
            "text": b"hello",
            "empty": b"",
            "cut": whole[: len(whole) // 2],
        }[content]
    )
    with pytest.raises(SchemaError, match=r"dump\.pt: not a whole file of torch\.save"):
        load_torch(path)
    assert not trace.exists()


def test_damage_inside_is_one_line_naming_the_file(tmp_path):
    path = saved(tmp_path, {"a": list(range(200))})
    data = bytearray(path.read_bytes())
    at = data.index(b"\x80\x02")
    data[at + 4 : at + 60] = b"\xff" * 56
    path.write_bytes(bytes(data))
    with pytest.raises(SchemaError, match=r"dump\.pt") as caught:
        load_torch(path)
    assert "\n" not in str(caught.value)


def test_a_value_that_contains_itself_is_refused(tmp_path):
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SchemaError, match=r"dump\.pt: nested too deeply"):
        load_torch(saved(tmp_path, {"samples": loop}))


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_torch(tmp_path / "nope.pt")


def test_tensors_become_arrays_bit_for_bit(tmp_path):
    values = {
        "bfloat16": torch.tensor([0.1, float("nan"), float("-inf")], dtype=torch.bfloat16),
        "int8": torch.arange(-3, 3, dtype=torch.int8),
        "view": torch.arange(12).reshape(3, 4)[:, ::2],
        "grad": torch.ones(2, requires_grad=True),
    }
    got = load_torch(saved(tmp_path, values))
    np.testing.assert_array_equal(got["bfloat16"], values["bfloat16"].to(torch.float32).numpy())
    np.testing.assert_array_equal(got["int8"], values["int8"].numpy(), strict=True)
    np.testing.assert_array_equal(got["view"], [[0, 2], [4, 6], [8, 10]])
    np.testing.assert_array_equal(got["grad"], [1, 1])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.int32).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
        np.arange(5, dtype=">i8"),
        np.array([True, False]),
        np.array([0.5, np.nan], np.float32),
        np.zeros((0, 4, 2), np.int32),
        np.array(["prompt", "x"]),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_numpy_arrays_are_read_without_numpys_unpickling(tmp_path, array):
    got = load_torch(saved(tmp_path, {"a": array}))["a"]
    assert got.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


def test_numpy_scalars_and_object_arrays_are_plain_values(tmp_path):
    got = load_torch(
        saved(tmp_path, {"a": np.float32(0.1), "b": np.array(["x", None], dtype=object)})
    )
    assert got["a"] == np.float32(0.1) and got["b"] == ["x", None]


def test_structured_arrays_are_refused(tmp_path):
    array = np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])
    with pytest.raises(SchemaError, match="numpy array of type"):
        load_torch(saved(tmp_path, {"a": array}))


@pytest.fixture
def foreign(monkeypatch):
    """Classes of miles and NeMo-RL as far as a pickle can tell; gone again when it is read."""

    @dataclass(frozen=True)
    class AdapterRef:
        name: str
        slot: int

    class BatchedDataDict(UserDict):
        def __init__(self, *args):
            super().__init__(*args)
            self.micro_batch_indices = None

    def install(name, class_):
        for i in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:i])
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        class_.__module__, class_.__qualname__ = name, class_.__name__
        setattr(sys.modules[name], class_.__name__, class_)
        return class_

    return {
        "adapter": install("miles.utils.types", AdapterRef),
        "batch": install("nemo_rl.distributed.batched_data_dict", BatchedDataDict),
    }


def test_known_classes_are_read_by_their_attributes_without_importing_them(
    tmp_path, foreign, monkeypatch
):
    value = {
        "adapter": foreign["adapter"]("lora", 3),
        "batch": foreign["batch"]({"ids": torch.arange(3)}),
    }
    path = saved(tmp_path, value)
    for name in list(sys.modules):
        if name.split(".")[0] in ("miles", "nemo_rl"):
            monkeypatch.delitem(sys.modules, name)
    got = load_torch(path)
    assert got["adapter"] == {"name": "lora", "slot": 3}
    assert got["batch"]["ids"].tolist() == [0, 1, 2] and set(got["batch"]) == {"ids"}


def test_jsonl_errors_name_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": NaN}\n\n{"a": \n')
    with pytest.raises(SchemaError, match=r"a\.jsonl:3: not JSON"):
        list(read_jsonl(path))
    path.write_text("[1]\n")
    with pytest.raises(SchemaError, match=r"a\.jsonl:1: not a JSON object"):
        list(read_jsonl(path))
    path.write_text(json.dumps({"a": float("-inf")}) + "\n")
    assert list(read_jsonl(path)) == [{"a": float("-inf")}]
