"""Where tapes lie: whole files or none, links kept out, options of object stores understood."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow.fs as fs
import pytest

from rolltape.store import StorageError, TapeExistsError, UsageError, create_tape
from rolltape.store import places as places_module
from rolltape.store.places import LocalPlace, ObjectPlace, Place, place_of
from rolltape.store.writer import put_json


def object_place(tmp_path: Path) -> ObjectPlace:
    return ObjectPlace(fs.LocalFileSystem(), str(tmp_path / "store" / "prefix"), "x://store/prefix")


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return LocalPlace(tmp_path / "folder")
    return object_place(tmp_path)


def test_files_come_back_as_they_were_put(place: Place) -> None:
    assert place.files() == {} and place.folders() == [] and place.files("tokens") == {}
    place.put("tape.json", b"{}")
    place.put("tokens/a", b"12345")
    place.put("tokens/b", b"")
    assert place.files() == {"tape.json": 2} and place.folders() == ["tokens"]
    assert place.files("tokens") == {"a": 5, "b": 0}
    assert place.read("tokens/a") == b"12345" and place.nbytes() == 7
    assert place.open("tokens/a").read_at(2, 1) == b"23"
    assert place.open("tokens/b").size() == 0
    assert place.exists("tape.json") and not place.exists("tokens") and not place.exists("x")
    place.put("tokens/a", b"new")
    assert place.read("tokens/a") == b"new"
    place.remove("tokens/a")
    place.remove("tokens/a")
    assert list(place.files("tokens")) == ["b"]


@pytest.mark.parametrize("method", ["read", "open"])
def test_what_is_not_there_is_told_apart_from_what_fails(place: Place, method: str) -> None:
    with pytest.raises(FileNotFoundError):
        getattr(place, method)("tokens/a")


def test_no_trace_of_a_put_that_failed(tmp_path: Path, monkeypatch: Any) -> None:
    place = LocalPlace(tmp_path)
    place.put("a", b"old")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        place.put("a", b"new")
    assert str(tmp_path / "a") in str(caught.value)
    assert place.files() == {"a": 3} and place.read("a") == b"old"


def test_a_put_may_also_survive_power_loss(place: Place, monkeypatch: Any) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    place.put("folder/a", b"1")
    assert synced == []
    place.put("folder/a", b"2", fsync=True)
    assert place.read("folder/a") == b"2"
    if isinstance(place, LocalPlace):  # the file before it got its name, then the folders
        file, *folders = synced
        assert Path(file).name.startswith(".a.")
        assert folders == [str(place.path / "folder"), str(place.path)]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    stop = threading.Event()

    def write() -> None:
        for i in range(300):
            place.put("a", bytes([i % 250]) * 50_000)
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not stop.is_set():
        if place.exists("a"):
            data = place.read("a")
            assert len(data) == 50_000 and len(set(data)) == 1
            seen += 1
    thread.join()
    assert seen


def test_only_one_of_many_makes_a_file(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    made: list[int] = []
    barrier = threading.Barrier(8)

    def make(number: int) -> None:
        barrier.wait()
        try:
            put_json(place, "tape.json", {"number": number}, exclusive=True)
        except TapeExistsError:
            return
        made.append(number)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and list(place.files()) == ["tape.json"]
    assert f'"number": {made[0]}' in place.read("tape.json").decode()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        LocalPlace(tmp_path / "file").put("a/b", b"")
    with pytest.raises(StorageError, match="Not a directory"):
        LocalPlace(tmp_path / "file").folders()
    for path in (tmp_path / "file" / "tape", tmp_path / "file"):
        with pytest.raises(Exception, match="file") as caught:
            create_tape(path, role="rollout")
        assert "\n" not in str(caught.value)


def test_folders_that_are_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("x")
    place = LocalPlace(tmp_path / "tape")
    place.put("tape.json", b"{}")
    (tmp_path / "tape" / "tokens").symlink_to(tmp_path / "elsewhere")
    assert place.folders() == []
    with pytest.raises(StorageError, match="is a link to another folder"):
        place.files("tokens")


def test_devices_and_pipes_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    place = LocalPlace(tmp_path)
    assert place.files() == {}
    for name in ("pipe", "zero"):
        with pytest.raises(StorageError, match="not a regular file"):
            place.read(name)
        with pytest.raises(StorageError, match="not a regular file"):
            place.open(name)


def test_a_live_shard_is_not_mapped_since_its_writer_may_cut_it(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    place.put("a.arrow.live", b"x" * 100_000)
    file = place.open("a.arrow.live")
    os.truncate(tmp_path / "a.arrow.live", 10)
    assert file.read_at(100, 50_000) == b""  # mapped, this would end the process


class Broken(fs.FileSystemHandler):
    """A store that answers nothing."""

    def get_type_name(self) -> str:
        return "broken"

    def normalize_path(self, path: str) -> str:
        return path

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no answer\nafter three attempts")

    get_file_info = get_file_info_selector = create_dir = delete_dir = _fail
    delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _fail
    open_input_stream = open_input_file = open_output_stream = open_append_stream = _fail


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.files(),
        lambda p: p.folders(),
        lambda p: p.exists("a"),
        lambda p: p.read("a"),
        lambda p: p.open("a"),
        lambda p: p.put("a", b""),
        lambda p: p.remove("a"),
    ],
)
def test_a_store_that_does_not_answer_is_one_line(call: Any) -> None:
    place = ObjectPlace(fs.PyFileSystem(Broken()), "bucket/prefix", "x://bucket/prefix")
    with pytest.raises(StorageError, match="no answer") as caught:
        call(place)
    assert "\n" not in str(caught.value) and "x://bucket/prefix" in str(caught.value)


# -- URLs ---------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: Any) -> dict[str, Any]:
    """What the S3 client was made with."""
    seen: dict[str, Any] = {}
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)

    class Client(fs.S3FileSystem):
        def __init__(self, **options: Any) -> None:
            seen.update(options)
            super().__init__(**options)

    monkeypatch.setattr(places_module.fs, "S3FileSystem", Client)
    return seen


def test_a_store_that_does_not_answer_is_noticed_in_seconds(s3: dict[str, Any]) -> None:
    place_of("s3://bucket/a/b", {"region": "eu-west-1"})
    assert s3["connect_timeout"] == 3 and s3["request_timeout"] == 5
    assert s3["retry_strategy"].max_attempts == 3 and s3["region"] == "eu-west-1"
    assert s3["background_writes"] is False


def test_options_come_as_text_from_the_command_line(s3: dict[str, Any]) -> None:
    options = {
        "region": "eu-west-1",
        "request_timeout": "0.5",
        "max_attempts": "7",
        "anonymous": "true",
    }
    place_of("s3://bucket/a", options)
    assert s3["request_timeout"] == 0.5 and s3["anonymous"] is True
    assert s3["retry_strategy"].max_attempts == 7


def test_options_in_the_url_and_in_the_environment(s3: dict[str, Any], monkeypatch: Any) -> None:
    place = place_of("s3://me:p%2Fw@bucket/a/b/?endpoint_override=localhost:1&scheme=http")
    assert isinstance(place, ObjectPlace)
    assert (place.base, str(place), place.name) == ("bucket/a/b", "s3://bucket/a/b", "b")
    assert (s3["access_key"], s3["secret_key"]) == ("me", "p/w")
    assert (s3["endpoint_override"], s3["scheme"]) == ("localhost:1", "http")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:2")
    place_of("s3://bucket/a")
    assert s3["endpoint_override"] == "http://localhost:2"


def test_a_hash_is_part_of_a_key(s3: dict[str, Any]) -> None:
    place = place_of("s3://bucket/runs/a#2?region=eu-west-1")
    assert isinstance(place, ObjectPlace) and s3["region"] == "eu-west-1"
    assert (place.base, str(place)) == ("bucket/runs/a#2", "s3://bucket/runs/a#2")
    google = place_of("gs://anonymous@bucket/runs/a#2")
    assert isinstance(google, ObjectPlace) and google.base == "bucket/runs/a#2"


def test_a_file_url_may_quote_any_character() -> None:
    place = place_of("file:///runs/a%20b%3Fc#d")
    assert isinstance(place, LocalPlace) and place.path == Path("/runs/a b?c#d")


@pytest.mark.parametrize(
    ("uri", "options", "match"),
    [
        ("runs/a", {"region": "x"}, "this is a local path"),
        ("s3://bucket/a", {"no_such_option": "x", "region": "r"}, "no_such_option"),
        ("s3://bucket/a", {"request_timeout": "soon"}, "could not convert"),
        ("s3:///a", {}, "no bucket"),
        ("nosuch://bucket/a", {}, "nosuch"),
    ],
)
def test_what_cannot_be_a_place_is_one_line(uri: str, options: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        place_of(uri, options)
    assert "\n" not in str(caught.value)
