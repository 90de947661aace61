"""Values as rolltape writes them in JSON: numpy unwrapped, non-finite floats as strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltape.store.columns import Masked


def jsonable(value: Any) -> Any:
    """A copy that `json.dumps(..., allow_nan=False)` takes.

    NaN and the infinities become "NaN", "Infinity" and "-Infinity"; missing elements of a
    `Masked` become None. Float32 keeps its shortest text: 0.1 stays 0.1.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Masked):
        return [
            jsonable(item) if valid else None
            for item, valid in zip(value.values, value.valid, strict=True)
        ]
    if isinstance(value, list | tuple | set | np.ndarray):
        return [jsonable(item) for item in value]
    if isinstance(value, np.float32):
        value = float(str(value))
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_object(text: str | None) -> dict[str, Any]:
    """The JSON object in a cell; {} where there is none.

    A recorder writes nothing else; of what somebody else wrote there the beginning stands under
    `unreadable`, so that one cell does not keep the rest from being read.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unreadable": text[:200]}
