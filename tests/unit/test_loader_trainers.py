"""Batches under the names, shapes and padding that other trainers expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rolltape import store  # noqa: E402
from rolltape.store.errors import UsageError  # noqa: E402
from rolltape.store.loader import (  # noqa: E402
    TapeDataset,
    slime_fields,
    trl_fields,
    verl_fields,
)
from tests.builders import Sample, random_samples, write_tape  # noqa: E402

LAYOUTS = [{"layout": "packed"}, {}, {"padding_side": "left"}]


def made(**options: Any) -> list[Sample]:
    samples = random_samples(4, response=[5, 9, 12, 3], **options)
    for i, sample in enumerate(samples):  # prompts of different lengths
        cut = i
        sample.prompt_len -= cut
        sample.loss_mask.values[sample.prompt_len : 6] = True
        for column in (sample.raw, sample.scaled, sample.processed):
            column.valid[sample.prompt_len : 6] = True
    return samples


def batch_of(path: Path, samples: list[Sample], **options: Any) -> Any:
    write_tape(path, samples)
    columns = ("logprobs", "routes", "annotations")
    return next(iter(TapeDataset(path, batch_size=4, columns=columns, **options)))


@pytest.mark.parametrize("options", LAYOUTS)
def test_verl_gets_left_padded_prompts_and_right_padded_responses(
    tmp_path: Path, options: Any
) -> None:
    samples = made()
    found = verl_fields(
        batch_of(tmp_path / "a", samples, **options), prompt_length=8, response_length=4
    )
    tensors = found["tensors"]
    assert tensors["prompts"].shape == (4, 8) and tensors["responses"].shape == (4, 14)
    assert tensors["routed_experts"].shape == (4, 22, 3, 4)
    assert tensors["routed_experts"].dtype == torch.uint8
    assert found["non_tensors"]["uid"].tolist() == ["0", "0", "1", "1"]
    for i, sample in enumerate(samples):
        head, total = sample.prompt_len, sample.length
        prompt, response = sample.ids[:head], sample.ids[head:]
        assert tensors["prompts"][i].tolist() == [0] * (8 - head) + list(prompt)
        assert tensors["responses"][i].tolist() == [*response, *[0] * (14 - len(response))]
        width = [0] * (8 - head) + [1] * total + [0] * (14 - len(response))
        assert tensors["attention_mask"][i].tolist() == width
        assert tensors["response_mask"][i].tolist() == width[8:]
        positions = np.clip(np.cumsum(width) - 1, 0, None)
        assert tensors["position_ids"][i].tolist() == positions.tolist()
        logprobs = tensors["rollout_log_probs"][i].numpy()
        assert (logprobs[: total - head] == sample.processed.values[head:]).all()
        assert not logprobs[total - head :].any()
        experts = tensors["routed_experts"][i].numpy()
        start = 8 - head
        assert (experts[start : start + total - 1] == sample.used.ids[:-1]).all()
        assert not experts[:start].any() and not experts[start + total - 1 :].any()


@pytest.mark.parametrize("options", LAYOUTS)
def test_slime_gets_lists_of_samples(tmp_path: Path, options: Any) -> None:
    samples = made(layers=(0, 1, 2))
    found = slime_fields(batch_of(tmp_path / "a", samples, **options))
    for i, sample in enumerate(samples):
        response = sample.length - sample.prompt_len
        assert found["tokens"][i] == sample.ids.tolist()
        assert found["response_lengths"][i] == response == len(found["loss_masks"][i])
        assert found["total_lengths"][i] == sample.length
        assert found["loss_masks"][i] == [1] * response
        assert found["rollout_log_probs"][i] == sample.processed.values[-response:].tolist()
        assert (found["rollout_routed_experts"][i] == sample.used.ids[:-1]).all()
    assert "rewards" not in found


def test_routes_of_many_experts_stay_two_bytes_wide(tmp_path: Path) -> None:
    samples = made(experts=300, layers=(0, 1))
    batch = batch_of(tmp_path / "a", samples)
    assert verl_fields(batch)["tensors"]["routed_experts"].dtype == torch.uint16
    found = slime_fields(batch)["rollout_routed_experts"]
    assert found[0].dtype == np.uint16 and (found[0] == samples[0].used.ids[:-1]).all()


def test_slime_counts_dense_layers_too(tmp_path: Path) -> None:
    samples = made(layers=(1, 3))
    batch = batch_of(tmp_path / "a", samples)
    with pytest.raises(UsageError, match="give num_layers"):
        slime_fields(batch)
    with pytest.raises(UsageError, match="num_layers is 3, there are routes of layer 3"):
        slime_fields(batch, num_layers=3)
    found = slime_fields(batch, num_layers=5)["rollout_routed_experts"][1]
    assert found.shape == (samples[1].length - 1, 5, 4)
    assert (found[:, [1, 3]] == samples[1].used.ids[:-1]).all() and not found[:, [0, 2, 4]].any()


def test_slime_gets_the_rewards_on_the_tape(tmp_path: Path) -> None:
    samples = made(layers=(0, 1))
    tape = write_tape(tmp_path / "a", samples, sealed=False)
    with store.TapeWriter(tmp_path / "a") as writer:
        for key in (sequence.key for sequence in tape):
            row = {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": 0}
            writer.append("annotations", {**row, "name": "reward", "number": 0.5, "t_ns": 1})
    store.seal(tmp_path / "a")
    batch = next(iter(TapeDataset(tmp_path / "a", batch_size=4, columns=("annotations",))))
    assert slime_fields(batch)["rewards"] == [0.5] * 4


@pytest.mark.parametrize("options", LAYOUTS)
def test_trl_gets_completions_with_the_sampling_logprobs(tmp_path: Path, options: Any) -> None:
    samples = made()
    batch = batch_of(tmp_path / "a", samples, **options)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    found = trl_fields(batch, advantages=advantages)
    assert found["advantages"] is advantages
    assert found["num_items_in_batch"] == sum(s.length - s.prompt_len for s in samples)
    for i, sample in enumerate(samples):
        head, response = sample.prompt_len, sample.length - sample.prompt_len
        assert found["prompt_ids"][i][-head:].tolist() == sample.ids[:head].tolist()
        assert found["prompt_mask"][i].sum() == head and found["prompt_mask"][i][-1] == 1
        assert found["completion_ids"][i][:response].tolist() == sample.ids[head:].tolist()
        assert found["completion_mask"][i].tolist()[:response] == [1] * response
        logprobs = found["sampling_per_token_logps"][i][:response].numpy()
        assert (logprobs == sample.processed.values[head:]).all()
    assert "old_per_token_logps" not in found


@pytest.mark.parametrize("adapter", [verl_fields, slime_fields, trl_fields])
def test_what_is_missing_is_not_handed_over_as_zero(tmp_path: Path, adapter: Any) -> None:
    samples = made(layers=(0, 1))
    samples[1].processed.valid[8] = False
    with pytest.raises(UsageError, match=r"position 8 counts in the loss and has no logprob"):
        adapter(batch_of(tmp_path / "a", samples))


@pytest.mark.parametrize("adapter", [verl_fields, slime_fields])
def test_a_missing_route_is_not_handed_over_as_expert_0(tmp_path: Path, adapter: Any) -> None:
    samples = made(layers=(0, 1))
    samples[2].used.valid[4, 1] = False
    with pytest.raises(UsageError, match=r"0-1\.0: position 4 has no route"):
        adapter(batch_of(tmp_path / "b", samples))


def test_routes_that_are_not_handed_over_may_be_missing(tmp_path: Path) -> None:
    samples = made()
    samples[2].used.valid[4, 1] = False
    batch = batch_of(tmp_path / "a", samples)
    found = trl_fields(batch)
    assert found["completion_ids"][0][:5].tolist() == samples[0].ids[-5:].tolist()
    assert batch.routes is not None  # the batch itself keeps what it has
