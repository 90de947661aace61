"""What transformers says of a sequence, and a recorded one compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltape.recorder.moe import find_moe_blocks


def teacher(path: Path) -> Any:
    """ids -> (raw logprobs [T], routes [T, layers, k]) by a teacher-forced pass of a model.

    In float64: a reference in float32 has errors of its own that are as large as the engine's,
    and depend on the number of threads.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    blocks = find_moe_blocks(model)
    got: dict[int, Any] = {}
    for index, block in enumerate(blocks):
        block.experts.register_forward_pre_hook(
            lambda _, args, index=index: got.__setitem__(index, args[1])
        )

    def score(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(given).logits[0].double().log_softmax(-1)
        raw = np.zeros(len(ids))
        raw[1:] = logprobs[:-1].gather(-1, given[0, 1:, None])[:, 0].numpy()
        return raw, np.stack([got[i].numpy() for i in range(len(blocks))], 1)

    return score


def check_positions(sequence: Any, truth: Any) -> int:
    """What there is of a sequence whose tokens are all known; returns the number of kept sets."""
    ids, first, explicit = sequence.tokens.values, sequence.prompt_len, 0
    raw, routes = truth(ids)
    mine, got = sequence.logprob("raw"), sequence.routes()
    np.testing.assert_allclose(mine.values[mine.valid], raw[mine.valid], atol=1e-5, rtol=1e-6)
    there = got.valid
    assert (np.sort(got.ids, -1)[there] == np.sort(routes, -1)[there]).all()
    supports, sampling = sequence.supports(), sequence.info["sampling"]
    for position in range(first, len(ids)):
        kept = supports.at(position)
        if kept is not None:
            explicit += 1
            assert int(ids[position]) in kept
            assert len(kept) <= (sampling.get("top_k") or len(kept))
    # what is left shares out the mass of what was cut
    scaled, processed = sequence.logprob("scaled"), sequence.logprob("processed")
    both = scaled.valid & processed.valid
    assert (processed.values[both] >= scaled.values[both] - 1e-6).all()
    return explicit
