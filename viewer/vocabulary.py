"""Bytes of each token, from `tokenizer.json` alone: no tokenizer library, nothing is executed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltape.store.errors import UsageError

MAX_BYTES = 256 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    """Token id -> bytes.

    Args:
        path: the `tokenizer.json` it came from.
        pieces: bytes by id; a token need not be valid UTF-8 on its own.
    """

    path: Path
    pieces: dict[int, bytes]

    def get(self, token: int) -> bytes | None:
        """Bytes of a token; None for an id that the vocabulary does not have."""
        return self.pieces.get(token)


def load_vocabulary(path: Path) -> Vocabulary:
    """Read a `tokenizer.json`, or the one in a folder.

    Raises:
        UsageError: absent, too large, not JSON, or without a vocabulary.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file}: no such file", hint="--tokenizer takes a tokenizer.json")
    if file.stat().st_size > MAX_BYTES:
        raise UsageError(f"{file} is larger than {MAX_BYTES >> 20} MiB")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Vocabulary(file, _pieces(content))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file}: not a tokenizer.json: {error!r}") from error


def _pieces(content: dict[str, Any]) -> dict[int, bytes]:
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        texts = {int(token): str(text) for text, token in vocab.items()}
    else:  # unigram: [[text, score], ...]
        texts = {token: str(entry[0]) for token, entry in enumerate(vocab)}
    decoders = _decoder_types(content.get("decoder"))
    prefix = content["model"].get("continuing_subword_prefix") or "##"
    if "ByteLevel" in decoders:
        table = _byte_level_table()
        pieces = {token: _from_byte_level(text, table) for token, text in texts.items()}
    elif "WordPiece" in decoders:
        pieces = {token: _from_word_piece(text, prefix) for token, text in texts.items()}
    else:
        pieces = {token: _from_sentence_piece(text) for token, text in texts.items()}
    for entry in content.get("added_tokens") or []:
        pieces[int(entry["id"])] = str(entry["content"]).encode()
    return pieces


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    found = {str(decoder.get("type"))}
    for inner in decoder.get("decoders") or []:
        found |= _decoder_types(inner)
    return found


def _byte_level_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in set(shown))
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def _from_byte_level(text: str, table: dict[str, int]) -> bytes:
    codes = [table.get(char) for char in text]
    known = [code for code in codes if code is not None]
    return bytes(known) if len(known) == len(codes) else text.encode()


def _from_sentence_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(_SPACE_MARK, " ").encode()


def _from_word_piece(text: str, prefix: str) -> bytes:
    return text.removeprefix(prefix).encode() if text.startswith(prefix) else b" " + text.encode()
