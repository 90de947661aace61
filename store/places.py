"""Where a tape lies: a local folder, or a prefix in an object store. One small interface.

Names are relative, with slashes: `tape.json`, `tokens/<shard>`. A file is put whole or not at
all, and no name is ever used for two contents, so that readers need no locks.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from rolltape.store.errors import StorageError, UsageError

#: What is set for S3 unless the options say otherwise, so that a store which does not answer is
#: noticed in seconds: seconds to connect, seconds without a byte, attempts of the client within
#: one call.
S3_DEFAULTS = {"connect_timeout": 3.0, "request_timeout": 5.0, "max_attempts": 3}
# a put that returns is done, and a small one is a single request
_S3_ALWAYS = {"background_writes": False, "allow_delayed_open": True}
_S3_NUMBERS = ("connect_timeout", "request_timeout", "max_attempts", "load_frequency")
_S3_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")


class Place(Protocol):
    """A folder of files. `str()` of it is what people typed."""

    @property
    def name(self) -> str:
        """Last part of the path."""

    def folders(self) -> list[str]:
        """Names of the folders directly in it, sorted."""

    def nbytes(self) -> int:
        """Bytes of all files in it and in the folders directly in it."""

    def files(self, folder: str = "") -> dict[str, int]:
        """Sizes in bytes of the files directly in a folder, by file name; empty if it is absent.

        Raises:
            StorageError: it cannot be listed, or is a link that leads elsewhere.
        """

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def read(self, name: str) -> bytes:
        """A whole file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it cannot be read.
        """

    def open(self, name: str) -> pa.NativeFile:
        """A file for random access; memory-mapped where that is safe.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it cannot be read.
        """

    def put(self, name: str, data: bytes | pa.Buffer, *, fsync: bool = False) -> None:
        """Write a file so that it is there in full or not at all.

        Args:
            name: of the file.
            data: its content.
            fsync: in a folder, also survive power loss; an object store always does.

        Raises:
            StorageError: it could not be written.
        """

    def remove(self, name: str) -> None:
        """Remove a file; no error if it is gone."""


class LocalPlace:
    """A folder of this machine.

    Args:
        path: the folder; need not exist yet.
        mapped: map files into memory where that is safe, for buffers that are stored as they are.
            Else what is read is copied, and files that are open take no memory.

    Files in it may be links, as caches of downloads make them; folders in it may not, so that
    nothing is ever listed, written or removed elsewhere.
    """

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        self.path = path
        self.mapped = mapped

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.name

    def nbytes(self) -> int:
        """See `Place`."""
        return _nbytes(self)

    def folders(self) -> list[str]:
        """See `Place`."""
        try:
            return sorted(p.name for p in os.scandir(self.path) if p.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}") from error

    def files(self, folder: str = "") -> dict[str, int]:
        """See `Place`."""
        where = self.path / folder
        if folder and where.is_symlink():
            raise StorageError(f"{where} is a link to another folder", hint="copy that one here")
        found = {}
        try:
            entries = list(os.scandir(where))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise StorageError(f"{where}: {error.strerror or error}") from error
        for entry in entries:
            # a shard may get its final name between the listing and the look at its size
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def exists(self, name: str) -> bool:
        """See `Place`."""
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        """See `Place`."""
        path = self.path / name
        with _local_errors(path):
            _regular(path)
            return path.read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        """See `Place`."""
        path = self.path / name
        with _local_errors(path):
            # An empty file cannot be mapped, and one that is still being written must not be: its
            # writer cuts off what it could not finish.
            if not _regular(path):
                return pa.BufferReader(b"")
            if name.endswith(".live") or not self.mapped:
                return pa.OSFile(str(path))
            return pa.memory_map(str(path))

    def put(self, name: str, data: bytes | pa.Buffer, *, fsync: bool = False) -> None:
        """See `Place`."""
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    if fsync:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(temporary, path)
                if fsync:
                    sync_folder(path.parent)
                    if path.parent != self.path:  # it may be new, too
                        sync_folder(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error

    def remove(self, name: str) -> None:
        """See `Place`."""
        with contextlib.suppress(FileNotFoundError), _local_errors(self.path / name):
            (self.path / name).unlink()


class ObjectPlace:
    """A prefix in an object store, over any `pyarrow.fs` file system.

    Args:
        filesystem: the store.
        base: bucket and prefix, without a slash at the end.
        uri: what people typed.
    """

    def __init__(self, filesystem: fs.FileSystem, base: str, uri: str) -> None:
        self.filesystem = filesystem
        self.base = base.rstrip("/")
        self.uri = uri

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """Last part of the prefix."""
        return self.base.rpartition("/")[2]

    def nbytes(self) -> int:
        """See `Place`."""
        return _nbytes(self)

    def folders(self) -> list[str]:
        """See `Place`."""
        return sorted(i.base_name for i in self._infos("") if i.type == fs.FileType.Directory)

    def files(self, folder: str = "") -> dict[str, int]:
        """See `Place`."""
        return {i.base_name: i.size for i in self._infos(folder) if i.type == fs.FileType.File}

    def _infos(self, folder: str) -> list[Any]:
        where = f"{self.base}/{folder}".rstrip("/")
        with _remote_errors(f"{self.uri}/{folder}"):
            infos: list[Any] = self.filesystem.get_file_info(
                fs.FileSelector(where, allow_not_found=True)
            )
        return infos

    def exists(self, name: str) -> bool:
        """See `Place`."""
        with _remote_errors(f"{self.uri}/{name}"):
            info = self.filesystem.get_file_info(f"{self.base}/{name}")
        return bool(info.type == fs.FileType.File)

    def read(self, name: str) -> bytes:
        """See `Place`."""
        with (
            _remote_errors(f"{self.uri}/{name}"),
            self.filesystem.open_input_file(f"{self.base}/{name}") as file,
        ):
            data: bytes = file.read()
        return data

    def open(self, name: str) -> pa.NativeFile:
        """See `Place`."""
        with _remote_errors(f"{self.uri}/{name}"):
            return self.filesystem.open_input_file(f"{self.base}/{name}")

    def put(self, name: str, data: bytes | pa.Buffer, *, fsync: bool = False) -> None:
        """See `Place`; an object appears when its upload is complete."""
        with _remote_errors(f"{self.uri}/{name}"):
            try:
                self._put(name, data)
            except FileNotFoundError:
                # a file system with real folders behind the interface
                self.filesystem.create_dir(f"{self.base}/{name}".rpartition("/")[0])
                self._put(name, data)

    def _put(self, name: str, data: bytes | pa.Buffer) -> None:
        with self.filesystem.open_output_stream(f"{self.base}/{name}") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """See `Place`."""
        with _remote_errors(f"{self.uri}/{name}"), contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.base}/{name}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _regular(path: Path) -> int:
    """Size of a file; reading a device or a pipe would have no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path}: not a regular file")
    return status.st_size


