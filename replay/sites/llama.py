"""Llama, dense; Mistral and Qwen2 are built the same."""

from rolltape.replay.sites.decoder import DENSE, VLLM_AFTER, transformers_layer, vllm_layer
from rolltape.replay.sites.places import Family

TRANSFORMERS = Family(
    types=("llama", "mistral", "qwen2"), layer=transformers_layer(feed_forward=DENSE)
)
VLLM = Family(
    types=("llama", "mistral", "qwen2"),
    layer=vllm_layer(feed_forward=DENSE),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
