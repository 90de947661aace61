"""Two rollouts on TensorRT-LLM, and the tape of them run again.

tensorrt_llm_reexecute_job.py record MODEL
tensorrt_llm_reexecute_job.py again TAPE FOLDER RESULT MODEL-WITH-A-CHANGE [NAME=TAPE ...]

RESULT gets what `reexecute` answers for the tape itself, with the other model, with switches, and
for each other tape by its name: {"error": ...} where it refuses. `left` is what a run left behind.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, MoeConfig
from tensorrt_llm_job import FRESH, generate, mix, params, prompt

from rolltape import store
from rolltape.recorder.inject import _rolltape_hook
from rolltape.replay.cli import replay
from rolltape.replay.executors import tensorrt_llm as executor
from rolltape.replay.reexecute import reexecute
from rolltape.replay.reproduction import reproduction
from rolltape.store import RolltapeError


def everything(model: str) -> None:
    """Overlap, chunks of prompts and experts, padded graphs, several samples, unforeseen ends."""
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        kv_cache_config=FRESH,
        enable_chunked_prefill=True,
        max_num_tokens=16,
        moe_config=MoeConfig(max_num_tokens=6),
        cuda_graph_config=CudaGraphConfig(batch_sizes=[2, 4, 8], enable_padding=True),
    )
    with engine as llm:
        # ids seed the draws of the double: those of a later run will be others
        llm._executor.engine.next_req_id += 1000
        first = generate(llm, mix())
        fourth = first[0]["outputs"][0]["ids"][3]
        scored = (prompt(13), params(prompt_logprobs=0, logprobs=0))
        stop = (prompt(9), params(end_id=fourth, logprobs=0))
        generate(llm, [stop, scored, *mix()[1:3]])
        other = llm.generate_async(prompt(12), params(max_tokens=16, logprobs=0))
        how = params(max_tokens=40, logprobs=0, temperature=1.0, end_id=-1)
        gone = llm.generate_async(prompt(7), how, streaming=True)
        for _ in range(4):
            next(gone)
        gone.abort()
        gone.result()
        other.result()


def scarce(model: str) -> None:
    """Prefixes that are taken over, and fewer blocks than the sequences need when they grow."""
    cache = KvCacheConfig(max_tokens=96)
    with LLM(model=model, skip_tokenizer_init=True, kv_cache_config=cache) as llm:
        how = params(max_tokens=8, temperature=1.0, logprobs=0)
        generate(llm, [(prompt(18), how)])
        generate(llm, [(prompt(18)[:14] + prompt(5), how)])
        grow = params(max_tokens=24, temperature=1.0, logprobs=0)
        generate(llm, [(prompt(10, i), grow) for i in range(4)])


def again(tape: str, folder: str, result: str, changed: str, *others: str) -> None:
    root = Path(folder)
    seen: list[Any] = []
    run = executor.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(run(*args, **kwargs))
        return seen[-1]

    setattr(executor, "run", watched)  # noqa: B010
    found: dict[str, Any] = {}

    def ask(name: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            found[name] = call()
        except RolltapeError as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["left"] = left_behind()
        found[name]["took"] = time.perf_counter() - began

    ask("itself", lambda: reexecute(tape, root / "itself", on="tensorrt_llm"))
    ask("changed", lambda: reexecute(tape, root / "changed", on="tensorrt_llm", model=changed))
    one = ["batch=2"]
    ask("batch", lambda: reexecute(tape, root / "batch", on="tensorrt_llm", switches=one))
    for name, switch in (("uncached", "prefix_cache=off"), ("chunk", "chunk=12")):
        out, given = root / name, [switch]
        ask(name, partial(reexecute, tape, out, on="tensorrt_llm", switches=given))
    of_0 = {"switches": ["weights=0"], "on": "tensorrt_llm"}
    ask("version", lambda: reexecute(tape, root / "version", **of_0))
    other = {**of_0, "checkpoints": [f"0={changed}"]}
    ask("wrong", lambda: reexecute(tape, root / "wrong", **other))
    done = store.open(root / "itself")
    for name, _, path in (other.partition("=") for other in others):
        source, out = store.open(path), root / name
        if name.startswith("compared-"):
            ask(name, partial(reproduction, source, done, execution=seen[0]))
        else:
            ask(name, partial(reexecute, source, out, on="tensorrt_llm"))
        if name == "foreign":
            out = root / "told"
            line = [path, "-o", str(out), "--mode", "re-execute", "--foreign-pins", "--json"]
            ask("told", partial(command, line))
    Path(result).write_text(json.dumps(found, default=str))


def command(line: list[str]) -> dict[str, Any]:
    ran = CliRunner().invoke(replay, line, standalone_mode=False, catch_exceptions=False)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return {**answer, "status": ran.return_value}


def left_behind() -> list[str]:
    """Patches and hooks that are still there."""
    left = [name for name in _rolltape_hook._finder.pending if name in _rolltape_hook.HOOKS]
    for name in {target.partition(":")[0] for target in _rolltape_hook.HOOKS.values()}:
        module = sys.modules.get(name)
        if getattr(module, "_patches", None) or getattr(module, "_installed", None):
            left.append(name)
    return left


def main(task: str, *args: str) -> None:
    if task == "record":
        everything(args[0])
        scarce(args[0])
    else:
        again(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
