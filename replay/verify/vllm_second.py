"""A second vLLM engine, in a process of its own, that runs the sequences of the suite once.

    python -m rolltape.replay.verify.vllm_second SPEC.json

The specification has `model`, `arguments` of the engine, `tape` (folder that is made), `prompts`,
`responses` (token ids by row) and `decode`: whether the responses are decoded, tokens forced, or
scored as parts of the prompts, which needs nothing inside of the workers. The caller's id of a
request is `second/ROW`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rolltape
from rolltape.replay.verify.cases import NotApplicableError
from rolltape.store import Tape

NAME = "second"
_SECONDS = 900


def second_engine(
    folder: Path,
    model: str,
    arguments: Mapping[str, Any],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    decode: bool,
) -> Tape:
    """Run the sequences on another engine; returns its tape.

    Args:
        folder: for what goes there and back; made.
        model: path of the checkpoint.
        arguments: of the engine.
        prompts: int64 by row.
        responses: int64 by row.
        decode: decode the responses, or score them as parts of the prompts.

    Raises:
        NotApplicableError: the engine did not start, or failed.
    """
    folder.mkdir()
    spec = {
        "model": model,
        "arguments": dict(arguments),
        "tape": str(folder / "tape"),
        "prompts": [ids.tolist() for ids in prompts],
        "responses": [ids.tolist() for ids in responses],
        "decode": decode,
    }
    given = folder / "spec.json"
    given.write_text(json.dumps(spec))
    # it records for itself, not for the recording of this process
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLTAPE_")}
    ranks = int(arguments.get("tensor_parallel_size", 1))
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1 and len(cores) >= ranks:
        # on the CPU; by itself vLLM gives each rank a NUMA node of its own
        bound = "|".join(map(str, cores[:ranks]))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
    command = [sys.executable, "-m", __name__, str(given)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotApplicableError(f"a second engine did not end within {_SECONDS} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        reason = errors[-1].split("]: ")[-1].strip() if errors else "no reason was given"
        raise NotApplicableError(f"a second engine failed: {reason[:300]}")
    return rolltape.open(folder / "tape")


def _main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with rolltape.record(spec["tape"], level="routing", on_full="block"):
        _run(spec)


def _run(spec: Mapping[str, Any]) -> None:
    from vllm import SamplingParams

    from rolltape.replay.verify.vllm import start_engine
    from rolltape.replay.verify.vllm_force import Inside

    decode = spec["decode"]
    engine = start_engine(spec["model"], spec["arguments"])
    inside = Inside(engine) if decode else None
    usual: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    rows = zip(spec["prompts"], spec["responses"], strict=True)
    for row, (prompt, response) in enumerate(rows):
        whole = [*prompt, *response]
        if decode:
            params = SamplingParams(**usual, logprobs=0, max_tokens=len(response))
        else:
            params = SamplingParams(**usual, prompt_logprobs=0, max_tokens=1)
        request = f"{NAME}/{row}"
        ids = {"prompt_token_ids": prompt if decode else whole}
        name = engine.add_request(request, ids, params) or request
        if inside is not None:
            inside.tokens[name] = np.array(whole, np.int64)
    while engine.has_unfinished_requests():
        engine.step()
    if inside is not None:
        inside.close()
    engine.engine_core.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