def _nbytes(place: Place) -> int:
    return sum(sum(place.files(folder).values()) for folder in ["", *place.folders()])


def place_of(
    uri: str | os.PathLike[str] | LocalPlace | ObjectPlace,
    storage_options: Mapping[str, Any] | None = None,
) -> LocalPlace | ObjectPlace:
    """The place that a path or URL names.

    Args:
        uri: a local path, a URL that pyarrow knows (`s3://bucket/prefix`, `gs://`, with options
            as its query: `?endpoint_override=...&scheme=http`), or one that fsspec knows. `#` is
            part of the name in all of them.
        storage_options: keyword arguments of the file system: of `pyarrow.fs.S3FileSystem` for
            s3 (`endpoint_override`, `region`, `access_key`, `connect_timeout`, ..., and
            `max_attempts` of one call; see `S3_DEFAULTS`), else of the fsspec one. Texts are
            taken for numbers and booleans where those are meant.

    Raises:
        UsageError: nothing here knows such URLs, or the options do not fit.
    """
    if isinstance(uri, LocalPlace | ObjectPlace):
        return uri
    text = os.fspath(uri)
    options = dict(storage_options or {})
    if "://" not in text:
        if options:
            raise UsageError(f"{text}: storage options are for URLs, this is a local path")
        return LocalPlace(Path(text))
    if text.startswith("file://") and not options:
        return LocalPlace(Path(unquote(urlsplit(text, allow_fragments=False).path)))
    scheme, _, rest = text.partition("?")[0].rstrip("/").partition("://")
    bucket, slash, path = rest.partition("/")
    # the query may hold keys, and so may what stands before the bucket
    shown = f"{scheme}://{bucket.rpartition('@')[2]}{slash}{path}"
    filesystem, base = _filesystem(text, options)
    return ObjectPlace(filesystem, base, shown)


def _filesystem(uri: str, options: dict[str, Any]) -> tuple[fs.FileSystem, str]:
    scheme = uri.partition("://")[0]
    try:
        if scheme == "s3":
            return _s3(uri, options)
        if scheme in ("gs", "gcs", "hdfs", "abfs", "abfss") and not options:
            # pyarrow would cut off a fragment
            filesystem, path = fs.FileSystem.from_uri(uri.replace("#", "%23"))
            return filesystem, path
        import fsspec
    except ImportError as error:
        raise UsageError(f"{scheme}:// needs fsspec", hint="pip install fsspec") from error
    except (pa.ArrowInvalid, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{scheme}://: {str(error).splitlines()[0]}") from error
    try:
        filesystem, path = fsspec.core.url_to_fs(uri, **options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{scheme}://: {str(error).splitlines()[0]}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path


def _s3(uri: str, options: Mapping[str, Any]) -> tuple[fs.FileSystem, str]:
    """What `pyarrow.fs.FileSystem.from_uri` does, with our timeouts."""
    parts = urlsplit(uri, allow_fragments=False)
    known: dict[str, Any] = {**_S3_ALWAYS, **S3_DEFAULTS}
    if parts.username:
        known["access_key"] = unquote(parts.username)
        known["secret_key"] = unquote(parts.password or "")
    for name, value in {**dict(parse_qsl(parts.query)), **options}.items():
        if name in _S3_NUMBERS:
            value = float(value)
        elif isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        known[name] = value
    bucket = parts.netloc.rpartition("@")[2]
    base = f"{bucket}{parts.path}"
    if not bucket:
        raise ValueError("no bucket in the URL")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        known.setdefault("endpoint_override", endpoint)
    if not {"region", "endpoint_override"} & set(known) and not any(map(os.getenv, _S3_REGION)):
        with contextlib.suppress(OSError):  # it will say so itself when it is used
            known["region"] = fs.resolve_s3_region(bucket)
    attempts = int(known.pop("max_attempts"))
    strategy = fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
    return fs.S3FileSystem(**{"retry_strategy": strategy, **known}), base


def unused(path: Path) -> Path:
    """The path, or with the first number behind it under which there is nothing: `a`, `a-2`."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


@contextlib.contextmanager
def _local_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _remote_errors(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{where}: {str(error).splitlines()[0]}") from error
