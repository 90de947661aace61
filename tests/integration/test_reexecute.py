"""Re-execution: the same bits again, or the name of the first value that is not the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers as hf
from click.testing import CliRunner

import rolltape
from rolltape.recorder import session
from rolltape.recorder import transformers as adapter
from rolltape.recorder.force import Force
from rolltape.replay.cli import replay
from rolltape.replay.executors import transformers as executor
from rolltape.replay.executors.protocol import Execution
from rolltape.replay.reexecute import reexecute
from rolltape.replay.reproduction import reproduction
from rolltape.replay.schedule import read_schedule
from rolltape.store import ForcingError, ModelMismatchError, Tape, TapeWriter, codecs, create_tape
from rolltape.store import seal as seal_tape
from rolltape.store.compact import compact
from rolltape.store.errors import TapeExistsError, UsageError
from rolltape.store.keys import Key
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from tests.integration.conftest import DEVICE, ROOT, TINY_MOE, make_model
from tests.tampered import edited

pytestmark = [pytest.mark.engine, pytest.mark.skipif(DEVICE != "cpu", reason="bits of the CPU")]

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 50, "top_p": 0.95, "temperature": 0.9}


def ends_often(model: Any, inputs: Any, candidates: int = 24) -> list[int]:
    """Token ids that are likely enough for rows to end at different times."""
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1].float().mean(0)
    return [int(i) for i in logits.topk(candidates).indices[8:]]


def rollout(model: Any, inputs: Any, tape: Path, **options: Any) -> Tape:
    """Several calls: padded and sampled with early ends, samples, greedy with a penalty."""
    with rolltape.record(tape, **options):
        torch.manual_seed(3)
        eos = ends_often(model, inputs)
        model.generate(**inputs, **SAMPLED, max_new_tokens=20, eos_token_id=eos, pad_token_id=7)
        two = {name: value[:2] for name, value in inputs.items()}
        model.generate(
            **two, do_sample=True, top_k=0, min_p=0.02, num_return_sequences=3, max_new_tokens=9
        )
        model.generate(
            inputs["input_ids"][1:2], do_sample=False, repetition_penalty=1.2, max_new_tokens=12
        )
    return rolltape.open(tape)


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Any:
    """A recorded BF16 rollout of the bundled model, and the model."""
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(TINY_MOE, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["import os\n", "def read(path):\n    with open(path) as f:\n        return ",
             "class A:\n    pass\n\nclass B(A):\n    def __init__(self):\n        ", "x",
             "for i in range(10):\n    print(i)\n", "# comment\nassert "]  # fmt: skip
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    path = tmp_path_factory.mktemp("small") / "a"
    tape = rollout(model, inputs, path, layers=2, sketches=3, top_logprobs=3)
    return tape, model, inputs


@pytest.fixture
def model(small: Any) -> Any:
    return small[1]


@pytest.fixture
def tape(small: Any) -> Tape:
    """Opened anew: what another test read of it does not count."""
    return rolltape.open(small[0].path)


@pytest.fixture(scope="module")
def done(small: Any, tmp_path_factory: Any) -> tuple[Tape, Execution]:
    """One re-execution of the rollout, to hold against recordings that were changed."""
    path = tmp_path_factory.mktemp("done") / "b"
    calls = read_schedule(small[0]).calls
    seen = executor.execute(small[0], path, calls, small[1], "tiny-moe")
    return rolltape.open(path), seen


def test_a_rollout_is_reproduced_bit_for_bit(small: Any, tape: Tape, tmp_path: Path) -> None:
    found = reexecute(tape, tmp_path / "b")
    assert found["verdict"] == "identical", found
    assert found["first"] is None and found["differ"] == {} and found["not_compared"] == []
    assert found["self_test"] == {"steps": 8, "rows": 6, "neutral": True, "control": True}
    lengths = {s.length - s.prompt_len for s in tape if s.key.request.startswith("0-")}
    assert len(lengths) > 2, "rows are meant to end at different times"
    tokens = sum(s.length - s.prompt_len for s in tape)
    inputs = sum(s.length - 1 for s in tape)
    compared = found["compared"]
    for column in ("raw", "scaled", "processed", "supports", "distributions"):
        assert compared[column] == tokens
    assert compared["tokens"] == sum(s.length for s in tape)
    assert compared["routes.ids"] == compared["routes.weights"] == inputs * 6
    assert compared["steps"] == len(tape.table("steps"))
    assert compared["forwards"] == len(tape.table("forwards"))
    hidden = [s for s in tape if s.activations()]
    assert len(hidden) == 2
    assert compared["activations"] == sum(s.length - 1 for s in hidden) * 6 * 128
    sketched = [s for s in tape if s.sketches()]
    assert len(sketched) == 3
    assert compared["sketches"] == sum(s.length - 1 for s in sketched) * 6
    b = rolltape.open(tmp_path / "b")
    assert b.role == "rollout" and b.parent == tape.uuid and b.uuid != tape.uuid
    assert {s.origin for s in b} == set(tape.keys())
    assert not set(b.engines) & set(tape.engines)
    assert b.header["provenance"]["mode"] == "re-execute"


@pytest.fixture(scope="module")
def big(tmp_path_factory: Any) -> Path:
    """A larger random MoE in BF16, on disk."""
    folder = tmp_path_factory.mktemp("big")
    torch.manual_seed(1)
    config = hf.Qwen3MoeConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True,
        decoder_sparse_step=1, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def test_a_larger_random_model_is_reproduced(big: Path, tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(big).eval()
    ids = torch.randint(2, 5000, (12, 30))
    mask = torch.ones_like(ids)
    for row in range(12):
        ids[row, : 2 * row], mask[row, : 2 * row] = 0, 0
    with rolltape.record(tmp_path / "a"):
        for part in (slice(0, 8), slice(8, 12)):
            model.generate(
                ids[part], attention_mask=mask[part], **SAMPLED, max_new_tokens=16,
                eos_token_id=list(range(1, 200)),
            )  # fmt: skip
    tape = rolltape.open(tmp_path / "a")
    assert len({s.length - s.prompt_len for s in tape}) > 2
    found = reexecute(tape, tmp_path / "b")
    assert found["verdict"] == "identical", found
    assert found["compared"]["routes.ids"] == 8 * sum(s.length - 1 for s in tape)


# -- what must not pass ---------------------------------------------------------------------


def test_a_flipped_bit_of_a_recorded_logprob_is_named(
    tape: Tape, done: Any, tmp_path: Path
) -> None:
    chosen = next(s for s in tape if s.key.request == "0-4")
    at = chosen.prompt_len + 1
    flipped: list[np.float32] = []

    def flip(rows: list[dict[str, Any]]) -> None:
        row = next(
            r for r in rows
            if r["request"] == "0-4" and r["raw"] is not None
            and r["start"] <= at < r["start"] + r["n"]
        )  # fmt: skip
        value = np.array(row["raw"], np.float32)
        value.view(np.uint32)[at - row["start"]] ^= 1
        flipped.append(value[at - row["start"]])
        row["raw"] = value.tolist()

    b, seen = done
    found = reproduction(edited(tape, tmp_path / "a", tokens=flip), b, execution=seen)
    assert found["verdict"] == "not-reproduced"
    assert found["differ"] == {"raw": 1} and found["sequences_differ"] == 1
    first, true = found["first"], chosen.logprob("raw").values[at]
    assert (first["what"], first["sequence"], first["position"]) == ("raw", chosen.id, at)
    assert first["step"] == chosen.step.values[at] and first["ulp"] == 1
    assert first["recorded"]["hex"] == f"0x{int(flipped[0].view(np.uint32)):08x}"
    assert first["found"] == {"decimal": str(true), "hex": f"0x{int(true.view(np.uint32)):08x}"}


def test_a_changed_route_is_named(tape: Tape, done: Any, tmp_path: Path) -> None:
    chosen = next(s for s in tape if s.key.request == "0-2")
    at, layer = chosen.prompt_len + 2, 3

    def change(rows: list[dict[str, Any]]) -> None:
        row = next(
            r for r in rows
            if r["request"] == "0-2" and r["start"] <= at < r["start"] + r["n"]
        )  # fmt: skip
        ids = codecs.decode_plain(row["ids"], row["n"], 6, row["k"], row["num_experts"], None)
        ids = ids.copy()
        ids[at - row["start"], layer, 1] = (ids[at - row["start"], layer, 1] + 1) % 16
        row["ids"] = codecs.encode_plain(ids, row["num_experts"])

    b, seen = done
    found = reproduction(edited(tape, tmp_path / "a", routes=change), b, execution=seen)
    assert found["verdict"] == "not-reproduced" and found["differ"] == {"routes.ids": 1}
    first = found["first"]
    assert first["what"] == "routes.ids[1]" and first["layer"] == layer
    assert (first["sequence"], first["position"]) == (chosen.id, at)
    routes = chosen.routes()
    assert routes is not None
    was = int(routes.ids[at, layer, 1])
    assert first["found"]["decimal"] == str(was)
    assert first["recorded"]["decimal"] == str((was + 1) % 16)


def flip_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("table", "column", "what"),
    [
        ("supports", "ids", "supports"),
        ("distributions", "logprobs", "distributions"),
        ("distributions", "tail", "distributions"),
        ("activations", "data", "activations layers.0.out[0]"),
        ("activations", "sketch", "sketch layers.0.out (hash of the row)"),
        ("routes", "weights", "routes.weights[0]"),
        ("tokens", "scaled", "scaled"),
        ("tokens", "loss_mask", "loss_mask"),
        ("tokens", "ids", "tokens"),
    ],
)
def test_every_kind_of_value_is_compared(
    tape: Tape, done: Any, tmp_path: Path, table: str, column: str, what: str
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        sketch = column == "sketch"
        name = "data" if sketch else column
        for row in rows:
            if not row[name] or (table == "activations" and (row["encoding"] is None) is sketch):
                continue
            if isinstance(row[name], bytes):
                row[name] = flip_byte(row[name], 0)
            elif isinstance(row[name][0], float):
                row[name][0] = float(np.nextafter(np.float32(row[name][0]), np.float32(-99)))
            elif isinstance(row[name][0], bool):
                row[name][0] = not row[name][0]
            else:
                row[name][-1] += 1
            return

    a = edited(tape, tmp_path / "a", **{table: change})
    b, seen = done
    found = reproduction(a, b, execution=seen)
    assert found["verdict"] == "not-reproduced" and list(found["differ"].values()) == [1]
    assert found["first"]["what"] == what and found["sequences_differ"] == 1


@pytest.mark.parametrize("field", ["row", "pad_left", "columns", "experts", "threads"])
def test_a_changed_composition_of_one_step_is_named(
    tape: Tape, model: Any, done: Any, tmp_path: Path, field: str
) -> None:
    step = 4

    def change(rows: list[dict[str, Any]]) -> None:
        of = [r for r in rows if r["step"] == step]
        if field == "row":
            of[0]["row"], of[1]["row"] = of[1]["row"], of[0]["row"]
        else:
            of[0][field] = "eager" if field == "experts" else of[0][field] + 1

    table = "forwards" if field in ("row", "pad_left") else "steps"
    a, (b, seen) = edited(tape, tmp_path / "a", **{table: change}), done
    found = reproduction(a, b, execution=seen)
    if field == "row":  # the layout is that of the first step; the whole way once
        found = reexecute(a, tmp_path / "b", model=model)
    assert found["verdict"] == "not-reproduced"
    assert found["first"]["step"] == step
    kind = "step" if table == "steps" else "row"
    assert found["first"]["what"] == f"composition: {kind} {field}"
    assert set(found["differ"]) == {table}


def nudged(model: Any, name: str, index: tuple[int, ...]) -> None:
    """Move one weight by one unit in the last place, the one that matters most around there."""
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.view(torch.int16)[index] += 1


def test_a_weight_moved_by_one_ulp_is_refused_and_its_effect_is_named(
    tape: Tape, tmp_path: Path
) -> None:
    other = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    nudged(other, "model.layers.2.post_attention_layernorm.weight", (5,))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelMismatchError, match="weights digest"):
        reexecute(tape, tmp_path / "b", model=str(tmp_path / "other"))
    assert not (tmp_path / "b").exists()
    found = reexecute(tape, tmp_path / "b", switches=[f"weights={tmp_path / 'other'}"])
    assert found["verdict"] == "divergent"
    # nothing before the weight can differ, and what it feeds is the router of its own layer
    assert found["first"]["what"].startswith("routes.") and found["first"]["layer"] == 2
    assert "steps" not in found["differ"]


def test_a_model_that_changes_behind_the_check_is_not_reproduced(
    tape: Tape, tmp_path: Path
) -> None:
    other = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    nudged(other, "model.norm.weight", (0,))
    calls = read_schedule(tape).calls
    seen = executor.execute(tape, tmp_path / "b", calls, other, "nudged")
    found = reproduction(tape, rolltape.open(tmp_path / "b"), execution=seen)
    assert found["verdict"] == "not-reproduced"
    assert found["first"]["what"] in ("raw", "scaled") and found["first"]["ulp"] > 0
    assert "routes.ids" not in found["differ"], "the norm comes after the last router"


# -- a copy is no execution -----------------------------------------------------------------


def copied(parent: Tape, root: Path, *, again: bool = False) -> None:
    """What a replay that copies its parent would write: new engine, new times, old values."""
    engines = {engine: f"{number:032x}" for number, engine in enumerate(parent.engines, 1)}
    if not (root / "tape.json").exists():
        create_tape(root, role="rollout", parent=parent.uuid)
    with TapeWriter(root) as writer:
        for name in (n for n in TAPE_TABLES if n not in DERIVED_TABLES):
            rows = parent.rows(name)
            for row in rows:
                if name == "sequences":
                    key = Key(row["engine"], row["request"], row["sample"], row["pass"])
                    row["origin"] = key.text
                if name == "engines":
                    row["writer"] = writer.id
                if row.get("engine"):
                    row["engine"] = engines[row["engine"]]
                if name == "steps":
                    row["t_ns"] = time.time_ns()
            if rows:
                table = pa.Table.from_pylist(rows, parent.schemas[name])
                columns = {c: table.column(c).combine_chunks() for c in table.schema.names}
                writer.append(name, columns)


def test_a_copy_of_the_parent_is_no_execution(tape: Tape, tmp_path: Path) -> None:
    shutil.copytree(tape.path, tmp_path / "same")
    found = reproduction(tape, rolltape.open(tmp_path / "same"))
    assert found["verdict"] == "not-run"
    copied(tape, tmp_path / "b")
    seal_tape(tmp_path / "b")
    b = rolltape.open(tmp_path / "b")
    found = reproduction(tape, b)
    assert found["differ"] == {}, "it is meant to be a perfect copy"
    assert (found["verdict"], found["executed"]) == (
        "not-run",
        ["nobody vouches for its execution"],
    )
    told = Execution(
        model="m",
        forwards=3,
        started_ns=0,
        ended_ns=1,
        self_test={"neutral": True, "control": True},
    )
    found = reproduction(tape, b, execution=told)
    assert found["verdict"] == "not-run"
    assert any("the model ran 3 times" in problem for problem in found["executed"])
    assert any("did not run while it was executed" in problem for problem in found["executed"])


def test_an_executor_that_copies_is_caught_by_its_own_control(
    tape: Tape, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = executor._run_all
    free: list[Path] = []

    def copying(source: Tape, root: Path, calls: Any, *args: Any, **kwargs: Any) -> int:
        if kwargs.get("free"):
            free.append(root)
            return real(source, root, calls, *args, **kwargs)
        parent = rolltape.open(free[-1]) if root.parent == free[-1].parent else source
        copied(parent, root)
        return len(parent.table("steps"))

    monkeypatch.setattr(executor, "_run_all", copying)
    found = reexecute(tape, tmp_path / "b", model=model)
    assert found["differ"] == {} and found["verdict"] == "not-run"
    assert "a changed prompt changed nothing" in found["reason"]


# -- other compositions ---------------------------------------------------------------------


def alone(model: Any, ids: np.ndarray, prompt: int) -> np.ndarray:
    """Raw logprobs of a response decoded by itself, without rolltape: float32 [T - prompt]."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    out = []
    with torch.no_grad():
        result = model(tokens[:, :prompt], use_cache=True, logits_to_keep=1)
        for p in range(prompt, len(ids)):
            logprobs = torch.log_softmax(result.logits[:, -1].float(), -1)
            out.append(logprobs[0, tokens[0, p]].item())
            result = model(tokens[:, p : p + 1], cache=result.cache, logits_to_keep=1)
    return np.array(out, np.float32)


