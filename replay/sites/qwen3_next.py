"""Qwen3-Next: most layers have linear attention, which only shows `attn_norm` and `attn`.

`heads` is behind the output gate of attention. vLLM's projection holds that gate beside the query,
and its shared experts are added inside of `experts`. Where vLLM fuses norms, RoPE and gate into one
kernel (16 bits on a GPU) the norms are not called and `q` and `k` are not seen.
"""

from rolltape.replay.sites.decoder import (
    K_NORM,
    KV_COPIES,
    Q_NORM,
    SHARED,
    VLLM_AFTER,
    VLLM_K_NORM,
    transformers_layer,
    vllm_layer,
)
from rolltape.replay.sites.places import Family, columns, output, sharded

_ATTN = (output("self_attn.o_proj"), output("linear_attn"))

TRANSFORMERS = Family(
    types=("qwen3_next",),
    layer={**transformers_layer(q=Q_NORM, k=K_NORM, feed_forward=SHARED), "attn": _ATTN},
)
#: The projection: query and gate head by head, key, value.
_V = ("q_size", "q_size", "kv_size")
_LAYER = vllm_layer(
    q=Q_NORM,
    k=VLLM_K_NORM,
    feed_forward={"router": output("mlp.gate"), "mlp": output("mlp")},
)
VLLM = Family(
    types=("qwen3_next",),
    layer={
        **_LAYER,
        "v": sharded(columns("self_attn.qkv_proj", _V, (*_V, "kv_size")), KV_COPIES),
        "attn": _ATTN,
    },
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU, in BF16: its linear attention has no other dtype there",
)
