"""Route forcing on tiny random models of every family: neutral, differentiable, never silent."""

from __future__ import annotations

import copy
from threading import Thread
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rolltape.recorder.moe import find_moe_blocks
from rolltape.replay.forcing import BlockChoice, ForcedRoutes, RouteForcing, same_bits, self_test
from rolltape.replay.recipes import margin, recipe_for
from rolltape.store import ForcingError
from tests.integration.conftest import BASE, FAMILIES, make_model

pytestmark = pytest.mark.engine

VOCAB, EXPERTS, K = 320, 8, 2  # of the models in conftest.py
DTYPES = [torch.float32, torch.bfloat16]


def tokens(seed: int, shape: tuple[int, int] = (2, 12)) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def live_choices(model: Any, ids: torch.Tensor) -> list[BlockChoice]:
    seen: list[BlockChoice] = []
    with torch.no_grad(), RouteForcing(model, capture=seen.append):
        model(ids)
    return seen


def foreign_routes(model: Any, ids: torch.Tensor, seed: int) -> ForcedRoutes:
    """Random distinct experts for every token and layer."""
    layers = tuple(block.layer for block in find_moe_blocks(model))
    draw = torch.rand(
        *ids.shape, len(layers), EXPERTS, generator=torch.Generator().manual_seed(seed)
    )
    chosen = draw.argsort(-1)[..., :K]
    return ForcedRoutes(layers, chosen, torch.ones(chosen.shape[:-1], dtype=torch.bool))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# -- neutrality ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    ids = tokens(1)
    blocks = find_moe_blocks(model)
    for mode in ("ids", "ids+weights"):
        result = self_test(model, {"input_ids": ids}, mode=mode)
        assert result == {"blocks": len(blocks), "rows": ids.numel(), "bitwise": True}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recipe_gives_the_routers_own_weights(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    checked: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        logits, weights, ids = output
        recipe = recipe_for(by_router[module])
        assert same_bits(recipe.weights(logits, ids), weights)
        best = recipe.scores(logits).topk(K).indices
        assert torch.equal(best.sort(-1).values, ids.sort(-1).values)
        checked.append(module)

    by_router = {block.router: block for block in find_moe_blocks(model)}
    for router in by_router:
        router.register_forward_hook(look)
    with torch.no_grad():
        model(tokens(2))
    assert checked == list(by_router)


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_reports_live_choice_used_weights_and_margin(family: str) -> None:
    model = make_model(family)
    ids = tokens(3)
    live = live_choices(model, ids)
    forced: list[BlockChoice] = []
    routes = foreign_routes(model, ids, 4)
    with (
        torch.no_grad(),
        RouteForcing(model, capture=forced.append) as forcing,
        forcing.routes(routes),
    ):
        model(ids)
    assert [c.layer for c in forced] == list(routes.layers)
    for column, (own, choice) in enumerate(zip(live, forced, strict=True)):
        assert own.used_ids is own.live_ids
        assert own.margin is not None
        assert own.margin.shape == (ids.numel(),)
        assert (own.margin >= 0).all()
        assert own.margin.max() > 0
        assert torch.equal(choice.used_ids, routes.ids[..., column, :].reshape(-1, K))
    # nothing was forced before the first block, so that its live choice is the same
    assert torch.equal(live[0].live_ids, forced[0].live_ids)


def test_margin_is_the_lead_of_the_kth_expert_in_probability() -> None:
    model = make_model("qwen3_moe")
    kept: list[torch.Tensor] = []
    router = find_moe_blocks(model)[0].router
    handle = router.register_forward_hook(lambda _m, _a, output: kept.append(output[0]))
    choice = live_choices(model, tokens(5))[0]
    handle.remove()
    top = kept[0].softmax(-1).sort(-1, descending=True).values
    assert torch.equal(choice.margin, top[:, K - 1] - top[:, K])


# -- foreign routes -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_ids_change_the_output(family: str) -> None:
    model = make_model(family)
    ids = tokens(6)
    with torch.no_grad(), RouteForcing(model) as forcing:
        live = model(ids).logits
        with forcing.routes(foreign_routes(model, ids, 7)):
            forced = model(ids).logits
        again = model(ids).logits
    assert not torch.allclose(live, forced)
    assert same_bits(live, again)


def reference_weights(family: str, block: Any, logits: torch.Tensor, ids: torch.Tensor) -> Any:
    """Each family's published formula, written out once more."""
    if family in ("deepseek_v3", "glm4_moe"):
        sigmoid = torch.sigmoid(logits)
        chosen = torch.stack([sigmoid[torch.arange(len(ids)), ids[:, j]] for j in range(K)], 1)
        return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * block.router.routed_scaling_factor
    if family == "gpt_oss":
        chosen = torch.stack([logits[torch.arange(len(ids)), ids[:, j]] for j in range(K)], 1)
        return functional.softmax(chosen, dim=1)
    probabilities = functional.softmax(logits, dim=1)
    chosen = torch.stack([probabilities[torch.arange(len(ids)), ids[:, j]] for j in range(K)], 1)
    return chosen if family == "olmoe" else chosen / chosen.sum(1, keepdim=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_gradient_equals_a_reference_under_foreign_ids(family: str) -> None:
    model = make_model(family)
    ids = tokens(8)
    routes = foreign_routes(model, ids, 9)
    reference = copy.deepcopy(model)
    with RouteForcing(model) as forcing:
        with forcing.routes(routes):
            loss = loss_of(model, ids)
        loss.backward()

    for column, block in enumerate(find_moe_blocks(reference)):
        forced = routes.ids[..., column, :].reshape(-1, K)

        def replaced(
            _m: Any, _a: Any, output: Any, block: Any = block, forced: Any = forced
        ) -> Any:
            return output[0], reference_weights(family, block, output[0], forced), forced

        block.router.register_forward_hook(replaced)
    expected = loss_of(reference, ids)
    expected.backward()

    torch.testing.assert_close(loss, expected)
    other = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, other[name].grad, msg=name)
    for block in find_moe_blocks(model):
        assert block.router.weight.grad.abs().max() > 0


def test_live_choice_stays_where_routes_are_not_valid() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(10)
    own = live_choices(model, ids)
    routes = foreign_routes(model, ids, 11)
    routes.valid[:] = False
    routes.valid[0, 3, 1] = True  # one token in one layer
    used: list[BlockChoice] = []
    with (
        torch.no_grad(),
        RouteForcing(model, capture=used.append) as forcing,
        forcing.routes(routes),
    ):
        model(ids)
    changed = (used[1].used_ids != used[1].live_ids).any(-1).nonzero().flatten().tolist()
    assert changed == [3]
    assert same_bits(used[0].used_weights, own[0].used_weights)
    assert torch.equal(used[0].used_ids, own[0].live_ids)
    assert torch.equal(used[2].used_ids, used[2].live_ids)


def test_recorded_weights_are_used_as_they_are() -> None:
    model = make_model("qwen3_moe", torch.bfloat16)
    ids = tokens(12)
    routes = foreign_routes(model, ids, 13)
    weights = torch.rand(routes.ids.shape, generator=torch.Generator().manual_seed(14))
    routes = ForcedRoutes(routes.layers, routes.ids, routes.valid, weights)
    used: list[BlockChoice] = []
    with (
        torch.no_grad(),
        RouteForcing(model, "ids+weights", capture=used.append) as forcing,
        forcing.routes(routes),
    ):
        model(ids)
    for column, choice in enumerate(used):
        expected = weights[..., column, :].reshape(-1, K).bfloat16()
        assert same_bits(choice.used_weights, expected)


def test_narrow_unsigned_ids_are_accepted() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(15)
    routes = foreign_routes(model, ids, 16)
    out = []
    for dtype in (torch.int64, torch.uint8, torch.uint16):
        narrow = ForcedRoutes(routes.layers, routes.ids.to(dtype), routes.valid)
        with torch.no_grad(), RouteForcing(model) as forcing, forcing.routes(narrow):
            out.append(model(ids).logits)
    assert same_bits(out[0], out[1])
    assert same_bits(out[0], out[2])


# -- gradient checkpointing ---------------------------------------------------------------------


def two_micro_batches(model: Any, backward: str = "after") -> dict[str, torch.Tensor]:
    """Both go forward, with different routes, before either goes backward.

    That is called after the blocks, or inside of the block of the second one, or in a thread.
    """
    first, second = tokens(20), tokens(21, (3, 9))
    with RouteForcing(model) as forcing:
        with forcing.routes(foreign_routes(model, first, 22)):
            losses = [loss_of(model, first)]
        with forcing.routes(foreign_routes(model, second, 23)):
            losses.append(loss_of(model, second))
            if backward == "inside":
                losses.pop(0).backward()
        for loss in losses:
            if backward == "thread":
                thread = Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
    return gradients(model)


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("backward", ["after", "inside", "thread"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_under_checkpointing_are_those_without(
    family: str, reentrant: bool, backward: str
) -> None:
    model = make_model(family).train()
    expected = two_micro_batches(copy.deepcopy(model))
    # reentrant checkpointing needs an input with a gradient to start from
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    recomputed = []
    block = find_moe_blocks(model)[0]
    block.router.register_forward_hook(
        lambda *_: recomputed.append(torch._C._current_graph_task_id() != -1)
    )
    got = two_micro_batches(model, backward)
    assert sum(recomputed) == 2  # it did recompute, once per micro-batch
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], msg=name, rtol=1e-5, atol=1e-7)


def test_recompute_is_not_captured_again() -> None:
    model = make_model("qwen3_moe").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids = tokens(20)
    seen: list[BlockChoice] = []
    with RouteForcing(model, capture=seen.append) as forcing:
        with forcing.routes(foreign_routes(model, ids, 22)):
            loss = loss_of(model, ids)
        loss.backward()
    assert [choice.layer for choice in seen] == [0, 1, 2]


def test_swapped_micro_batches_would_be_seen() -> None:
    """The test above can fail: with the routes exchanged the gradients are others."""
    model = make_model("qwen3_moe").train()
    ids = tokens(20)
    found = []
    for seed in (22, 23):
        other = copy.deepcopy(model)
        with RouteForcing(other) as forcing:
            with forcing.routes(foreign_routes(other, ids, seed)):
                loss = loss_of(other, ids)
            loss.backward()
        found.append(gradients(other))
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(found[0][name], found[1][name])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_own_checkpointing_is_refused_unless_carried(reentrant: bool) -> None:
    model = make_model("qwen3_moe").train()
    ids = tokens(24)
    routes = foreign_routes(model, ids, 25)

    def run(module: Any, carry: bool) -> dict[str, torch.Tensor]:
        embedded = module.get_input_embeddings()(ids)
        with RouteForcing(module) as forcing:

            def forward(hidden: torch.Tensor) -> torch.Tensor:
                loss: torch.Tensor = module(inputs_embeds=hidden, labels=ids, use_cache=False).loss
                return loss

            function = forcing.carry if carry else (lambda f: f)
            with forcing.routes(routes):
                loss = checkpoint(function(forward), embedded, use_reentrant=reentrant)
                if carry:
                    loss.backward()
            if not carry:
                loss.backward()
        return gradients(module)

    with pytest.raises(ForcingError, match="micro-batch is not known"):
        run(copy.deepcopy(model), carry=False)

    def within(module: Any) -> None:
        embedded = module.get_input_embeddings()(ids)
        with RouteForcing(module) as forcing, forcing.routes(routes):
            checkpoint(
                lambda h: module(inputs_embeds=h, labels=ids, use_cache=False).loss,
                embedded,
                use_reentrant=reentrant,
            ).backward()

    with pytest.raises(ForcingError, match="micro-batch is not known"):
        within(copy.deepcopy(model))

    plain = copy.deepcopy(model)
    with RouteForcing(plain) as forcing:
        with forcing.routes(routes):
            loss = loss_of(plain, ids)
        loss.backward()
    carried = run(copy.deepcopy(model), carry=True)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(carried[name], gradient, msg=name, rtol=1e-5, atol=1e-7)


def test_live_forward_under_checkpointing_stays_live() -> None:
    model = make_model("qwen3_moe").train()
    ids = tokens(26)
    plain = copy.deepcopy(model)
    loss_of(plain, ids).backward()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with RouteForcing(model) as forcing:
        loss = loss_of(model, ids)
        with forcing.routes(foreign_routes(model, ids, 27)):
            loss_of(model, ids)
        loss.backward()
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name, rtol=1e-5, atol=1e-7)


