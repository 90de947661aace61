"""DeepSeek-V3: latent attention. The first layers are dense, the others have shared experts.

`q` is the whole query before RoPE; `kv` is the compressed latent with the rotary part of the key,
before the norm of the one and the RoPE of the other; `q_rot` and `k_rot` are the whole query and
the expanded key as attention gets them; there is no `k` or `v` of its own. `experts` are the routed
experts alone.

There is no map for vLLM: its attention absorbs the expansion into other products, and such a map
could not be checked on a CPU.
"""

from rolltape.replay.sites.decoder import SHARED
from rolltape.replay.sites.places import Family, attention, into, output

TRANSFORMERS = Family(
    types=("deepseek_v3",),
    layer={
        "attn_norm": output("input_layernorm"),
        "q": (output("self_attn.q_b_proj"), output("self_attn.q_proj")),
        "kv": output("self_attn.kv_a_proj_with_mqa"),
        "q_rot": attention("self_attn", 0),
        "k_rot": attention("self_attn", 1),
        "heads": into("self_attn.o_proj"),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **SHARED,
        "out": output(""),
    },
)
VLLM = None
