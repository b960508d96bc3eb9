"""Files are complete or absent, and on disk when this is reported."""

import errno
import os
import stat
from pathlib import Path

import pytest

from dist_transformer.base import files
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import (
    folder_beside,
    log_lines,
    move,
    remove_unfinished,
    whole_path,
    write_file,
)


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


def test_lines_of_a_log_come_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"one\n\xff\x85\r\n\nlast")
    assert list(log_lines(file)) == ["one\n", "\ufffd\ufffd\r\n", "\n", "last"]
    assert list(log_lines(file, in_progress=True)) == ["one\n", "\ufffd\ufffd\r\n", "\n"]


def test_a_write_that_fails_names_the_path_as_it_was_given(tmp_path: Path) -> None:
    """One sentence for people, and an OSError with its number for programs; what cannot be read is another error."""
    place, out = tmp_path / "none" / "a.json", tmp_path / "out"
    with pytest.raises(UserError) as failed:
        write_file(place, "x")
    assert str(failed.value) == f"{place} cannot be written (No such file or directory): choose another place"
    assert (isinstance(failed.value, OSError), failed.value.errno) == (True, errno.ENOENT)
    with pytest.raises(UserError, match=rf"^{out} cannot be written"), folder_beside(out) as folder:
        write_file(folder / "none" / "a.json", "x")
    with pytest.raises(FileNotFoundError, match="source"), whole_path(tmp_path / "b") as beside:
        beside.write_bytes((tmp_path / "source").read_bytes())
    assert [*tmp_path.iterdir()] == []