def test_alone_the_values_are_those_of_a_batch_of_one(
    tape: Tape, model: Any, tmp_path: Path
) -> None:
    found = reexecute(tape, tmp_path / "b", model=model, switches=["batch=one"])
    b = rolltape.open(tmp_path / "b")
    assert {s.origin for s in b} == set(tape.keys())
    assert b.table("steps").column("rows").unique().to_pylist() == [1]
    equal = True
    for sequence in b:
        span = slice(sequence.prompt_len, sequence.length)
        raw = sequence.logprob("raw").values[span]
        expected = alone(model, sequence.tokens.values, sequence.prompt_len)
        np.testing.assert_array_equal(raw, expected)
        assert sequence.origin is not None
        equal &= np.array_equal(raw, tape.sequence(sequence.origin).logprob("raw").values[span])
    assert found["verdict"] == ("identical" if equal and not found["differ"] else "divergent")
    assert equal == (found["differ"].get("raw", 0) == 0)


def test_batches_of_another_size_hold_the_same_sequences(
    tape: Tape, model: Any, tmp_path: Path
) -> None:
    found = reexecute(tape, tmp_path / "b", model=model, switches=["batch=4"])
    assert found["verdict"] in ("identical", "divergent")
    assert found["sequences"] == len(tape) and found["not_compared"] == []
    assert found["compared"]["raw"] == sum(s.length - s.prompt_len for s in tape)
    assert "steps" not in found["compared"]
    b = rolltape.open(tmp_path / "b")
    rows = b.table("steps").column("rows").unique().to_pylist()
    assert max(rows) == 4


