"""Reading the files of other frameworks without running anything that they contain.

A `torch.save` file is a pickle, and a pickle is a program. torch's weights-only unpickler runs
only a short list of functions. Numpy arrays are not on it; here the names that a pickled array
refers to are bound to the inert classes below, which only remember what they were given, and the
array is built afterwards from its bytes. Nothing of numpy's own unpickling runs.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store.errors import SchemaError, UsageError

#: Before this one, `weights_only=True` could be made to run code (CVE-2025-32434).
SAFE_TORCH = (2, 6)

#: How torch names what it refuses.
_GLOBAL = re.compile(r"\bGLOBAL ([\w.]+)")


class _Array:
    """Stands for numpy.ndarray: the state of a pickled array, as it came."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, spec: Any, align: Any = False, copy: Any = False) -> None:
        self.spec, self.order = spec, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Scalar:
    """Stands for the function that rebuilds a numpy scalar."""

    def __init__(self, dtype: Any, raw: Any) -> None:
        self.dtype, self.raw = dtype, raw


class _Record:
    """Stands for a class of which only the attributes are wanted."""


def _new_array(*_: Any) -> _Array:
    return _Array()


def _no_bytes() -> bytes:
    return b""  # as pickle protocol 2 writes the content of an empty array


_STAND_INS: list[Any] = [
    (_no_bytes, "builtins.bytes"),
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    *((_new_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_Scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_Record, "miles.utils.types.AdapterRef"),
    (_Record, "miles.utils.types.RewardSpec"),
    (_Record, "nemo_rl.distributed.batched_data_dict.BatchedDataDict"),
    (_Record, "nemo_rl.distributed.batched_data_dict.SlicedDataDict"),
]


def load_torch(path: Path, *, hint: str | None = None) -> Any:
    """What `torch.save` wrote, tensors and arrays as numpy arrays, without running its pickle.

    Args:
        path: the file.
        hint: what to do when the file is refused.

    Raises:
        UsageError: no torch, or one whose safe loading is not safe.
        SchemaError: not written by `torch.save`, or its pickle refers to something else than
            tensors, numpy arrays and plain values; the message names it.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"{path}: reading it needs torch", hint="pip install torch") from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise UsageError(
            f"torch {torch.__version__} cannot load {path} safely", hint="torch 2.6 or newer can"
        )
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise SchemaError(
            f"{path}: not a whole file of torch.save (cut off?), and plain pickles are not read",
            hint=hint or "a pickle can run any program; save it with torch.save",
        )
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STAND_INS):
            warnings.simplefilter("ignore")  # of the pickle's protocol number
            content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # the unpickler raises what a bad stream makes of it
        named = _GLOBAL.search(str(error))
        what = f"refers to {named[1]}" if named else f"cannot be read: {_last_line(error)}"
        raise SchemaError(
            f"{path}: refused, nothing in it was run: its pickle {what}",
            hint=hint or "only tensors, numpy arrays and plain values are read",
        ) from error
    try:
        return _plain(content, path)
    except RecursionError as error:
        raise SchemaError(f"{path}: nested too deeply") from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if "torch.load" not in line and "weights_only" not in line]
    return f"{type(error).__name__}: {(useful or lines or ['?'])[-1]}"


def _plain(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item, path) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, path) for item in value]
    if isinstance(value, _Array):
        return _array(value, path)
    if isinstance(value, _Scalar):
        return np.frombuffer(value.raw, _dtype(value.dtype, path))[0]
    if isinstance(value, _Record):
        inner = vars(value)
        # a UserDict keeps its content in `data`
        return _plain(inner["data"] if isinstance(inner.get("data"), dict) else inner, path)
    if type(value).__module__.partition(".")[0] == "torch":
        return _tensor(value, path)
    return value


def _tensor(value: Any, path: Path) -> np.ndarray:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise SchemaError(f"{path}: holds a {type(value).__name__}, expected tensors")
    value = value.detach()
    if value.dtype == torch.bfloat16:
        value = value.to(torch.float32)
    array: np.ndarray = value.numpy()
    return array


def _array(value: _Array, path: Path) -> Any:
    try:
        _, shape, dtype, fortran, raw = value.state
        if dtype.spec in ("O", "O8") and isinstance(raw, list):
            return [_plain(item, path) for item in raw]
        flat = np.frombuffer(raw, _dtype(dtype, path))
        return flat.reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError, AttributeError) as error:
        raise SchemaError(f"{path}: a numpy array in it is damaged: {error}") from error


def _dtype(value: Any, path: Path) -> np.dtype:
    spec = value.spec if isinstance(value, _Dtype) else None
    if not isinstance(spec, str) or not re.fullmatch(r"[biuf][1248]|U\d{1,6}", spec):
        raise SchemaError(f"{path}: holds a numpy array of type {spec!r}", hint="numbers are read")
    order = value.order if value.order in ("<", ">") else "="
    return np.dtype(order + spec)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one at a time; NaN and infinities as Python writes them.

    Raises:
        UsageError: no such file.
        SchemaError: a line that is not a JSON object.
    """
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    with lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise SchemaError(f"{path}:{number}: not a JSON object")
                yield value
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"{path}:{number}: not JSON: {error}") from error
