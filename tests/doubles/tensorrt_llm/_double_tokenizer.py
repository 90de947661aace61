"""Printable ASCII, a token a letter; ids 0 (the end) and 1 are control characters."""

from __future__ import annotations

from typing import Any


class DoubleTokenizer:
    def __init__(self, config: Any) -> None:
        self.eos_token_id, self.pad_token_id = config.eos_token_id, None
        self.vocab_size = config.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) - 30 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token + 30) for token in token_ids)
