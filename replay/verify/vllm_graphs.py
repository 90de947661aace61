"""Sites inside of CUDA graphs: where two executions part on an engine whose forwards are graphs.

    python -m rolltape.replay.verify.vllm_graphs SPEC.json

A hook runs when a graph is captured and never again, but what it enqueues is captured with the
rest. So hooks that only copy each site into a buffer of its own are put on the model before
anything is captured; after each step the buffers hold the sites of that step. Compiled code passes
no hook at all and is switched off: a difference that it alone makes is not found here.

The specification has `model`, `arguments` of the engine, `prompts`, `responses` (token ids by row),
`lots` (two lists of lots of rows, run one after the other) and `rows` to look at. The answer,
`first_site` of the two, goes to `site.json` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rolltape
from rolltape.replay.verify.cases import NotApplicableError
from rolltape.replay.verify.first_site import Trace, digests, first_site
from rolltape.replay.verify.vllm_second import beside

_LOOKS = 3


def site_in_graphs(
    folder: Path,
    model: str,
    arguments: Mapping[str, Any],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    lots: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    rows: Sequence[int],
) -> dict[str, Any] | None:
    """The first site at which two executions part, on a second engine; None if they agree there.

    Args:
        folder: for what goes there and back; made.
        model: path of the checkpoint.
        arguments: of the engine that they were seen on.
        prompts: int64 by row.
        responses: int64 by row; forced.
        lots: rows that run together, of either side.
        rows: to look at.

    Returns:
        site, sequence (the row as text), position, forward (counted from the first of that row).

    Raises:
        NotApplicableError: the engine did not start, or failed; no map of sites for the model.
    """
    folder.mkdir()
    spec = {
        "model": model,
        "arguments": {**arguments, **uncompiled(arguments)},
        "prompts": [ids.tolist() for ids in prompts],
        "responses": [ids.tolist() for ids in responses],
        "lots": [[list(lot) for lot in side] for side in lots],
        "rows": list(rows),
    }
    given = folder / "spec.json"
    given.write_text(json.dumps(spec))
    beside(__name__, given, ranks=1)
    found: dict[str, Any] | None = json.loads((folder / "site.json").read_text())
    return found


def uncompiled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that captures its decode steps, but compiles nothing."""
    import torch

    if not torch.cuda.is_available():
        return {"enforce_eager": True}
    said = arguments.get("compilation_config")  # a number is short for the mode
    given = dict(said) if isinstance(said, Mapping) else {}
    return {"compilation_config": {**given, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


class Buffers:
    """A buffer for every site of a model, written whenever the model runs, also in graphs.

    Args:
        model: what the runner loaded, before anything was captured.
        tokens: most tokens of a step.
        requests: most requests of a step: `logits` has no more rows.
    """

    def __init__(self, model: Any, tokens: int, requests: int) -> None:
        from contextlib import ExitStack

        from rolltape.replay.sites import sites_of
        from rolltape.replay.taps import attached

        self._tokens, self._requests = tokens, requests
        self.sites: dict[str, Any] = {}
        ExitStack().enter_context(attached(model, sites_of(model, "vllm"), self._look))

    def _look(self, site: str, rows: Any) -> None:
        buffer = self.sites.get(site)
        if buffer is None:
            most = self._requests if site == "logits" else self._tokens
            size = max(most, len(rows))
            buffer = self.sites[site] = rows.new_zeros((size, *rows.shape[1:]))
        buffer[: len(rows)].copy_(rows)


def _main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tape = Path(path).with_name("tape")
    with rolltape.record(tape, level="tokens", on_full="block"):
        found = _run(spec)
    Path(path).with_name("site.json").write_text(json.dumps(found))


def _run(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    from rolltape.replay.verify.vllm import start_engine
    from rolltape.replay.verify.vllm_force import Inside

    buffers: list[Buffers] = []
    for owner in _runners():
        owner.load_model = _with_buffers(owner.load_model, buffers)
    engine = start_engine(spec["model"], spec["arguments"])
    if not buffers:  # a runner that loads in another way
        raise NotApplicableError("the model of this engine is not loaded where taps are put on it")
    inside = Inside(engine)
    for _ in range(_LOOKS):
        a, b = (_traced(spec, engine, inside, buffers[0], lots) for lots in spec["lots"])
        if not a or a.keys() != b.keys():
            raise NotApplicableError("the two sides did not show the same sites and positions")
        if (found := first_site(a, b)) is not None:
            return found
    return None


def _runners() -> list[Any]:
    """The model runners that load a model themselves."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if current_platform.device_type != "cpu":
        return [GPUModelRunner]
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return [CPUModelRunner]


def _with_buffers(load: Any, made: list[Buffers]) -> Any:
    """This process runs nothing else: the patch stays."""

    def loaded(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(runner, *args, **kwargs)
        sizes = int(runner.max_num_tokens), int(runner.max_num_reqs)
        made.append(Buffers(runner.get_model(), *sizes))
        return result

    return loaded


def _traced(
    spec: Mapping[str, Any], engine: Any, inside: Any, buffers: Buffers, lots: list[list[int]]
) -> Trace:
    from vllm import SamplingParams

    trace: Trace = {}
    usual: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    if not engine.reset_prefix_cache():
        raise NotApplicableError("this engine did not empty its prefix cache")
    for lot in lots:
        names: dict[str, int] = {}
        for row in lot:
            prompt, response = spec["prompts"][row], spec["responses"][row]
            params = SamplingParams(**usual, logprobs=0, max_tokens=len(response))
            ids = {"prompt_token_ids": prompt}
            outer = f"{len(trace)}-{row}"
            name = engine.add_request(outer, ids, params) or outer
            inside.tokens[name] = np.array([*prompt, *response], np.int64)
            if row in spec["rows"]:
                names[name] = row
        forward = -1
        while engine.has_unfinished_requests():
            inside.spans = []
            engine.step()
            forward += any(name in names for name, _, _ in inside.spans)
            _look(trace, buffers, inside.spans, names, forward)
        inside.tokens.clear()
    return trace


def _look(
    trace: Trace,
    buffers: Buffers,
    spans: Sequence[tuple[str, int, int]],
    names: Mapping[str, int],
    forward: int,
) -> None:
    """Hash the rows of a step that has run."""
    at, wanted = 0, []
    for index, (name, start, n) in enumerate(spans):
        if name in names:
            wanted.append((str(names[name]), index, at, start, n))
        at += n
    for site, buffer in buffers.sites.items():
        for key, index, first, start, n in wanted:
            rows, positions = buffer[first : first + n], range(start, start + n)
            if site == "logits":  # of the last token of each row
                rows, positions = buffer[index : index + 1], range(start + n - 1, start + n)
            for position, digest in zip(positions, digests(rows), strict=True):
                trace.setdefault((key, position, site), (digest, forward))


if __name__ == "__main__":
    _main(*sys.argv[1:])
