"""Runs the determinism suite on one vLLM engine: as it is, and with a fault. Prints JSON.

Usage: vllm_verify_job.py MODEL DTYPE [CASE]: with a case, that one alone and without a fault.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

from rolltape.replay.verify.cases import CASES, Report
from rolltape.replay.verify.prompts import Workload
from rolltape.replay.verify.suite import run_cases
from rolltape.replay.verify.vllm import bench
from rolltape.store.jsonable import jsonable

PROMPTS = 5


@contextmanager
def off_for_few_rows(model: Any) -> Iterator[None]:
    """The MoE block of layer 2 is off where fewer than four tokens run at once."""

    def hook(_: Any, args: Any, output: Any) -> Any:
        return output * 1.01 if len(output) < 4 else output

    handle = model.model.layers[2].mlp.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def main(model: str, dtype: str, case: str = "") -> None:
    work = Workload(prompts=PROMPTS, tokens=6, length=None, seed=0)
    engine = bench(model, work, dtype=dtype)
    found = {}
    try:
        if case:
            cases = run_cases(engine, ("run-to-run", case))
            found[case] = Report(facts=engine.facts, cases=cases).as_dict()
            print(json.dumps(jsonable(found)))
            return
        # two ranks would be another two starts
        every = [name for name in CASES if name != "tp"]
        found["clean"] = Report(facts=engine.facts, cases=run_cases(engine, every)).as_dict()
        with off_for_few_rows(engine._inside.model):
            cases = run_cases(engine, ("slot", "batch", "prefix-cache"))
            found["fault"] = Report(facts=engine.facts, cases=cases).as_dict()
    finally:
        engine.close()
    print(json.dumps(jsonable(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