# -- what the tape does not hold ------------------------------------------------------------


def test_calls_that_cannot_be_laid_out_are_not_passed_over(
    model: Any, small: Any, tmp_path: Path
) -> None:
    inputs = small[2]
    with rolltape.record(tmp_path / "a"):
        model.generate(**inputs, **SAMPLED, max_new_tokens=4)
        short = {name: value[:2, -6:] for name, value in inputs.items()}
        first = model.generate(
            short["input_ids"], max_new_tokens=3, return_dict_in_generate=True, do_sample=False
        )
        model.generate(first.sequences, cache=first.cache, max_new_tokens=3, do_sample=False)
    found = reexecute(tmp_path / "a", tmp_path / "b", model=model)
    assert found["verdict"] == "inconclusive"
    (missing,) = found["not_compared"]
    assert missing["sequences"] == 2 and "cache that an earlier call" in missing["reason"]
    assert found["differ"] == {} and found["sequences"] == 8


def test_rows_that_were_not_recorded(model: Any, small: Any, tmp_path: Path) -> None:
    with rolltape.record(tmp_path / "a", sample_rate=0.5):
        model.generate(**small[2], **SAMPLED, max_new_tokens=3)
    assert 0 < len(rolltape.open(tmp_path / "a")) < 6
    found = reexecute(tmp_path / "a", tmp_path / "b", model=model)
    assert found["verdict"] == "not-run" and "rows were not recorded" in found["reason"]
    assert found["tape"] is None and not (tmp_path / "b").exists()
    arguments = [str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--mode", "re-execute"]
    for more in ([], ["--json"]):
        ran = CliRunner().invoke(replay, arguments + more, standalone_mode=False)
        assert ran.return_value == 3, ran.output
        assert ran.output.startswith("not-run: " if not more else "{")
    assert json.loads(ran.output)["verdict"] == "not-run"


def test_weights_that_changed_between_calls(tmp_path: Path, small: Any) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    with rolltape.record(tmp_path / "a"):
        model.generate(**small[2], **SAMPLED, max_new_tokens=4)
        nudged(model, "model.norm.weight", (3,))
        model.generate(**small[2], **SAMPLED, max_new_tokens=4)
    found = reexecute(tmp_path / "a", tmp_path / "b")
    assert found["verdict"] == "inconclusive" and found["differ"] == {}
    (missing,) = found["not_compared"]
    assert missing["sequences"] == 6 and "weight version 1 made it" in missing["reason"]
    found = reexecute(tmp_path / "a", tmp_path / "c", model=model)
    assert "weight version 0 made it" in found["not_compared"][0]["reason"]
    found = reexecute(tmp_path / "a", tmp_path / "d", switches=[f"weights={TINY_MOE}"])
    assert found["verdict"] == "divergent"
    assert found["first"]["sequence"].split(".")[1].startswith("1-")


def test_a_pad_token_that_is_not_known(tape: Tape, model: Any, tmp_path: Path) -> None:
    def forget(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            settings = json.loads(row["sampling"])
            settings.pop("layout")
            row["sampling"] = json.dumps(settings)

    found = reexecute(edited(tape, tmp_path / "a", sequences=forget), tmp_path / "b", model=model)
    assert found["verdict"] == "inconclusive", "calls without padding can still be run"
    assert any("older rolltape" in entry["reason"] for entry in found["not_compared"])


def test_open_and_compacted_recordings(tape: Tape, done: Any, model: Any, tmp_path: Path) -> None:
    def kill(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in rows if row["finish"] == "open"]

    a = edited(tape, tmp_path / "a", sequences=kill)
    assert {s.finish for s in a} == {"open"}
    assert reexecute(a, tmp_path / "b", model=model)["verdict"] == "identical"
    for sets in (False, True):
        compact(tape.path, tmp_path / f"packed-{sets}", sets=sets)
        packed = rolltape.open(tmp_path / f"packed-{sets}")
        assert read_schedule(packed).refused == ()
        found = reproduction(packed, done[0], execution=done[1])
        assert found["verdict"] == "identical", found
        assert found["compared"].get("routes.weights", 0) == 0 if sets else True


def test_positions_of_the_jobs_own_and_odd_padding(model: Any, tmp_path: Path) -> None:
    ids = torch.randint(2, 4000, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(10) >= 2 * torch.arange(3)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with rolltape.record(tmp_path / "a"):
        for ids_of in (positions, positions + 3 * mask):
            model.generate(
                ids, attention_mask=mask, position_ids=ids_of, do_sample=False, max_new_tokens=3
            )
    a = rolltape.open(tmp_path / "a")
    layouts = [a.info(key)["sampling"]["layout"] for key in sorted(a.keys())]
    assert [row["prompt_pad"] for row in layouts[:3]] == [
        None,
        *(ids[r, : 2 * r].tolist() for r in (1, 2)),
    ]
    assert [row["inputs"] for row in layouts] == [[]] * 3 + [["position_ids"]] * 3
    found = reexecute(a, tmp_path / "b", model=model)
    assert found["verdict"] == "inconclusive" and found["sequences"] == 3, found
    (missing,) = found["not_compared"]
    assert "inputs that are not recorded: position_ids" in missing["reason"]


def test_a_processor_that_cannot_be_set_up_again(model: Any, small: Any, tmp_path: Path) -> None:
    class Odd(hf.LogitsProcessor):  # type: ignore[misc, name-defined, unused-ignore]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores - torch.arange(scores.shape[-1]) % 3

    with rolltape.record(tmp_path / "a"):
        model.generate(
            **small[2], **SAMPLED, max_new_tokens=4,
            logits_processor=hf.LogitsProcessorList([Odd()]),
        )  # fmt: skip
    found = reexecute(tmp_path / "a", tmp_path / "b", model=model)
    assert found["verdict"] == "inconclusive" and found["differ"] == {}
    assert {entry["what"] for entry in found["not_compared"]} == {"scaled", "processed", "supports"}
    assert found["compared"]["raw"] == 6 * 4


# -- generation as it comes -----------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_models_of_other_families(family: str, tmp_path: Path) -> None:
    model = make_model(family, torch.bfloat16)
    ids = torch.randint(2, 300, (5, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) >= torch.arange(5)[:, None]).long()
    with rolltape.record(tmp_path / "a"):
        model.generate(
            ids * mask, attention_mask=mask, do_sample=True, top_k=40, max_new_tokens=8,
            eos_token_id=list(range(30)), pad_token_id=3,
        )  # fmt: skip
    found = reexecute(tmp_path / "a", tmp_path / "b", model=model)
    assert found["verdict"] == "identical", found


def test_two_engines_in_one_tape(model: Any, small: Any, tmp_path: Path) -> None:
    twin = hf.AutoModelForCausalLM.from_pretrained(TINY_MOE).eval()
    with rolltape.record(tmp_path / "a"):
        for one in (model, twin, model):
            one.generate(**small[2], **SAMPLED, max_new_tokens=3)
    assert len(rolltape.open(tmp_path / "a").engines) == 2
    found = reexecute(tmp_path / "a", tmp_path / "b")
    assert found["verdict"] == "identical" and found["sequences"] == 18, found


class EndsAt(hf.StoppingCriteria):  # type: ignore[misc, name-defined, unused-ignore]
    """Ends row b at its own step, as stop strings would."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.arange(len(input_ids)) + 1 <= input_ids.shape[1] - self.width


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 3},
        {"cache_implementation": "static"},
        {"num_return_sequences": 2, "typical_p": 0.8},
        {"stop": True},
    ],
    ids=["no-cache", "chunks", "bans", "static", "samples", "criterion"],
)
def test_every_way_to_generate(
    model: Any, small: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    inputs = small[2]
    if options.pop("stop", False):
        options = {"stopping_criteria": [EndsAt(inputs["input_ids"].shape[1])]}
    with rolltape.record(tmp_path / "a"):
        torch.manual_seed(2)
        model.generate(**inputs, do_sample=True, top_k=30, max_new_tokens=8, **options)
    tape = rolltape.open(tmp_path / "a")
    if "stopping_criteria" in options:
        assert len({s.length - s.prompt_len for s in tape}) == 6
    found = reexecute(tape, tmp_path / "b", model=model)
    assert found["verdict"] == "identical", found


def test_a_call_that_was_cut_short(model: Any, small: Any, tmp_path: Path) -> None:
    class Stops:
        def __init__(self) -> None:
            self.left = 5

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("enough")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with rolltape.record(tmp_path / "a"), pytest.raises(RuntimeError, match="enough"):
        model.generate(**small[2], **SAMPLED, max_new_tokens=20, stopping_criteria=[Stops()])
    tape = rolltape.open(tmp_path / "a")
    assert {s.finish for s in tape} == {"error"} and {s.length - s.prompt_len for s in tape} == {5}
    found = reexecute(tape, tmp_path / "b", model=model)
    assert found["verdict"] == "identical", found


@contextmanager
def recorded_settings(model: Any) -> Iterator[None]:
    threads = torch.get_num_threads()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
        model.set_experts_implementation("grouped_mm")
        torch.backends.cuda.enable_flash_sdp(True)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_settings_are_restored_for_the_run_and_put_back(
    model: Any, small: Any, tmp_path: Path
) -> None:
    with recorded_settings(model), rolltape.record(tmp_path / "a"):
        model.generate(**small[2], **SAMPLED, max_new_tokens=4)
    mine = model.generation_config

    def state() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(), model.config._attn_implementation,
            model.config._experts_implementation, torch.backends.cuda.flash_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist(),
            session.active(),
        )  # fmt: skip

    before = state()
    found = reexecute(tmp_path / "a", tmp_path / "b", model=model)
    assert found["verdict"] == "identical", found
    assert state() == before and model.generation_config is mine
    (step, *_) = rolltape.open(tmp_path / "b").rows("steps")
    assert step["attention"] == "eager" and step["experts"] == "eager"
    assert step["threads"] == before[0] + 1 and step["sdpa"] == "mem_efficient,math,cudnn"
    (engine,) = rolltape.open(tmp_path / "b").engines.values()
    assert engine["effective"]["deterministic_algorithms"] is True


# -- the force ------------------------------------------------------------------------------


def test_a_force_that_is_not_neutral_is_refused(
    tape: Tape, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = adapter._Recording._probed

    def early(self: Any, processors: Any) -> Any:
        found = real(self, processors)
        return found if self.force is None else type(found)([found[-1], *found[:-1]])

    monkeypatch.setattr(adapter._Recording, "_probed", early)
    with pytest.raises(ForcingError, match="self-test"):
        reexecute(tape, tmp_path / "b", model=model)
    assert not (tmp_path / "b").exists()


def test_an_engine_that_does_not_repeat_itself_is_never_identical(
    tape: Tape, model: Any, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-3 * torch.rand(output.shape, generator=generator).to(output.dtype)

    handle = model.lm_head.register_forward_hook(noise)
    try:
        found = reexecute(tape, tmp_path / "b", model=model)
    finally:
        handle.remove()
    assert found["verdict"] == "not-reproduced" and found["first"]["what"] == "raw"
    assert found["self_test"]["neutral"] is None
    assert "not reproducible" in found["self_test"]["reason"]


def test_a_force_that_nobody_took_is_an_error(model: Any, small: Any, tmp_path: Path) -> None:
    force = Force(np.zeros((6, 2), np.int64), ("",) * 6)
    with pytest.raises(ForcingError, match="no generate"), adapter.forced(force):
        model.generate(**small[2], max_new_tokens=1, do_sample=False)
    with (
        rolltape.record(tmp_path / "a"),
        pytest.raises(ForcingError, match="of 5 rows and 2 steps forced on step 0 of a call of 6"),
        adapter.forced(dataclasses.replace(force, tokens=np.zeros((5, 2), np.int64))),
    ):
        model.generate(**small[2], max_new_tokens=1, do_sample=False)


# -- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switches": ["batch=0"]}, "batch=0: no such value"),
        ({"switches": ["routing=ids"]}, "no switch 'routing'"),
        ({"switches": ["batch=one", "batch=2"]}, "given twice"),
        ({"switches": ["weights="]}, "not KEY=VALUE"),
        ({"switches": ["weights=x"], "model": "y"}, "a model are given"),
        ({"on": "vulkan"}, "no such executor"),
        ({"model": "/nowhere"}, "no such folder"),
    ],
)
def test_bad_requests(tape: Tape, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reexecute(tape, tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_what_is_there_already_is_not_overwritten(tape: Tape, model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TapeExistsError):
        reexecute(tape, tmp_path, model=model)
    with (
        rolltape.record(tmp_path / "r"),
        pytest.raises(UsageError, match="records already"),
    ):
        reexecute(tape, tmp_path / "b", model=model)


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rolltape", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reexecute.md").read_text()
    commands = [
        line.strip().replace("runs/", f"{tmp_path}/").replace("-- python", f"-- {sys.executable}")
        for line in page.splitlines()
        if line.startswith("    rolltape ") and "--checkpoint" not in line
    ]
    assert len(commands) == 3
    for command, allowed in zip(commands, ((0,), (0,), (0, 1)), strict=True):
        done = run(*command.split()[1:])
        assert done.returncode in allowed, done.stdout + done.stderr
    assert done.stdout.startswith(("divergent: ", "identical: "))


def test_the_command_line(tape: Tape, tmp_path: Path) -> None:
    mode = ("--on", "transformers", "--mode", "re-execute")
    done = run("replay", tape.path, "-o", tmp_path / "b", *mode, "--model", TINY_MOE)
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("identical: all ") and first.endswith("have the same bits")
    diff = run("diff", tape.path, tmp_path / "b", "--json")
    assert diff.returncode == 0 and json.loads(diff.stdout)["verdict"] == "identical"

    def flip(rows: list[dict[str, Any]]) -> None:
        row = next(r for r in rows if r["processed"] is not None)
        value = np.array(row["processed"], np.float32)
        value.view(np.uint32)[0] ^= 4
        row["processed"] = value.tolist()

    edited(tape, tmp_path / "a", tokens=flip)
    done = run("replay", tmp_path / "a", "-o", tmp_path / "c", *mode, "--model", TINY_MOE)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("not-reproduced: 1 of ")
    assert lines[1].startswith("first difference: step 0, ") and lines[1].endswith(": processed")
    assert lines[2].split()[0] == "recorded" and lines[3].split()[0] == "re-executed"
    assert lines[3].endswith("4 ulp")
    done = run("replay", tape.path, "-o", tmp_path / "d", *mode, "--layers", "2")
    assert done.returncode == 2 and "--layers is an option of mode score" in done.stderr
