"""A tape by its name, so that every process opens it for itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rolltape.store.errors import UsageError
from rolltape.store.places import LocalPlace
from rolltape.store.sequences import Tape, open_tape

Uri = str | os.PathLike[str]


class Source:
    """A tape that is opened where it is first used, once in each process; picklable.

    Args:
        uri: path or URL.
        storage_options: see `rolltape.store.open`.
        version: see `rolltape.store.open`.
    """

    def __init__(
        self, uri: Uri, storage_options: Mapping[str, Any] | None, version: int | None = None
    ) -> None:
        self.uri = os.fspath(uri)
        self.storage_options = dict(storage_options) if storage_options else None
        self.version = version
        self._tape: Tape | None = None
        self._process = 0

    @classmethod
    def of(cls, tape: Tape | Uri, storage_options: Mapping[str, Any] | None) -> Source:
        """From a name, or from a tape that is open.

        Raises:
            UsageError: an open tape that lies in an object store.
        """
        if not isinstance(tape, Tape):
            return cls(tape, storage_options)
        if not isinstance(tape.place, LocalPlace):
            raise UsageError(
                f"{tape.place}: workers have to open it themselves",
                hint="give its URL and storage_options instead of the open tape",
            )
        return cls(tape.path, None, tape.version)

    @property
    def tape(self) -> Tape:
        """The tape, opened in this process."""
        if self._tape is None or self._process != os.getpid():
            self._tape = open_tape(
                self.uri, storage_options=self.storage_options, version=self.version
            )
            self._process = os.getpid()
        return self._tape

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tape": None}
