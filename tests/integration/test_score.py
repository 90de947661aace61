"""Scoring tapes made by a plain `generate()`: numbers, switches, keys, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from rolltape import store
from rolltape.recorder.digest import Digest, weights_digest
from rolltape.recorder.facts import model_facts
from rolltape.recorder.moe import find_moe_blocks
from rolltape.recorder.rows import engine_job, weights_job
from rolltape.replay.batches import make_batches, place_routes
from rolltape.replay.conditions import applied
from rolltape.replay.forcing import RouteForcing, same_bits
from rolltape.replay.logprobs import Sampling, Span, score
from rolltape.replay.score import replay, score_tape
from rolltape.replay.switches import Switches
from rolltape.replay.tapes import ScoreWriter
from rolltape.store import ForcingError, ModelMismatchError, Routes, Supports, UsageError
from rolltape.store.codecs import encode_floats, encode_plain
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

pytestmark = pytest.mark.engine

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-moe"
NEW_TOKENS = 12
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "top_k": 20,
    "top_p": 0.9,
}
SEMANTICS: dict[str, Any] = {
    "temperature": 0.7,
    "edits": ["repetition_penalty=1.2"],
    "truncation": ["top_k=20", "top_p=0.9"],
    "vocab_size": 4096,
    "dtype": "float32",
    "source": "engine",
}


@dataclass
class Rollout:
    """One sequence as the engine made it; arrays over its positions."""

    request: str
    sample: int
    prompt: np.ndarray
    response: np.ndarray
    raw: np.ndarray
    scaled: np.ndarray
    processed: np.ndarray
    kept: list[np.ndarray]
    ids: np.ndarray  # [T - 1, layers, k]
    weights: np.ndarray

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def load(dtype: torch.dtype) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, local_files_only=True).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load(torch.float32)


@pytest.fixture(scope="module")
def model16() -> Any:
    return load(torch.bfloat16)


def generate(
    model: Any, *, request: str, prompt: list[int], seed: int, **more: Any
) -> list[Rollout]:
    blocks = find_moe_blocks(model)
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in blocks]
    handles = [
        b.experts.register_forward_pre_hook(
            lambda _m, args, kept=kept: kept.append((args[1].clone(), args[2].float().clone()))
        )
        for b, kept in zip(blocks, seen, strict=True)
    ]
    torch.manual_seed(seed)
    options = {**SAMPLING, **more}
    samples = options.pop("num_return_sequences", 1)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=samples,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    for handle in handles:
        handle.remove()
    rollouts = []
    for b in range(samples):
        tokens = out.sequences[b, len(prompt) :].numpy()
        n = int((tokens == 1).argmax()) + 1 if (tokens == 1).any() else len(tokens)
        raw, scaled, processed, kept = [], [], [], []
        for i, token in enumerate(tokens[:n]):
            prefix = out.sequences[b : b + 1, : len(prompt) + i]
            logits = out.logits[i][b : b + 1]
            edited = logits
            if options["do_sample"]:
                edited = RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(
                    prefix, logits.clone()
                )
                edited = TemperatureLogitsWarper(options["temperature"])(prefix, edited)
            raw.append(float(logits.log_softmax(-1)[0, token]))
            scaled.append(float(edited.log_softmax(-1)[0, token]))
            processed.append(float(out.scores[i].log_softmax(-1)[b, token]))
            kept.append(torch.nonzero(out.scores[i][b] > -torch.inf).flatten().numpy())
        rows = [
            [
                torch.cat([c.view(samples, -1, c.shape[-1])[b] for c in part])
                for part in zip(*calls, strict=True)
            ]
            for calls in seen
        ]
        total = len(prompt) + n - 1
        rollouts.append(
            Rollout(
                request,
                b,
                np.array(prompt),
                tokens[:n],
                *(np.array(x, np.float32) for x in (raw, scaled, processed)),
                kept,
                torch.stack([r[0] for r in rows], 1)[:total].numpy(),
                torch.stack([r[1] for r in rows], 1)[:total].numpy(),
            )
        )
    return rollouts


def prompt_of(seed: int, length: int) -> list[int]:
    draw = torch.randint(2, 4096, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(t) for t in draw]


def rollouts_of(model: Any) -> list[Rollout]:
    out = []
    for number, length in enumerate((7, 19, 11)):
        out += generate(
            model,
            request=str(number),
            prompt=prompt_of(number, length),
            seed=number,
            num_return_sequences=2,
        )
    return out


@pytest.fixture(scope="module")
def rollouts(model: Any) -> list[Rollout]:
    return rollouts_of(model)


@pytest.fixture(scope="module")
def rollouts16(model16: Any) -> list[Rollout]:
    return rollouts_of(model16)


ENGINE = "e" * 32


def write_tape(
    path: Path,
    model: Any,
    rollouts: Many[Rollout],
    *,
    facts: dict[str, Any] | None = None,
    digests: Many[Digest] | None = None,
    semantics: dict[str, Any] | None = None,
    routes: bool = True,
    supports: bool = True,
    weights: bool = True,
    finish: str = "length",
    engine: str = ENGINE,
    root: Path | None = None,
) -> store.Tape:
    """A tape as a recorder would leave it. Version v made the sequences with index v, v + n, ..."""
    path = root or store.create_tape(path, role="rollout", provenance={"made_by": "test"})
    known = {**model_facts(model, str(MODEL)), **(facts or {})}
    versions = digests if digests is not None else [weights_digest(model)]
    blocks = find_moe_blocks(model)
    with store.TapeWriter(path) as writer:
        engine_job(engine, "rollout", "transformers", known)(writer)
        for version, digest in enumerate(versions):
            weights_job(engine, version, digest)(writer)
        for index, r in enumerate(rollouts):
            key = {"engine": engine, "request": r.request, "sample": r.sample, "pass": 0}
            n, total = len(r.prompt), r.length
            tokens = np.concatenate([r.prompt, r.response]).astype(np.uint32)
            writer.append(
                "sequences",
                {
                    **key,
                    "group": f"g{r.request}",
                    "prompt_len": [n],
                    "length": total,
                    "digest": store.token_digest(n, tokens),
                    "finish": finish,
                    "sampling": json.dumps(SAMPLING),
                },
            )
            writer.append("tokens", {**key, "start": [0], "n": n, "ids": [tokens[:n]]})
            writer.append(
                "forwards",
                {
                    **key,
                    "step": [2 * index, 2 * index + 1],
                    "row": 0,
                    "start": [0, n],
                    "n": [n, total - n],
                    "kind": ["prefill", "score"],
                    "weight_version": index % max(1, len(versions)),
                },
            )
            if not len(r.response):
                continue
            span = {**key, "start": [n], "n": total - n}
            writer.append(
                "tokens",
                {
                    **span,
                    "ids": [tokens[n:]],
                    "loss_mask": [np.ones(total - n, bool)],
                    "raw": [r.raw],
                    "scaled": [r.scaled],
                    "processed": [r.processed],
                    "semantics": [semantics or SEMANTICS],
                },
            )
            if supports:
                writer.append(
                    "supports",
                    {
                        **span,
                        "derived": False,
                        "state": [np.full(total - n, SUPPORT_EXPLICIT, np.uint8)],
                        "counts": [np.array([len(k) for k in r.kept], np.int32)],
                        "ids": [np.concatenate(r.kept)],
                    },
                )
            if routes:
                writer.append(
                    "routes",
                    {
                        **key,
                        "start": [0],
                        "n": total - 1,
                        "role": "used",
                        "layers": [[b.layer for b in blocks]],
                        "k": r.ids.shape[2],
                        "num_experts": blocks[0].num_experts,
                        "encoding": "plain",
                        "ids": [encode_plain(r.ids, blocks[0].num_experts)],
                        "weights": [encode_floats(r.weights) if weights else None],
                    },
                )
    store.seal(path)
    return store.open(path)


@pytest.fixture(scope="module")
def tape(model: Any, rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tape(tmp_path_factory.mktemp("t") / "tape", model, rollouts)


@pytest.fixture(scope="module")
def tape16(
    model16: Any, rollouts16: list[Rollout], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return write_tape(tmp_path_factory.mktemp("t") / "tape", model16, rollouts16)


def scored(tape: store.Tape, out: Path, model: Any, *switches: str, **options: Any) -> store.Tape:
    score_tape(tape, out, model, switches=Switches.parse(switches), **options)
    return store.open(out)


def column(tape: store.Tape, name: str) -> np.ndarray:
    """One logprob column of every sequence, end to end; missing is NaN."""
    return np.concatenate([s.logprob(name).fill(np.nan) for s in tape])


def hooks_of(model: Any) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def response(r: Rollout) -> slice:
    return slice(len(r.prompt), r.length)


# -- numbers ------------------------------------------------------------------------------------


def test_float32_rollout_is_scored_to_rounding(
    tape: Any, model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    result = scored(tape, tmp_path / "b", model, "support=recorded")
    assert len(result) == len(rollouts) == 6
    for r, s in zip(rollouts, result, strict=True):
        for name, expected in (("raw", r.raw), ("scaled", r.scaled), ("processed", r.processed)):
            got = s.logprob(name)
            assert got.valid.tolist() == [False] * len(r.prompt) + [True] * len(r.response)
            np.testing.assert_allclose(got.values[response(r)], expected, atol=1e-5, rtol=0)
        (span,) = s.semantics
        assert span == (len(r.prompt), len(r.response), {**SEMANTICS, "source": "recomputed"})
    # the three columns do differ, so that each of them has been tested
    assert np.nanmax(np.abs(column(result, "raw") - column(result, "scaled"))) > 0.1
    assert np.nanmax(np.abs(column(result, "processed") - column(result, "scaled"))) > 0.01


def test_padded_packed_and_single_agree(tape: Any, model: Any, tmp_path: Path) -> None:
    runs = [
        scored(tape, tmp_path / "padded", model),
        scored(tape, tmp_path / "packed", model, layout="packed"),
        scored(tape, tmp_path / "single", model, tokens_per_batch=1),
        scored(tape, tmp_path / "two", model, tokens_per_batch=64),
    ]
    assert [len(r.table("steps")) for r in runs] == [1, 1, 6, 3]
    for name in ("raw", "scaled"):
        first = column(runs[0], name)
        for other in runs[1:]:
            np.testing.assert_allclose(column(other, name), first, atol=2e-5, rtol=0)
    packed = runs[1].rows("steps")[0]
    assert (packed["rows"], packed["padded_tokens"]) == (1, 0)
    padded = runs[0].rows("steps")[0]
    assert padded["tokens"] == packed["tokens"] == packed["columns"]
    assert padded["rows"] * padded["columns"] == padded["tokens"] + padded["padded_tokens"]
    assert padded["padded_tokens"] > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 40, 64, 87, 8192])
def test_batches_keep_to_the_token_budget(budget: int, layout: Any, tape: Any) -> None:
    batches = make_batches(tape, tokens_per_batch=budget, layout=layout)
    placed = [p.sequence.id for b in batches for p in b.placed]
    assert sorted(placed) == sorted(s.id for s in tape)
    for batch in batches:
        assert len(batch.placed) == 1 or batch.rows * batch.columns <= budget
        assert batch.tokens + batch.padded == batch.rows * batch.columns


def test_temperature_one_leaves_the_penalty(tape: Any, model: Any, tmp_path: Path) -> None:
    live = scored(tape, tmp_path / "a", model)
    one = scored(tape, tmp_path / "b", model, "temperature=1")
    np.testing.assert_array_equal(column(one, "raw"), column(live, "raw"))
    assert np.nanmax(np.abs(column(one, "scaled") - column(live, "scaled"))) > 0.1
    assert np.nanmax(np.abs(column(one, "scaled") - column(one, "raw"))) > 1e-3
    assert next(iter(one)).semantics[0][2]["temperature"] == 1.0


def test_support_full_gives_no_processed_where_tokens_were_cut(
    tape: Any, model: Any, tmp_path: Path
) -> None:
    full = scored(tape, tmp_path / "a", model)
    for s in full:
        assert not s.logprob("processed").valid.any()
        assert s.supports() is None
        assert s.semantics[0][2]["truncation"] is None


def test_supports_are_carried_as_derived(tape: Any, model: Any, tmp_path: Path) -> None:
    result = scored(tape, tmp_path / "b", model, "support=recorded")
    for a, b in zip(tape, result, strict=True):
        ours, theirs = a.supports(), b.supports()
        assert not ours.derived
        assert theirs.derived
        for name in ("state", "offsets", "ids"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_greedy_tokens_have_all_mass_on_the_kept_token(model: Any, tmp_path: Path) -> None:
    (r,) = generate(
        model,
        request="g",
        prompt=prompt_of(9, 8),
        seed=0,
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=None,
    )
    r.kept = [np.array([t]) for t in r.response]
    meaning = {**SEMANTICS, "temperature": 1.0, "edits": [], "truncation": ["greedy"]}
    tape = write_tape(tmp_path / "a", model, [r], semantics=meaning)
    (s,) = scored(tape, tmp_path / "b", model, "support=recorded")
    np.testing.assert_array_equal(s.logprob("processed").values[response(r)], 0.0)
    np.testing.assert_array_equal(s.logprob("scaled").values, s.logprob("raw").values)
    np.testing.assert_allclose(s.logprob("raw").values[response(r)], r.raw, atol=1e-5, rtol=0)
    assert s.semantics[0][2]["truncation"] == ["greedy"]


def test_without_truncation_processed_is_scaled(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    tape = write_tape(
        tmp_path / "a", model, rollouts[:1], semantics={**SEMANTICS, "truncation": []}
    )
    (s,) = scored(tape, tmp_path / "b", model)
    np.testing.assert_array_equal(
        s.logprob("processed").fill(np.nan), s.logprob("scaled").fill(np.nan)
    )
    assert s.semantics[0][2]["truncation"] == []


def test_other_edits_are_not_pretended(model: Any, rollouts: list[Rollout], tmp_path: Path) -> None:
    edits = ["repetition_penalty=1.2", "NoRepeatNGramLogitsProcessor"]
    tape = write_tape(tmp_path / "a", model, rollouts[:1], semantics={**SEMANTICS, "edits": edits})
    summary = score_tape(tape, tmp_path / "b", model)
    (s,) = store.open(tmp_path / "b")
    assert s.semantics[0][2]["edits"] == []
    plain = s.logprob("raw").values[response(rollouts[0])]
    assert np.abs(s.logprob("scaled").values[response(rollouts[0])] - plain).max() > 0.01
    assert any("NoRepeatNGramLogitsProcessor" in w for w in summary["warnings"])


def small_sequence(tmp_path: Path, model: Any, length: int) -> Any:
    r = Rollout(
        "s",
        0,
        np.array([3]),
        np.arange(4, 3 + length),
        *(np.zeros(length - 1),) * 3,
        [np.array([4])] * (length - 1),
        np.zeros((length - 1, 6, 4), int),
        np.zeros(0),
    )
    return next(iter(write_tape(tmp_path / "s", model, [r], weights=False)))


def test_kept_sets_position_by_position(model: Any, tmp_path: Path) -> None:
    s = small_sequence(tmp_path, model, 6)
    assert s.tokens.values.tolist() == [3, 4, 5, 6, 7, 8]
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    kept = {1: [1, 4, 9], 3: [2, 3], 4: [7, 11]}  # token 6 is not in its own kept set
    state = np.full(6, SUPPORT_UNRECORDED, np.uint8)
    state[2] = SUPPORT_FULL
    state[list(kept)] = SUPPORT_EXPLICIT
    counts = [len(kept.get(p, ())) for p in range(6)]
    ids = np.concatenate(list(kept.values())).astype(np.uint32)
    supports = Supports(state, np.concatenate([[0], np.cumsum(counts)]), ids, False)
    spans = [Span(0, 1, None), Span(1, 5, Sampling(temperature=2.0, truncation=("top_k=3",)))]
    got = score(logits, s, spans, supports, dtype=torch.float64)
    half = logits.double() / 2
    assert got.processed.valid.tolist() == [False, True, True, True, True, False]
    for position, token in ((1, 4), (4, 7)):
        row = half[position - 1]
        expected = float(row[token] - row[kept[position]].logsumexp(0))
        assert got.processed.values[position] == pytest.approx(expected, abs=1e-6)
    assert got.processed.values[2] == got.scaled.values[2]
    assert got.processed.values[3] == -np.inf
    assert got.outside == 1
    assert got.scaled.valid.tolist() == [False] + [True] * 5
    assert got.raw.values[1] == pytest.approx(float(logits[0].double().log_softmax(0)[4]), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_bit_depends_on_how_many_rows_are_normalised_at_a_time(
    dtype: torch.dtype, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, width = 40, 1001
    s = small_sequence(tmp_path, model, n)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(4 * rng.standard_normal((n, width))).to(torch.bfloat16)
    counts = np.where(np.arange(n) % 3 == 1, rng.integers(1, 60, n), 0)
    state = np.where(counts > 0, SUPPORT_EXPLICIT, SUPPORT_FULL).astype(np.uint8)
    ids = np.concatenate([rng.choice(width, c, replace=False) for c in counts]).astype(np.uint32)
    supports = Supports(state, np.concatenate([[0], np.cumsum(counts)]), ids, False)
    plain, hot = Sampling(), Sampling(0.7, 1.3, ("repetition_penalty=1.3",), ("top_k=60",))
    spans = [Span(0, 3, None), Span(3, 17, plain), Span(20, 20, hot)]

    def found() -> list[bytes]:
        got = score(logits, s, spans, supports, dtype=dtype, top=3)
        assert got.top is not None
        columns = (got.raw, got.scaled, got.processed)
        values = [c.values.tobytes() + c.valid.tobytes() for c in columns]
        return [*values, got.top.logprobs.tobytes(), got.top.tail.tobytes()]

    at_once = found()
    for rows in (1, 3, 7):
        monkeypatch.setattr("rolltape.replay.logprobs._CACHED_ELEMENTS", rows * width)
        assert found() == at_once
    full = logits.to(dtype).log_softmax(-1)
    token = int(s.tokens.values[5])
    assert at_once[0][5 * 4 : 6 * 4] == np.float32(full[4, token].item()).tobytes()


def test_non_finite_logits_stay_non_finite(model: Any, tmp_path: Path) -> None:
    s = small_sequence(tmp_path, model, 4)
    logits = torch.zeros(4, 16)
    logits[0, 4] = -torch.inf
    logits[1, 0] = torch.nan
    spans = [Span(0, 1, None), Span(1, 3, Sampling())]
    got = score(logits, s, spans, None, dtype=torch.float32).raw
    assert got.values[1] == -np.inf
    assert np.isnan(got.values[2])
    assert np.isfinite(got.values[3])
    assert got.valid.tolist() == [False, True, True, True]


# -- switches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switch",
    ["dtype=float32", "dtype=float64", "lm_head=float32", "router=float32", "attention=eager"],
)
def test_each_precision_switch_changes_bits_and_little_else(
    switch: str, tape16: Any, model16: Any, tmp_path: Path
) -> None:
    live = scored(tape16, tmp_path / "a", model16)
    changed = scored(tape16, tmp_path / "b", model16, switch)
    delta = np.abs(column(changed, "raw") - column(live, "raw"))
    delta = delta[np.isfinite(delta)]
    assert 0 < delta.mean() < 0.1
    if switch == "dtype=float64":
        assert next(iter(changed)).semantics[0][2]["dtype"] == "float64"


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_cast_is_bitwise_what_a_load_in_that_dtype_gives(
    name: str, tape: Any, tape16: Any, model: Any, model16: Any, tmp_path: Path
) -> None:
    # the checkpoint is bfloat16, so that both models hold the same numbers
    down = name == "bfloat16"
    source, cast, loaded = (tape, model, model16) if down else (tape16, model16, model)
    result = scored(source, tmp_path / "b", cast, f"dtype={name}")
    (engine,) = result.engines.values()
    assert engine["dtype"] == name
    (batch,) = make_batches(source, tokens_per_batch=8192, layout="padded")
    with torch.no_grad():
        logits = loaded(**batch.inputs("cpu")).logits
    for p in batch.placed:
        ids = torch.from_numpy(p.sequence.tokens.values.astype(np.int64))
        expected = logits[p.span][:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        (s,) = [s for s in result if s.origin == p.sequence.key]
        got = s.logprob("raw")
        np.testing.assert_array_equal(
            got.values[got.valid], expected.numpy()[got.valid[1:]], strict=True
        )


def test_cast_spares_what_the_architecture_keeps_in_float32() -> None:
    torch.manual_seed(0)
    config = hf.DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    deepseek = hf.AutoModelForCausalLM.from_config(config)
    with applied(deepseek, Switches(dtype="bfloat16")):
        by_dtype = {n: t.dtype for n, t in deepseek.named_parameters()}
        assert set(by_dtype.values()) == {torch.bfloat16}
        buffers = {n: t.dtype for n, t in deepseek.named_buffers()}
        assert buffers["model.rotary_emb.inv_freq"] == torch.float32
        assert buffers["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert {t.dtype for t in deepseek.parameters()} == {torch.float32}


def test_head_and_router_in_float32_do_what_they_say(
    tape16: Any, model16: Any, tmp_path: Path
) -> None:
    seen: dict[str, set[torch.dtype]] = {"head": set(), "router": set(), "experts": set()}
    block = find_moe_blocks(model16)[0]
    handles = [
        model16.lm_head.register_forward_hook(lambda _m, _a, out: seen["head"].add(out.dtype)),
        block.router.register_forward_hook(lambda _m, _a, out: seen["router"].add(out[0].dtype)),
        block.experts.register_forward_pre_hook(
            lambda _m, args: seen["experts"].add(args[2].dtype)
        ),
    ]
    scored(tape16, tmp_path / "a", model16, "lm_head=float32", "router=float32")
    for handle in handles:
        handle.remove()
    assert seen["head"] == {torch.float32}
    assert torch.float32 in seen["router"]
    assert seen["experts"] == {torch.bfloat16}


def test_model_is_as_before(tape16: Any, model16: Any, tmp_path: Path) -> None:
    before = {n: t.clone() for n, t in model16.state_dict().items()}
    hooks = hooks_of(model16)
    tied = model16.lm_head.weight is model16.model.embed_tokens.weight
    assert tied
    model16.train()
    scored(
        tape16,
        tmp_path / "a",
        model16,
        *("routing=ids", "dtype=float32", "lm_head=float32", "router=float32", "attention=eager"),
        layers=1,
    )
    assert model16.training
    model16.eval()
    after = model16.state_dict()
    assert all(same_bits(before[n], after[n]) for n in before)
    assert model16.lm_head.weight is model16.model.embed_tokens.weight
    assert model16.config._attn_implementation == "sdpa"
    assert hooks_of(model16) == hooks


# -- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["ids", "ids+weights"])
def test_forced_routes_are_the_ones_used(
    routing: str, tape16: Any, model16: Any, tmp_path: Path
) -> None:
    summary = score_tape(tape16, tmp_path / "b", model16, switches=Switches(routing=routing))
    rows = sum(s.length for s in tape16)
    assert summary["self_test"] == {"blocks": 6, "rows": rows_of_first(tape16), "bitwise": True}
    assert summary["forced"] == {"decisions": 6 * (rows - 6), "live": 6 * 6}
    live_differs = 0
    for a, b in zip(tape16, store.open(tmp_path / "b"), strict=True):
        recorded, used, live = a.routes(), b.routes(), b.routes("live")
        n = a.length - 1
        np.testing.assert_array_equal(used.ids[:n], recorded.ids[:n])
        assert used.valid.all()
        assert live.valid.all()
        assert live.margin is not None
        assert (live.margin >= 0).all()
        assert used.margin is None
        np.testing.assert_array_equal(used.ids[n], live.ids[n])  # the last token has no record
        live_differs += int((np.sort(live.ids[:n]) != np.sort(used.ids[:n])).any(-1).sum())
        if routing == "ids+weights":
            np.testing.assert_array_equal(used.weights[:n], recorded.weights[:n])
    assert live_differs > 0  # bfloat16 flips some, or this test shows nothing


def rows_of_first(tape: store.Tape) -> int:
    (batch,) = make_batches(tape, tokens_per_batch=8192, layout="padded")
    return batch.rows * batch.columns


def test_live_routes_have_weights_and_margin(tape: Any, model: Any, tmp_path: Path) -> None:
    for a, b in zip(tape, scored(tape, tmp_path / "b", model, layout="packed"), strict=True):
        used, recorded = b.routes(), a.routes()
        assert b.routes("live") is None
        assert used.valid.all()
        assert used.margin.shape == (a.length, 6)
        clear = (used.margin > 1e-3)[:-1]
        assert clear.mean() > 0.5
        np.testing.assert_array_equal(used.ids[:-1][clear], recorded.ids[:-1][clear])
        np.testing.assert_allclose(
            used.weights[:-1][clear], recorded.weights[:-1][clear], atol=1e-4
        )


def shifted(_: Any, routes: Routes) -> Routes:
    return replace(routes, ids=np.roll(routes.ids, 1, axis=0))


def test_shifted_routes_are_much_worse_than_recorded_ones(
    tape: Any, model: Any, tmp_path: Path
) -> None:
    reference = np.concatenate([s.logprob("raw").fill(np.nan) for s in tape])
    right = scored(tape, tmp_path / "a", model, "routing=ids")
    wrong = scored(tape, tmp_path / "b", model, "routing=ids", transform_routes=shifted)
    gap = [np.nanmean(np.abs(column(t, "raw") - reference)) for t in (right, wrong)]
    assert gap[0] < 1e-5
    assert gap[1] > 0.05
    for s, t in zip(tape, wrong, strict=True):
        expected = shifted(s, s.routes())
        where = expected.valid
        np.testing.assert_array_equal(t.routes().ids[where], expected.ids[where])


def test_sequences_without_routes_run_live_and_are_counted(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    write_tape(root, model, rollouts[:2], root=root)
    tape = write_tape(root, model, rollouts[2:3], root=root, routes=False)
    summary = score_tape(tape, tmp_path / "b", model, switches=Switches(routing="ids"))
    assert "1 sequences without routes ran live" in summary["warnings"]
    assert summary["forced"]["live"] == 6 * (2 + rollouts[2].length)


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_routes_stay_with_their_tokens_in_any_layout(side: str, tape: Any, model: Any) -> None:
    a, b = list(tape)[:3:2]
    ids = [torch.from_numpy(s.tokens.values.astype(np.int64)) for s in (a, b)]
    width = max(a.length, b.length)
    alone = [model(i[None]).logits[0] for i in ids]
    if side == "packed":
        at = [(0, 0), (0, a.length)]
        shape = (1, a.length + b.length)
        position_ids = torch.cat([torch.arange(len(i)) for i in ids])[None]
        inputs = {"input_ids": torch.cat(ids)[None], "position_ids": position_ids}
    else:
        at = [(row, width - len(i) if side == "left" else 0) for row, i in enumerate(ids)]
        shape = (2, width)
        tokens = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for (row, column_), i in zip(at, ids, strict=True):
            tokens[row, column_ : column_ + len(i)] = i
            mask[row, column_ : column_ + len(i)] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    routes = place_routes([a.routes(), b.routes()], at, shape=shape)
    assert int(routes.valid.sum()) == 6 * (a.length + b.length - 2)
    with torch.no_grad(), RouteForcing(model) as forcing, forcing.routes(routes):
        out = model(**inputs, use_cache=False).logits
    for (row, start), expected in zip(at, alone, strict=True):
        # own routes: each sequence is as it is alone; another's routes would change it
        torch.testing.assert_close(
            out[row, start : start + len(expected)], expected, atol=2e-4, rtol=0
        )


def test_routes_that_do_not_fit_the_batch_are_refused(tape: Any) -> None:
    a, b = list(tape)[:3:2]
    shape = (2, max(a.length, b.length))
    with pytest.raises(UsageError, match="do not fit a batch"):
        place_routes([a.routes(), b.routes()], [(0, 0), (1, 1)], shape=shape)
    with pytest.raises(UsageError, match="two sequences lie at row 0"):
        place_routes([a.routes(), a.routes()], [(0, 0), (0, 1)], shape=(1, 64))
    with pytest.raises(UsageError, match="none of the sequences"):
        place_routes([None, None], [(0, 0), (1, 0)], shape=shape)


# -- the tape that is written -------------------------------------------------------------------


def test_identity_is_carried(
    tape: Any, model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    result = scored(tape, tmp_path / "b", model)
    assert result.parent == tape.uuid
    assert result.role == "trainer"
    assert result.header["provenance"]["switches"] == Switches().as_dict()
    assert result.seal["status"] == {"replay": "ok"}
    (engine,) = result.engines.values()
    assert engine["engine"] != ENGINE
    assert (engine["role"], engine["dtype"], engine["model"]) == ("trainer", "float32", str(MODEL))
    assert engine["effective"]["switch.routing"] == "live"
    for a, b in zip(tape, result, strict=True):
        assert b.origin == a.key
        assert b.key == a.key._replace(engine=engine["engine"])
        assert (b.finish, b.length, b.prompt_len) == ("scored", a.length, a.prompt_len)
        assert (b.info["group"], b.info["digest"]) == (a.info["group"], a.info["digest"])
        assert b.tokens.valid.all()
        np.testing.assert_array_equal(b.tokens.values, a.tokens.values)
        np.testing.assert_array_equal(b.loss_mask.fill(False), a.loss_mask.fill(False))
        assert b.weight_version.values[1:].tolist() == [0] * (a.length - 1)
        (forward,) = b.forwards.to_pylist()
        assert (forward["kind"], forward["start"], forward["n"]) == ("score", 0, a.length)
    (weights,) = result.rows("weights")
    assert weights["digest"] == weights_digest(model).value
    (step,) = result.rows("steps")
    assert (step["kind"], step["attention"], step["experts"]) == ("score", "sdpa", "grouped_mm")


def test_replay_loads_the_model_that_the_tape_names(tape: Any, model: Any, tmp_path: Path) -> None:
    summary = replay(tape.path, tmp_path / "b", switches=["routing=ids"], device="cpu")
    assert summary["model"] == str(MODEL)
    assert summary["sequences"] == 6
    assert summary["tokens"] == sum(s.length - s.prompt_len for s in tape)
    assert summary["forward_tokens"] == sum(s.length for s in tape)
    assert summary["switches"]["routing"] == "ids"
    assert summary["self_test"]["bitwise"] is True
    assert summary["warnings"] == []
    json.dumps(summary, allow_nan=False)
    direct = scored(tape, tmp_path / "c", model, "routing=ids")
    np.testing.assert_array_equal(column(store.open(tmp_path / "b"), "raw"), column(direct, "raw"))


def test_layer_outputs_of_chosen_sequences(tape: Any, model: Any, tmp_path: Path) -> None:
    first = scored(tape, tmp_path / "a", model, layers=2)
    with_layers = [s for s in first if s.activations()]
    assert [s.key.request for s in with_layers] == ["0", "0"]
    chosen = scored(tape, tmp_path / "b", model, sequences=["2.1"], layout="packed")
    (only,) = [s for s in chosen if s.activations()]
    assert (only.key.request, only.key.sample) == ("2", 1)
    ids = torch.from_numpy(only.tokens.values.astype(np.int64))[None]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    sites = only.activations()
    assert list(sites) == [f"layers.{i}.out" for i in range(6)]
    for layer in range(5):  # the last one is normalised in hidden_states
        ((start, dtype, data),) = sites[f"layers.{layer}.out"]
        assert (start, dtype) == (0, "float32")
        np.testing.assert_allclose(data, states[layer + 1][0].numpy(), atol=1e-3)


def test_aborted_and_empty_sequences_are_kept(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    whole = rollouts[0]
    none = np.zeros(0, np.float32)
    empty = replace(
        whole, request="empty", response=whole.response[:0], raw=none, scaled=none, processed=none
    )
    void = replace(empty, request="void", prompt=whole.prompt[:0])
    tape = write_tape(tmp_path / "a", model, [whole, empty, void], finish="abort")
    a, b, c = scored(tape, tmp_path / "b", model, "routing=ids", "support=recorded")
    assert (a.finish, b.finish, c.finish) == ("scored", "scored", "scored")
    assert a.logprob("processed").valid.sum() == len(whole.response)
    assert b.length == len(whole.prompt)
    assert not b.logprob("raw").valid.any()
    assert b.semantics == []
    assert b.routes().valid.all()
    assert (c.length, c.routes()) == (0, None)


def test_engines_with_the_same_request_ids_stay_apart(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    other = replace(rollouts[2], request="0", sample=0)
    write_tape(root, model, rollouts[:1], root=root)
    tape = write_tape(root, model, [other], root=root, engine="f" * 32)
    result = scored(tape, tmp_path / "b", model)
    assert len(result) == 2
    assert len(result.engines) == 2
    assert [s.origin for s in result] == tape.keys()
    assert [s.length for s in result] == [s.length for s in tape]
    assert {s.length for s in result} == {rollouts[0].length, other.length}
    assert {s.key.engine for s in result} == set(result.engines)


def test_failure_leaves_a_sealed_tape_that_says_so(tape: Any, model: Any, tmp_path: Path) -> None:
    calls = []
    hooks = hooks_of(model)

    def broken(sequence: Any, routes: Routes) -> Routes:
        calls.append(sequence.id)
        if len(calls) == 3:
            raise RuntimeError("disk full")
        return routes

    with pytest.raises(RuntimeError, match="disk full"):
        scored(
            tape,
            tmp_path / "b",
            model,
            "routing=ids",
            tokens_per_batch=1,
            transform_routes=broken,
        )
    left = store.open(tmp_path / "b")
    assert left.seal["status"] == {"replay": "error", "error": "RuntimeError: disk full"}
    finishes = [s.finish for s in left]
    assert (finishes.count("scored"), finishes.count("open")) == (2, 4)
    assert hooks_of(model) == hooks


def test_a_batch_that_cannot_be_written_ends_the_scoring(
    tape: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ScoreWriter.write
    written: list[str] = []

    def fail(self: ScoreWriter, found: Any) -> None:
        if written:
            raise OSError("no room")
        written.extend(p.sequence.key.request for p in found.batch.placed)
        write(self, found)

    monkeypatch.setattr(ScoreWriter, "write", fail)
    with pytest.raises(OSError, match="no room"):
        score_tape(tape, tmp_path / "b", model, tokens_per_batch=1)
    part = store.open(tmp_path / "b")
    assert part.seal["status"] == {"replay": "error", "error": "OSError: no room"}
    done = {s.key.request for s in part if s.finish == "scored"}
    assert done == set(written) and len(part) == len(tape)


def test_tokens_of_other_versions_are_scored_and_named(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    own = weights_digest(model)
    older = replace(own, value=own.value ^ 1)
    tape = write_tape(tmp_path / "a", model, rollouts, digests=[older, own])
    summary = score_tape(tape, tmp_path / "b", model)
    assert summary["sequences"] == 6
    assert any("3 of 6 sequences have tokens made by another" in w for w in summary["warnings"])
    for s in store.open(tmp_path / "b"):
        assert set(s.weight_version.values[1:].tolist()) == {1}


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 4097),
        ("num_layers", 7),
        ("moe_layers", [0, 1, 2]),
        ("num_experts", 32),
        ("experts_per_token", 2),
        ("dtype", "float16"),
    ],
)
def test_another_model_is_refused_by_field(
    field: str, value: Any, model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    tape = write_tape(tmp_path / "a", model, rollouts[:1], facts={field: value})
    with pytest.raises(ModelMismatchError) as caught:
        score_tape(tape, tmp_path / "b", model)
    assert str(caught.value).startswith(f"{field}: ")
    assert str(value) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_other_weights_are_refused(model: Any, rollouts: list[Rollout], tmp_path: Path) -> None:
    tape = write_tape(tmp_path / "a", model, rollouts[:1])
    weight = model.model.layers[2].mlp.gate.weight
    with torch.no_grad():
        weight[0, 0] += 1e-3
    try:
        with pytest.raises(ModelMismatchError) as caught:
            score_tape(tape, tmp_path / "b", model)
    finally:
        with torch.no_grad():
            weight[0, 0] -= 1e-3
    assert f"{weights_digest_of(tape):016x}" in str(caught.value)
    assert "weights digest" in str(caught.value)


def weights_digest_of(tape: store.Tape) -> int:
    return int(tape.rows("weights")[0]["digest"])


def test_without_digest_the_summary_says_not_verified(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    tape = write_tape(tmp_path / "a", model, rollouts[:1], digests=[])
    summary = score_tape(tape, tmp_path / "b", model)
    assert summary["warnings"] == ["the tape has no weight digest: the weights are not verified"]


def refused(tape: Any, out: Path, model: Any, *switches: str, **options: Any) -> str:
    with pytest.raises((UsageError, ForcingError, store.TapeExistsError)) as caught:
        scored(tape, out, model, *switches, **options)
    assert "\n" not in str(caught.value)
    assert not (out / "seal.json").exists()
    return str(caught.value)


def test_switches_that_the_tape_cannot_do(
    model: Any, rollouts: list[Rollout], tmp_path: Path
) -> None:
    bare = write_tape(tmp_path / "a", model, rollouts[:1], routes=False, supports=False)
    out = tmp_path / "b"
    assert "has no routes" in refused(bare, out, model, "routing=ids")
    assert "has no supports" in refused(bare, out, model, "support=recorded")
    light = write_tape(tmp_path / "c", model, rollouts[:1], weights=False)
    assert "have no weights" in refused(light, out, model, "routing=ids+weights")
    empty = write_tape(tmp_path / "d", model, [])
    assert "has no sequences" in refused(empty, out, model)


def test_requests_that_cannot_be_met(tape: Any, model: Any, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "not an empty folder" in refused(tape, tmp_path / "full", model)
    assert "flash" in refused(tape, tmp_path / "b", model, "attention=flash_attention_2")
    assert "no layout 'jagged'" in refused(tape, tmp_path / "b", model, layout="jagged")
    assert "no sequence 'nine'" in refused(tape, tmp_path / "b", model, sequences=["nine"])
    assert "tokens_per_batch is 0" in refused(tape, tmp_path / "b", model, tokens_per_batch=0)
    with pytest.raises(UsageError, match="--model PATH"):
        replay(tape.path, tmp_path / "b", model=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="device"):
        replay(tape.path, tmp_path / "b", device="cuda:99")


def test_force_that_is_not_neutral_is_refused(tape: Any, model: Any, tmp_path: Path) -> None:
    router = find_moe_blocks(model)[2].router
    handle = router.register_forward_hook(lambda _m, _a, out: (out[0], out[1] * 2, out[2]))
    message = refused(tape, tmp_path / "b", model, "routing=ids")
    handle.remove()
    assert "model.layers.2.mlp" in message
    assert not (tmp_path / "b").exists()


def test_packed_is_refused_where_sequences_see_each_other(
    tape: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward

    def blind(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", blind)
    message = refused(tape, tmp_path / "b", model, layout="packed")
    assert "does not keep packed sequences apart" in message
    assert not (tmp_path / "b").exists()


def test_dense_models_are_scored_live_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    dense = hf.AutoModelForCausalLM.from_config(config).eval()
    none = np.zeros(4, np.float32)
    r = Rollout(
        "d",
        0,
        np.arange(2, 7),
        np.arange(7, 11),
        none,
        none,
        none,
        [np.arange(3, 20)] * 4,
        np.zeros(0),
        np.zeros(0),
    )
    tape = write_tape(tmp_path / "a", dense, [r], routes=False)
    (s,) = scored(tape, tmp_path / "b", dense, "support=recorded")
    assert s.routes() is None
    assert s.logprob("processed").valid.sum() == 4
    for switch in ("routing=ids", "router=float32"):
        assert "is dense" in refused(tape, tmp_path / "c", dense, switch)


# -- the guide ----------------------------------------------------------------------------------


def test_training_loop_of_the_guide_runs(
    model: Any, rollouts: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    code = guide.split("```python\n")[1].split("```")[0]
    write_tape(tmp_path / "runs" / "a", model, rollouts[:4])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"MODEL": str(MODEL)}
    exec(compile(code, "docs/replay.md", "exec"), names)
    assert len(names["micro_batches"]) == 2
    for block in find_moe_blocks(names["model"]):
        assert block.router.weight.grad.abs().max() > 0
    trained = weights_digest(names["model"])
    assert trained.value != weights_digest(model).value
