"""A second vLLM engine, in a process of its own, that runs the sequences of the suite once.

    python -m rolltape.replay.verify.vllm_second SPEC.json

The specification has `model`, `arguments` of the engine, `tape` (folder that is made), `prompts`,
`responses` (token ids by row) and `decode`: whether the responses are decoded, tokens forced, or
scored as parts of the prompts, which needs nothing inside of the workers. With `sites`, the token
ids of one of those prompts, all sites of it are kept, merged over the ranks, in `sites.pt` beside
the tape. The caller's id of a request is `second/ROW`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rolltape
from rolltape.replay.verify.cases import NotApplicableError
from rolltape.store import Tape

if TYPE_CHECKING:
    from rolltape.replay.sites.vllm_ranks import MergedForward
    from rolltape.replay.verify.rank_sites import SiteRows

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
    sites: Sequence[int] | None = None,
) -> Tape:
    """Run the sequences on another engine; returns its tape.

    Args:
        folder: for what goes there and back; made.
        model: path of the checkpoint.
        arguments: of the engine.
        prompts: int64 by row.
        responses: int64 by row.
        decode: decode the responses, or score them as parts of the prompts.
        sites: keep the sites of the prompt of these ids, for `sites_of_second`.

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
        "sites": None if sites is None else [int(token) for token in sites],
    }
    given = folder / "spec.json"
    given.write_text(json.dumps(spec))
    beside(__name__, given, ranks=int(arguments.get("tensor_parallel_size", 1)))
    return rolltape.open(folder / "tape")


def beside(module: str, given: Path, *, ranks: int) -> None:
    """Run a module on its specification, in a process of its own.

    Args:
        module: its name.
        given: the specification.
        ranks: of the engine that it starts.

    Raises:
        NotApplicableError: it failed, or took too long.
    """
    # it records for itself, not for the recording of this process
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLTAPE_")}
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1 and len(cores) >= ranks:
        # on the CPU; by itself vLLM gives each rank a NUMA node of its own
        bound = "|".join(map(str, cores[:ranks]))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
    command = [sys.executable, "-m", module, str(given)]
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


def sites_of_second(folder: Path) -> tuple[SiteRows, list[dict[str, Any]]]:
    """The sites that `second_engine` kept, and the replicas that disagree."""
    import torch

    found = torch.load(folder / "sites.pt", weights_only=True)
    return found["sites"], found["replicas"]


def kept_sites(forwards: Sequence[MergedForward]) -> tuple[SiteRows, list[dict[str, Any]]]:
    """Sites and replicas that disagree, of a prompt that ran whole in one forward.

    Raises:
        NotApplicableError: it did not.
    """
    if len(forwards) != 1:
        raise NotApplicableError(f"the prompt ran whole in {len(forwards)} forwards, not in one")
    (forward,) = forwards
    replicas = [
        {"site": d.site, "position": d.position, "rank": d.rank, "against": d.against}
        for d in forward.disagreements
    ]
    return forward.sites, replicas


def _main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with rolltape.record(spec["tape"], level="routing", on_full="block"):
        _run(spec, Path(path).with_name("sites.pt"))


def _run(spec: Mapping[str, Any], kept: Path) -> None:
    import torch
    from vllm import SamplingParams

    from rolltape.replay.sites.vllm_ranks import RankTaps
    from rolltape.replay.verify.vllm import start_engine
    from rolltape.replay.verify.vllm_force import Inside

    decode = spec["decode"]
    engine = start_engine(spec["model"], spec["arguments"])
    inside = Inside(engine) if decode else None
    taps = None
    if spec["sites"] is not None:
        taps = RankTaps(engine.collective_rpc, tokens=spec["sites"])
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
    if taps is not None:
        sites, replicas = kept_sites(taps.forwards())
        torch.save({"sites": sites, "replicas": replicas}, kept)
        taps.remove()
    engine.engine_core.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