def test_backward_after_leaving_is_refused_under_checkpointing() -> None:
    model = make_model("qwen3_moe").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids = tokens(28)
    with RouteForcing(model) as forcing, forcing.routes(foreign_routes(model, ids, 29)):
        loss = loss_of(model, ids)
    with pytest.raises(ForcingError, match="was left"):
        loss.backward()


def test_checkpointing_enabled_too_late_is_refused() -> None:
    model = make_model("qwen3_moe").train()
    ids = tokens(30)
    with RouteForcing(model) as forcing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        with forcing.routes(foreign_routes(model, ids, 31)):
            loss = loss_of(model, ids)
        with pytest.raises(ForcingError, match="enable gradient checkpointing before"):
            loss.backward()


# -- refusals -----------------------------------------------------------------------------------


def test_dense_model_is_refused() -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**BASE))
    with pytest.raises(ForcingError, match="no MoE block"):
        RouteForcing(model)


def test_routes_of_another_model_are_refused() -> None:
    model = make_model("deepseek_v3")
    ids = tokens(32)
    good = foreign_routes(model, ids, 33)
    whole = torch.ones(*ids.shape, 3, dtype=torch.bool)
    cases = {
        r"of layers \[0, 1, 2\], the model's MoE layers are \[1, 2\]": ForcedRoutes(
            (0, 1, 2), torch.zeros(*ids.shape, 3, K, dtype=torch.int64), whole
        ),
        "3 experts a token, model.layers.1.mlp has 2": ForcedRoutes(
            (1, 2), torch.zeros(*ids.shape, 2, 3, dtype=torch.int64), good.valid
        ),
        "over 16 experts, model.layers.1.mlp has 8": ForcedRoutes(
            (1, 2), good.ids, good.valid, num_experts=16
        ),
        r"expert ids \d..8, model.layers.1.mlp has 8 experts": ForcedRoutes(
            (1, 2), good.ids + 1, good.valid
        ),
    }
    with torch.no_grad(), RouteForcing(model) as forcing:
        for message, routes in cases.items():
            with pytest.raises(ForcingError, match=message), forcing.routes(routes):
                model(ids)
    forcing = RouteForcing(model, "ids+weights")
    with forcing, pytest.raises(ForcingError, match="no weights"), forcing.routes(good):
        model(ids)


