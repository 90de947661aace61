"""Batches of NeMo-RL: `train_data_step*.jsonl` of its logger, or a batch saved by `torch.save`.

Read for this: NVIDIA-NeMo/RL 7ea279ab `nemo_rl/algorithms/grpo.py` (`train_data`,
`add_grpo_token_loss_masks_and_generation_logprobs`, the logging of `train_data_step`),
`nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`), `nemo_rl/models/generation/interfaces.py`
(`GenerationOutputSpec`, the -1 sentinel), `nemo_rl/models/generation/vllm/utils.py` and
`nemo_rl/experience/rollouts.py` (placeholder routes).

All arrays are [batch, padded length], padded on the right. What follows from that source:

* `generation_logprobs` is 0.0 where `token_mask` is 0;
* a route of -1 is one that was not captured, and padding and tokens of the environment have the
  placeholder 0..k-1;
* training data does not say where the prompt ends: it is the first token with token mask 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError
from rolltape.store.exchange.dumps import load_torch, read_jsonl
from rolltape.store.exchange.rows import (
    NO_PLACE,
    Carried,
    Row,
    as_number,
    is_empty,
    prompt_group,
    same_everywhere,
    without_placeholders,
)

#: What a field is called in the batch, in the log, and in the output of a generation.
_IDS = ("input_ids", "token_ids", "output_ids")
_LENGTHS = ("input_lengths", "unpadded_sequence_lengths")
_MASK = ("token_mask", "token_loss_mask")
_SAMPLE_MASK = ("sample_mask", "sample_loss_mask")
_LOGPROBS = ("generation_logprobs", "logprobs")
_REWARD = ("filtered_rewards", "rewards", "total_reward")
_GENERATED = ("generation_lengths",)
#: Name of the routes in these dumps.
ROUTES = "routed_experts"

_OF_TRAINER = "sequences: logprobs of the trainer belong in a tape of their own"
_DERIVABLE = {
    "prev_logprobs": _OF_TRAINER,
    "reference_policy_logprobs": _OF_TRAINER,
    "content": "sequences: text; the token ids are carried",
}
_HANDLED = {
    *_IDS, *_LENGTHS, *_MASK, *_SAMPLE_MASK, *_LOGPROBS, *_REWARD, *_GENERATED,
    ROUTES, "truncated", "advantages", "idx",
}  # fmt: skip


def read(path: Path, ordinal: int, carried: Carried) -> list[Row]:
    """The sequences of one file.

    Raises:
        SchemaError: not such a file; arrays that are not one row a sequence.
    """
    rows = []
    for number, sample in enumerate(_samples(path)):
        row = _row(sample, f"{path.name}: row {number}", f"{ordinal}-{number}", carried)
        if row is not None:
            rows.append(row)
    return rows


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """One dict a sequence, its values without the batch dimension."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(read_jsonl(path), 1):
            # the logger iterates in batches of one, so that everything is a list of one
            yield from _unbatched(line, f"{path}:{number}")
        return
    content = load_torch(path, hint="only tensors, numpy arrays and plain values are read")
    if not isinstance(content, dict):
        raise SchemaError(f"{path}: holds a {type(content).__name__}, expected a batch")
    yield from _unbatched(content, str(path))


