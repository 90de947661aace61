"""What the decoder families have in common; a family file says where it differs."""

from __future__ import annotations

from collections.abc import Mapping

from rolltape.replay.sites.places import Place, attention, columns, into, output

Sites = dict[str, Place | tuple[Place, ...]]


def transformers_layer(
    *, q: Place | None = None, k: Place | None = None, feed_forward: Mapping[str, Place]
) -> Sites:
    """The sites of a layer of transformers with split projections.

    Args:
        q: the query where it is not the output of `q_proj`: behind its norm.
        k: the same for the key.
        feed_forward: sites between `mlp_norm` and `out`.
    """
    return {
        "attn_norm": output("input_layernorm"),
        "q": q or output("self_attn.q_proj"),
        "k": k or output("self_attn.k_proj"),
        "v": output("self_attn.v_proj"),
        "q_rot": attention("self_attn", 0),
        "k_rot": attention("self_attn", 1),
        "heads": into("self_attn.o_proj"),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **feed_forward,
        "out": output(""),
    }


def vllm_layer(
    *, q: Place | None = None, k: Place | None = None, feed_forward: Mapping[str, Place]
) -> Sites:
    """The sites of a layer of vLLM: fused projections, the residual beside the hidden state."""
    return {
        "attn_norm": output("input_layernorm"),
        "q": q or columns("self_attn.qkv_proj", (), ("q_size",)),
        "k": k or columns("self_attn.qkv_proj", ("q_size",), ("q_size", "kv_size")),
        "v": columns("self_attn.qkv_proj", ("q_size", "kv_size"), ("q_size", "kv_size", "kv_size")),
        "q_rot": into("self_attn.attn", 0),
        "k_rot": into("self_attn.attn", 1),
        "heads": into("self_attn.o_proj"),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **feed_forward,
        "out": Place(module="", port="sum"),
    }


#: vLLM computes logits only for the rows that it samples from: see `rolltape.replay.sites.vllm`.
VLLM_AFTER = {"norm": output("model.norm"), "logits": output("logits_processor")}

#: Per-head norms of query and key, [.., heads, head size].
Q_NORM, K_NORM = output("self_attn.q_norm", dims=2), output("self_attn.k_norm", dims=2)

DENSE = {"mlp": output("mlp")}
MOE = {"router": output("mlp.gate"), "experts": output("mlp.experts")}
#: Layers that may be of either kind: of the sites of the other kind no module exists.
MOE_OR_DENSE = {**MOE, "mlp": output("mlp.down_proj")}
#: Experts that all tokens share are added to those of the router behind `experts`.
SHARED = {**MOE, "mlp": output("mlp")}
