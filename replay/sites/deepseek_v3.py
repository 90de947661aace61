"""DeepSeek-V3: latent attention. The first layers are dense, the others have shared experts.

`q` is the whole query before RoPE; `kv` is the compressed latent with the rotary part of the key,
before the norm of the one and the RoPE of the other; `q_rot` and `k_rot` are the whole query and
the expanded key as attention gets them; there is no `k` or `v` of its own. `experts` are the routed
experts alone.

vLLM never expands the key of tokens that it decodes, so that there `k_rot` does not exist, and adds
the shared experts inside of `experts`. It rotates neighbouring columns of a head, transformers
halves: `q_rot` has the order of transformers in both. In float16 vLLM scales the residual stream,
so that `attn_norm` and `norm` agree there and `out` does not.
"""

from dataclasses import replace

from rolltape.replay.sites.decoder import SHARED, VLLM_AFTER
from rolltape.replay.sites.places import Family, Place, attention, columns, into, output, sharded

_Q = (output("self_attn.q_b_proj"), output("self_attn.q_proj"))
_KV = output("self_attn.kv_a_proj_with_mqa")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")

TRANSFORMERS = Family(
    types=("deepseek_v3",),
    layer={
        "attn_norm": output("input_layernorm"),
        "q": _Q,
        "kv": _KV,
        "q_rot": attention("self_attn", 0),
        "k_rot": attention("self_attn", 1),
        "heads": into("self_attn.o_proj"),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **SHARED,
        "out": output(""),
    },
)
_INSIDE = replace(sharded(into("self_attn.mla_attn.mla_attn", 0)), dims=2)
VLLM = Family(
    types=("deepseek_v3",),
    layer={
        "attn_norm": output("input_layernorm"),
        "q": tuple(map(sharded, _Q)),
        "kv": (columns("self_attn.fused_qkv_a_proj", _LATENT[:1], _LATENT), _KV),
        "q_rot": replace(_INSIDE, paired="qk_rope_head_dim"),
        "heads": sharded(into("self_attn.o_proj")),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        "router": output("mlp.gate"),
        "mlp": output("mlp"),
        "out": Place(module="", port="sum"),
    },
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
