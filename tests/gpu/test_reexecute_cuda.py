"""On a GPU: which attention gives the same bits twice; nothing else is called identical."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import transformers as hf  # noqa: E402

import rolltape  # noqa: E402
from rolltape.replay.reexecute import reexecute  # noqa: E402
from rolltape.replay.verify import verify  # noqa: E402
from tests.integration.conftest import TINY_MOE  # noqa: E402
from tests.tampered import edited  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
PROMPTS, PROMPT_TOKENS, TOKENS = 64, 64, 96  # kernels of attention change at 128 tokens of cache


@contextmanager
def flash_alone() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        yield


def rollout(model: Any, path: Path) -> Any:
    """Sampled without padding, which flash attention of torch does not take."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(2, model.config.vocab_size, (PROMPTS, PROMPT_TOKENS)))
    model.generation_config.eos_token_id = None
    with rolltape.record(path):
        torch.manual_seed(3)
        model.generate(
            ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), do_sample=True,
            temperature=0.9, top_k=50, top_p=0.95, max_new_tokens=TOKENS, pad_token_id=0,
        )  # fmt: skip
    return rolltape.open(path)


def tiny() -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.bfloat16).cuda().eval()


def larger() -> Any:
    """About 1.6B parameters."""
    config = hf.Qwen3MoeConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512,
        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device("cuda"):
        return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("make", [tiny, larger])
def test_pinned_to_flash_a_rollout_is_reproduced_bit_for_bit(make: Any, tmp_path: Path) -> None:
    model = make()
    with flash_alone():
        tape = rollout(model, tmp_path / "a")
    found = reexecute(tape, tmp_path / "b", model=model)  # which pins it, too
    assert found["verdict"] == "identical", found
    assert found["compared"]["processed"] == PROMPTS * TOKENS
    assert found["compared"]["routes.ids"] > 0 and found["not_compared"] == []

    def flip(rows: list[dict[str, Any]]) -> None:
        row = next(r for r in rows if r["processed"] and r["processed"][-1] not in (None, 0.0))
        value = np.float32(row["processed"][-1])
        row["processed"][-1] = float((value.view(np.uint32) ^ np.uint32(1)).view(np.float32))

    other = edited(tape, tmp_path / "flipped", tokens=flip)
    again = reexecute(other, tmp_path / "c", model=model)
    assert (again["verdict"], again["differ"]) == ("not-reproduced", {"processed": 1})
    norm = model.model.layers[1].input_layernorm.weight
    with torch.no_grad():
        norm.view(torch.int16)[0] += 1
    model.save_pretrained(tmp_path / "moved")
    switches = [f"weights={tmp_path / 'moved'}"]
    moved = reexecute(tape, tmp_path / "d", switches=switches, device="cuda")
    assert moved["verdict"] == "divergent" and moved["first"]["step"] == 0


def test_one_row_at_a_time_is_another_computation(tmp_path: Path) -> None:
    """Of the bundled model it is not: its rows are the same bits whatever the batch is."""
    model = larger()
    with flash_alone():
        tape = rollout(model, tmp_path / "a")
    found = reexecute(tape, tmp_path / "b", model=model, switches=["batch=one"])
    print({k: found[k] for k in ("verdict", "differ", "compared", "first")})
    assert found["verdict"] == "divergent" and found["first"]["step"] == 0


def test_default_attention_is_found_not_to_repeat_and_is_named(tmp_path: Path) -> None:
    model = tiny()
    report = verify("transformers", model, cases=("run-to-run",), prompts=64, tokens=80).as_dict()
    print(report)
    (case,) = [c for c in report["cases"] if c["case"] == "run-to-run"]
    assert case["verdict"] == "failed"
    assert "heads" in str(case), "attention is where it begins"
    tape = rollout(model, tmp_path / "a")
    found = reexecute(tape, tmp_path / "b", model=model)
    print({k: found[k] for k in ("verdict", "differ", "compared", "first")})
    assert found["verdict"] == "not-reproduced"
