"""`vllm_job.py` under a recorder whose hook raises at every third step."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import vllm_job

import rolltape.recorder.vllm.record as record

if __name__ == "__main__":
    launch, count = record.Recorder.launch, itertools.count(1)

    def faulty(self: Any, *args: Any) -> None:
        if next(count) % 3 == 0:
            raise RuntimeError("injected")
        launch(self, *args)

    setattr(record.Recorder, "launch", faulty)  # noqa: B010
    vllm_job.main(*sys.argv[1:])
