"""`rolltape shrink`: a fault that shows in many sequences, shown by one, and cut short."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from click.testing import CliRunner

import rolltape
from rolltape import store
from rolltape.cli import main
from rolltape.replay import diff_tapes
from rolltape.replay.reexecute import reexecute
from rolltape.replay.score import replay
from rolltape.replay.shrink import minimal, shrink
from rolltape.replay.shrink_cli import shrink as command
from rolltape.store import TapeExistsError, UsageError, create_tape
from rolltape.store.excerpt import write_excerpt
from rolltape.store.fsck import fsck
from rolltape.store.keys import Key
from tests.builders import random_samples, write_tape
from tests.integration.conftest import TINY_MOE

pytestmark = pytest.mark.engine

#: Faults in layer 3, that leave the weights as they are.
MODULE = """
from transformers import AutoModelForCausalLM

from rolltape.replay.models import model_of


def load(tape, dtype):
    return AutoModelForCausalLM.from_pretrained(model_of(tape), dtype=dtype)


def scaled(tape, *, device, dtype):
    model = load(tape, dtype)
    model.model.layers[3].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * 1.25, *output[1:])
    )
    return model


def of_two(tape, *, device, dtype):
    model = load(tape, dtype)
    model.model.layers[3].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * (1 + (len(output[0]) > 1)), *output[1:])
    )
    return model


def healthy(tape, *, device, dtype):
    return load(tape, dtype)
"""


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sampled sequences of the bundled model in float32, with routes and kept sets."""
    folder = tmp_path_factory.mktemp("shrink")
    (folder / "faulty_factories.py").write_text(MODULE)
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    prompts = torch.arange(5, 65).reshape(6, 10)
    torch.manual_seed(0)
    with rolltape.record(folder / "a"):
        model.generate(prompts, do_sample=True, max_new_tokens=12, top_k=50, pad_token_id=0)
    return folder / "a"


@pytest.fixture(autouse=True)
def factories(tape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tape.parent))


def largest(a: Path, b: Path) -> float:
    found = diff_tapes(store.open(a), store.open(b))
    assert found["compared"]["logprobs"] > 0
    return float(found["max_abs"])


def test_a_fault_in_one_layer_is_shown_by_one_sequence_on_its_own(
    tape: Path, tmp_path: Path
) -> None:
    replay(tape, tmp_path / "b", on="faulty_factories:scaled", switches=["support=recorded"])
    done = CliRunner().invoke(
        command, [str(tape), str(tmp_path / "b"), "-o", str(tmp_path / "s"), "--json"],
        standalone_mode=False,
    )  # fmt: skip
    assert done.return_value == 0, done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == "shrunk" and found["column"] == "processed"
    assert found["sequences"] == [6, 1] and found["tokens"][1] < found["tokens"][0] / 5
    assert found["scorings"] <= 4

    small, whole = store.open(tmp_path / "s"), store.open(tape)
    assert small.parent == whole.uuid and not small.problems
    assert fsck(tmp_path / "s").findings == ()
    (sequence,) = small
    original = whole.sequence(sequence.key)
    n = sequence.length
    assert found["kept"] == {sequence.id: n} and n - 1 == found["position"]
    assert np.array_equal(sequence.tokens.values, original.tokens.values[:n])

    # the tape is a tape: it replays, shows the fault, and does not without it
    bound = found["bound"]
    replay(tmp_path / "s", tmp_path / "again", on="faulty_factories:scaled",
           switches=["support=recorded"])  # fmt: skip
    assert largest(tmp_path / "s", tmp_path / "again") == pytest.approx(found["largest"])
    assert found["largest"] >= bound > 0.01
    replay(tmp_path / "s", tmp_path / "fine", switches=["support=recorded"])
    assert largest(tmp_path / "s", tmp_path / "fine") < bound / 100


def test_a_switch_that_changes_the_dtype_is_applied_again(tape: Path, tmp_path: Path) -> None:
    replay(tape, tmp_path / "b", switches=["dtype=bfloat16", "support=recorded"])
    found = shrink(tape, tmp_path / "b", tmp_path / "s")
    assert found["verdict"] == "shrunk" and found["sequences"][1] < 6
    replay(tmp_path / "s", tmp_path / "again", switches=["dtype=bfloat16", "support=recorded"])
    assert largest(tmp_path / "s", tmp_path / "again") >= found["bound"]


