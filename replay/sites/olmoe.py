"""OLMoE: norms of query and key over all heads at once, which every rank therefore holds.

`clip_qkv` is applied behind them, in place: `q`, `k` and `v` are what there was before it, `q_rot`
and `k_rot` come after it.
"""

from rolltape.replay.sites.decoder import MOE, VLLM_AFTER, transformers_layer, vllm_layer
from rolltape.replay.sites.places import Family, into, output, sharded

_Q, _K = output("self_attn.q_norm"), output("self_attn.k_norm")

TRANSFORMERS = Family(
    types=("olmoe",),
    layer={
        **transformers_layer(q=_Q, k=_K, feed_forward=MOE, split=False),
        "heads": sharded(into("self_attn.o_proj")),  # transformers splits it in front of the module
    },
)
VLLM = Family(
    types=("olmoe",),
    layer=vllm_layer(q=_Q, k=_K, feed_forward=MOE),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
