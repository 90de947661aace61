"""The smallest part of a re-execution that still has other bits, cut behind a step.

Of transformers that is one call. Its rows cannot be left out: who stands beside whom is what is
run again. For vLLM see `rolltape.replay.shrink_steps`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rolltape.recorder.provenance import provenance
from rolltape.replay.reexecute import reexecute
from rolltape.replay.reproduction import reproduction
from rolltape.replay.schedule import Call, read_schedule
from rolltape.replay.serving_steps import serving_engines
from rolltape.replay.shrink_steps import parts_of_run
from rolltape.store import Tape, UsageError
from rolltape.store.excerpt import write_excerpt
from rolltape.store.keys import Key

#: What of a first difference has to be the same in a part of a serving engine's run.
_SAME = ("what", "step", "sequence", "position")


def shrink_calls(
    a: Tape, b: Tape, out: Path, *, model: nn.Module | None, device: str | None
) -> dict[str, Any]:
    """Keep the call or the run of the first difference, cut behind its step, if it still differs.

    Args:
        a: a recording of transformers or vLLM.
        b: its re-execution.
        out: folder of the new tape.
        model: loaded already; by default what the tapes name.
        device: torch device of a model that is loaded here.

    Returns:
        As `rolltape.replay.shrink.shrink`; `first` is the first difference of the new tape and its
        re-execution, and column, bound and largest are None.

    Raises:
        UsageError: a switch of `b` that composes batches anew, or another engine.
    """
    start = time.perf_counter()
    asked: Mapping[str, str] = b.header["provenance"]["switches"]
    for key in ("batch", "chunk", "prefix_cache"):
        if asked.get(key, "recorded") != "recorded":
            raise UsageError(
                f"{b.place} ran with {key}={asked[key]}: no recorded call is run again there",
                hint="shrink a re-execution of the recorded batches",
            )
    places = b.header["provenance"].get("checkpoints") or {}
    checkpoints = [f"{version}={path}" for version, path in places.items()]
    serving = serving_engines(a)
    result: dict[str, Any] = {
        "tape": None,
        "parent": str(a.place),
        "mode": "re-execute",
        "column": None,
        "bound": None,
        "largest_before": None,
        "switches": dict(asked),
        "checkpoints": checkpoints,
        "on": "vllm" if serving else "transformers",
    }

    def answer(verdict: str, reason: str, **more: Any) -> dict[str, Any]:
        seconds = round(time.perf_counter() - start, 3)
        return {"verdict": verdict, "reason": reason, **result, **more, "seconds": seconds}

    seen = reproduction(a, b)
    if seen["first"] is None:
        if seen["sequences"]:
            return answer("identical", "no value differs: there is nothing to shrink")
        return answer("not-run", "nothing of the two can be compared")
    if serving:
        parts = parts_of_run(a, seen["first"])
    else:
        parts = _parts_of_call(read_schedule(a).calls, seen["first"])
    if not parts:
        what = "run" if serving else "call"
        return answer("not-run", f"the {what} of the first difference cannot be laid out again")
    given = [f"weights={asked['weights']}"] if asked["weights"] != "recorded" else []
    runs = 0
    for lengths in parts:
        runs += 1
        with tempfile.TemporaryDirectory(prefix="rolltape-") as folder:
            part = write_excerpt(a, Path(folder, "a"), lengths)
            found = reexecute(
                part,
                Path(folder, "b"),
                switches=given,
                model=_served(b) if serving and not given and not checkpoints else model,
                checkpoints=checkpoints,
                device=device,
            )
        if found["verdict"] not in ("not-reproduced", "divergent"):
            continue
        # a run without what came before may differ for that reason alone
        if not serving or all(found["first"][k] == seen["first"][k] for k in _SAME):
            break
    else:
        return answer(
            "not-reproduced",
            f"run again on its own, the last part is {found['verdict']}: {found['reason']}",
            scorings=runs,
        )
    first = found["first"]
    facts = {**provenance(sys.argv), "shrunk": {"replay": b.uuid, "switches": dict(asked)}}
    root = write_excerpt(a, out, lengths, provenance=facts)
    return answer(
        "shrunk",
        found["reason"],
        tape=str(root),
        largest=None,
        first=first,
        sequence=first["sequence"],
        position=first["position"],
        sequences=[len(a), len(lengths)],
        tokens=[sum(s.length for s in a), sum(lengths.values())],
        kept={key.id: n for key, n in lengths.items()},
        scorings=runs,
    )


def _served(b: Tape) -> str | None:
    """The model that a serving engine ran the re-execution with."""
    return next((row["model"] for row in b.engines.values()), None)


def _parts_of_call(calls: tuple[Call, ...], first: Mapping[str, Any]) -> list[dict[Key, int]]:
    """The call of a difference: cut behind its step, and whole; nothing if there is none."""
    for call in calls:
        names = {row.key.id for row in call.rows}
        here = call.first_step <= first["step"] < call.first_step + call.steps
        if first["sequence"] in names or (first["sequence"] is None and here):
            whole = {row.key: len(row.prompt) + len(row.response) for row in call.rows}
            drawn = first["step"] - call.first_step + 1
            cut = {row.key: min(whole[row.key], len(row.prompt) + drawn) for row in call.rows}
            return [cut, whole]
    return []
