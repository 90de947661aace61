"""Notes on tokens and sequences in a JSON file: the one thing that the viewer ever writes.

The file is written whole, under another name first, and only if it still holds what the writer had
read. Without a file there is no address that writes.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rolltape.store.errors import UsageError
from rolltape.viewer.answers import Problem, bad_parameter

#: A larger body is refused.
MAX_BYTES = 1 << 20
_MAX_ITEMS = 2000
#: Members of an item and the characters that each may have; `tok` is a position.
_TEXTS = {"run": 256, "seq": 256, "rep": 256, "hash": 2048, "name": 512, "note": 20_000, "at": 64}


class Notes:
    """The file.

    Args:
        path: where; it need not be there yet, its folder must.

    Raises:
        UsageError: it cannot be one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        if not path.parent.is_dir():
            raise UsageError(f"--notes {path}: no such folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"--notes {path} is a folder", hint="name a JSON file in it")
        self.read()

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Items, and the tag of the content that they are from.

        Raises:
            UsageError: the file is not one of notes.
        """
        data = self._bytes()
        try:
            value = json.loads(data) if data else {"items": []}
            items = checked(value)
        except (ValueError, RecursionError, Problem) as error:
            text = str(error) or type(error).__name__
            raise UsageError(
                f"{self.path} is not a file of notes: {text}", hint="choose another --notes FILE"
            ) from error
        return items, _tag(data)

    def write(self, value: Any, tag: str | None) -> str:
        """Write items, if the file is still what `tag` was given for; the tag of the new content.

        Raises:
            Problem: 400 not items; 409 the file has changed; 428 no tag.
        """
        items = checked(value)
        if tag is None:
            raise Problem(
                428, "precondition required", "If-Match: the ETag of the notes as they were read"
            )
        data = json.dumps({"items": items}, ensure_ascii=False, indent=1).encode() + b"\n"
        with self._lock:
            if tag != _tag(self._bytes()):
                raise Problem(
                    409,
                    "the notes have changed",
                    f"{self.path.name} was changed since it was read; read it again and merge",
                )
            self._replace(data)
        return _tag(data)

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def _replace(self, data: bytes) -> None:
        # through a symbolic link: the link stays
        target = self.path.resolve()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
            os.chmod(name, mode)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise


def _tag(data: bytes) -> str:
    return f'"{xxhash.xxh3_128_hexdigest(data)}"'


def checked(value: Any) -> list[dict[str, Any]]:
    """The items of `{"items": [...]}`, with nothing in them but what items have.

    Raises:
        Problem: 400, naming the member.
    """
    items = value.get("items") if isinstance(value, Mapping) else None
    if not isinstance(items, list):
        raise bad_parameter("items", "an object with a list of items")
    if len(items) > _MAX_ITEMS:
        raise bad_parameter("items", f"{len(items)}, at most {_MAX_ITEMS}")
    return [_item(item, f"items[{k}]") for k, item in enumerate(items)]


def _item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise bad_parameter(where, "not an object")
    found: dict[str, Any] = {}
    for name, most in _TEXTS.items():
        text = item.get(name)
        if text is None and name not in ("run", "hash"):
            continue
        if not isinstance(text, str) or len(text) > most or not _is_plain(text):
            raise bad_parameter(f"{where}.{name}", f"text of at most {most} characters")
        found[name] = text
    if not found["hash"].startswith("#/run/"):
        raise bad_parameter(f"{where}.hash", "an address within the viewer, #/run/...")
    tok = item.get("tok")
    if tok is not None:
        if isinstance(tok, bool) or not isinstance(tok, int) or not 0 <= tok < 1 << 31:
            raise bad_parameter(f"{where}.tok", "a position")
        found["tok"] = tok
    return found


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return "\0" not in text
