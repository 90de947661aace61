"""Canonical names of the tensors in a model, and where they pass by in each engine.

| site | tensor, one row a token |
|---|---|
| `embed` | token embeddings |
| `layers.N.attn_norm` | hidden state behind the norm before attention |
| `layers.N.q`, `.k`, `.v` | after projection and, where the model has them, norms; BEFORE RoPE |
| `layers.N.q_rot`, `.k_rot` | query and key AFTER RoPE, as attention gets them |
| `layers.N.heads` | what attention returns, before the output projection |
| `layers.N.attn` | after the output projection |
| `layers.N.mlp_norm` | hidden state behind the norm before the feed-forward block |
| `layers.N.router` | router logits |
| `layers.N.experts` | combined output of the routed experts |
| `layers.N.mlp` | output of a dense feed-forward block, or of one with shared experts |
| `layers.N.out` | residual stream behind the layer |
| `norm`, `logits` | |

A family file says what differs. `rolltape.store.sites.site_order` sorts sites as they run.
"""

from rolltape.replay.sites.find import known_families, select_sites, sites_of
from rolltape.replay.sites.places import Family, Place

__all__ = ["Family", "Place", "known_families", "select_sites", "sites_of"]
