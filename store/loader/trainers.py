"""Batches under the field names of other trainers.

Each docstring says what was read, in the public source of the framework, to get the names, shapes
and padding right. Those formats have no way to say "missing": a zero stands in their padding. So
nothing that is missing where it would be used is handed over: that raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rolltape.store.errors import UsageError
from rolltape.store.loader.batches import Batch


def verl_fields(
    batch: Batch, *, prompt_length: int = 0, response_length: int = 0
) -> dict[str, Any]:
    """Arguments of verl's `DataProto.from_dict`: `tensors` and `non_tensors`.

    Read: `AgentLoopWorker` in verl/experimental/agent_loop/agent_loop.py (`_postprocess` and what
    pads one sample before it). Prompts are padded on the left and responses on the right, each to a
    width of its own; `routed_experts` runs over both, from the first prompt token on, and is zero
    elsewhere; `rollout_log_probs` is zero on padding.

    Args:
        batch: of sequences with one prompt and one response; any layout.
        prompt_length: least width of the prompts.
        response_length: least width of the responses.

    Returns:
        tensors: `prompts` int64 [n, P], `responses` int64 [n, R], `response_mask` int64 [n, R]
        (the loss mask), `input_ids`, `attention_mask`, `position_ids` int64 [n, P + R], and as far
        as they were read `rollout_log_probs` float32 [n, R], `routed_experts` uint8 or uint16
        [n, P + R, layers, k]. non_tensors: `uid`, an object array of group numbers as strings.

    Raises:
        UsageError: a logprob or route that would be used is missing.
    """
    _check_missing(batch)
    n = len(batch)
    prompts = max(prompt_length, int(batch.prompt_lens.max()))
    responses = max(response_length, int((batch.lengths - batch.prompt_lens).max()))
    width = prompts + responses

    def spread(values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((n, width, *values.shape[2:]), dtype=values.dtype)
        for i in range(n):
            start = prompts - int(batch.prompt_lens[i])
            out[i, start : start + int(batch.lengths[i])] = values[batch.span(i)]
        return out

    ids = spread(batch.input_ids)
    attention = spread(batch.attention_mask).to(torch.int64)
    tensors = {
        "prompts": ids[:, :prompts],
        "responses": ids[:, prompts:],
        "response_mask": spread(batch.loss_mask)[:, prompts:].to(torch.int64),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    if batch.logprobs is not None:
        tensors["rollout_log_probs"] = spread(_known_logprobs(batch))[:, prompts:]
    if batch.routes is not None:
        tensors["routed_experts"] = spread(_known_routes(batch))
    uid = np.array([str(int(g)) for g in batch.group_index], dtype=object)
    return {"tensors": tensors, "non_tensors": {"uid": uid}}


def slime_fields(batch: Batch, *, num_layers: int | None = None) -> dict[str, list[Any]]:
    """The lists, one entry a sample, that slime's training actor gets.

    Read: `_convert_samples_to_train_data` (slime/ray/rollout.py), `_get_rollout_data` and
    `fill_routing_replay` (slime/backends/megatron_utils/actor.py), and what generates samples.
    Routes have one row less than tokens and are indexed by the number of the decoder layer, dense
    layers counted. They keep their narrow dtype: slime itself takes int32.

    Args:
        batch: any layout.
        num_layers: decoder layers of the model; needed if not all of them are MoE layers. Rows of
            dense layers are zero; slime does not look at them.

    Returns:
        `tokens` (lists of int), `response_lengths` and `total_lengths` (ints), `loss_masks` (lists
        of 0 and 1, over the response), `sample_indices` (ints), and as far as they were read
        `rollout_log_probs` (lists of float over the response), `rollout_routed_experts` (arrays
        [T - 1, layers, k]), `rewards` (annotation `reward`).

    Raises:
        UsageError: a logprob or route that would be used is missing, or `num_layers` is needed.
    """
    _check_missing(batch)
    spans = [batch.span(i) for i in range(len(batch))]
    heads = batch.prompt_lens.tolist()
    out: dict[str, list[Any]] = {
        "tokens": [batch.input_ids[s].tolist() for s in spans],
        "response_lengths": (batch.lengths - batch.prompt_lens).tolist(),
        "total_lengths": batch.lengths.tolist(),
        "loss_masks": [
            batch.loss_mask[s][h:].int().tolist() for s, h in zip(spans, heads, strict=True)
        ],
        "sample_indices": list(batch.indexes),
    }
    if batch.logprobs is not None:
        known = _known_logprobs(batch)
        out["rollout_log_probs"] = [
            known[s][h:].tolist() for s, h in zip(spans, heads, strict=True)
        ]
    if batch.routes is not None:
        routes = _by_layer_number(batch, num_layers)
        out["rollout_routed_experts"] = [routes[s][:-1].numpy() for s in spans]
    if batch.annotations is not None and all("reward" in a for a in batch.annotations):
        out["rewards"] = batch.annotation("reward").tolist()
    return out


def trl_fields(batch: Batch, *, advantages: torch.Tensor | None = None) -> dict[str, Any]:
    """The inputs of TRL's `GRPOTrainer` loss.

    Read: `_generate_and_score_completions` in trl/trainer/grpo_trainer.py. Prompts are padded on
    the left, completions on the right; `completion_mask` is the loss mask. What the rollout
    recorded is `sampling_per_token_logps`; `old_per_token_logps` are the trainer's own and not ours
    to give.

    Args:
        batch: any layout.
        advantages: float [n]; left out if None.

    Returns:
        `prompt_ids`, `prompt_mask` int64 [n, P], `completion_ids`, `completion_mask` int64 [n, C],
        `num_items_in_batch` (loss tokens), and as far as they are there
        `sampling_per_token_logps` float32 [n, C], `advantages` [n].

    Raises:
        UsageError: a logprob of a loss token is missing.
    """
    # routes are not handed over, so missing ones do not matter
    verl = verl_fields(replace(batch, routes=None, routes_valid=None))["tensors"]
    prompts = verl["prompts"].shape[1]
    out: dict[str, Any] = {
        "prompt_ids": verl["prompts"],
        "prompt_mask": verl["attention_mask"][:, :prompts],
        "completion_ids": verl["responses"],
        "completion_mask": verl["response_mask"],
        "num_items_in_batch": batch.loss_mask.sum(),
    }
    if "rollout_log_probs" in verl:
        out["sampling_per_token_logps"] = verl["rollout_log_probs"]
    if advantages is not None:
        out["advantages"] = advantages
    return out


def _check_missing(batch: Batch) -> None:
    for i, name in enumerate(batch.ids):
        span = batch.span(i)
        if batch.logprobs_valid is not None:
            holes = batch.loss_mask[span] & ~batch.logprobs_valid[span]
            if holes.any():
                raise UsageError(
                    f"{name}: position {int(holes.nonzero()[0])} counts in the loss and has no "
                    "logprob",
                    hint="this format cannot say so: leave the sequence out, or clear its mask",
                )
        if batch.routes_valid is not None:
            # the last token had no forward
            holes = ~batch.routes_valid[span][:-1].all(-1)
            if holes.any():
                raise UsageError(
                    f"{name}: position {int(holes.nonzero()[0])} has no route",
                    hint="this format cannot say so: leave the sequence out, or use the batch",
                )


def _known_logprobs(batch: Batch) -> torch.Tensor:
    assert batch.logprobs is not None and batch.logprobs_valid is not None
    return batch.logprobs.masked_fill(~batch.logprobs_valid, 0.0)


def _known_routes(batch: Batch) -> torch.Tensor:
    assert batch.routes is not None and batch.routes_valid is not None
    return torch.where(batch.routes_valid.unsqueeze(-1), batch.routes, 0).to(batch.routes.dtype)


def _by_layer_number(batch: Batch, num_layers: int | None) -> torch.Tensor:
    routes = _known_routes(batch)
    layers = list(batch.route_layers)
    if num_layers is None:
        if layers != list(range(len(layers))):
            raise UsageError(
                f"the routes are of layers {layers[0]} to {layers[-1]}, {len(layers)} of them",
                hint="slime counts dense layers too: give num_layers",
            )
        return routes
    if layers and max(layers) >= num_layers:
        raise UsageError(f"num_layers is {num_layers}, there are routes of layer {max(layers)}")
    shape = (*routes.shape[:2], num_layers, routes.shape[3])
    out = torch.zeros(shape, dtype=routes.dtype)
    out[:, :, layers] = routes
    return out