def test_a_fault_that_needs_two_rows_keeps_two(tape: Path, tmp_path: Path) -> None:
    replay(tape, tmp_path / "b", on="faulty_factories:of_two")
    found = shrink(tape, tmp_path / "b", tmp_path / "s")
    assert found["verdict"] == "shrunk" and found["sequences"] == [6, 2]
    assert min(found["kept"].values()) < 22
    replay(tmp_path / "s", tmp_path / "again", on="faulty_factories:of_two")
    assert largest(tmp_path / "s", tmp_path / "again") >= found["bound"]


def test_what_does_not_show_again_is_not_written(tape: Path, tmp_path: Path) -> None:
    replay(tape, tmp_path / "b", on="faulty_factories:scaled")
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
    found = shrink(tape, tmp_path / "b", tmp_path / "s", model=model)
    assert found["verdict"] == "not-reproduced" and "scored again" in found["reason"]
    high = shrink(tape, tmp_path / "b", tmp_path / "s", bound=1e6)
    assert high["verdict"] == "not-run" and "below the bound" in high["reason"]
    done = CliRunner().invoke(
        command, [str(tape), str(tmp_path / "b"), "-o", str(tmp_path / "s"), "--bound", "1e6"],
        standalone_mode=False,
    )  # fmt: skip
    assert done.return_value == 3 and not (tmp_path / "s").exists()


def test_what_cannot_be_shrunk_is_refused(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(tape, tmp_path / "b", on="faulty_factories:healthy")
    with monkeypatch.context() as several:
        several.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match="WORLD_SIZE is 2"):
            shrink(tape, tmp_path / "b", tmp_path / "s")
    with pytest.raises(UsageError, match="is not a replay of"):
        shrink(tmp_path / "b", tape, tmp_path / "s")
    with pytest.raises(UsageError, match="not above 0"):
        shrink(tape, tmp_path / "b", tmp_path / "s", bound=0.0)
    with pytest.raises(TapeExistsError):
        shrink(tape, tmp_path / "b", tape)
    write_excerpt(store.open(tape), tmp_path / "part", {s.key: 12 for s in store.open(tape)})
    with pytest.raises(UsageError, match="was not made by `rolltape replay`"):
        shrink(tape, tmp_path / "part", tmp_path / "s")


def test_an_excerpt_holds_what_the_tape_holds_up_to_a_position(tape: Path, tmp_path: Path) -> None:
    whole = store.open(tape)
    lengths = dict(zip(whole.keys(), (22, 11, 15, 10), strict=False))
    write_excerpt(whole, tmp_path / "e", lengths)
    part = store.open(tmp_path / "e")
    assert fsck(tmp_path / "e").findings == () and not part.problems
    assert list(part.keys()) == list(lengths)
    for key, n in lengths.items():
        a, b = whole.sequence(key), part.sequence(key)
        assert b.length == n and b.prompt_len == a.prompt_len
        for name in ("raw", "scaled", "processed"):
            mine, its = b.logprob(name), a.logprob(name)[:n]
            assert np.array_equal(mine.valid, its.valid)
            assert np.array_equal(mine.values[mine.valid], its.values[its.valid])
        assert np.array_equal(b.loss_mask.fill(False), a.loss_mask.fill(False)[:n])
        assert np.array_equal(b.step.fill(-1), a.step.fill(-1)[:n])
        now, then = b.routes(), a.routes()
        inputs = n if n == a.length else n - 1  # the last token of all is no input
        assert np.array_equal(now.valid[:inputs], then.valid[:inputs]) and now.valid.any()
        assert not now.valid[inputs:].any()
        assert np.array_equal(now.ids[now.valid], then.ids[:inputs][then.valid[:inputs]])
        assert [entry[0] for entry in now.missing if entry[3] == "last"] == [n - 1]
        kept, all_kept = b.supports(), a.supports()
        assert np.array_equal(kept.state, all_kept.state[:n])
        assert np.array_equal(kept.ids, all_kept.ids[: all_kept.offsets[n]])
    with pytest.raises(UsageError, match="has no positions"):
        write_excerpt(whole, tmp_path / "f", {next(iter(lengths)): 23})


@pytest.mark.parametrize("needed", [{0}, {7}, {2, 3}, {0, 7}, {1, 4, 6}, set(range(8))])
def test_nothing_can_be_left_out_of_a_minimal_part(needed: set[int]) -> None:
    keys = [Key("e", str(i), 0, 0) for i in range(8)]
    asked: list[Any] = []

    def shows(part: Any) -> bool:
        asked.append(part)
        return {int(k.request) for k in part} >= needed

    assert {int(k.request) for k in minimal(keys, shows)} == needed
    assert len(asked) < 64


