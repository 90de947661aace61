"""GLM4-MoE: the first layers are dense, the others have shared experts beside the routed ones.

`experts` are the routed ones alone in transformers. vLLM adds the shared ones inside of the same
module, so that there only `mlp` exists.
"""

from rolltape.replay.sites.decoder import (
    K_NORM,
    Q_NORM,
    SHARED,
    VLLM_AFTER,
    VLLM_K_NORM,
    transformers_layer,
    vllm_layer,
)
from rolltape.replay.sites.places import Family, output

#: Queries and keys have norms in some models of the family only.
_Q = (Q_NORM, output("self_attn.q_proj"))
_K = (K_NORM, output("self_attn.k_proj"))

TRANSFORMERS = Family(
    types=("glm4_moe",),
    layer={**transformers_layer(feed_forward=SHARED), "q": _Q, "k": _K},
)
_LAYER = vllm_layer(feed_forward={"router": output("mlp.gate"), "mlp": output("mlp")})
VLLM = Family(
    types=("glm4_moe",),
    layer={
        **_LAYER,
        "q": (Q_NORM, _LAYER["q"]),  # type: ignore[dict-item]
        "k": (VLLM_K_NORM, _LAYER["k"]),  # type: ignore[dict-item]
    },
    after=VLLM_AFTER,
    checked="vLLM 0.32 on a CPU",
)
