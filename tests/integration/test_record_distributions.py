"""The most probable tokens of each position, recorded and replayed, with the mass of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rolltape
from rolltape.recorder import transformers as adapter
from rolltape.recorder.top import top_logprobs
from rolltape.replay.score import replay, score_tape
from rolltape.store import Sequence, Tape, UsageError
from rolltape.store.distributions import Distributions, compare_distributions
from tests.integration.conftest import DEVICE, TINY_MOE, make_model
from tests.integration.test_record_transformers import SAMPLE, Oracle, by_row

pytestmark = pytest.mark.engine

VOCAB = 4096
RAW = {"temperature": 1.0, "edits": [], "truncation": [], "vocab_size": VOCAB, "dtype": "float32"}


def distributions(sequence: Sequence) -> Distributions:
    found = sequence.distributions()
    assert found is not None
    return found


def recorded(model: Any, inputs: Any, tape: Path, k: int, **options: Any) -> tuple[Any, Tape]:
    with rolltape.record(tape, top_logprobs=k):
        torch.manual_seed(5)
        ids = model.generate(**inputs, **options)
    return ids, rolltape.open(tape)


def check_against(oracle: Oracle, tape: Tape, k: int) -> None:
    """Top-k and tail of every response position, from the logits that `generate()` gave out."""
    want = [logprobs.topk(k) for logprobs in oracle.logprobs["raw"]]
    exact = [logits.double().log_softmax(-1).cpu() for logits in oracle.out.logits]
    rest = [
        e.scatter(-1, w.indices, -torch.inf).logsumexp(-1) for e, w in zip(exact, want, strict=True)
    ]
    sequences = by_row(tape, oracle.samples)
    assert len(sequences) == len(oracle.sequences)
    for row, sequence in enumerate(sequences):
        found, prompt = distributions(sequence), sequence.prompt_len
        assert found.k == k
        assert not found.valid[:prompt].any() and found.valid[prompt:].all()
        for position in range(prompt, sequence.length):
            best = want[position - prompt]
            if DEVICE == "cpu":
                np.testing.assert_array_equal(found.ids[position], best.indices[row].numpy())
                np.testing.assert_array_equal(found.logprobs[position], best.values[row].numpy())
            # the oracle works on the host: another order of sums, and near ties may change places
            ids = torch.from_numpy(found.ids[position].astype(np.int64))
            of_ids = exact[position - prompt][row][ids].numpy()
            np.testing.assert_allclose(found.logprobs[position], of_ids, atol=2e-5, rtol=1e-6)
            values = best.values[row].numpy()
            np.testing.assert_allclose(found.logprobs[position], values, atol=2e-5, rtol=1e-6)
            tail = float(rest[position - prompt][row])
            assert found.tail[position] == pytest.approx(tail, abs=2e-5, rel=1e-6)
        for start, n, semantics in found.semantics:
            assert semantics == {**RAW, "source": "engine"} and start >= prompt and n > 0


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "top_k": None},
        {"top_k": 0},
        {"top_k": 50, "top_p": 0.9, "num_return_sequences": 3},
        {"top_k": 0, "temperature": 1.3, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "full", "samples", "penalty"],
)
def test_the_best_k_are_those_of_the_raw_distribution_whatever_the_sampler_does(
    tiny_moe: Any, prompts: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {**SAMPLE, **options}
    oracle = Oracle(tiny_moe, prompts, **options)
    ids, tape = recorded(tiny_moe, prompts, tmp_path / "a", 7, **options)
    assert torch.equal(ids.cpu(), oracle.sequences), "recording changed the sampled tokens"
    check_against(oracle, tape, 7)
    named_at_all = 0
    for sequence in tape:
        found, raw = distributions(sequence), sequence.logprob("raw").values
        named, at = np.nonzero(found.ids == sequence.tokens.values[:, None])
        drawn = found.valid[named]
        np.testing.assert_array_equal(found.logprobs[named, at][drawn], raw[named[drawn]])
        named_at_all += int(drawn.sum())
    assert named_at_all


def test_rows_that_end_early_and_blocks_of_few_steps_leave_no_hole(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    options = {**SAMPLE, "top_k": 0, "max_new_tokens": 40, "eos_token_id": VOCAB - 1}
    free = Oracle(tiny_moe, prompts, **options).sequences[:, prompts["input_ids"].shape[1] :]
    tokens, counts = torch.unique(free, return_counts=True)
    options["eos_token_id"] = int(tokens[counts.argmax()])
    monkeypatch.setattr(adapter, "BLOCK_STEPS", 3)
    oracle = Oracle(tiny_moe, prompts, **options)
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", 5, **options)
    assert len({s.length - s.prompt_len for s in tape}) > 1, "the test needs different lengths"
    check_against(oracle, tape, 5)
    assert tape.table("distributions").num_rows > len(tape)


def test_an_interrupted_call_keeps_the_distributions_of_what_ran(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    class Interrupt:
        calls = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt), rolltape.record(tmp_path / "a", top_logprobs=3):
        tiny_moe.generate(**prompts, **SAMPLE, top_k=0, logits_processor=[Interrupt()])
    for sequence in rolltape.open(tmp_path / "a"):
        assert sequence.length - sequence.prompt_len == 4
        np.testing.assert_array_equal(
            distributions(sequence).valid, np.arange(sequence.length) >= sequence.prompt_len
        )


def test_nothing_is_written_unless_asked_for(tiny_moe: Any, prompts: Any, tmp_path: Path) -> None:
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", 0, **SAMPLE)
    assert tape.table("distributions").num_rows == 0
    assert not (tmp_path / "a" / "distributions").exists()
    assert all(sequence.distributions() is None for sequence in tape)
    score_tape(tape, tmp_path / "b", tiny_moe)
    assert not (tmp_path / "b" / "distributions").exists()


def test_all_of_the_vocabulary_leaves_nothing_in_the_tail(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    _, tape = recorded(model, inputs, tmp_path / "a", 320, do_sample=False, max_new_tokens=4)
    found = distributions(next(iter(tape)))
    assert (found.tail[found.valid] == -np.inf).all() and found.valid.sum() == 4
    mass = np.exp(found.logprobs[found.valid].astype(np.float64)).sum(1)
    np.testing.assert_allclose(mass, 1, atol=1e-5)


def test_more_than_the_vocabulary_is_refused_and_the_rest_is_recorded(
    tmp_path: Path, capfd: Any
) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    options = {"do_sample": False, "max_new_tokens": 4}
    oracle = Oracle(model, inputs, **options)
    _, tape = recorded(model, inputs, tmp_path / "a", 321, **options)
    assert "top_logprobs is 321, the vocabulary has 320 tokens" in capfd.readouterr().err
    (event,) = tape.rows("events")
    assert event["kind"] == "hook_error" and "the vocabulary has 320" in event["detail"]
    (sequence,) = tape
    np.testing.assert_array_equal(sequence.tokens.values, oracle.sequences[0].numpy())
    assert sequence.logprob("raw").valid[3:].all() and sequence.routes() is not None
    assert tape.table("distributions").num_rows == 0
    with (
        pytest.raises(UsageError, match="the vocabulary has 320"),
        rolltape.record(tmp_path / "strict", top_logprobs=321, strict=True),
    ):
        model.generate(**inputs, **options)
    for k in (321, -1):
        with pytest.raises(UsageError, match=f"top_logprobs is {k}, the vocabulary has 320"):
            score_tape(tape, tmp_path / "b", model, top_logprobs=k)
    with pytest.raises(UsageError, match="the vocabulary has 320"):  # before the model is loaded
        replay(tmp_path / "a", tmp_path / "b", model="nowhere", top_logprobs=321)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_replay_and_recording_agree_in_float32(
    tiny_moe: Any, prompts: Any, tmp_path: Path, layout: str
) -> None:
    model = type(tiny_moe).from_pretrained(TINY_MOE, dtype=torch.float32).to(DEVICE).eval()
    options = {**SAMPLE, "temperature": 0.7, "repetition_penalty": 1.2, "top_p": 0.9}
    _, tape = recorded(model, prompts, tmp_path / "a", 20, **options)
    score_tape(tape, tmp_path / "b", model, top_logprobs=20, layout=layout)
    replayed = {s.origin: s for s in rolltape.open(tmp_path / "b")}
    compared = 0
    for sequence in tape:
        other = replayed[sequence.key]
        a, b = distributions(sequence), distributions(other)
        np.testing.assert_array_equal(a.valid, b.valid)
        assert [s for *_, s in b.semantics] == [{**RAW, "source": "recomputed"}]
        where = a.valid
        # near ties may change places: the values by rank are what can be compared; the float32
        # error of a logit grows with its size, so it is relative for ids far down
        for name in ("logprobs", "tail"):
            left, right = (getattr(side, name)[where] for side in (a, b))
            np.testing.assert_allclose(left, right, atol=2e-5, rtol=1e-5)
            np.testing.assert_allclose(np.exp(left), np.exp(right), atol=2e-5)
        found = compare_distributions(a, b)
        assert (found.kl_lower[where] < 1e-6).all() and (found.tv_lower[where] < 2e-5).all()
        assert found.overlap[where].mean() > 0.99
        named, at = np.nonzero((b.ids == other.tokens.values[:, None]) & where[:, None])
        np.testing.assert_array_equal(b.logprobs[named, at], other.logprob("raw").values[named])
        compared += len(named)
    assert compared > 50


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_the_tail_has_correct_digits_also_where_the_best_hold_nearly_everything(
    scale: float,
) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * scale
    logits = logits.to(DEVICE)
    logprobs = logits.log_softmax(-1)
    before = logprobs.clone()
    ids, values, tail = top_logprobs(logprobs, 20)
    assert torch.equal(logprobs, before)
    assert torch.equal(values, logprobs.gather(-1, ids))
    exact = logits.double().log_softmax(-1).scatter(-1, ids, -torch.inf).logsumexp(-1)
    if scale >= 10:
        assert exact.min() < -15, "1 minus the mass of the best would be 0 in float32"
    torch.testing.assert_close(tail.double(), exact, rtol=1e-6, atol=1e-5)


def test_ids_that_are_ruled_out_have_no_mass() -> None:
    logprobs = torch.full((2, 10), -torch.inf, device=DEVICE)
    logprobs[:, 3:5] = torch.log(torch.tensor([0.75, 0.25]))
    ids, values, tail = top_logprobs(logprobs, 4)
    assert ids[:, :2].tolist() == [[3, 4]] * 2
    assert (values[:, 2:] == -torch.inf).all() and (tail == -torch.inf).all()