def test_missing_weights_are_refused_only_where_they_are_needed() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(32)
    routes = foreign_routes(model, ids, 33)
    weights = torch.rand(routes.ids.shape)
    weights[0, 4] = torch.nan
    routes = ForcedRoutes(routes.layers, routes.ids, routes.valid, weights)
    forcing = RouteForcing(model, "ids+weights")
    refused = pytest.raises(ForcingError, match="no recorded weights")
    with torch.no_grad(), forcing:
        with refused, forcing.routes(routes):
            model(ids)
        routes.valid[0, 4] = False
        with forcing.routes(routes):
            assert model(ids).logits.isfinite().all()


def test_routes_of_another_shape_are_refused() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(34)
    routes = foreign_routes(model, ids, 35)
    forcing = RouteForcing(model)
    refused = pytest.raises(ForcingError, match="24 rows forced on a forward of 22 rows")
    with torch.no_grad(), forcing, refused, forcing.routes(routes):
        model(ids[:, :11])
    with pytest.raises(ForcingError, match=r"expected bool \[2, 12, 3\]"):
        ForcedRoutes(routes.layers, routes.ids, routes.valid[:, :1])
    with pytest.raises(ForcingError, match="expected integers"):
        ForcedRoutes(routes.layers, routes.ids.float(), routes.valid)


