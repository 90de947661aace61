"""What only a GPU can show. Run on one with `pytest tests/gpu`; elsewhere it skips and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.routing_replay import measure  # noqa: E402
from rolltape.recorder.digest import weights_digest  # noqa: E402
from rolltape.recorder.moe import find_moe_blocks  # noqa: E402
from rolltape.replay.forcing import ForcedRoutes, RouteForcing, self_test  # noqa: E402
from tests.integration.conftest import FAMILIES, TINY_MOE, make_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def foreign(model: Any, ids: Any, seed: int) -> ForcedRoutes:
    blocks = find_moe_blocks(model)
    draw = torch.rand(
        *ids.shape,
        len(blocks),
        blocks[0].num_experts,
        generator=torch.Generator().manual_seed(seed),
    )
    chosen = draw.argsort(-1)[..., : blocks[0].k]
    valid = torch.ones(chosen.shape[:-1], dtype=torch.bool)
    return ForcedRoutes(tuple(b.layer for b in blocks), chosen, valid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forcing_own_routes_changes_no_bit(family: str, dtype: Any) -> None:
    model = make_model(family, dtype).cuda()
    ids = torch.randint(2, 320, (3, 20), generator=torch.Generator().manual_seed(1)).cuda()
    assert self_test(model, {"input_ids": ids}, mode="ids")["bitwise"] is True


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_use_their_own_micro_batch(reentrant: bool) -> None:
    """On CUDA the recompute runs in a thread of the autograd engine."""

    def gradients(checkpointing: bool) -> dict[str, Any]:
        model = make_model("qwen3_moe").cuda().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        losses = []
        with RouteForcing(model) as forcing:
            for seed in (1, 2):
                ids = torch.randint(2, 320, (2, 16), generator=torch.Generator().manual_seed(seed))
                ids = ids.cuda()
                with forcing.routes(foreign(model, ids, seed)):
                    losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
            sum(losses).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    routers = [n for n in plain if n.endswith("gate.weight")]
    assert routers and all(plain[n].abs().sum() > 0 for n in routers)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_digest_does_not_depend_on_the_device() -> None:
    model = make_model("qwen3_moe", torch.bfloat16).cpu()
    assert weights_digest(model).value == weights_digest(model.cuda()).value


def test_the_main_job(tmp_path: Path) -> None:
    diffs = measure(
        str(TINY_MOE), tmp_path, count=32, tokens=64, dtype="model", device="cuda", seed=0
    )
    live = diffs["live"]
    assert live["routing"]["disagree"] > 0
    assert diffs["ids"]["k3"] <= 0.7 * live["k3"]
    assert diffs["ids shifted by one"]["k3"] >= 100 * live["k3"]
    assert diffs["random ids"]["verdict"] == "divergent"