def test_the_summary_names_the_next_command(tape: Path, tmp_path: Path) -> None:
    replay(tape, tmp_path / "b", on="faulty_factories:scaled", switches=["routing=ids"])
    done = CliRunner().invoke(
        command, [str(tape), str(tmp_path / "b"), "-o", str(tmp_path / "s")], standalone_mode=False
    )
    assert "1 of 6 sequences" in done.output
    assert done.output.rstrip().endswith("--on faulty_factories:scaled --switch routing=ids")
    assert "faulty_factories" in sys.modules
    following = shlex.split(done.output.rstrip().splitlines()[-1].removeprefix("next: rolltape "))
    with pytest.raises(SystemExit) as ended:  # it can be run as it stands
        main(following)
    assert ended.value.code in (None, 0)
    assert store.open(tmp_path / "s.replay").parent == store.open(tmp_path / "s").uuid


def test_a_re_execution_of_a_serving_engine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    a = write_tape(tmp_path / "a", random_samples(1), facts={"adapter": "sglang"})
    header = {"mode": "re-execute", "switches": {"batch": "recorded", "weights": "recorded"}}
    create_tape(tmp_path / "b", role="rollout", parent=a.uuid, provenance=header)
    with pytest.raises(UsageError) as refused:
        shrink(a, tmp_path / "b", tmp_path / "s")
    assert "re-executes sglang" in str(refused.value)
    assert "a scoring of any recording" in str(refused.value)
    assert f"rolltape replay {tmp_path / 'a'} -o" in str(refused.value.hint)


def test_of_a_re_execution_one_call_is_kept_up_to_the_first_other_bit(
    tmp_path: Path, tape: Path
) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    prompts = torch.arange(5, 65).reshape(6, 10)
    with rolltape.record(tmp_path / "a"):
        torch.manual_seed(0)
        for half in prompts.split(3):
            model.generate(half, do_sample=True, top_k=50, max_new_tokens=9, pad_token_id=0)
    whole = store.open(tmp_path / "a")
    keys = list(whole.keys())
    faulty = {int(whole.sequence(keys[4]).tokens.values[13])}  # input of the step that makes 14

    def bend(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
        ids = kwargs["input_ids"]
        if ids.shape[1] == 1 and len(ids) == 3 and int(ids[1, 0]) in faulty:
            output.logits[1] *= 1 + 2**-20

    same = reexecute(whole, tmp_path / "same", model=model)
    assert same["verdict"] == "identical"
    assert shrink(whole, tmp_path / "same", tmp_path / "s", model=model)["verdict"] == "identical"

    hook = model.register_forward_hook(bend, with_kwargs=True)
    found = reexecute(whole, tmp_path / "b", model=model)
    assert found["verdict"] == "not-reproduced", found["reason"]
    small = shrink(whole, tmp_path / "b", tmp_path / "s", model=model)
    assert small["verdict"] == "shrunk" and small["sequences"] == [6, 3]
    assert small["scorings"] == 1 and small["first"]["what"] == found["first"]["what"]
    assert small["position"] == found["first"]["position"]
    assert small["sequence"] == found["first"]["sequence"]
    assert max(small["kept"].values()) == small["position"] + 1 <= 19
    assert fsck(tmp_path / "s").findings == ()

    again = reexecute(tmp_path / "s", tmp_path / "again", model=model)
    assert again["verdict"] == "not-reproduced" and again["first"] == small["first"]
    hook.remove()
    fine = reexecute(tmp_path / "s", tmp_path / "fine", model=model)
    assert fine["verdict"] == "identical", fine["not_compared"]
    gone = shrink(whole, tmp_path / "b", tmp_path / "t", model=model)
    assert gone["verdict"] == "not-reproduced" and not (tmp_path / "t").exists()
    with pytest.raises(UsageError, match="any other bit counts"):
        shrink(whole, tmp_path / "b", tmp_path / "t", model=model, bound=0.1)
    reexecute(whole, tmp_path / "one", model=model, switches=["batch=one"])
    with pytest.raises(UsageError, match="ran with batch=one"):
        shrink(whole, tmp_path / "one", tmp_path / "t", model=model)
