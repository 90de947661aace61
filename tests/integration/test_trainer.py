"""What a trainer computes is recorded from its loss, and compares with the rollout by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rolltape
from rolltape import store
from rolltape.recorder import trainer
from rolltape.replay import diff_tapes
from rolltape.replay.score import replay
from rolltape.store.keys import Key
from tests.integration.conftest import ROOT


def scored_by(model: Any, ids: Any, mask: Any) -> Any:
    """Logprobs [B, S - 1] of the tokens 1..S-1, as a trainer's loss computes them."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    logs = torch.log_softmax(logits[:, :-1].float(), -1)
    return logs.gather(-1, ids[:, 1:, None])[..., 0]


@pytest.fixture
def rollout(tiny_moe: Any, prompts: Any, tmp_path: Path) -> Any:
    """A recorded rollout, what it generated, and the keys of its rows."""
    torch.manual_seed(1)
    with rolltape.record(tmp_path / "rollout"):
        out = tiny_moe.generate(
            **prompts, do_sample=True, max_new_tokens=12, top_k=0, pad_token_id=0
        )
        keys = rolltape.last_requests()
        for i, key in enumerate(keys):
            assert rolltape.annotate(key, reward=i / 2, group="all", note="kept")
    return store.open(tmp_path / "rollout"), out, keys


def batch_of(tape: store.Tape, keys: list[Key], *, device: Any = None) -> tuple[Any, ...]:
    """Right padded, as a trainer has it: ids, attention mask, loss mask, prompt lengths."""
    rows = [tape.sequence(key) for key in keys]
    width = max(row.length for row in rows)
    ids, mask, loss = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, row in enumerate(rows):
        ids[i, : row.length] = torch.from_numpy(row.tokens.values.astype(np.int64))
        mask[i, : row.length] = 1
        loss[i, row.prompt_len : row.length] = 1
    return ids, mask, loss, [row.prompt_len for row in rows]


def test_annotations_stand_at_the_rows_of_generate(rollout: Any) -> None:
    tape, out, keys = rollout
    assert len(keys) == len(out) == len(tape)
    for i, key in enumerate(keys):
        sequence = tape.sequence(key)
        assert sequence.annotations == {"reward": i / 2, "group": "all", "note": "kept"}
        assert (sequence.info["group"], sequence.info["group_derived"]) == ("all", False)
        response = out[i, out.shape[1] - 12 :].tolist()
        got = sequence.tokens.values[sequence.prompt_len :].tolist()
        assert response[: len(got)] == got


@pytest.mark.parametrize("origin", [True, False])
def test_a_scored_batch_compares_with_the_rollout(
    tiny_moe: Any, rollout: Any, tmp_path: Path, origin: bool
) -> None:
    tape, _, keys = rollout
    ids, mask, loss, prompt_lens = batch_of(tape, keys)
    with rolltape.record(tmp_path / "trainer"), torch.no_grad():
        with trainer.live_routes(tiny_moe) as routes:
            logprobs = scored_by(tiny_moe, ids, mask)
        assert trainer.record_logprobs(
            tiny_moe,
            ids,
            logprobs,
            attention_mask=mask,
            loss_mask=loss[:, 1:],
            prompt_lens=prompt_lens,
            origins=keys if origin else None,
            scoring="old",
            optimizer_step=3,
            micro_batch=0,
            routes=routes,
        )
    mine = store.open(tmp_path / "trainer")
    assert mine.rows("events") == []
    assert [row["role"] for row in mine.engines.values()] == ["trainer"]
    assert mine.rows("weights")[-1]["digest"] == tape.rows("weights")[-1]["digest"]
    first = next(iter(mine))
    assert first.annotations == {"scoring": "old", "optimizer_step": 3, "micro_batch": 0}
    summary = diff_tapes(tape, mine)
    assert summary["compared"]["sequences"] == len(keys)
    assert summary["alignment"]["by_key" if origin else "by_digest"] == len(keys)
    assert summary["tokens_compared"] == int(loss.sum())
    assert summary["compared"]["routes"] > 0
    assert summary["mean_abs"] < 0.05 and not summary["non_finite"]


def test_the_same_computation_as_a_replay_has_the_same_bits(
    tiny_moe: Any, rollout: Any, tmp_path: Path
) -> None:
    tape, _, keys = rollout
    replay(tape.path, tmp_path / "replay", tokens_per_batch=1)
    with rolltape.record(tmp_path / "trainer"), torch.no_grad():
        for key in keys:
            ids, _, loss, prompt_lens = batch_of(tape, [key])
            logits = tiny_moe(ids, use_cache=False).logits
            logs = torch.log_softmax(logits[:, :-1].float(), -1)
            found = logs.gather(-1, ids[:, 1:, None])[..., 0]
            assert trainer.record_logprobs(
                tiny_moe, ids, found, loss_mask=loss, prompt_lens=prompt_lens, origins=[key]
            )
    theirs = {s.origin: s for s in store.open(tmp_path / "replay")}
    for mine in store.open(tmp_path / "trainer"):
        a, b = mine.logprob("raw"), theirs[mine.origin].logprob("raw")
        assert a.valid.any()
        np.testing.assert_array_equal(a.values[a.valid], b.values[a.valid])