def test_nothing_forced_is_an_error() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(36)
    routes = foreign_routes(model, ids, 37)
    forcing = RouteForcing(model)
    with forcing, pytest.raises(ForcingError, match="did not run"), forcing.routes(routes):
        pass


def test_nested_use_is_refused() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(38)
    routes = foreign_routes(model, ids, 39)
    with torch.no_grad(), RouteForcing(model) as forcing:
        with pytest.raises(ForcingError, match="attached to this model already"):
            RouteForcing(model).__enter__()
        with pytest.raises(ForcingError, match="attached to this model already"):
            forcing.__enter__()
        refused = pytest.raises(ForcingError, match="inside of routes")
        with refused, forcing.routes(routes), forcing.routes(routes):
            model(ids)
    with pytest.raises(ForcingError, match="outside of"), RouteForcing(model).routes(routes):
        model(ids)


def test_router_that_no_recipe_reproduces_is_named() -> None:
    model = make_model("qwen3_moe")
    ids = tokens(40)
    block = find_moe_blocks(model)[1]

    def scaled(_module: Any, _args: Any, output: Any) -> Any:
        return output[0], output[1] * 1.5, output[2]

    block.router.register_forward_hook(scaled)
    routes = foreign_routes(model, ids, 41)
    forcing = RouteForcing(model)
    refused = pytest.raises(ForcingError, match=r"model\.layers\.1\.mlp: softmax over all experts")
    with torch.no_grad(), forcing, refused, forcing.routes(routes):
        model(ids)
    with pytest.raises(ForcingError, match=r"model\.layers\.1\.mlp"):
        self_test(model, {"input_ids": ids})


