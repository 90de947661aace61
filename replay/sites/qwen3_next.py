"""Qwen3-Next: most layers have linear attention, which only shows `attn_norm` and `attn`.

`heads` is behind the output gate of attention. There is no map for vLLM: its linear attention needs
kernels that do not run on a CPU, so that the map could not be checked.
"""

from rolltape.replay.sites.decoder import K_NORM, Q_NORM, SHARED, transformers_layer
from rolltape.replay.sites.places import Family, output

TRANSFORMERS = Family(
    types=("qwen3_next",),
    layer={
        **transformers_layer(q=Q_NORM, k=K_NORM, feed_forward=SHARED),
        "attn": (output("self_attn.o_proj"), output("linear_attn")),
    },
)
VLLM = None
