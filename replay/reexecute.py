"""Mode `re-execute`: the recorded schedule again on the same engine, and whether the bits agree."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltape.recorder.provenance import provenance
from rolltape.replay.executors.conditions import changed_conditions
from rolltape.replay.executors.protocol import Changes, NotRunError
from rolltape.replay.reproduction import reproduction
from rolltape.replay.versions import parse_checkpoints
from rolltape.store import Tape, TapeExistsError, UsageError
from rolltape.store import open as open_tape

#: Engine -> module with `run`, see `rolltape.replay.executors.transformers.run`.
EXECUTORS = {
    "transformers": "rolltape.replay.executors.transformers",
    "vllm": "rolltape.replay.executors.vllm",
    "tensorrt_llm": "rolltape.replay.executors.tensorrt_llm",
}


def reexecute(
    tape: Tape | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    on: str | None = None,
    switches: Sequence[str] = (),
    model: Any = None,
    checkpoints: Sequence[str] = (),
    device: str | None = None,
    foreign_pins: bool = False,
) -> dict[str, Any]:
    """Run the recorded calls of a tape again, tokens forced, and compare every bit.

    Args:
        tape: the recording.
        out: folder of the new tape, whose parent `tape` is.
        on: the engine that was recorded; by default what the tape says.
        switches: `KEY=VALUE`, see `rolltape.replay.switches.ALTERNATIVES`.
        model: path of the model, or a loaded one; by default what the tape names.
        checkpoints: `VERSION=PATH`, of weight versions of the tape.
        device: torch device; by default of the kind that was recorded.
        foreign_pins: TensorRT-LLM: take choices of kernels that another device or library made.

    Returns:
        JSON-able: what `rolltape.replay.reproduction.reproduction` returns, and mode, on, tape,
        parent, model, checkpoints, switches, forwards, self_test, conditions (what is not as it
        was), warnings, seconds.

    Raises:
        UsageError: a request or switch that tape or engine cannot do.
        ModelMismatchError: the model is not the one of the tape.
        ForcingError: tokens cannot be forced without changing other values.
        TapeError: `tape` cannot be read, or `out` is there already.
    """
    changes = Changes.parse(switches)
    places = parse_checkpoints(checkpoints)
    if on is not None and on not in EXECUTORS:
        raise UsageError(f"--on {on}: no such executor", hint=" | ".join(EXECUTORS))
    if "://" in os.fspath(out):
        raise UsageError(f"-o {out}: a replay is written to a local folder")
    root = Path(out)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TapeExistsError(f"{root} is not an empty folder", hint="choose another -o")
    source = tape if isinstance(tape, Tape) else open_tape(tape)
    start = time.perf_counter()
    on = on or _recorded_by(source)
    more: dict[str, Any] = {"foreign_pins": True} if foreign_pins else {}
    if foreign_pins and on != "tensorrt_llm":
        raise UsageError(f"--foreign-pins: --on {on} pins no choice of a kernel")
    executor = importlib.import_module(EXECUTORS[on])
    facts = {
        **provenance(sys.argv),
        "mode": "re-execute",
        "switches": changes.as_dict(),
        "checkpoints": {str(version): path for version, path in places.items()},
        **more,
    }
    try:
        execution = executor.run(
            source,
            root,
            changes=changes,
            model=model,
            checkpoints=places,
            device=device,
            provenance=facts,
            **more,
        )
    except NotRunError as error:
        return _not_run(source, on, changes, str(error))
    done = open_tape(root)
    found = reproduction(
        source,
        done,
        execution=execution,
        composition=not changes.composition,
        changed=changes.any,
    )
    return {
        **found,
        "mode": "re-execute",
        "on": on,
        "tape": str(root),
        "parent": str(source.place),
        "model": execution.model,
        "checkpoints": facts["checkpoints"],
        "switches": changes.as_dict(),
        "forwards": execution.forwards,
        "self_test": dict(execution.self_test),
        "conditions": _conditions(source, done),
        "warnings": list(execution.warnings),
        "seconds": round(time.perf_counter() - start, 3),
    }


def _recorded_by(source: Tape) -> str:
    """The executor of the first rollout engine of a tape that has one."""
    adapters = [e["adapter"] for e in source.engines.values() if e["role"] == "rollout"]
    return next((name for name in adapters if name in EXECUTORS), "transformers")


def _not_run(source: Tape, on: str, changes: Changes, reason: str) -> dict[str, Any]:
    return {
        "verdict": "not-run",
        "reason": reason,
        "first": None,
        "compared": {},
        "differ": {},
        "sequences": 0,
        "sequences_differ": 0,
        "not_compared": [{"what": "sequences", "reason": reason, "sequences": len(source)}],
        "executed": [],
        "mode": "re-execute",
        "on": on,
        "tape": None,
        "parent": str(source.place),
        "model": None,
        "checkpoints": {},
        "switches": changes.as_dict(),
        "forwards": 0,
        "self_test": {"neutral": None, "control": None, "reason": "not run"},
        "conditions": [],
        "warnings": [],
        "seconds": 0.0,
    }


def _conditions(source: Tape, done: Tape) -> list[str]:
    origins = {s.origin.engine: s.key.engine for s in done if s.origin is not None}
    lines = [
        line
        for engine, now in origins.items()
        for line in changed_conditions(source, engine, done.engine(now))
    ]
    return list(dict.fromkeys(lines))