def test_self_test_tells_noise_from_the_force() -> None:
    model = make_model("qwen3_moe")
    model.lm_head.register_forward_hook(lambda _m, _a, out: out + torch.rand(()))
    with pytest.raises(ForcingError, match="two live forwards"):
        self_test(model, {"input_ids": tokens(42)})


def test_everything_is_undone_on_exit() -> None:
    model = make_model("qwen3_moe").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    functions = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    ids = tokens(43)
    with torch.no_grad():
        before = model(ids).logits
    routes = foreign_routes(model, ids, 44)
    handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    forcing = RouteForcing(model)
    with pytest.raises(ZeroDivisionError), forcing, forcing.routes(routes):
        model(ids)
    handle.remove()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] == functions
    with torch.no_grad():
        assert same_bits(model(ids).logits, before)
    with RouteForcing(model):  # free to be entered again
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_margin_is_the_lead_of_the_last_choice(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 16, generator=generator).to(dtype)
    scores[0] = 0.25  # all equal
    scores[1, 3:] = -torch.inf  # a group that was left out
    for k in (1, 3, 15):
        best = scores.topk(k + 1, dim=-1)
        expected = best.values[:, k - 1].float() - best.values[:, k].float()
        ids = best.indices[:, :k].flip(-1)
        assert torch.equal(margin(scores, ids).nan_to_num(7), expected.nan_to_num(7))
    assert margin(scores, torch.arange(16).expand(64, 16)).isinf().sum() == 63
