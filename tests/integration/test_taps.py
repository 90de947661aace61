"""Taps on real models: what they copy, what they leave, and what can be put in its place."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rolltape.replay.live_diff import InStep, compare_live, live_diff
from rolltape.replay.noise import measure_floor
from rolltape.replay.sites import known_families, select_sites, sites_of
from rolltape.replay.taps import Span, Taps, attached
from rolltape.replay.token_batches import lay_out
from rolltape.replay.transplant import transplant
from rolltape.store.errors import UsageError
from tests.integration.conftest import BASE, FAMILIES, make_model

pytestmark = pytest.mark.engine

IDS = {"a": list(range(5, 14)), "b": list(range(40, 45))}


def hooks(model: Any) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def run(model: Any, laid: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**laid.inputs("cpu")).logits
    return logits


DENSE: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE),
    "qwen2": lambda: transformers.Qwen2Config(**BASE),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **BASE,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}


def model_of(family: str) -> Any:
    if family in FAMILIES:
        return make_model(family)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(DENSE[family]()).eval()


def test_all_maps_are_run() -> None:
    assert {*FAMILIES, *DENSE} == known_families().keys()


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_every_site_is_passed_and_nothing_changes(family: str) -> None:
    model = model_of(family)
    (laid,) = lay_out(IDS)
    before, plain = hooks(model), run(model, laid)
    with Taps(model, "*") as taps:
        taps.watch(laid.spans, columns=laid.columns)
        watched = run(model, laid)
        taken = taps.taken()
        assert taps.taken() == []
    assert torch.equal(plain, watched)
    assert hooks(model) == before
    seen = [t.site for t in taken if t.span.key == "a"]
    assert seen and set(seen) == set(sites_of(model)), set(sites_of(model)) - set(seen)
    for t in taken:  # padding is not copied
        assert len(t.values) == len(IDS[t.span.key])
    logits = next(t for t in taken if t.site == "logits" and t.span.key == "b")
    assert torch.equal(logits.values, plain[1, :5])
    out = next(t for t in taken if t.site == "layers.2.out" and t.span.key == "b")
    normed = next(t for t in taken if t.site == "norm" and t.span.key == "b")
    with torch.no_grad():
        assert torch.allclose(model.model.norm(out.values), normed.values, atol=1e-6)


def test_the_patch_of_attention_is_undone_also_after_an_error() -> None:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.__dict__["get_interface"]
    model = make_model("qwen3_moe")
    taps = Taps(model, "layers.*.q_rot")
    with taps:
        assert AttentionInterface.__dict__["get_interface"] is not original
    assert AttentionInterface.__dict__["get_interface"] is original
    with pytest.raises(RuntimeError, match="stop"), taps:
        raise RuntimeError("stop")
    assert AttentionInterface.__dict__["get_interface"] is original


def test_a_copy_does_not_follow_an_operation_in_place() -> None:
    """`clip_qkv` of OLMoE clamps the outputs of its norms in place."""
    model = make_model("olmoe", clip_qkv=0.5)
    (laid,) = lay_out(IDS)
    with Taps(model, "layers.0.q,layers.0.q_rot,layers.0.v") as taps:
        taps.watch(laid.spans, columns=laid.columns)
        run(model, laid)
        found = {(t.site, t.span.key): t.values for t in taps.taken()}
    assert float(found["layers.0.q", "a"].abs().max()) > 0.5
    assert float(found["layers.0.q_rot", "a"].abs().max()) <= 0.5 * 2**0.5 + 1e-6


def test_rotated_and_not_rotated_differ_by_the_rotation_only() -> None:
    model = make_model("qwen3_moe")
    (laid,) = lay_out({"a": IDS["a"]})
    with Taps(model, "layers.0.q*,layers.0.k*") as taps:
        taps.watch(laid.spans, columns=laid.columns)
        run(model, laid)
        found = {t.site: t.values for t in taps.taken()}
    for name in ("q", "k"):
        plain, turned = found[f"layers.0.{name}"], found[f"layers.0.{name}_rot"]
        assert torch.equal(plain[0], turned[0])  # position 0 is not turned
        assert not torch.equal(plain[1:], turned[1:])
        heads = plain.reshape(len(plain), -1, 16)
        assert torch.allclose(heads.norm(dim=-1), turned.reshape(heads.shape).norm(dim=-1))


def test_decoding_behind_a_cache_shows_the_new_rows_only() -> None:
    model = make_model("qwen3_moe")
    ids = torch.tensor([IDS["a"]])
    with Taps(model, "layers.1.*") as taps, torch.no_grad():
        taps.watch([Span(key=0, row=0, column=0, n=9)], columns=9)
        model(input_ids=ids, use_cache=False)
        whole = {t.site: t.values for t in taps.taken()}
        taps.watch([], columns=8)
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        cache = {name: transformers.DynamicCache(config=model.config)}
        model(input_ids=ids[:, :8], use_cache=True, **cache)
        taps.watch([Span(key=0, row=0, column=0, n=1, start=8)], columns=1)
        model(input_ids=ids[:, 8:], use_cache=True, **cache)
        step = {t.site: t.values for t in taps.taken()}
    assert step.keys() == whole.keys()
    for site, rows in step.items():
        assert torch.allclose(rows[0], whole[site][8], atol=1e-5), site


def test_a_wrong_layout_and_unknown_sites_are_refused() -> None:
    model = make_model("qwen3_moe")
    (laid,) = lay_out(IDS)
    with Taps(model, "embed") as taps:
        taps.watch(laid.spans, columns=100)
        with pytest.raises(UsageError, match="rows"):
            run(model, laid)
    with pytest.raises(UsageError, match=r"layers\.7\.out"):
        select_sites(sites_of(model), "layers.7.out")
    model.config.model_type = "gpt2"
    with pytest.raises(UsageError, match="no map of sites"):
        sites_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_live_and_stored_say_the_same(family: str) -> None:
    """The rows of a live diff are those of taps on each side alone, compared on the host."""
    from rolltape.replay.measures import coarser
    from rolltape.replay.site_errors import row_errors

    model = make_model(family)
    other = copy.deepcopy(model).bfloat16()
    tally, missing = compare_live(model, other, IDS)
    assert missing == []
    (laid,) = lay_out(IDS)
    sides = []
    for side in (model, other):
        with Taps(side, "*") as taps:
            taps.watch(laid.spans, columns=laid.columns)
            run(side, laid)
            sides.append({(t.site, t.span.key): t.values for t in taps.taken()})
    for site, spans in tally.spans.items():
        for span in spans:
            a, b = (side[site, span.sequence] for side in sides)
            grid = coarser(*(str(x.dtype).removeprefix("torch.") for x in (a, b)))
            want = row_errors(
                span.sequence, site, 0, a.float().numpy(), b.float().numpy(), grid=grid
            )
            for name in ("max_abs", "equal", "ulp", "non_finite"):
                assert np.array_equal(getattr(span, name), getattr(want, name)), (site, name)
            assert np.allclose(span.rel_l2.values, want.rel_l2.values, rtol=1e-5, atol=1e-9)
            assert np.allclose(span.cosine.values, want.cosine.values, atol=1e-6)


def test_a_live_diff_keeps_nothing_of_the_tensors() -> None:
    """Both stand still at a site: what is compared is where it lies, and no longer there after."""
    model = make_model("qwen3_moe")
    (laid,) = lay_out(IDS)
    places = {s: p for s, p in sites_of(model).items() if s.endswith(".out")}
    with InStep(model, places, laid.inputs("cpu")) as other:
        first = other.reach("layers.0.out")
        kept = first.clone()
        assert other._early == {} and torch.equal(first, kept)
        other.reach("layers.2.out")
        assert other._early.keys() == {"layers.1.out"}  # passed by out of turn: it has to be kept


def test_an_error_of_either_side_reaches_the_caller() -> None:
    model = make_model("qwen3_moe")
    broken = copy.deepcopy(model)

    def fail(*_: Any) -> None:
        raise ValueError("broken layer")

    broken.model.layers[1].mlp.register_forward_pre_hook(fail)
    for sides in ((model, broken), (broken, model)):
        with pytest.raises(ValueError, match="broken layer"):
            live_diff(*sides, IDS)
    assert live_diff(model, copy.deepcopy(model), IDS)["verdict"] == "identical"
    with pytest.raises(UsageError, match="in b"):
        live_diff(model, make_model("qwen3_moe", hidden_size=32), IDS)


def test_a_model_is_not_compared_with_itself() -> None:
    model = make_model("qwen3_moe")
    with pytest.raises(UsageError, match="one model"):
        live_diff(model, model, IDS)


def test_both_sides_run_under_the_callers_autocast() -> None:
    model = make_model("qwen3_moe")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = live_diff(model, copy.deepcopy(model), IDS)
    assert found["verdict"] == "identical"


def test_a_floor_is_measured_and_read_back(tmp_path: Any) -> None:
    model = make_model("qwen3_moe", torch.bfloat16)
    floor = measure_floor(model, IDS, rows=2)
    assert floor.sequences == 2 and len(floor.executions) == 2
    assert floor.sites["embed"].max == 0
    assert {s.positions for s in floor.sites.values()} == {2 * 14}  # twice compared
    floor.save(tmp_path / "floor.json")
    assert type(floor).load(tmp_path / "floor.json") == floor
    facts = {"model_fingerprint": floor.model_fingerprint, "dtype": "bfloat16", "device": "cpu"}
    assert floor.unlike([{**facts, "host": floor.host}]) == []
    assert "host" in floor.unlike([{**facts, "host": "another"}])[0]
    assert floor.unlike([]) != []
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="not a noise floor"):
        type(floor).load(tmp_path / "other.json")
    with pytest.raises(UsageError, match="two sequences"):
        measure_floor(model, {"a": IDS["a"]})


def test_a_floor_catches_what_really_differs_between_batches() -> None:
    """A model whose rows depend on the batch has a floor, and stays within it."""
    model = make_model("qwen3_moe")

    def noisy(_module: Any, _args: Any, output: Any) -> Any:
        return output * (1 + 1e-4 * len(output))

    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(noisy)
    floor = measure_floor(model, IDS, rows=2)
    handle.remove()
    assert floor.sites["layers.1.v"].max < 1e-6
    assert 5e-5 < floor.sites["layers.1.attn"].max < 2e-4


def donor_rows(model: Any, sites: str) -> tuple[Any, Any]:
    (laid,) = lay_out(IDS)
    with Taps(model, sites) as taps:
        taps.watch(laid.spans, columns=laid.columns)
        logits = run(model, laid)
        rows: dict[str, Any] = {}
        for t in taps.taken():
            rows.setdefault(t.site, {})[t.span.key] = t.span.start, t.values
    logprobs = {}
    for span in laid.spans:
        ids = torch.tensor(IDS[span.key])
        own = torch.log_softmax(logits[span.row, : span.n - 1].float(), -1)
        chosen = own.gather(-1, ids[1:, None])[:, 0].double().numpy()
        logprobs[span.key] = np.concatenate([[np.nan], chosen])
    return rows, logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transplant_of_a_models_own_rows_changes_nothing(family: str) -> None:
    """Every site can be forced; the self-test inside compares every bit of the logits."""
    model = make_model(family)
    rows, logprobs = donor_rows(model, "*")
    found = transplant(model, IDS, rows, logprobs)
    assert [t.site for t in found] == list(sites_of(model))
    assert all(t.before == t.after == 0 and t.gone is None for t in found)
    assert {t.rows for t in found} == {14} and {t.tokens for t in found} == {12}


def test_the_gap_goes_behind_the_fault_and_not_before_it() -> None:
    model = make_model("qwen3_moe")
    faulty = copy.deepcopy(model)
    faulty.model.layers[1].self_attn.scaling *= 2
    rows, logprobs = donor_rows(model, "*")
    gone = {t.site: t.gone for t in transplant(faulty, IDS, rows, logprobs)}
    order = list(gone)
    first = order.index("layers.1.heads")
    assert all(gone[s] == pytest.approx(0, abs=1e-3) for s in order[:first])
    assert gone["layers.1.heads"] == pytest.approx(1, abs=1e-3)
    assert gone["layers.1.out"] == pytest.approx(1, abs=1e-3)
    assert gone["logits"] == pytest.approx(1, abs=1e-3)


def test_transplants_that_cannot_be_are_refused() -> None:
    model = make_model("qwen3_moe")
    rows, logprobs = donor_rows(model, "layers.1.out")
    narrow = {"layers.1.out": {"a": (0, torch.zeros(9, 3))}}
    with pytest.raises(UsageError, match="3 wide"):
        transplant(model, IDS, narrow, logprobs)
    with pytest.raises(UsageError, match="no logprob"):
        transplant(model, IDS, rows, {k: v * np.nan for k, v in logprobs.items()})
    with pytest.raises(UsageError, match="no row"):
        transplant(model, IDS, {"layers.1.out": {"z": rows["layers.1.out"]["a"]}}, logprobs)


def test_attached_replaces_what_it_is_given() -> None:
    model = make_model("qwen3_moe")
    (laid,) = lay_out(IDS)
    with attached(model, {"logits": sites_of(model)["logits"]}, lambda _site, rows: rows * 0):
        assert not run(model, laid).any()