def _unbatched(batch: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    ids = next((batch[name] for name in _IDS if name in batch), None)
    lengths = next((batch[name] for name in _LENGTHS if name in batch), None)
    if ids is None or lengths is None:
        raise SchemaError(
            f"{where}: no {' or '.join(_IDS)} with {' or '.join(_LENGTHS)}",
            hint="a tape needs token ids; the logs of nemo_gym responses have none",
        )
    if not isinstance(lengths, list | np.ndarray):
        yield dict(batch)  # a row that somebody took out of its batch
        return
    size = len(lengths)
    for name, value in batch.items():
        if name in _HANDLED and name not in ("idx", *_REWARD) and (
            not isinstance(value, list | np.ndarray) or len(value) != size
        ):  # fmt: skip
            raise SchemaError(f"{where}: {name} does not have {size} rows as the lengths have")
    for i in range(size):
        yield {
            name: value[i] if isinstance(value, list | np.ndarray) and len(value) == size else value
            for name, value in batch.items()
        }


def _row(sample: Mapping[str, Any], where: str, request: str, carried: Carried) -> Row | None:
    def get(names: tuple[str, ...]) -> tuple[str, Any]:
        return next(((n, sample[n]) for n in names if sample.get(n) is not None), (names[0], None))

    ids_name, ids = get(_IDS)
    _, length = get(_LENGTHS)
    ids = np.asarray(ids, np.int64).ravel()
    total = int(length)
    if not 0 <= total <= len(ids) or (total and (ids[:total].min() < 0)):
        carried.drop(ids_name, "sequences: damaged (lengths do not fit, or ids below 0)")
        carried.note(f"{where}: left out, {len(ids)} ids with a length of {total}")
        return None
    ids = ids[:total].astype(np.uint32)
    carried.keep(ids_name, "tokens.ids", total)

    mask_name, mask = get(_MASK)
    _, new = get(_GENERATED)
    generated = np.zeros(total, bool)
    if mask is not None:
        generated = np.asarray(mask).ravel()[:total] != 0
        carried.keep(mask_name, "tokens.loss_mask", total)
    elif new is not None:
        generated[total - int(new) :] = True
    if len(generated) != total:
        raise SchemaError(f"{where}: {mask_name} is shorter than {total} tokens")
    if mask is None and new is None:
        raise SchemaError(f"{where}: neither {_MASK[0]} nor {_GENERATED[0]}: where the prompt ends")
    if new is not None:
        prompt_len = total - int(new)
        carried.keep(_GENERATED[0], "sequences.prompt_len")
    else:
        prompt_len = int(np.flatnonzero(generated)[0]) if generated.any() else total
        carried.note(f"the prompt of a sequence ends where its first {mask_name} of 1 stands")
    annotations: dict[str, float | str] = {}
    loss = _loss_mask(generated if mask is not None else None, get(_SAMPLE_MASK), carried)
    reward_name, reward = get(_REWARD)
    if as_number(reward) is not None:
        annotations["reward"] = float(as_number(reward) or 0.0)
        carried.keep(reward_name, "annotations.reward")
    elif reward is not None:
        carried.drop(reward_name, "sequences: not a number a sequence")
    if reward_name == "filtered_rewards" and sample.get("rewards") is not None:
        # of the batch before dynamic sampling: row i is not row i of the other fields
        carried.drop("rewards", "sequences: not of these rows (dynamic sampling)")
    _advantage(sample.get("advantages"), generated, annotations, carried)
    truncated = sample.get("truncated")
    if truncated is not None:
        carried.keep("truncated", "sequences.finish")
    for name, value in sample.items():
        if name not in _HANDLED and not is_empty(value):
            carried.drop(name, _DERIVABLE.get(name, NO_PLACE))
    routes = sample.get(ROUTES)
    return Row(
        where=where,
        request=request,
        sample=0,
        prompt_len=prompt_len,
        ids=ids,
        finish="unknown" if truncated is None else "length" if bool(truncated) else "stop",
        group=prompt_group(ids, prompt_len),
        group_derived=True,
        loss_mask=loss,
        logprobs=_logprobs(*get(_LOGPROBS), generated, total, carried),
        routes=routes[: max(total - 1, 0)] if isinstance(routes, np.ndarray | list) else routes,
        annotations=annotations,
    )


def _loss_mask(
    mask: np.ndarray | None, sample_mask: tuple[str, Any], carried: Carried
) -> Masked | None:
    if mask is None:
        return None
    name, value = sample_mask
    if value is None:
        return Masked.full(mask)
    carried.keep(name, "tokens.loss_mask")
    if not as_number(value):
        carried.note(f"{name}: the loss mask of a sequence with 0 is false, as in training")
        return Masked.full(np.zeros(len(mask), bool))
    return Masked.full(mask)


def _logprobs(
    name: str, values: Any, generated: np.ndarray, total: int, carried: Carried
) -> Masked | None:
    if values is None:
        return None
    values = np.asarray(values, np.float32).ravel()[:total]
    if len(values) != total:
        carried.drop(name, "sequences: shorter than the sequence")
        return None
    column = without_placeholders(Masked.full(values), generated, carried, name=name)
    carried.keep(name, "", int(column.valid.sum()))
    return column


def _advantage(
    values: Any, generated: np.ndarray, annotations: dict[str, float | str], carried: Carried
) -> None:
    if values is None:
        return
    flat = np.asarray(values, np.float64).ravel()
    one = same_everywhere(flat[: len(generated)][generated] if flat.size > 1 else flat)
    if one is None:
        carried.drop("advantages", "sequences: differs from token to token, or no token counts")
        return
    annotations["advantage"] = one
    carried.keep("advantages", "annotations.advantage")
