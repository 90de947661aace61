"""GPT-OSS: the router is called `router`, attention has sinks and windows.

vLLM calls the embeddings `embedding` and the attention block `attn`. Its experts may return padded
columns behind those of the hidden state, which are left out.
"""

from rolltape.replay.sites.decoder import VLLM_AFTER, transformers_layer, vllm_layer
from rolltape.replay.sites.places import Family, columns, output

TRANSFORMERS = Family(
    types=("gpt_oss",),
    layer=transformers_layer(
        feed_forward={"router": output("mlp.router"), "experts": output("mlp.experts")},
        split=False,
    ),
)
VLLM = Family(
    types=("gpt_oss",),
    before={"embed": output("model.embedding")},
    layer=vllm_layer(
        block="attn",
        feed_forward={
            "router": output("mlp.router"),
            "experts": columns("mlp.experts", (), ("hidden_size",)),
        },
    ),
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
