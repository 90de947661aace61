"""Every error that rolltape raises on purpose.

    RolltapeError                 base; `str()` is one line, `hint` says what to do
    ├── UsageError                a wrong option, switch or combination of them
    ├── TapeError                 something about a tape or report on disk
    │   ├── NotATapeError         the folder is not a tape or report
    │   ├── NewerFormatError      written by a newer major version of the format
    │   ├── DamagedShardError     a shard whose bytes are not what was written
    │   ├── TapeExistsError       the output exists already
    │   ├── StorageError          a disk or an object store that does not answer
    │   ├── TapeFullError         --max-bytes is reached
    │   └── SchemaError           a value that the format cannot hold
    ├── ModelMismatchError        the model is not the one of the tape
    └── ForcingError              forced values that cannot be applied faithfully

The command line turns any of them into one line on stderr and exit status 2.
"""

from __future__ import annotations


class RolltapeError(Exception):
    """Base of all errors raised by rolltape.

    Args:
        message: what is wrong, naming file, row and field where there are any.
        hint: what the user can do about it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(RolltapeError):
    """A wrong option, switch or combination of them."""


class TapeError(RolltapeError):
    """Something is wrong with a tape or report on disk."""


class NotATapeError(TapeError):
    """The path is not a tape or a report."""


class NewerFormatError(TapeError):
    """The tape was written by a newer major version of the format."""


class DamagedShardError(TapeError):
    """The bytes of a shard are not what was written."""


class TapeExistsError(TapeError):
    """The output exists already; nothing is ever overwritten."""


class StorageError(TapeError):
    """A disk or an object store refuses or does not answer."""


class TapeFullError(TapeError):
    """The tape has reached the size at which recording is to stop."""


class SchemaError(TapeError):
    """A value that the tape format cannot hold."""


class ModelMismatchError(RolltapeError):
    """The model given for a replay is not the one of the tape."""


class ForcingError(RolltapeError):
    """Forced values cannot be applied faithfully to this model."""
