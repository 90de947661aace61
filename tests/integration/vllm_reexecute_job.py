"""Runs a tape of vLLM again: vllm_reexecute_job.py TAPE OUT MODEL RESULT [EDITED ...]

RESULT gets what `reexecute` answers, and what the same execution is to each edited recording.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

from rolltape import store
from rolltape.replay.executors import vllm as executor
from rolltape.replay.reexecute import reexecute
from rolltape.replay.reproduction import reproduction


def main(tape: str, out: str, model: str, result: str, *edited: str) -> None:
    seen: list[Any] = []
    run = executor.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(run(*args, **kwargs))
        return seen[-1]

    setattr(executor, "run", watched)  # noqa: B010
    found = {"itself": reexecute(tape, out, on="vllm", model=model)}
    for path in edited:
        other = reproduction(store.open(path), store.open(out), execution=seen[0])
        found[Path(path).name] = other
    Path(result).write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
