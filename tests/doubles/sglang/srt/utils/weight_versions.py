"""Which version of the weights drew which tokens of a response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class WeightVersionSpan:
    """Tokens start..end-1 of the response."""

    version: str
    start: int
    end: int
