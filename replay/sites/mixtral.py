"""Mixtral. vLLM calls its MoE block `block_sparse_moe`."""

from rolltape.replay.sites.decoder import MOE, VLLM_AFTER, transformers_layer, vllm_layer
from rolltape.replay.sites.places import Family, output

TRANSFORMERS = Family(types=("mixtral",), layer=transformers_layer(feed_forward=MOE))
VLLM = Family(
    types=("mixtral",),
    layer=vllm_layer(
        feed_forward={
            "router": output("block_sparse_moe.gate"),
            "experts": output("block_sparse_moe.experts"),
        }
    ),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
