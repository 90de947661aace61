"""A rollout of two engines with a schedule, updates and kernel choices, and a trainer's tape of it.

The numbers are made up so that a test can say what each one must be; the files are real. Run as a
script to look at it by hand: schedule_data.py FOLDER.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store import TapeWriter, create_report, create_tape, seal

ONE, TWO, TRAINER = "aa0c29ab" * 4, "bb0c29ab" * 4, "cc0c29ab" * 4
START = 1_700_000_000_000_000_000
MS = 1_000_000
#: Start of each step of engine ONE, ms; step 3 does not begin before the update is over.
STARTS = (0, 30, 40, 250, 262, 274, 286)


@dataclass(frozen=True)
class Schedule:
    """Where the tapes are."""

    a: Path
    b: Path
    report: Path


def build(root: Path, *, dirty: bool = True, mismatch: bool = True) -> Schedule:
    """Tape A (two engines, versions 0 and 1), tape B (the trainer) and their report.

    Args:
        root: folder for the three.
        dirty: whether a step runs while the weights are being written.
        mismatch: whether the trainer's version 1 has another router.
    """
    a = create_tape(root / "a", role="rollout")
    b = create_tape(root / "b", role="trainer")
    with TapeWriter(a) as writer:
        for engine, replica in ((ONE, 0), (TWO, 1)):
            _engine(writer, engine, "rollout", replica)
        _sequences(writer)
        _steps(writer, dirty=dirty)
        _events(writer)
        _tactics(writer, other="2")
        for engine in (ONE, TWO):
            _version(writer, engine, 0, START - 50 * MS, shift=0)
            _version(writer, engine, 1, START + 240 * MS, shift=1)
        _dirty(writer)
    with TapeWriter(b) as writer:
        _engine(writer, TRAINER, "trainer", None)
        for version in (0, 1):
            _version(writer, TRAINER, version, START, shift=version, wrong=mismatch)
        _scored(writer)
        _tactics(writer, other="7")
    for path in (a, b):
        seal(path, status={"exit": 0})
    return Schedule(a, b, _report(root / "report", a, b))


def _engine(writer: TapeWriter, engine: str, role: str, replica: int | None) -> None:
    writer.append(
        "engines",
        {
            "engine": engine,
            "writer": writer.id,
            "role": role,
            "adapter": "vllm" if role == "rollout" else "transformers",
            "process": "worker",
            "started_ns": START - 60 * MS,
            "replica": replica,
            "ranks": json.dumps({"tp": [0, 1]}),
            "model_fingerprint": "5c9f" * 8,
            "dtype": "bfloat16",
            "effective": json.dumps({"quantization": "fp8"} if role == "rollout" else {}),
        },
    )


def _sequences(writer: TapeWriter) -> None:
    """Requests 0 to 3 of engine ONE and 4 of engine TWO: 8 prompt tokens, 4 of response."""
    for request in range(5):
        engine = ONE if request < 4 else TWO
        row = {
            "engine": engine,
            "request": str(request),
            "sample": 0,
            "pass": 0,
            "prompt_len": 8,
            "opened_ns": START,
        }
        writer.append("sequences", {**row, "finish": "open"})
        closed = START + (300 if request != 3 else 50) * MS
        finish = {"finish": "stop", "length": 12, "digest": f"{request:032x}", "closed_ns": closed}
        writer.append("sequences", {**row, **finish})
        tokens = {n: row[n] for n in ("engine", "request", "sample", "pass")}
        logprobs = np.full(12, -1.0, np.float32)
        writer.append(
            "tokens",
            {**tokens, "start": 0, "n": 12, "ids": [np.arange(12)], "processed": [logprobs]},
        )


def _steps(writer: TapeWriter, *, dirty: bool) -> None:
    """Engine ONE: chunked prefill, decode, update, mixed with a recompute, decode, verify, decode.

    Engine TWO: a prefill with a cached prefix, and decodes; its last step begins in the middle.
    """
    # kind, rows of (request, start, n, kind, version), graph
    one = [
        ("prefill", [(0, 0, 5, "prefill", 0), (3, 0, 8, "prefill", 0)], None),
        ("mixed", [(0, 5, 3, "prefill", 0), (3, 8, 1, "decode", 0)], None),
        ("decode", [(0, 8, 1, "decode", 0), (3, 9, 1, "decode", 0)], "full:2"),
        (
            "mixed",
            [(0, 0, 9, "recompute", 1), (1, 0, 8, "prefill", 1), (3, 10, 1, "decode", 1)],
            None,
        ),
        ("decode", [(0, 9, 1, "decode", 1), (1, 8, 1, "decode", 1)], "full:2"),
        ("decode", [(0, 10, 1, "decode", 1), (1, 9, 2, "verify", 1)], None),
        ("decode", [(2, 8, 1, "decode", 1)], "full:1"),
    ]
    two = [
        ("prefill", [(4, 4, 4, "prefill", 0)], None),
        ("decode", [(4, 8, 1, "decode", 0)], "full:1"),
        ("decode", [(4, 9, 1, "decode", 0)], "full:1"),
    ]
    starts_two = (5, 25, 235 if dirty else 20)
    for engine, steps, starts in ((ONE, one, STARTS), (TWO, two, starts_two)):
        for number, ((kind, rows, graph), start) in enumerate(zip(steps, starts, strict=True)):
            tokens = sum(n for _, _, n, _, _ in rows)
            writer.append(
                "steps",
                {
                    "engine": engine,
                    "step": number,
                    "kind": kind,
                    "t_ns": START + start * MS,
                    "rows": len(rows),
                    "tokens": tokens,
                    "padded_tokens": 2 if graph else 0,
                    "graph": graph,
                    "attention": "FLASH_ATTN",
                    "experts": "triton",
                    "cache": "paged",
                },
            )
            for row, (request, at, n, row_kind, version) in enumerate(rows):
                _forward(writer, engine, number, row, request, at, n, row_kind, version)
    _forward(writer, TWO, 0, 0, 4, 0, 4, "cached", None)


def _forward(
    writer: TapeWriter,
    engine: str,
    step: int,
    row: int,
    request: int,
    start: int,
    n: int,
    kind: str,
    version: int | None,
) -> None:
    verify = kind == "verify"
    writer.append(
        "forwards",
        {
            "engine": engine,
            "step": step,
            "row": row,
            "request": str(request),
            "sample": 0,
            "pass": 0,
            "start": start,
            "n": n,
            "kind": kind,
            "drafted": 3 if verify else None,
            "accepted": 1 if verify else None,
            "weight_version": version,
            "kv_source": "shared" if kind == "cached" else "own",
        },
    )


def _events(writer: TapeWriter) -> None:
    happened: list[tuple[float, str, str | None, dict[str, Any]]] = [
        (60, "preempt", "0", {"forwarded": 9}),
        (100, "sleep", None, {"level": 1}),
        (200, "wake", None, {}),
        (205, "update", None, {"requested": "step-1"}),
        (206, "update", None, {"requested": "step-9"}),
        (240, "update", None, {"version": 1, "label": "step-1", "applied": True}),
        (280, "gap", None, {"table": "routes", "rows": 64, "reason": "queue full"}),
        (281, "finding", None, {"code": "RT405", "message": "the update changed no weight"}),
    ]
    for at, kind, request, detail in happened:
        writer.append(
            "events",
            {
                "engine": ONE,
                "writer": writer.id,
                "t_ns": START + int(at * MS),
                "kind": kind,
                "request": request,
                "sample": 0 if request else None,
                "detail": json.dumps(detail),
            },
        )


def _tactics(writer: TapeWriter, *, other: str) -> None:
    rows = [
        (-10, "fused_moe", {"shapes": [2, 32]}, "chosen", "Cutlass", other, None, None),
        (-9, "fused_moe", {"shapes": [2, 32]}, "cached", "Cutlass", "1", "full:2", None),
        (-8, "fused_moe", {"shapes": [4, 32]}, "fallback", "Cutlass", "-1", None, None),
        (100, "bmm", {"shapes": [64]}, "chosen", "Trtllm", "3", None, None),
        (300, "gemm", {}, "unrecorded", "cuBLASLt", None, None, "its heuristic has no interface"),
    ]
    for at, op, key, source, implementation, tactic, graph, reason in rows:
        writer.append(
            "tactics",
            {
                "engine": ONE,
                "writer": writer.id,
                "t_ns": START + at * MS,
                "tuner": "flashinfer" if op != "gemm" else "cublas",
                "op": op,
                "key": json.dumps(key),
                "source": source,
                "implementation": implementation,
                "tactic": tactic,
                "graph": graph,
                "time_ms": 0.25 if source == "chosen" else None,
                "reason": reason,
            },
        )


#: Tensor groups with their digest of version 0 and why it cannot be compared.
GROUPS: dict[str, tuple[int, str | None]] = {
    "": (1000, None),
    "embed": (10, None),
    "layers.0.router": (20, None),
    "layers.0.experts": (30, "repacked for the MoE kernel"),
    "layers.10.attn": (40, None),
    "layers.2.attn": (50, None),
    "derived": (60, "made by the engine"),
}


def _version(
    writer: TapeWriter, engine: str, version: int, t_ns: int, *, shift: int, wrong: bool = False
) -> None:
    for group, (digest, reason) in GROUPS.items():
        if engine == TRAINER and group == "derived":
            continue
        repacked = 5 if engine == TRAINER and reason else 0
        frozen = group == "embed"
        value = digest + (0 if frozen else shift) + repacked
        if wrong and version == 1 and group in ("", "layers.0.router"):
            value += 100
        _weight(writer, engine, version, t_ns, group, value, None if engine == TRAINER else reason)


def _weight(
    writer: TapeWriter,
    engine: str,
    version: int,
    t_ns: int,
    group: str,
    digest: int,
    reason: str | None = None,
) -> None:
    writer.append(
        "weights",
        {
            "engine": engine,
            "version": version,
            "state": "complete",
            "t_ns": t_ns,
            "group": group,
            "digest": digest,
            "tensors": 2,
            "elements": 64,
            "label": f"step-{version}",
            "reason": reason,
        },
    )


def _dirty(writer: TapeWriter) -> None:
    for engine in (ONE, TWO):
        writer.append(
            "weights",
            {
                "engine": engine,
                "version": 0,
                "state": "dirty",
                "t_ns": START + 210 * MS,
                "group": "",
                "tensors": 0,
                "elements": 0,
                "reason": "update_weights",
            },
        )


def _scored(writer: TapeWriter) -> None:
    """The trainer scores each sequence with version 1."""
    for request in range(5):
        key = {"engine": TRAINER, "request": str(request), "sample": 0, "pass": 0}
        done = {"prompt_len": 8, "finish": "scored", "length": 12, "digest": f"{request:032x}"}
        writer.append("sequences", {**key, **done})
        logprobs = np.full(12, -1.0, np.float32)
        writer.append(
            "tokens",
            {**key, "start": 0, "n": 12, "ids": [np.arange(12)], "processed": [logprobs]},
        )
        row = {"step": request, "row": 0, "start": 0, "n": 11, "kind": "score"}
        writer.append("forwards", {**key, **row, "weight_version": 1})


def _report(path: Path, a: Path, b: Path) -> Path:
    uuids = [str(json.loads((p / "tape.json").read_text())["uuid"]) for p in (a, b)]
    sides = [
        {"path": str(p), "uuid": u, "role": r}
        for p, u, r in zip((a, b), uuids, ("rollout", "trainer"), strict=True)
    ]
    summary = {"verdict": "identical", "a": sides[0], "b": sides[1], "tokens_compared": 20}
    report = create_report(path, summary=summary)
    with TapeWriter(report) as writer:
        for request in range(5):
            engine = ONE if request < 4 else TWO
            ids = {"a": f"{engine[:8]}.{request}.0", "b": f"{TRAINER[:8]}.{request}.0"}
            sizes = {"prompt_len": 8, "length": 12, "compared": 4, "max_abs": 0.0}
            writer.append("sequences", {**ids, **sizes})
    return report


def build_dense(
    root: Path, *, steps: int, engines: int = 2, timed: bool = True, rows: bool = False
) -> Path:
    """A tape of many steps: every 50th a prefill of 10 ms, decodes of 1 ms between them.

    Args:
        root: folder for it.
        steps: of each engine.
        engines: how many.
        timed: whether the steps have times.
        rows: whether each step has a row in `forwards`.
    """
    path = create_tape(root / "dense", role="rollout")
    number = np.arange(steps)
    prefill = number % 50 == 0
    start = np.concatenate([[0], np.cumsum(np.where(prefill, 10, 1) * MS)[:-1]])
    with TapeWriter(path) as writer:
        for engine in (ONE, TWO, TRAINER)[:engines]:
            for part in np.array_split(number, max(1, steps // 4096)):
                writer.append(
                    "steps",
                    {
                        "engine": [engine] * len(part),
                        "step": part,
                        "kind": np.where(prefill[part], "prefill", "decode").tolist(),
                        "t_ns": (START + start[part]).tolist() if timed else [None] * len(part),
                        "rows": part % 32 + 1,
                        "tokens": part % 32 + 1,
                    },
                )
            if rows:
                writer.append(
                    "forwards",
                    {
                        "engine": [engine] * steps,
                        "step": number,
                        "row": 0,
                        "request": ["0"] * steps,
                        "sample": 0,
                        "pass": 0,
                        "start": number,
                        "n": 1,
                        "kind": "decode",
                    },
                )
    seal(path, status={"exit": 0})
    return path


if __name__ == "__main__":
    made = build(Path(sys.argv[1]))
    sys.stdout.write(f"{made.a} {made.b} {made.report}\n")