def test_packed_and_padded_say_the_same_and_each_scoring_is_a_pass(
    tiny_moe: Any, rollout: Any, tmp_path: Path
) -> None:
    tape, _, keys = rollout
    ids, mask, loss, prompt_lens = batch_of(tape, keys)
    logprobs = -torch.rand(ids.shape)
    cuts = [0, *np.cumsum(mask.sum(1).tolist()).tolist()]
    flat = mask.bool()
    with rolltape.record(tmp_path / "t"):
        trainer.record_logprobs(
            tiny_moe,
            ids,
            logprobs,
            attention_mask=mask,
            loss_mask=loss,
            prompt_lens=prompt_lens,
            origins=keys,
        )
        trainer.record_logprobs(
            tiny_moe,
            ids[flat][None],
            logprobs[flat][None],
            loss_mask=loss[flat][None],
            cu_seqlens=cuts,
            prompt_lens=prompt_lens,
            origins=keys,
            temperature=0.5,
        )
    scored = store.open(tmp_path / "t")
    assert len(scored) == 2 * len(keys) and not scored.rows("events")
    for key in list(scored.keys())[: len(keys)]:
        once, again = scored.sequence(key), scored.sequence(key._replace(scoring=1))
        np.testing.assert_array_equal(once.tokens.values, again.tokens.values)
        a, b = once.logprob("raw"), again.logprob("scaled")
        np.testing.assert_array_equal(a.valid, b.valid)
        np.testing.assert_array_equal(a.values[a.valid], b.values[b.valid])
        assert once.origin == again.origin


def test_other_facts_and_the_dtype_of_the_log_softmax_are_kept(
    tiny_moe: Any, tmp_path: Path
) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    with rolltape.record(tmp_path / "t", role="trainer"):
        trainer.record_logprobs(
            tiny_moe,
            ids,
            torch.zeros(1, 4, dtype=torch.bfloat16),
            loss_mask=ids,
            facts={"autocast": "bf16", "clip": 0.2},
        )
    tape = store.open(tmp_path / "t")
    (sequence,) = tape
    assert tape.role == "trainer"
    assert sequence.annotations == {"scoring": "current", "autocast": "bf16", "clip": 0.2}
    (row,) = tape.rows("tokens")
    assert row["semantics"]["dtype"] == "bfloat16"


def test_the_code_of_the_guide_runs(tiny_moe: Any, rollout: Any, tmp_path: Path) -> None:
    tape, _, keys = rollout
    ids, mask, loss, _ = batch_of(tape, keys)
    text = (ROOT / "docs" / "trainer.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    names = {"model": tiny_moe, "input_ids": ids, "mask": mask, "loss_mask": loss, "keys": keys}
    names |= {"torch": torch, "step": 0, "i": 0}
    with rolltape.record(tmp_path / "t", role="trainer"), torch.no_grad():
        for block in blocks:
            exec(block, names)
    found = store.open(tmp_path / "t")
    assert len(blocks) == 2 and len(found) == len(keys)
    assert {row["kind"] for row in found.rows("events")} == set()
    assert [r["name"] for r in found.rows("annotations") if r["request"] == "chat-7"]


def test_a_fault_of_the_recorder_does_not_reach_the_loss(tiny_moe: Any, tmp_path: Path) -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    with rolltape.record(tmp_path / "t"):
        assert not trainer.record_logprobs(
            tiny_moe, ids, torch.zeros(2, 9), loss_mask=torch.ones(2, 4)
        )
    (event,) = store.open(tmp_path / "t").rows("events")
    assert event["kind"] == "hook_error" and "does not fit" in event["detail"]


def test_without_a_recording_nothing_happens(tiny_moe: Any) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    with trainer.live_routes(tiny_moe) as routes:
        tiny_moe(ids)
    assert routes.layers == {}
    assert not trainer.record_logprobs(tiny_moe, ids, torch.zeros(1, 4), loss_mask=ids)
    assert rolltape.annotate("anything", reward=1.0) is False


def test_an_annotation_by_external_id_waits_for_its_sequence(tmp_path: Path) -> None:
    with rolltape.record(tmp_path / "t"):
        assert rolltape.annotate("chat-7", sample=2, reward=0.5, verdict="fine")
        assert rolltape.annotate("chat-8", group="g")
        assert not rolltape.annotate("chat-9")  # says nothing
    rows = store.open(tmp_path / "t").rows("annotations")
    assert [(r["engine"], r["request"], r["sample"], r["name"]) for r in rows] == [
        ("", "chat-7", 2, "reward"),
        ("", "chat-7", 2, "verdict"),
        ("", "chat-8", -1, "group"),
    ]
