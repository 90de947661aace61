"""The rollout dumps of slime and miles: `--save-debug-rollout-data PATH.pt`.

Read for this: THUDM/slime 624b824a `slime/utils/types.py` (`Sample`, `append_response_tokens`),
`slime/observability/rollout_data_utils.py` (`save_debug_rollout_data`,
`validate_rollout_routed_experts_for_replay`), `slime/ray/rollout.py` (defaults of the loss mask);
radixark/miles 31f1ca96 `miles/utils/types.py`, `miles/ray/rollout/debug_data.py`.

A file is `torch.save({"rollout_id": n, "samples": [Sample.to_dict(), ...]})`. What follows from
that source and not from the file:

* `loss_mask` and `rollout_log_probs` cover the response; no loss mask means all ones, and
  `remove_sample` all zeros;
* tokens of tools have loss mask 0 and logprob 0.0;
* routes are [tokens - 1, num_layers, k] from position 0, and slime's may end early; the columns
  are all layers of the model, those without experts are zeros;
* `weight_versions` has an entry a generation call, without saying which tokens it made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError
from rolltape.store.exchange.dumps import load_torch
from rolltape.store.exchange.rows import (
    NO_PLACE,
    WRONG_LENGTH,
    Carried,
    Row,
    annotate,
    is_empty,
    response_column,
    without_placeholders,
)

#: `Sample.Status` -> finish.
_FINISH = {
    "completed": "stop",
    "truncated": "length",
    "aborted": "abort",
    "failed": "error",
    "pending": "open",
}

_ANNOTATED = (
    "reward",
    "label",
    "index",
    "rollout_id",
    "remove_sample",
    "session_id",
    "routing_key",
    "adapter",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
    "metadata",
    "train_metadata",
)
_DERIVABLE = {
    "prompt": "sequences: text; the token ids are carried",
    "response": "sequences: text; the token ids are carried",
    "teacher_log_probs": "sequences: logprobs of another model belong in a tape of their own",
    "opd_reverse_kl": "sequences: logprobs of another model belong in a tape of their own",
}
_HANDLED = {
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "status",
    "group_index",
    "weight_versions",
    *_ANNOTATED,
}
#: Name of the routes in these dumps.
ROUTES = "rollout_routed_experts"


def read(path: Path, ordinal: int, carried: Carried) -> list[Row]:
    """The samples of one dump.

    Raises:
        SchemaError: not such a dump.
    """
    content = load_torch(path)
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise SchemaError(
            f"{path}: no list of samples", hint="expected a file of --save-debug-rollout-data"
        )
    rollout = content.get("rollout_id")
    rows: list[Row] = []
    members: Counter[str] = Counter()
    for number, sample in enumerate(content["samples"]):
        if not isinstance(sample, dict) or "tokens" not in sample:
            raise SchemaError(f"{path}: sample {number} has no field 'tokens'")
        group = sample.get("group_index")
        name = f"{ordinal}-{'s' + str(number) if group is None else group}"
        where = f"{path.name}: sample {number}"
        row = _row(sample, where, (name, members[name]), rollout, carried)
        if row is not None:
            members[name] += 1
            rows.append(row)
    return rows


def _row(
    sample: Mapping[str, Any], where: str, key: tuple[str, int], rollout: Any, carried: Carried
) -> Row | None:
    ids = np.asarray(sample["tokens"] if sample["tokens"] is not None else [], np.int64).ravel()
    total, response = len(ids), int(sample.get("response_length") or 0)
    if response > total or (total and (ids.min() < 0 or ids.max() >= 1 << 32)):
        carried.drop("tokens", "sequences: damaged (lengths do not fit, or ids below 0)")
        carried.note(f"{where}: left out, {total} tokens with a response of {response}")
        return None
    carried.keep("tokens", "tokens.ids", total)
    status = str(sample.get("status"))
    if status not in _FINISH:
        carried.note(f"{where}: status {status!r} is not known; its finish is `unknown`")
    else:
        carried.keep("status", "sequences.finish")
    group = sample.get("group_index")
    if group is not None:
        carried.keep("group_index", "sequences.group")
    generated = _generated(sample, total, response, carried)
    annotations: dict[str, float | str] = {}
    for name in _ANNOTATED:
        if name == "rollout_id" and sample.get(name) is None:
            continue
        if not is_empty(sample.get(name)) or name in ("reward", "index"):
            annotate(annotations, name, sample.get(name), carried)
    version = _version(sample, annotations, carried)
    for name, value in sample.items():
        if name not in _HANDLED and not is_empty(value):
            carried.drop(name, _DERIVABLE.get(name, NO_PLACE))
    removed = bool(sample.get("remove_sample"))
    if removed:
        carried.note("remove_sample: the loss mask of such a sequence is false, as in training")
    mask = generated & (not removed)
    return Row(
        where=where,
        request=key[0],
        sample=key[1],
        prompt_len=total - response,
        ids=ids.astype(np.uint32),
        finish=_FINISH.get(status, "unknown"),
        group=None if group is None else f"{'' if rollout is None else f'{rollout}-'}{group}",
        group_derived=None if group is None else False,
        loss_mask=Masked.full(mask),
        logprobs=_logprobs(sample, generated, total, response, carried),
        routes=sample.get(ROUTES),
        kept=_kept(sample, total, response, carried),
        version=version,
        annotations=annotations,
    )


def _generated(
    sample: Mapping[str, Any], total: int, response: int, carried: Carried
) -> np.ndarray:
    """Which tokens the loss mask marks, bool [T]."""
    out = np.zeros(total, bool)
    mask = sample.get("loss_mask")
    if mask is not None and len(mask) == response:
        out[total - response :] = np.asarray(mask, np.int64) != 0
        carried.keep("loss_mask", "tokens.loss_mask", response)
        return out
    if mask is not None:
        carried.drop("loss_mask", WRONG_LENGTH)
    out[total - response :] = True
    return out


def _logprobs(
    sample: Mapping[str, Any], generated: np.ndarray, total: int, response: int, carried: Carried
) -> Masked | None:
    name = "rollout_log_probs"
    values = sample.get(name)
    if values is None:
        return None
    values = np.asarray(values, np.float32).ravel()
    if len(values) != response:
        carried.drop(name, WRONG_LENGTH)
        return None
    column = without_placeholders(
        response_column(values, total=total), generated, carried, name=name
    )
    carried.keep(name, "", int(column.valid.sum()))
    return column


def _kept(
    sample: Mapping[str, Any], total: int, response: int, carried: Carried
) -> tuple[np.ndarray, np.ndarray] | None:
    name = "rollout_top_p_token_ids"
    ids, offsets = sample.get(name), sample.get("rollout_top_p_token_offsets")
    if ids is None or offsets is None:
        if ids is not None or offsets is not None:
            carried.drop(name, "sequences: ids without offsets, or offsets without ids")
        return None
    ids, offsets = np.asarray(ids, np.int64).ravel(), np.asarray(offsets, np.int64).ravel()
    sizes = np.diff(offsets)
    fits = len(offsets) == response + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not fits or (sizes < 0).any() or (ids < 0).any():
        carried.drop(name, "sequences: offsets and ids do not belong together")
        return None
    counts = np.zeros(total, np.int32)
    counts[total - response :] = sizes
    # ascending within a position, as a tape has them
    ordered = ids[np.lexsort((ids, np.repeat(np.arange(len(sizes)), sizes)))]
    carried.keep(name, "supports.ids", len(ids))
    carried.keep("rollout_top_p_token_offsets", "supports.counts", response)
    return counts, ordered.astype(np.uint32)


def _version(
    sample: Mapping[str, Any], annotations: dict[str, float | str], carried: Carried
) -> int | None:
    name = "weight_versions"
    versions = [str(v) for v in sample.get(name) or []]
    if not versions:
        return None
    annotations[name] = ",".join(versions)
    carried.keep(name, f"annotations.{name}", len(versions))
    if len(set(versions)) > 1:
        carried.drop(
            name,
            "sequences: several versions, and no word which tokens each made (not in forwards)",
        )
        return None
    if not versions[0].isdecimal():
        carried.drop(name, "sequences: the version is not a number (not in forwards)")
        return None
    return int(versions[0])
