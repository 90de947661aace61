"""verl: the JSONL of `trainer.rollout_data_dir`, or the tensors of a batch saved by `torch.save`.

Read for this: volcengine/verl b178a3cd `verl/trainer/ppo/ray_trainer.py` (`_dump_generations`,
`_log_rollout_data`), `verl/experimental/agent_loop/agent_loop.py` (padding, `_postprocess`),
`verl/protocol.py` (`DataProto.save_to_disk`).

The JSONL has `input`, `output`, `gts`, `score`, `step` and what the reward function returned:
text, decoded without special tokens. Ids that a tokenizer makes of it are not the ids of the
rollout; they are carried only when a tokenizer is given, and are marked as derived.

`DataProto.save_to_disk` writes a pickle of verl's own classes, which can run code and is not
read. `torch.save(dict(data.batch.items()), "batch.pt")` writes its tensors: `prompts` padded on
the left, `responses` on the right, `attention_mask`, `response_mask`, `rollout_log_probs`,
`routed_experts` [batch, padded length, layers, k] with zeros where nothing was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.exchange.dumps import load_torch, read_jsonl
from rolltape.store.exchange.rows import (
    NO_PLACE,
    Carried,
    Row,
    annotate,
    is_empty,
    prompt_group,
    response_column,
    without_placeholders,
)

#: Name of the routes in these dumps.
ROUTES = "routed_experts"

Encode = Callable[[str], list[int]]
_TEXT = ("input", "output")
_IDS = ("prompt_ids", "response_ids")

_HOW_TO_SAVE = 'in verl: torch.save(dict(data.batch.items()), "batch.pt")'
_OF_TRAINER = "sequences: logprobs of the trainer belong in a tape of their own"
_REASONS = {
    "old_log_probs": _OF_TRAINER,
    "ref_log_prob": _OF_TRAINER,
    "input_ids": "sequences: made of prompts and responses, which are carried",
    "position_ids": "sequences: made of the attention mask",
}
_SCORES = ("rm_scores", "token_level_scores")


def read(path: Path, ordinal: int, carried: Carried, *, tokenizer: Path | None) -> list[Row]:
    """The sequences of one file.

    Args:
        path: `.jsonl`, or a file of `torch.save`.
        ordinal: number of the file in the import.
        carried: the account.
        tokenizer: `tokenizer.json` for JSONL without ids.

    Raises:
        UsageError: text without a tokenizer.
        SchemaError: not such a file.
    """
    if path.suffix == ".jsonl":
        return _read_text(path, ordinal, carried, tokenizer)
    batch = load_torch(path, hint=_HOW_TO_SAVE)
    needed = ("prompts", "responses", "attention_mask")
    if not isinstance(batch, dict) or any(
        not isinstance(batch.get(name), np.ndarray) for name in needed
    ):
        raise SchemaError(f"{path}: no tensors {', '.join(needed)}", hint=_HOW_TO_SAVE)
    size, width = len(batch["prompts"]), batch["prompts"].shape[-1]
    mask = batch["attention_mask"]
    if mask.shape != (size, width + batch["responses"].shape[-1]):
        raise SchemaError(f"{path}: attention_mask is {list(mask.shape)}, not that of the tokens")
    for name, value in batch.items():
        if not isinstance(value, np.ndarray) or len(value) != size:
            raise SchemaError(f"{path}: {name} does not have {size} rows as the prompts have")
    rows = []
    for i in range(size):
        sample = {name: value[i] for name, value in batch.items()}
        row = _row(sample, f"{path.name}: row {i}", f"{ordinal}-{i}", width, carried)
        if row is not None:
            rows.append(row)
    return rows


def _row(
    sample: Mapping[str, Any], where: str, request: str, width: int, carried: Carried
) -> Row | None:
    attended = np.asarray(sample["attention_mask"]).astype(bool)
    prompt_len, response = int(attended[:width].sum()), int(attended[width:].sum())
    start, total = width - prompt_len, prompt_len + response
    # padding stands on the outside only; else no position is sure
    if not attended[start : start + total].all():
        carried.drop("attention_mask", "sequences: holes between tokens")
        carried.note(f"{where}: left out, its attention mask has holes")
        return None
    ids = np.concatenate([sample["prompts"][start:], sample["responses"][:response]])
    ids = ids.astype(np.uint32)
    for name in ("prompts", "responses"):
        carried.keep(name, "tokens.ids", prompt_len if name == "prompts" else response)
    carried.keep("attention_mask", "sequences.prompt_len")
    generated = np.zeros(total, bool)
    mask = sample.get("response_mask")
    generated[prompt_len:] = True if mask is None else np.asarray(mask[:response]).astype(bool)
    if mask is not None:
        carried.keep("response_mask", "tokens.loss_mask", response)
    logprobs = None
    if sample.get("rollout_log_probs") is not None:
        values = np.asarray(sample["rollout_log_probs"][:response], np.float32)
        logprobs = without_placeholders(
            response_column(values, total=total), generated, carried, name="rollout_log_probs"
        )
        carried.keep("rollout_log_probs", "", int(logprobs.valid.sum()))
    annotations: dict[str, float | str] = {}
    handled = {"prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs"}
    score = next((name for name in _SCORES if name in sample), None)
    if score is not None:
        annotations["reward"] = float(np.asarray(sample[score], np.float64).sum())
        carried.keep(score, "annotations.reward")
    for name in sample:
        if name not in {*handled, ROUTES, score}:
            carried.drop(name, _REASONS.get(name, NO_PLACE))
    routes = sample.get(ROUTES)
    return Row(
        where=where,
        request=request,
        sample=0,
        prompt_len=prompt_len,
        ids=ids,
        finish="unknown",
        group=prompt_group(ids, prompt_len),
        group_derived=True,
        loss_mask=Masked.full(generated) if mask is not None else None,
        logprobs=logprobs,
        routes=None if routes is None else routes[start : start + max(total - 1, 0)],
        annotations=annotations,
    )


def _read_text(path: Path, ordinal: int, carried: Carried, tokenizer: Path | None) -> list[Row]:
    encode: Encode | None = None
    rows = []
    for number, line in enumerate(read_jsonl(path)):
        where = f"{path.name}: line {number + 1}"
        annotations: dict[str, float | str] = {}
        ids = _given_ids(line, where, carried)
        if ids is None:
            if tokenizer is None:
                raise UsageError(
                    f"{where}: has text and no token ids, and a tape is made of token ids",
                    hint="--tokenizer tokenizer.json makes ids, which are then marked as derived",
                )
            encode = encode or _encoder(tokenizer)
            ids = _derived_ids(line, encode, carried)
            annotations["tokens"] = "derived"
        for name, value in line.items():
            if name not in (*_TEXT, *_IDS) and (not is_empty(value) or name == "score"):
                _annotate(annotations, name, value, carried)
        prompt, both = ids[0], np.concatenate(ids)
        rows.append(
            Row(
                where=where,
                request=f"{ordinal}-{number}",
                sample=0,
                prompt_len=len(prompt),
                ids=both,
                finish="unknown",
                group=prompt_group(both, len(prompt)),
                group_derived=True,
                annotations=annotations,
            )
        )
    for missing in ("logprobs", "loss mask", "routes", "finish reason", "weight version"):
        carried.note(f"{missing}: not in the JSONL of verl")
    return rows


def _given_ids(
    line: Mapping[str, Any], where: str, carried: Carried
) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids of prompt and response where the line has them, None where it has text only."""
    if not all(isinstance(line.get(name), list) for name in _IDS):
        if not all(isinstance(line.get(name), str) for name in _TEXT):
            raise SchemaError(f"{where}: neither input and output, nor prompt_ids and response_ids")
        return None
    prompt, response = (np.asarray(line[name], np.int64) for name in _IDS)
    for values in (prompt, response):
        if values.ndim != 1 or (values < 0).any():
            raise SchemaError(f"{where}: prompt_ids and response_ids are not lists of ids")
    for name, values in zip(_IDS, (prompt, response), strict=True):
        carried.keep(name, "tokens.ids", len(values))
    for name in _TEXT:
        if name in line:
            carried.drop(name, "sequences: text; the token ids are carried")
    return prompt.astype(np.uint32), response.astype(np.uint32)


def _derived_ids(
    line: Mapping[str, Any], encode: Encode, carried: Carried
) -> tuple[np.ndarray, np.ndarray]:
    prompt, response = (np.asarray(encode(line[name]), np.uint32) for name in _TEXT)
    for name, values in zip(_TEXT, (prompt, response), strict=True):
        carried.keep(name, "tokens.ids (derived)", len(values))
    carried.drop("special tokens", "sequences: verl leaves them out of the text")
    carried.note(
        "token ids are derived: the tokenizer made them of the text, they are not the ids of the "
        "rollout, and special tokens are missing"
    )
    return prompt, response


def _annotate(out: dict[str, float | str], name: str, value: Any, carried: Carried) -> None:
    if name == "score" and isinstance(value, int | float):
        out["reward"] = float(value)
        carried.keep(name, "annotations.reward")
    else:
        annotate(out, name, value, carried)


def _encoder(path: Path) -> Encode:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "--tokenizer needs the package tokenizers", hint="pip install tokenizers"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"{path}: not a tokenizer.json: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
