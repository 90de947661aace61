"""Qwen3, dense: norms of query and key per head."""

from rolltape.replay.sites.decoder import (
    DENSE,
    K_NORM,
    Q_NORM,
    VLLM_AFTER,
    VLLM_K_NORM,
    transformers_layer,
    vllm_layer,
)
from rolltape.replay.sites.places import Family

TRANSFORMERS = Family(
    types=("qwen3",), layer=transformers_layer(q=Q_NORM, k=K_NORM, feed_forward=DENSE)
)
VLLM = Family(
    types=("qwen3",),
    layer=vllm_layer(q=Q_NORM, k=VLLM_K_NORM, feed_forward=DENSE),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
