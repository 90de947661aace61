"""What `generate()` really did stands in the tape, bit for bit, and the job never notices."""

from __future__ import annotations

import contextlib
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rolltape
from rolltape.recorder import session
from rolltape.recorder import transformers as adapter
from rolltape.recorder.moe import find_moe_blocks
from rolltape.store import Sequence, Tape, token_digest
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL
from tests.integration.conftest import DEVICE, FAMILIES, make_model

pytestmark = pytest.mark.engine

SAMPLE = {"do_sample": True, "pad_token_id": 1, "max_new_tokens": 12}


class Oracle:
    """Runs `generate()` unrecorded and keeps, by other means, what it computed."""

    def __init__(self, model: Any, inputs: Any, **options: Any) -> None:
        self.blocks = find_moe_blocks(model)
        self.calls: list[list[tuple[Any, Any]]] = [[] for _ in self.blocks]
        handles = [
            block.experts.register_forward_pre_hook(
                lambda module, args, i=i: self.calls[i].append(
                    (args[1].cpu().clone(), args[2].cpu().clone())
                )
            )
            for i, block in enumerate(self.blocks)
        ]
        torch.manual_seed(5)
        self.out = model.generate(
            **inputs,
            **options,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        for handle in handles:
            handle.remove()
        self.logprobs = {
            "raw": [scores.log_softmax(-1).cpu() for scores in self.out.logits],
            "processed": [scores.log_softmax(-1).cpu() for scores in self.out.scores],
        }
        self.sequences = self.out.sequences.cpu()
        self.width = inputs["input_ids"].shape[1]
        self.mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        self.samples = options.get("num_return_sequences", 1)

    def pad(self, row: int) -> int:
        return int((self.mask[row // self.samples] == 0).sum())

    def logprob(self, kind: str, row: int, step: int) -> np.float32:
        token = self.sequences[row, self.width + step]
        return np.float32(self.logprobs[kind][step][row, token].item())

    def kept(self, row: int, step: int) -> np.ndarray:
        return np.flatnonzero(np.isfinite(self.out.scores[step][row].cpu().numpy()))

    def route(self, row: int, column: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Choice at a column of the padded batch, for a run with a cache and no chunks."""
        rows = len(self.sequences)
        call = 0 if column < self.width else column - self.width + 1
        columns = self.width if call == 0 else 1
        ids, weights = self.calls[block][call]
        ids = ids.reshape(rows, columns, -1)[row, column if call == 0 else 0]
        weights = weights.reshape(rows, columns, -1)[row, column if call == 0 else 0]
        return ids.numpy(), weights.float().numpy()


def recorded(model: Any, inputs: Any, tape: Path, **options: Any) -> tuple[Any, Tape]:
    with rolltape.record(tape):
        torch.manual_seed(5)
        ids = model.generate(**inputs, **options)
    return ids, rolltape.open(tape)


def by_row(tape: Tape, samples: int = 1) -> list[Sequence]:
    def order(sequence: Sequence) -> int:
        call, prompt = sequence.key.request.split("-")
        assert call == "0"
        return int(prompt) * samples + sequence.key.sample

    return sorted(tape, key=order)


def check_against(oracle: Oracle, tape: Tape) -> None:
    sequences = by_row(tape, oracle.samples)
    assert len(sequences) == len(oracle.sequences)
    for row, sequence in enumerate(sequences):
        pad, prompt = oracle.pad(row), sequence.prompt_len
        assert prompt == oracle.width - pad
        expected = oracle.sequences[row, pad : pad + sequence.length].numpy()
        assert sequence.tokens.valid.all()
        np.testing.assert_array_equal(sequence.tokens.values, expected)
        assert sequence.info["digest"] == token_digest(prompt, expected)
        mask = sequence.loss_mask
        assert mask.valid.all() and not mask.values[:prompt].any() and mask.values[prompt:].all()
        for kind in ("raw", "processed"):
            logprob = sequence.logprob(kind)
            assert not logprob.valid[:prompt].any() and logprob.valid[prompt:].all()
            if kind == "processed" and tape.rows("tokens")[-1]["semantics"]["truncation"] == [
                "greedy"
            ]:
                assert (logprob.values[prompt:] == 0).all()
                continue
            want = [oracle.logprob(kind, row, i) for i in range(sequence.length - prompt)]
            np.testing.assert_array_equal(logprob.values[prompt:], np.array(want))
        check_routes(oracle, sequence, row)


def check_routes(oracle: Oracle, sequence: Sequence, row: int, *, exact: bool = True) -> None:
    routes = sequence.routes()
    if not oracle.blocks:
        assert routes is None
        return
    assert routes is not None and routes.weights is not None
    assert routes.layers == tuple(block.layer for block in oracle.blocks)
    assert routes.valid[:-1].all() and not routes.valid[-1].any()
    assert (sequence.length - 1, 1, None, "last") in routes.missing
    for position in range(sequence.length - 1):
        for index in range(len(oracle.blocks)):
            ids, weights = oracle.route(row, position + oracle.pad(row), index)
            np.testing.assert_array_equal(routes.ids[position, index], ids)
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(routes.weights[position, index], weights, **close)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "top_k": None},
        {"top_k": 0},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 0, "min_p": 0.05, "temperature": 0.7},
        {"top_k": 50, "num_return_sequences": 3},
        {"top_k": 0, "temperature": 1.3, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "full", "top-k-top-p", "min-p", "samples", "penalty"],
)
def test_recording_equals_what_generate_computed(
    tiny_moe: Any, prompts: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {**SAMPLE, **options}
    oracle = Oracle(tiny_moe, prompts, **options)
    ids, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options)
    assert torch.equal(ids.cpu(), oracle.sequences), "recording changed the sampled tokens"
    check_against(oracle, tape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_moe_family(family: str, dtype: Any, tmp_path: Path) -> None:
    model = make_model(family, dtype)
    ids = torch.randint(2, 320, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}
    options = {"do_sample": True, "max_new_tokens": 5, "top_k": 30}
    oracle = Oracle(model, inputs, **options)
    _, tape = recorded(model, inputs, tmp_path / "a", **options)
    check_against(oracle, tape)


def test_dense_model_has_no_routes_and_says_that_it_is_dense(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", mlp_only_layers=[0, 1, 2])
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    oracle = Oracle(model, inputs, do_sample=False, max_new_tokens=4)
    _, tape = recorded(model, inputs, tmp_path / "a", do_sample=False, max_new_tokens=4)
    check_against(oracle, tape)
    (engine,) = tape.engines.values()
    assert engine["moe_layers"] == []


def test_mixed_dense_and_moe_layers_keep_their_numbers(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", mlp_only_layers=[1])
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    _, tape = recorded(model, inputs, tmp_path / "a", do_sample=False, max_new_tokens=4)
    routes = next(iter(tape)).routes()
    assert routes is not None and routes.layers == (0, 2)


def test_more_than_256_experts_keep_their_ids(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", num_experts=300, num_local_experts=300)
    with torch.no_grad():
        for block in find_moe_blocks(model):
            block.router.get_parameter("weight")[290:] *= 3  # so that high ids are chosen
    inputs = {"input_ids": torch.arange(2, 40, device=DEVICE)[None]}
    oracle = Oracle(model, inputs, do_sample=False, max_new_tokens=4)
    _, tape = recorded(model, inputs, tmp_path / "a", do_sample=False, max_new_tokens=4)
    check_against(oracle, tape)
    routes = next(iter(tape)).routes()
    assert routes is not None and routes.ids.dtype == np.uint16 and routes.ids.max() > 255


def test_sequences_that_end_early_are_cut_there(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    def options(eos: int) -> dict[str, Any]:
        return {**SAMPLE, "top_k": 0, "eos_token_id": eos, "max_new_tokens": 40}

    free = Oracle(tiny_moe, prompts, **options(4095)).sequences[:, prompts["input_ids"].shape[1] :]
    tokens, counts = torch.unique(free, return_counts=True)
    eos = int(tokens[counts.argmax()])  # something that is sampled, at different places
    oracle = Oracle(tiny_moe, prompts, **options(eos))
    ids, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options(eos))
    check_against(oracle, tape)
    width = prompts["input_ids"].shape[1]
    stops = [s for s in tape if s.finish == "stop"]
    assert len({s.length - s.prompt_len for s in tape}) > 1, "the test needs different lengths"
    assert stops and all(s.tokens.values[-1] == eos for s in stops)
    for row, sequence in enumerate(by_row(tape)):
        response = ids[row, width:].tolist()
        end = response.index(eos) + 1 if eos in response else len(response)
        assert sequence.length - sequence.prompt_len == end
        assert sequence.finish == ("stop" if eos in response else "length")
    kinds = tape.table("forwards").column("kind").to_pylist()
    assert "dummy" in kinds, "rows that ended still ride along in the batch"


def test_schedule_says_which_rows_ran_in_which_step(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **SAMPLE, top_k=0)
    steps = tape.table("steps").to_pylist()
    assert [s["kind"] for s in steps] == ["prefill"] + ["decode"] * 11
    assert {s["rows"] for s in steps} == {6}
    real = int(prompts["attention_mask"].sum())
    assert steps[0]["tokens"] == real
    assert steps[0]["padded_tokens"] == prompts["input_ids"].numel() - real
    for sequence in tape:
        prompt = sequence.prompt_len
        assert not sequence.step.valid[:prompt].any()
        np.testing.assert_array_equal(sequence.step.values[prompt:], np.arange(12))
        assert (sequence.weight_version.values[prompt:] == 0).all()


@pytest.mark.parametrize("changes", [{"use_cache": False}, {"prefill_chunk_size": 5}])
def test_no_cache_and_chunked_prefill_give_the_same_rows(
    tiny_moe: Any, prompts: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = {**SAMPLE, "do_sample": False, "max_new_tokens": 6, **changes}
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options)
    for sequence in tape:
        routes = sequence.routes()
        assert routes is not None
        assert routes.valid[:-1].all() and not routes.valid[-1].any()
        np.testing.assert_array_equal(
            sequence.step.valid, np.arange(sequence.length) >= sequence.prompt_len
        )
    kinds = set(tape.table("forwards").column("kind").to_pylist())
    assert ("recompute" in kinds) == ("use_cache" in changes)


def test_support_is_the_finite_scores(tiny_moe: Any, prompts: Any, tmp_path: Path) -> None:
    options = {**SAMPLE, "top_k": 30, "top_p": 0.9}
    oracle = Oracle(tiny_moe, prompts, **options)
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options)
    for row, sequence in enumerate(by_row(tape)):
        supports = sequence.supports()
        assert supports is not None and not supports.derived
        for position in range(sequence.prompt_len, sequence.length):
            np.testing.assert_array_equal(
                supports.at(position), oracle.kept(row, position - sequence.prompt_len)
            )


@pytest.mark.parametrize(
    ("options", "state"),
    [({"top_k": 0}, SUPPORT_FULL), ({"do_sample": False}, SUPPORT_EXPLICIT)],
    ids=["full", "greedy"],
)
def test_support_without_truncation(
    tiny_moe: Any, prompts: Any, tmp_path: Path, options: dict[str, Any], state: int
) -> None:
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **{**SAMPLE, **options})
    for sequence in tape:
        supports = sequence.supports()
        assert supports is not None
        assert (supports.state[sequence.prompt_len :] == state).all()
        if state == SUPPORT_EXPLICIT:
            token = sequence.tokens.values[-1]
            np.testing.assert_array_equal(supports.at(sequence.length - 1), [token])


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 1.2}]
)
def test_processed_minus_scaled_is_minus_log_of_the_kept_mass(
    prompts: Any, tmp_path: Path, tiny_moe: Any, options: dict[str, Any]
) -> None:
    model = (
        type(tiny_moe)
        .from_pretrained(tiny_moe.config._name_or_path, dtype=torch.float32)
        .to(DEVICE)
        .eval()
    )
    options = {**SAMPLE, "top_k": 20, "top_p": 0.9, **options}
    width = prompts["input_ids"].shape[1]
    scaled_scores: list[torch.Tensor] = []

    class Keep:  # sees the scores before truncation, as temperature and penalties left them
        def __call__(self, ids: Any, scores: Any) -> Any:
            scaled_scores.append(scores.cpu().clone() / options["temperature"])
            return scores

    _, tape = recorded(model, prompts, tmp_path / "a", **options, logits_processor=[Keep()])
    for row, sequence in enumerate(by_row(tape)):
        supports = sequence.supports()
        assert supports is not None
        difference = sequence.logprob("processed").values - sequence.logprob("scaled").values
        for position in range(sequence.prompt_len, sequence.length):
            step = position - sequence.prompt_len
            full = scaled_scores[step][row].double().log_softmax(-1)
            kept = supports.at(position)
            assert kept is not None
            mass = full[torch.from_numpy(kept.astype(np.int64))].exp().sum()
            assert abs(difference[position] + math.log(mass)) < 1e-5
    assert width  # the prompts were there
    (semantics,) = {str(f["semantics"]) for f in tape.rows("tokens") if f["semantics"]}
    assert "top_k=20" in semantics and "top_p=0.9" in semantics


def test_weights_that_change_between_calls_make_a_new_version(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    with rolltape.record(tmp_path / "a"):
        model.generate(**inputs, do_sample=False, max_new_tokens=3)
        model.generate(**inputs, do_sample=False, max_new_tokens=3)
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 0.5
        model.generate(**inputs, do_sample=False, max_new_tokens=3)
    tape = rolltape.open(tmp_path / "a")
    versions = [s.weight_version.values[-1] for s in sorted(tape, key=lambda s: s.key.request)]
    assert versions == [0, 0, 1]
    rows = [r for r in tape.rows("weights") if r["group"] == ""]
    assert [r["version"] for r in rows] == [0, 1] and rows[0]["digest"] != rows[1]["digest"]
    assert [e["kind"] for e in tape.rows("events")] == ["update"]


def test_layer_outputs_are_those_of_the_model(tiny_moe: Any, prompts: Any, tmp_path: Path) -> None:
    with rolltape.record(tmp_path / "a", level="layers", layers=2):
        tiny_moe.generate(**prompts, do_sample=False, max_new_tokens=4, pad_token_id=1)
    tape = rolltape.open(tmp_path / "a")
    kept = [s for s in by_row(tape) if s.activations()]
    assert [s.key.request for s in kept] == ["0-0", "0-1"]
    alone = torch.from_numpy(kept[1].tokens.values[None, : kept[1].prompt_len].astype(np.int64))
    hidden = tiny_moe(alone.to(DEVICE), output_hidden_states=True).hidden_states
    sites = kept[1].activations()
    assert set(sites) == {f"layers.{i}.out" for i in range(6)}
    start, dtype, data = sites["layers.2.out"][0]
    assert (start, dtype, data.shape) == (0, "bfloat16", (kept[1].prompt_len, 128))
    want = hidden[3][0].float().detach().cpu().numpy()
    assert np.abs(data - want).max() <= 0.05 * np.abs(want).max()
    assert sum(len(d) for _, _, d in sites["layers.2.out"]) == kept[1].length - 1


# -- the job is never harmed ----------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["_on_raw", "_on_processed", "_on_token", "_on_experts", "_on_forward", "_hand_over"]
)
def test_a_hook_that_raises_leaves_the_job_alone_and_a_record_of_it(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any, hook: str, capfd: Any
) -> None:
    options = {**SAMPLE, "top_k": 20}
    torch.manual_seed(5)
    want = tiny_moe.generate(**prompts, **options)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected fault")

    monkeypatch.setattr(adapter._Recording, hook, broken)
    got, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options)
    assert torch.equal(got, want)
    errors = [e for e in tape.rows("events") if e["kind"] == "hook_error"]
    assert errors and "injected fault" in errors[0]["detail"]
    assert "injected fault" in capfd.readouterr().err


def test_strict_lets_faults_reach_the_job(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected fault")

    monkeypatch.setattr(adapter._Recording, "_on_token", broken)
    with (
        pytest.raises(RuntimeError, match="injected fault"),
        rolltape.record(tmp_path / "a", strict=True),
    ):
        tiny_moe.generate(**prompts, **SAMPLE)


def test_a_full_queue_drops_whole_blocks_and_says_which(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(adapter, "BLOCK_STEPS", 2)
    monkeypatch.setattr(adapter, "BLOCK_SECONDS", 1e9)
    real = session.Session.put
    full = iter([False, False, True])  # the third block does not fit

    def put(self: Any, job: Any, *, nbytes: int, gap: Any) -> bool:
        if isinstance(gap, list) and next(full, False):  # a block
            with self._lock:
                self._add_gap(gap)
            return False
        return real(self, job, nbytes=nbytes, gap=gap)

    monkeypatch.setattr(session.Session, "put", put)
    options = {**SAMPLE, "do_sample": False}
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **options)
    gaps = {(e["request"], e["start"], e["n"]) for e in tape.rows("events") if e["kind"] == "gap"}
    assert gaps == {(s.key.request, s.prompt_len + 4, 2) for s in tape}
    for sequence in tape:
        step = np.arange(sequence.length) - sequence.prompt_len
        lost = (step >= 4) & (step < 6)
        np.testing.assert_array_equal(~sequence.tokens.valid, lost)
        assert sequence.info["digest"] is None
        assert sequence.finish == "length"
        routes = sequence.routes()
        assert routes is not None and {m[3] for m in routes.missing} == {"dropped", "last"}


def test_a_row_that_ended_in_a_dropped_block_stays_open(tmp_path: Path, monkeypatch: Any) -> None:
    model = make_model("qwen3_moe")
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]], device=DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    free = model.generate(**inputs, **options, eos_token_id=319)
    eos = int(free[0, 4])  # row 0 ends with its second token
    monkeypatch.setattr(adapter, "BLOCK_STEPS", 4)
    monkeypatch.setattr(adapter, "BLOCK_SECONDS", 1e9)
    real = session.Session.put

    def put(self: Any, job: Any, *, nbytes: int, gap: Any) -> bool:
        lost = isinstance(gap, list) and gap[0]["n"] == 4
        return not lost and real(self, job, nbytes=nbytes, gap=gap)

    monkeypatch.setattr(session.Session, "put", put)
    _, tape = recorded(model, inputs, tmp_path / "a", **options, eos_token_id=eos)
    assert by_row(tape)[0].finish == "open"


def test_an_interrupted_call_keeps_what_ran(tiny_moe: Any, prompts: Any, tmp_path: Path) -> None:
    class Interrupt:
        calls = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt), rolltape.record(tmp_path / "a"):
        tiny_moe.generate(**prompts, **SAMPLE, top_k=0, logits_processor=[Interrupt()])
    tape = rolltape.open(tmp_path / "a")
    assert {s.finish for s in tape} == {"abort"}
    assert {s.length - s.prompt_len for s in tape} == {4}
    assert all(s.routes().valid[:-1].all() for s in tape)


def test_a_call_that_fails_before_the_first_token_is_an_empty_sequence(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    def fail(ids: Any, scores: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), rolltape.record(tmp_path / "a"):
        tiny_moe.generate(**prompts, **SAMPLE, logits_processor=[fail])
    tape = rolltape.open(tmp_path / "a")
    assert len(tape) == 6
    for sequence in tape:
        assert sequence.finish == "error" and sequence.length == sequence.prompt_len


def test_calls_in_other_threads_and_inside_of_calls_stay_apart(tmp_path: Path) -> None:
    """One model, four calls at once, each of which calls again from its stopping criteria."""
    model = make_model("qwen3_moe")
    prompts = [torch.arange(5 + i, 12 + 2 * i, device=DEVICE)[None] for i in range(4)]
    options = {"do_sample": False, "max_new_tokens": 6}
    inner = torch.tensor([[7, 8, 9]], device=DEVICE)

    class Again:
        def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
            model.generate(inner, do_sample=False, max_new_tokens=2)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def job(ids: Any) -> None:
        model.generate(ids, **options, stopping_criteria=[Again()])

    oracles = [Oracle(model, {"input_ids": ids}, **options) for ids in prompts]
    with rolltape.record(tmp_path / "a"):
        threads = [threading.Thread(target=job, args=(ids,)) for ids in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tape = rolltape.open(tmp_path / "a")
    assert len(tape) == 4 + 4 * 6 and not tape.rows("events")
    by_length = {s.length: s for s in tape}
    for ids, oracle in zip(prompts, oracles, strict=True):
        sequence = by_length[ids.shape[1] + 6]
        np.testing.assert_array_equal(sequence.tokens.values, oracle.sequences[0].numpy())
        # calls of several threads share one experts implementation, which `generate` switches
        check_routes(oracle, sequence, 0, exact=False)


class Streamer:
    """Runs the model for itself whenever it gets tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def put(self, value: Any) -> None:
        self.model(torch.tensor([[9, 8, 7, 6, 5]], device=DEVICE))

    def end(self) -> None:
        self.put(None)


def test_forwards_of_a_streamer_are_not_taken_for_those_of_the_call(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.arange(5, 12, device=DEVICE)[None]}
    options = {"do_sample": False, "max_new_tokens": 6}
    oracle = Oracle(model, inputs, **options)
    with rolltape.record(tmp_path / "a"), torch.no_grad():
        model.generate(**inputs, **options, streamer=Streamer(model))
    tape = rolltape.open(tmp_path / "a")
    check_against(oracle, tape)
    assert {r["kind"] for r in tape.rows("forwards")} == {"prefill", "decode"}


@pytest.mark.parametrize(
    "hook", ["_on_token", "_on_raw", "_on_processed", "_on_forward", "_on_experts"]
)
def test_after_a_fault_nothing_wrong_is_recorded(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any, hook: str
) -> None:
    """A fault in the middle of a call: what stands in the tape is right, the rest is missing."""
    options = {**SAMPLE, "top_k": 20}
    oracle = Oracle(tiny_moe, prompts, **options)
    real = getattr(adapter._Recording, hook)

    def faulty(self: Any, *args: Any) -> None:
        if self.call.number == 0 and self._first + len(self._steps) == 5:
            raise RuntimeError("injected fault")
        real(self, *args)

    monkeypatch.setattr(adapter._Recording, hook, faulty)
    with rolltape.record(tmp_path / "a"):
        for _ in range(2):  # the second call is healthy
            torch.manual_seed(5)
            tiny_moe.generate(**prompts, **options)
    tape = rolltape.open(tmp_path / "a")
    (gap,) = [e for e in tape.rows("events") if e["kind"] == "gap"]
    assert '"first_step": 5' in gap["detail"]
    for sequence in tape:
        row = int(sequence.key.request.split("-")[1])
        whole = sequence.key.request.startswith("1-")
        assert sequence.finish == ("length" if whole else "open")
        assert sequence.length - sequence.prompt_len == (12 if whole else 5)
        expected = oracle.sequences[row, oracle.pad(row) :][: sequence.length].numpy()
        np.testing.assert_array_equal(sequence.tokens.values, expected)
        want = [oracle.logprob("processed", row, i) for i in range(12 if whole else 5)]
        np.testing.assert_array_equal(
            sequence.logprob("processed").values[sequence.prompt_len :], np.array(want)
        )
        supports, routes = sequence.supports(), sequence.routes()
        assert supports is not None and routes is not None
        assert (supports.state[sequence.prompt_len :] == SUPPORT_EXPLICIT).all()
        for position in np.flatnonzero(routes.valid.all(1)):
            ids, _ = oracle.route(row, int(position) + oracle.pad(row), 3)
            np.testing.assert_array_equal(routes.ids[position, 3], ids)


def test_a_support_that_could_not_be_seen_is_unrecorded_not_full(
    tiny_moe: Any, prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("injected fault")

    monkeypatch.setattr(adapter, "_pack", broken)
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **SAMPLE, top_k=20)
    for sequence in tape:
        supports = sequence.supports()
        assert supports is None or not (supports.state == SUPPORT_FULL).any()


def test_ids_that_an_edit_bans_are_not_in_the_support(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    banned = list(range(100, 2000))
    _, tape = recorded(tiny_moe, prompts, tmp_path / "a", **SAMPLE, top_k=0, suppress_tokens=banned)
    for sequence in tape:
        supports = sequence.supports()
        assert supports is not None
        kept = supports.at(sequence.length - 1)
        assert kept is not None and len(kept) == 4096 - len(banned)
        assert not np.isin(banned, kept).any()


def test_without_a_cache_the_first_pass_is_the_record(tiny_moe: Any, tmp_path: Path) -> None:
    inputs = {"input_ids": torch.arange(5, 12, device=DEVICE)[None]}
    options = {"do_sample": False, "max_new_tokens": 30, "use_cache": False, "pad_token_id": 1}
    oracle = Oracle(tiny_moe, inputs, **options)
    _, tape = recorded(tiny_moe, inputs, tmp_path / "a", **options)
    routes = next(iter(tape)).routes()
    assert routes is not None
    for position in range(36):
        for index, calls in enumerate(oracle.calls):
            ids = calls[max(0, position - 6)][0]  # the forward that ran it first
            np.testing.assert_array_equal(routes.ids[position, index], ids[position].numpy())


def test_a_weight_that_moves_but_does_not_change_is_no_new_version(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    with rolltape.record(tmp_path / "a"):
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
        experts.data = experts.data.clone()
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
        experts.data[3].add_(0.5)  # one expert, behind autograd's back
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
    tape = rolltape.open(tmp_path / "a")
    assert [r["version"] for r in tape.rows("weights") if r["group"] == ""] == [0, 1]
    assert [s.weight_version.values[-1] for s in tape] == [0, 0, 1]


def test_a_digest_that_fails_is_a_version_of_unknown_weights(
    tmp_path: Path, monkeypatch: Any
) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}

    def fail(model: Any) -> None:
        raise MemoryError("no room for the digest")

    with rolltape.record(tmp_path / "a"):
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        monkeypatch.setattr(adapter, "digests_of_transformers", fail)
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
    tape = rolltape.open(tmp_path / "a")
    rows = [r for r in tape.rows("weights") if r["group"] == ""]
    assert [r["digest"] is None for r in rows] == [False, True]
    assert "no room for the digest" in rows[1]["reason"]
    assert [s.weight_version.values[-1] for s in tape] == [0, 1, 1]


@pytest.mark.parametrize("where", ["_begin", "_Recording.end"])
def test_calls_that_are_lost_are_gaps_also_when_the_hook_is_disabled(
    tmp_path: Path, monkeypatch: Any, where: str
) -> None:
    model = make_model("qwen3_moe")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}

    def fail(*args: Any) -> None:
        raise RuntimeError("injected fault")

    owner, _, name = where.rpartition(".")
    monkeypatch.setattr(getattr(adapter, owner) if owner else adapter, name, fail)
    with rolltape.record(tmp_path / "a"):
        for _ in range(6):
            model.generate(**inputs, do_sample=False, max_new_tokens=2)
    tape = rolltape.open(tmp_path / "a")
    lost = [e for e in tape.rows("events") if e["kind"] == "gap"]
    assert len(lost) == 6
    assert not [s for s in tape if s.finish == "length"]


def test_drafts_of_an_assistant_are_not_rollouts(tmp_path: Path) -> None:
    model, assistant = make_model("qwen3_moe"), make_model("qwen3_moe", num_hidden_layers=1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE)}
    with rolltape.record(tmp_path / "a"):
        model.generate(**inputs, do_sample=False, max_new_tokens=4, assistant_model=assistant)
    tape = rolltape.open(tmp_path / "a")
    assert len(tape) == 0
    (event,) = tape.rows("events")
    assert "_assisted_decoding" in event["detail"]


def test_continuous_batching_leaves_a_gap(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    with rolltape.record(tmp_path / "a"), contextlib.suppress(Exception):
        model.generate_batch(inputs=[[5, 6, 7]], max_new_tokens=2)  # whether it works is not ours
    (event,) = rolltape.open(tmp_path / "a").rows("events")
    assert "generate_batch" in event["detail"]


def test_what_is_not_recorded_leaves_a_gap_with_the_reason(
    tiny_moe: Any, prompts: Any, tmp_path: Path
) -> None:
    with rolltape.record(tmp_path / "a"):
        tiny_moe.generate(**prompts, do_sample=False, num_beams=2, max_new_tokens=3, pad_token_id=1)
    tape = rolltape.open(tmp_path / "a")
    (event,) = tape.rows("events")
    assert event["kind"] == "gap" and "_beam_search" in event["detail"]


def test_everything_is_undone(tiny_moe: Any, prompts: Any, tmp_path: Path) -> None:
    from transformers.generation.utils import GenerationMixin

    def hooks() -> list[Any]:
        return [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in tiny_moe.modules()]

    before, hooked = dict(GenerationMixin.__dict__), hooks()
    recorded(tiny_moe, prompts, tmp_path / "a", **SAMPLE)
    assert dict(GenerationMixin.__dict__) == before
    assert hooks() == hooked
