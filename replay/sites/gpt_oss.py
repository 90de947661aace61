"""GPT-OSS: the router is called `router`, attention has sinks and windows.

There is no map for vLLM: its kernels for the quantised weights of this family do not run on a CPU,
so that a map could not be checked.
"""

from rolltape.replay.sites.decoder import transformers_layer
from rolltape.replay.sites.places import Family, output

TRANSFORMERS = Family(
    types=("gpt_oss",),
    layer=transformers_layer(
        feed_forward={"router": output("mlp.router"), "experts": output("mlp.experts")}
    ),
)
VLLM = None
