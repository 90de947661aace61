"""Qwen3-MoE: norms of query and key per head, MoE layers and dense ones."""

from rolltape.replay.sites.decoder import (
    K_NORM,
    MOE_OR_DENSE,
    Q_NORM,
    VLLM_AFTER,
    VLLM_K_NORM,
    transformers_layer,
    vllm_layer,
)
from rolltape.replay.sites.places import Family

TRANSFORMERS = Family(
    types=("qwen3_moe",), layer=transformers_layer(q=Q_NORM, k=K_NORM, feed_forward=MOE_OR_DENSE)
)
VLLM = Family(
    types=("qwen3_moe",),
    layer=vllm_layer(q=Q_NORM, k=VLLM_K_NORM, feed_forward=MOE_OR_DENSE),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
