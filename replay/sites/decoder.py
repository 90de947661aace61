"""What the decoder families have in common; a family file says where it differs."""

from __future__ import annotations

from collections.abc import Mapping

from rolltape.replay.sites.places import Place, attention, columns, into, output, sharded

Sites = dict[str, Place | tuple[Place, ...]]


def transformers_layer(
    *,
    q: Place | None = None,
    k: Place | None = None,
    feed_forward: Mapping[str, Place],
    split: bool = True,
) -> Sites:
    """The sites of a layer of transformers with split projections.

    Args:
        q: the query where it is not the output of `q_proj`: behind its norm.
        k: the same for the key.
        feed_forward: sites between `mlp_norm` and `out`.
        split: whether the plan of tensor parallelism splits attention by heads.
    """

    def of_heads(place: Place) -> Place:
        return sharded(place) if split else place

    return {
        "attn_norm": output("input_layernorm"),
        "q": q or of_heads(output("self_attn.q_proj")),
        "k": k or of_heads(output("self_attn.k_proj")),
        "v": of_heads(output("self_attn.v_proj")),
        "q_rot": of_heads(attention("self_attn", 0)),
        "k_rot": of_heads(attention("self_attn", 1)),
        "heads": of_heads(into("self_attn.o_proj")),
        "attn": output("self_attn.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **feed_forward,
        "out": output(""),
    }


#: Heads of keys and values are copied to several ranks if there are fewer heads than ranks.
KV_COPIES = "qkv_proj.num_kv_head_replicas"


def vllm_layer(
    *,
    q: Place | None = None,
    k: Place | None = None,
    feed_forward: Mapping[str, Place],
    block: str = "self_attn",
) -> Sites:
    """The sites of a layer of vLLM: fused projections, the residual beside the hidden state.

    Args:
        q: the query where it is not the first columns of `qkv_proj`: behind its norm.
        k: the same for the key.
        feed_forward: sites between `mlp_norm` and `out`.
        block: name of the attention block.
    """
    qkv, q_size, kv_size = f"{block}.qkv_proj", ("q_size",), ("kv_size",)
    key, value = q_size + kv_size, q_size + kv_size + kv_size
    return {
        "attn_norm": output("input_layernorm"),
        "q": q or sharded(columns(qkv, (), q_size)),
        "k": k or sharded(columns(qkv, q_size, key), KV_COPIES),
        "v": sharded(columns(qkv, key, value), KV_COPIES),
        "q_rot": sharded(into(f"{block}.attn", 0)),
        "k_rot": sharded(into(f"{block}.attn", 1), KV_COPIES),
        "heads": sharded(into(f"{block}.o_proj")),
        "attn": output(f"{block}.o_proj"),
        "mlp_norm": output("post_attention_layernorm"),
        **feed_forward,
        "out": Place(module="", port="sum"),
    }


#: vLLM computes logits only for the rows that it samples from: see `rolltape.replay.sites.vllm`.
VLLM_AFTER = {"norm": output("model.norm"), "logits": output("logits_processor")}

#: Per-head norms of query and key, [.., heads, head size].
Q_NORM = sharded(output("self_attn.q_norm", dims=2))
K_NORM = sharded(output("self_attn.k_norm", dims=2))
VLLM_K_NORM = sharded(output("self_attn.k_norm", dims=2), KV_COPIES)

DENSE = {"mlp": output("mlp")}
MOE = {"router": output("mlp.gate"), "experts": output("mlp.experts")}
#: Layers that may be of either kind: of the sites of the other kind no module exists.
MOE_OR_DENSE = {**MOE, "mlp": output("mlp.down_proj")}
#: Experts that all tokens share are added to those of the router behind `experts`.
SHARED = {**MOE, "mlp": output("mlp")}
