"""One forward over whole rows, as they stood in a `generate()` call: no cache, no decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rolltape.recorder.moe import find_moe_blocks
from rolltape.replay.schedule import Call
from rolltape.replay.verify.compare import Values
from rolltape.store.columns import Masked

#: Logprobs float32 [rows, steps], and per MoE layer (ids [rows, columns, k], weights float32).
Computed = tuple[np.ndarray, Mapping[int, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a call, whole.

    Args:
        ids: int64 [rows, columns], padding, prompt and response.
        pad_left: int64 [rows].
        steps: tokens of each response.
    """

    ids: np.ndarray
    pad_left: np.ndarray
    steps: int

    @classmethod
    def of(cls, call: Call) -> Rows:
        """Those of a call whose responses have one length."""
        rows = [np.concatenate([r.padding, r.prompt, r.response]) for r in call.rows]
        pads = np.array([r.pad_left for r in call.rows], np.int64)
        return cls(ids=np.stack(rows), pad_left=pads, steps=call.steps)


def teacher_forced(model: Any, rows: Rows) -> Computed:
    """The logprobs of the responses, and the routes of all columns but the last.

    Args:
        model: a causal language model of transformers.
        rows: what it runs, in one forward.
    """
    ids = torch.from_numpy(rows.ids).to(model.device)
    columns = ids.shape[1] - 1
    pad = torch.from_numpy(rows.pad_left).to(model.device)
    position = torch.arange(columns, device=model.device)[None] - pad[:, None]
    inputs = {
        "input_ids": ids[:, :-1],
        "attention_mask": (position >= 0).long(),
        "position_ids": position.clamp(min=0),
        "use_cache": False,
        "logits_to_keep": rows.steps,
    }
    with torch.no_grad(), _routes(model) as routes:
        logits = model(**inputs).logits
        # as generate() does it: the scores in float32, then a log-softmax
        logprobs = torch.log_softmax(logits.to(torch.float32), -1)
        chosen = logprobs.gather(-1, ids[:, -rows.steps :, None]).squeeze(-1)
    shape = len(ids), columns, -1
    host = {layer: tuple(t.reshape(shape).cpu() for t in found) for layer, found in routes.items()}
    return chosen.cpu().numpy(), {
        layer: (experts.numpy().astype(np.int64), weights.to(torch.float32).numpy())
        for layer, (experts, weights) in host.items()
    }


@contextmanager
def _routes(model: nn.Module) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []
    for block in find_moe_blocks(model):

        def look(_: Any, args: Any, kwargs: Any, layer: int = block.layer) -> None:
            ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
            weights = args[2] if len(args) > 2 else kwargs["top_k_weights"]
            found[layer] = ids.detach().clone(), weights.detach().clone()

        handles.append(block.experts.register_forward_pre_hook(look, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def values_of(call: Call, base: Sequence[Values], computed: Computed) -> list[Values]:
    """What was computed, laid over the sequences of a call.

    Args:
        call: that was run.
        base: the values of its rows as they were recorded.
        computed: from `teacher_forced`.
    """
    logprobs, routes = computed
    out = []
    for index, (row, mine) in enumerate(zip(call.rows, base, strict=True)):
        raw = Masked.empty(mine.length, np.float32)
        raw.values[len(row.prompt) :] = logprobs[index]
        raw.valid[len(row.prompt) :] = True
        chosen = mine.chosen
        if chosen is not None:
            ids = np.zeros(chosen.ids.shape, np.int64)
            weights = np.zeros(chosen.ids.shape, np.float32)
            valid = np.zeros(chosen.valid.shape, bool)
            for column, layer in enumerate(chosen.layers):
                if layer in routes:
                    ids[:-1, column] = routes[layer][0][index, row.pad_left :]
                    weights[:-1, column] = routes[layer][1][index, row.pad_left :]
                    valid[:-1, column] = True
            chosen = replace(chosen, ids=ids, weights=weights, valid=valid, weighted=valid)
        out.append(replace(mine, raw=raw, chosen=chosen))
    return out
