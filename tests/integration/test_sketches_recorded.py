"""Sketches of a real rollout, and a replay compared with what really happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import rolltape
from rolltape.recorder.sketch import sketch
from rolltape.replay.cli import diff, replay
from rolltape.replay.diff import diff_tapes
from rolltape.replay.score import score_tape
from rolltape.replay.transplant import donor_of, transplant
from rolltape.store import UsageError
from tests.integration.conftest import make_model

pytestmark = pytest.mark.engine


def rollout(path: Path, model: Any, **options: Any) -> Any:
    """Three left-padded prompts; one of them may end early."""
    ids = torch.randint(2, 320, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :2] = 0
    with rolltape.record(path, **options):
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=True, pad_token_id=0
        )
    return rolltape.open(path)


@pytest.mark.parametrize("cache", [True, False])
def test_sketches_are_those_of_the_tensors(tmp_path: Path, cache: bool) -> None:
    model = make_model("qwen3_moe", torch.bfloat16)
    model.generation_config.use_cache = cache
    tape = rollout(tmp_path / "a", model, layers=3, sketches=2, level="layers")
    sequences = list(tape)
    assert sequences[2].sketches() == {}
    for sequence in sequences[:2]:
        found, tensors = sequence.sketches(), sequence.activations()
        assert found.keys() == tensors.keys() == {f"layers.{i}.out" for i in range(3)}
        for site, spans in found.items():
            # without a cache a position is run again and again: the first one is what happened
            seen: dict[int, tuple[Any, Any]] = {}
            for span in spans:
                assert (span.dtype, span.width) == ("bfloat16", 64)
                for i in range(len(span.hashes)):
                    seen.setdefault(span.start + i, (span.hashes[i], span.projections[i]))
            assert set(seen) == set(range(sequence.length - 1))
            exact: dict[int, np.ndarray] = {}
            for start, _, rows in tensors[site]:
                for i, row in enumerate(rows):
                    exact.setdefault(start + i, row)
            for position, (hash_, projections) in seen.items():
                want = sketch(exact[position][None])
                assert hash_ == want[0][0]
                assert np.allclose(projections, want[1][0], rtol=1e-5, atol=1e-5)


def test_sketches_do_not_need_a_level_and_change_nothing(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    torch.manual_seed(3)
    plain = rollout(tmp_path / "a", model)
    torch.manual_seed(3)
    sketched = rollout(tmp_path / "b", model, sketches=9, level="tokens")
    assert [s.tokens.values.tolist() for s in plain] == [s.tokens.values.tolist() for s in sketched]
    assert all(len(s.sketches()) == 3 and not s.activations() for s in sketched)
    assert not any(s.sketches() for s in plain)


def test_a_replay_is_compared_with_what_really_happened(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    a = rollout(tmp_path / "a", model, sketches=3)
    ids = [s.id for s in a]
    score_tape(a, tmp_path / "b", model, sites="layers.*.out,logits", sequences=ids)
    b = rolltape.open(tmp_path / "b")
    assert set(next(iter(b)).activations()) == {*(f"layers.{i}.out" for i in range(3)), "logits"}
    layers = diff_tapes(a, b, layers=True)["activations"]
    assert [row["site"] for row in layers["sites"]] == [f"layers.{i}.out" for i in range(3)]
    assert all(row["sketched"] == row["positions"] for row in layers["sites"])
    assert all(row["rel_l2_max"] < 1e-5 for row in layers["sites"])  # decode against prefill, FP32

    # the same weights, another kernel: the digest agrees, the sketches do not
    kernel = model.model.layers[1].mlp.experts
    fault = kernel.register_forward_hook(lambda _module, _args, output: output * 1.05)
    score_tape(a, tmp_path / "c", model, layers=3)
    fault.remove()
    layers = diff_tapes(a, rolltape.open(tmp_path / "c"), layers=True)["activations"]
    by_site = {row["site"]: row["rel_l2_max"] for row in layers["sites"]}
    assert by_site["layers.0.out"] < 1e-5 < 1e-3 < by_site["layers.1.out"]
    assert layers["verdict"] == "divergent" and layers["front"]["max_abs"] is None


def test_stored_tensors_of_a_tape_are_transplanted(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    a = rollout(tmp_path / "a", model)
    ids = [s.id for s in a]
    score_tape(a, tmp_path / "b", model, sites="layers.*.heads,layers.*.out", sequences=ids)
    b = rolltape.open(tmp_path / "b")
    rows, logprobs = donor_of(b, "layers.1.*")
    assert list(rows) == ["layers.1.heads", "layers.1.out"] and logprobs.keys() == {s.id for s in b}
    model.model.layers[1].self_attn.scaling *= 2
    sequences = {s.id: s.tokens.values for s in b}
    for found in transplant(model, sequences, rows, logprobs):
        assert found.before > 1e-4 and found.gone == pytest.approx(1, abs=1e-2)
        assert found.tokens == sum(s.length - s.prompt_len for s in b)
    with pytest.raises(UsageError, match="no stored tensors"):
        donor_of(a)


def test_sites_of_no_sequence_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    a = rollout(tmp_path / "a", model)
    with pytest.raises(UsageError, match="which sequences"):
        score_tape(a, tmp_path / "b", model, sites="logits")
    with pytest.raises(UsageError, match="no site"):
        score_tape(a, tmp_path / "b", model, sites="layers.7.out", layers=1)
    assert not (tmp_path / "b").exists()


def test_sites_from_the_command_line(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model")
    a = rollout(tmp_path / "a", model, sketches=2)
    name = list(a)[1].id
    arguments = [a.path, "-o", tmp_path / "b", "--sites", "layers.1.*,norm", "--sequences", name]
    run = CliRunner().invoke
    done = run(replay, [str(x) for x in arguments], standalone_mode=False)
    assert done.exception is None, done.output
    b = rolltape.open(tmp_path / "b")
    found = [s.activations() for s in b]
    assert found[0] == found[2] == {}
    assert {"layers.1.q_rot", "layers.1.router", "norm"} <= found[1].keys() and len(found[1]) == 13
    done = run(diff, [str(a.path), str(b.path), "--layers"], standalone_mode=False)
    assert f"front: layers.1.out of {name} at position" in done.output
    assert "no noise floor (--floor): every bit counts" in done.output
