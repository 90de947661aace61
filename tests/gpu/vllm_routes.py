"""Compare a recording of vLLM with what the engine itself returned in the same run.

    python -m rolltape record -o TAPE -- python benchmarks/vllm_job.py --routes --outputs FILE ...
    python tests/gpu/vllm_routes.py TAPE FILE

Prints a line of JSON and fails if a route or a logprob of the last batch differs in a bit.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

import rolltape


def main(path: str, outputs: str) -> None:
    tape = rolltape.open(path)
    by_prompt = {}
    for sequence in tape:
        ids = sequence.tokens.values
        by_prompt[ids.astype(np.int64).tobytes()] = sequence
    routes = logprobs = different = missing = 0
    layers: set[int] = set()
    for output in torch.load(outputs, weights_only=False):
        ids = np.array(output["prompt"] + output["ids"], np.int64)
        sequence = by_prompt[ids.tobytes()]
        raw = sequence.logprob("raw").values[len(output["prompt"]) :]
        if output["logprobs"]:
            theirs = np.array(output["logprobs"], np.float32)
            logprobs += len(theirs)
            different += int((theirs.view(np.int32) != raw.view(np.int32)).sum())
        if output["routes"] is not None:
            mine = sequence.routes()
            native = np.asarray(output["routes"])[:, list(mine.layers)]
            n = len(native)
            missing += int((~mine.valid[:n]).sum())
            routes += int(mine.valid[:n].sum())
            different += int((mine.ids[:n] != native)[mine.valid[:n]].any(-1).sum())
            layers |= set(mine.layers)
    found = {"routes": routes, "logprobs": logprobs, "missing": missing, "different": different}
    print(json.dumps({**found, "layers": len(layers)}))
    if different or not routes + logprobs:
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
