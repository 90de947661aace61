"""Names of sites, the tensors of a model, and the order in which they run."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"(\d{1,9})")

#: Order in which the sites of a layer run.
_IN_LAYER = (
    *("attn_norm", "q", "k", "v", "kv", "q_rot", "k_rot", "heads", "attn"),
    *("mlp_norm", "router", "experts", "mlp", "out"),
)


def site_order(site: str) -> tuple[Any, ...]:
    """Sort key in the order in which sites run: layer by layer, `norm` and `logits` last.

    Sites of a layer that are not known come behind those that are, by name.
    """
    rank = {"embed": 0, "norm": 2, "logits": 3}.get(site, 1)
    _, _, last = site.rpartition(".")
    known = _IN_LAYER.index(last) if last in _IN_LAYER else len(_IN_LAYER)
    numbers = [int(p) for p in _NUMBER.findall(site)]
    return (rank, numbers, known, site)
