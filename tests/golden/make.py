"""Writes the golden tapes of the present format version: `python tests/golden/make.py`.

Run once per format version, when it is released; the tapes of old versions stay for ever, and
`tests/unit/test_golden.py` reads them all. The second tape is the first one, compacted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from rolltape import store
from rolltape.store import Masked, codecs
from rolltape.store.compact import compact
from rolltape.store.shards import format_version

ENGINE = "00112233445566778899aabbccddeeff"


def write(root: Path) -> None:
    """A tape with everything that a tape of this version can hold, in a few rows."""
    store.create_tape(root, role="rollout", provenance={"argv": ["rollout.py"]})
    key = {"engine": ENGINE, "request": "0-0", "sample": 1, "pass": 0}
    ids = np.array([[[3, 299], [0, 1]], [[256, 2], [7, 7 + 1]]])
    with store.TapeWriter(root) as writer:
        writer.append(
            "engines",
            {
                "engine": ENGINE,
                "writer": "f" * 32,
                "role": "rollout",
                "adapter": "transformers",
                "process": "worker",
                "ranks": json.dumps({"tp": [0, 1]}),
                "vocab_size": 70_000,
                "num_layers": 4,
                "moe_layers": [[1, 3]],
                "num_experts": 300,
                "experts_per_token": 2,
                "effective": json.dumps({"attention": "sdpa"}),
            },
        )
        writer.append(
            "engines",
            {
                "engine": ENGINE,
                "writer": "e" * 32,
                "role": "rollout",
                "adapter": "transformers",
                "process": "frontend",
                "requested": json.dumps({"attention": "eager"}),
                "effective": json.dumps({"attention": "eager", "threads": 2}),
            },
        )
        writer.append(
            "sequences",
            {**key, "external": "chat-7", "prompt_len": 1, "finish": "open"},
        )
        writer.append(
            "sequences",
            {
                **key,
                "group": "0-0",
                "prompt_len": 1,
                "length": 3,
                "finish": "stop",
                "sampling": "{}",
            },
        )
        writer.append(
            "sequences", {**key, "sample": 2, "prompt_len": 1, "length": 1, "finish": "abort"}
        )
        writer.append(
            "tokens",
            {
                **key,
                "start": 0,
                "n": 3,
                "ids": [np.array([1, 69_999, 40_000], np.uint32)],
                "loss_mask": [np.array([False, True, True])],
                "raw": [
                    Masked(np.array([0, -0.5, np.nan], np.float32), np.array([False, True, True]))
                ],
                "processed": [
                    Masked(np.array([0, -0.25, -np.inf], np.float32), np.array([False, True, True]))
                ],
                "semantics": [
                    {
                        "temperature": 0.7,
                        "edits": ["repetition_penalty=1.1"],
                        "truncation": ["top_k=2"],
                        "vocab_size": 70_000,
                        "dtype": "float32",
                        "source": "engine",
                    }
                ],
            },
        )
        writer.append(
            "routes",
            {
                **key,
                "start": 0,
                "n": 2,
                "role": "used",
                "layers": [[1, 3]],
                "k": 2,
                "num_experts": 300,
                "encoding": "plain",
                "ids": [codecs.encode_plain(ids, 300)],
                "weights": [codecs.encode_floats(np.full((2, 2, 2), 0.5))],
                "valid": [codecs.encode_bits(np.array([[True, True], [True, False]]))],
                "missing": json.dumps([[1, 1, 3, "not-captured"], [2, 1, None, "last"]]),
            },
        )
        writer.append(
            "routes",
            {
                **key,
                "start": 0,
                "n": 2,
                "role": "live",
                "step": 0,
                "weight_version": 4,
                "layers": [[1, 3]],
                "k": 2,
                "num_experts": 300,
                "encoding": "plain",
                "ids": [codecs.encode_plain(ids[:, ::-1], 300)],
                "margin": [codecs.encode_floats(np.array([[0.5, -0.0], [np.nan, 0.25]]))],
            },
        )
        writer.append(
            "supports",
            {
                **key,
                "start": 1,
                "n": 2,
                "derived": False,
                "state": [[0, 1]],
                "counts": [[0, 2]],
                "ids": [[40_000, 69_999]],
            },
        )
        writer.append(
            "forwards",
            {
                "engine": ENGINE,
                "step": [0, 1],
                "row": 0,
                "request": "0-0",
                "sample": 1,
                "pass": 0,
                "start": [0, 1],
                "n": [1, 1],
                "kind": ["prefill", "decode"],
                "weight_version": [4, 5],
            },
        )
        writer.append(
            "weights",
            {
                "engine": ENGINE,
                "version": [4, 5],
                "state": ["complete", "dirty"],
                "group": ["", "experts"],
                "digest": [2**64 - 1, None],
                "label": ["step-100", None],
                "reason": [None, "repacked by the engine"],
            },
        )
        writer.append(
            "tactics",
            {
                "engine": [ENGINE, ""],
                "writer": "f" * 32,
                "t_ns": 1,
                "tuner": ["flashinfer", "cublaslt"],
                "op": ["fused_moe", "gemm"],
                "key": '{"m": 8}',
                "source": ["chosen", "unrecorded"],
                "implementation": ["MoERunner", None],
                "tactic": ["(3, 1)", None],
                "time_ms": [0.5, None],
                "reason": [None, "the library does not say"],
            },
        )
        writer.append(
            "activations",
            {
                **key,
                "start": 0,
                "n": 1,
                "site": "layers.1.out",
                "dtype": "bfloat16",
                "width": 2,
                "data": [codecs.encode_floats(np.array([[1.5, -0.0]]))],
            },
        )
        writer.append(
            "distributions",
            {
                **key,
                "start": 1,
                "n": 2,
                "k": 2,
                "ids": [[69_999, 40_000, 40_000, 7]],
                "logprobs": [[-0.5, -1.0, 0.0, -np.inf]],
                "tail": [Masked(np.array([-3.5, 0], np.float32), np.array([True, False]))],
                "semantics": [
                    {
                        "temperature": 1.0,
                        "edits": [],
                        "truncation": [],
                        "vocab_size": 70_000,
                        "dtype": "float32",
                        "source": "recomputed",
                    }
                ],
            },
        )
        note = {**key, "t_ns": [1, 2, 3]}
        writer.append(
            "annotations",
            {
                **note,
                "name": ["reward", "filter", "reward"],
                "number": [0.0, None, -1.5],
                "text": [None, "too long", None],
            },
        )
        late = {"engine": "", "pass": 0, "t_ns": [4, 5, 6]}
        writer.append(
            "annotations",
            {
                **late,
                "request": ["chat-7", "chat-7", "chat-8"],
                "sample": [-1, 1, -1],
                "name": ["group", "advantage", "reward"],
                "number": [None, 0.75, 1.0],
                "text": ["prompt-7", None, None],
            },
        )
        writer.append(
            "steps",
            {"engine": ENGINE, "step": [0, 1], "kind": ["prefill", "decode"], "rows": 1},
        )
        writer.append(
            "events",
            {"writer": "f" * 32, "t_ns": 1, "kind": "gap", "detail": '{"reason": "golden"}'},
        )
    store.seal(root, status={"exit": 0})


if __name__ == "__main__":
    target = Path(__file__).parent / f"tape-{format_version()}"
    packed = target.with_name(f"{target.name}-packed")
    for folder in (target, packed):
        shutil.rmtree(folder, ignore_errors=True)
    write(target)
    compact(target, packed)
    print(target, packed)
