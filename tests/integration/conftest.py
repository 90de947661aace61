"""Real models for the tests that need torch and transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: `ROLLTAPE_TEST_DEVICE=cuda pytest tests/integration/...` runs the same tests on an accelerator.
DEVICE = os.environ.get("ROLLTAPE_TEST_DEVICE", "cpu")
ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "models" / "tiny-moe"

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

#: One tiny random configuration of each family whose router transformers has.
FAMILIES: dict[str, Any] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **BASE,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **BASE, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**BASE, num_experts=8, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **BASE, head_dim=16, num_local_experts=8, num_experts_per_tok=2
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **BASE,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}


def make_model(family: str, dtype: Any = None, **changes: Any) -> Any:
    """A small random model whose routers are far from ties."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    dtype = dtype or torch.float32
    model = (
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        .eval()
        .to(dtype)
        .to(DEVICE)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.normal_(std=0.1)
    return model


@pytest.fixture(scope="session")
def tiny_moe() -> Any:
    """The bundled trained model, BF16."""
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE).to(DEVICE).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Its tokenizer, ready for left padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MOE, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def prompts(tokenizer: Any) -> Any:
    """Six prompts of different lengths, left padded."""
    texts = [
        "import os\n",
        "def read(path):\n    with open(path) as f:\n        return ",
        "class A:\n    pass\n\nclass B(A):\n    def __init__(self):\n        ",
        "x",
        "for i in range(10):\n    print(i)\n",
        "# comment\nassert ",
    ]
    return tokenizer(texts, return_tensors="pt", padding=True).to(DEVICE)
