"""Identity: the key of a sequence, its printable id, and the digest of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash

from rolltape.store.errors import UsageError


class Key(NamedTuple):
    """One scoring of one sequence by one engine.

    Args:
        engine: 32 hex digits, made at engine start.
        request: the engine's request id; unique within the engine.
        sample: index among the samples of that request.
        scoring: the *pass*: 0, and more where a trainer scores a sequence again.
    """

    engine: str
    request: str
    sample: int = 0
    scoring: int = 0

    @property
    def id(self) -> str:
        """Short id for people, links and command lines, for example `1f0c29ab.0-3.1`."""
        tail = f".p{self.scoring}" if self.scoring else ""
        return f"{self.engine[:8]}.{self.request}.{self.sample}{tail}"

    @property
    def text(self) -> str:
        """The whole key as one string, as stored in `sequences.origin`."""
        return f"{self.engine}/{self.request}/{self.sample}/{self.scoring}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Inverse of `text`.

        Raises:
            UsageError: not a key.
        """
        engine, _, rest = text.partition("/")
        parts = rest.rsplit("/", 2)  # callers put slashes into ids of requests, too
        if len(parts) != 3 or not parts[1].isdecimal() or not parts[2].isdecimal():
            raise UsageError(f"{text!r} is not a sequence key", hint="engine/request/sample/pass")
        return cls(engine, parts[0], int(parts[1]), int(parts[2]))


def token_digest(prompt_len: int, ids: np.ndarray) -> str:
    """Digest of (prompt length, token ids): 32 hex digits of xxh3-128.

    Args:
        prompt_len: number of prompt tokens.
        ids: token ids, any integer dtype, shape [T].
    """
    little = np.ascontiguousarray(ids, dtype="<u4")
    return xxhash.xxh3_128_hexdigest(int(prompt_len).to_bytes(8, "little") + little.tobytes())
