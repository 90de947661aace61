"""A client for the viewer's interface, for tests without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the viewer extra is not installed")
pytest.importorskip("httpx2", reason="fastapi's test client needs httpx2")

from fastapi.testclient import TestClient

from rolltape.viewer import make_app

Json = dict[str, Any]


class Api:
    """A client for one run."""

    def __init__(self, *paths: Path, **options: Any) -> None:
        self.client = TestClient(make_app(paths, **options), base_url="http://127.0.0.1")
        runs = self.get("/api/runs")["runs"]
        self.run = runs[0]["id"] if runs else None

    def raw(self, path: str, **params: Any) -> Any:
        return self.client.get(path, params=params)

    def get(self, path: str, **params: Any) -> Json:
        answer = self.raw(path, **params)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def fails(self, status: int, path: str, **params: Any) -> Json:
        answer = self.raw(path, **params)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        return dict(answer.json())

    def at(self, *rest: str) -> str:
        return "/".join([f"/api/runs/{self.run}", *rest])

    def overview(self) -> Json:
        return self.get(self.at())

    def rows(self, **params: Any) -> list[Json]:
        return list(self.get(self.at("seqs"), **params)["rows"])

    def arrays(self, seq: str, start: int, end: int, **params: Any) -> tuple[Json, Json]:
        path = self.at("seqs", seq, "tokens")
        answer = self.raw(path, start=start, end=end, **params)
        assert answer.status_code == 200, answer.text
        return decode(answer.content)


def decode(data: bytes) -> tuple[Json, Json]:
    """Arrays and metadata of safetensors bytes, written here a second time on purpose."""
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    dtypes = {"U8": "u1", "U16": "<u2", "U32": "<u4", "F32": "<f4"}
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = (8 + size + x for x in entry["data_offsets"])
            dtype = np.dtype(dtypes[entry["dtype"]])
            assert low % dtype.itemsize == 0
            arrays[name] = np.frombuffer(data[low:high], dtype).reshape(entry["shape"])
    return arrays, header["__metadata__"]
