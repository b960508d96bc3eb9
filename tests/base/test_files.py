"""Files are complete or absent, on disk when this is reported, and never written through a link."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.base import files
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import (
    LINE_BYTES,
    append_to,
    folder_beside,
    is_pickle,
    log_lines,
    make_folder,
    move,
    read_small,
    regular,
    remove,
    remove_tree,
    remove_unfinished,
    sha256_of,
    whole_path,
    write_file,
    write_new,
)
from dist_transformer.base.links import guard
from dist_transformer.base.locks import exclusive


def test_content_is_flushed_before_its_name_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power at any moment leaves the old file or the new one."""
    calls: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        calls.append(("fsync", "folder" if place == tmp_path else "new file"))
        real_fsync(handle)

    def replace(source: Path, target: Path) -> Path:
        calls.append(("rename", target.name))
        return real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_file(tmp_path / "config.json", "new")
    assert calls == [("fsync", "new file"), ("rename", "config.json"), ("fsync", "folder")]
    assert (tmp_path / "config.json").read_text() == "new"


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail() -> None:
        with whole_path(file) as beside:
            beside.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    write_file(tmp_path / "file", "ours")
    assert (tmp_path / "other").read_text() == "theirs"
    assert not (tmp_path / "file").is_symlink()


def test_a_name_that_is_taken_beside_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may write in the folder, and guesses the name, could put a link there."""

    class Guessed:
        hex = "0"

    monkeypatch.setattr(files.uuid, "uuid4", Guessed)
    (tmp_path / "secret").write_text("theirs")
    (tmp_path / ".file.0.tmp").symlink_to(tmp_path / "secret")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", "ours")
    assert (tmp_path / "secret").read_text() == "theirs"


def test_additions_and_locks_refuse_links(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    refused = r"file is a link, a folder, a pipe or a device, so it is not written: remove it$"
    with pytest.raises(UserError, match=refused):
        append_to(tmp_path / "file")
    with pytest.raises(UserError, match=refused), exclusive(tmp_path / "file"):
        pass
    assert (tmp_path / "other").read_text() == "theirs"


def test_pipes_are_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for action in (append_to, lambda path: exclusive(path).__enter__(), lambda path: write_file(path, "ours")):
        with pytest.raises(UserError, match=r"pipe is a .*device.*: remove it"):
            action(pipe)
    for action in (read_small, sha256_of, regular, is_pickle, lambda path: next(log_lines(path))):
        with pytest.raises(OSError, match="it is a pipe or a device, not a regular file"):
            action(pipe)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_devices_are_not_read_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a pipe or a device, not a regular file"):
        next(log_lines(tmp_path / "file"))


@pytest.fixture
def guarded(tmp_path: Path) -> Path:
    """A folder that is reached by a link, and in it a link `inner` to the folder `theirs`, which holds `file`."""
    for name in ("real", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    (tmp_path / "ours").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "inner").symlink_to(tmp_path / "theirs")
    guard(tmp_path / "ours")
    return tmp_path / "ours"


WRITES: dict[str, Callable[[Path], object]] = {
    "write": lambda path: write_file(path, "ours"),
    "write new": lambda path: write_new(path.with_name("other"), "ours"),
    "append": append_to,
    "lock": lambda path: exclusive(path).__enter__(),
    "move away": lambda path: move(path, path.parents[1] / "taken"),
    "move there": lambda path: move(path.parents[1] / "own", path),
    "remove": remove,
    "remove a folder": lambda path: remove_tree(path.with_name("folder")),
    "remove unfinished": lambda path: remove_unfinished(path.parent),
    "make a folder": lambda path: make_folder(path.with_name("other")),
    "make the folder": lambda path: make_folder(path.parent),
    "make a hidden folder": lambda path: folder_beside(path).__enter__(),
}


@pytest.mark.parametrize("action", WRITES)
def test_no_link_below_a_guarded_folder_is_passed(action: str, guarded: Path) -> None:
    theirs = guarded.parent / "theirs"
    (guarded / "own").write_text("ours")
    (theirs / ".file.0.tmp").touch()
    (theirs / "folder").mkdir()
    with pytest.raises(
        UserError, match=r"inner is a link, and nothing is written or removed through links: put a real"
    ):
        WRITES[action](guarded / "inner" / "file")
    assert sorted(path.name for path in theirs.iterdir()) == [".file.0.tmp", "file", "folder"]
    assert (theirs / "file").read_text() == "theirs"
    assert [path.name for path in sorted(guarded.iterdir())] == ["inner", "own"]


def test_a_guarded_folder_may_be_a_link(guarded: Path) -> None:
    make_folder(guarded / "sub")
    write_file(guarded / "sub" / "file", "ours")
    with append_to(guarded / "log") as file:
        file.write(b"ours")
    remove(guarded / "inner")
    assert (guarded.parent / "theirs" / "file").read_text() == "theirs"
    remove_tree(guarded / "sub")
    assert [path.name for path in guarded.iterdir()] == ["log"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Write to a pipe, as `--json /dev/stdout` does."""
    reading, writing = os.pipe()
    write_file(Path(f"/proc/self/fd/{writing}"), "text")
    os.close(writing)
    assert os.read(reading, 10) == b"text"
    os.close(reading)


def test_rights_are_those_of_a_new_file(tmp_path: Path, umask: int) -> None:
    """Also where a library writes a file of its own beside, for its owner alone, and renames it."""
    with whole_path(tmp_path / "file") as beside:
        own = tmp_path / "library"
        own.write_text("content")
        own.chmod(0o600)
        own.rename(beside)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for name in (".a.0123.tmp", ".b.0123.tmp", "a", "a.tmp"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.0123.tmp", "a", "a.tmp"]


def test_a_rename_is_on_disk_in_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = set[Path]()
    monkeypatch.setattr(files, "sync", flushed.add)
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").touch()
    move(tmp_path / "from" / "file", tmp_path / "to" / "file")
    assert flushed == {tmp_path / "from", tmp_path / "to"}


def test_a_small_file_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_small(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="at most 4 are expected"):
        read_small(tmp_path / "file", most=4)


def test_lines_of_a_log_come_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"one\n\xff\x85\r\n\nlast")
    assert list(log_lines(file)) == ["one\n", "\ufffd\ufffd\r\n", "\n", "last"]
    assert list(log_lines(file, in_progress=True)) == ["one\n", "\ufffd\ufffd\r\n", "\n"]
    file.write_bytes(b"one\n" + b"x" * LINE_BYTES + b"\n" + b"y" * LINE_BYTES + b"z\nnever read\n")
    assert list(map(len, log_lines(file))) == [4, LINE_BYTES + 1, LINE_BYTES + 1]
