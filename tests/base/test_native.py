"""C++ sources compiled at first use: by several processes at once, beside damaged files, in folders of strangers."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_transformer.base import native
from dist_transformer.base.native import load_native

SOURCE = 'extern "C" int answer() { return 42; }\n'
ASK = (
    "import sys; from dist_transformer.base.native import load_native\n"
    "library = load_native(sys.argv[1], slower='it'); print(library and library.answer())"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    path = tmp_path / "one.cpp"
    path.write_text(SOURCE)
    return path


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.so"))


def answer(source: Path) -> int:
    library = load_native(str(source), slower="it")
    assert library is not None
    return int(library.answer())


def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    assert answer(source) == 42
    (first,) = libraries(tmp_path)
    assert stat.S_IMODE(first.parent.stat().st_mode) & 0o077 == 0, "its user's alone"
    made = first.stat().st_mtime_ns
    assert answer(source) == 42
    assert first.stat().st_mtime_ns == made, "compiled once"
    source.write_text(SOURCE.replace("42", "43"))
    assert answer(source) == 43
    assert len(libraries(tmp_path)) == 2


@pytest.mark.system
def test_several_processes_compile_at_once(source: Path, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", ASK, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [rank.communicate(timeout=600)[0] for rank in ranks] == ["42\n"] * 3
    (library,) = libraries(tmp_path)
    assert list(library.parent.iterdir()) == [library], "nothing temporary stays"


@pytest.mark.system
def test_a_killed_compilation_blocks_nobody(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { : >"$0.begun"; sleep 60; }\necho 1\n')
    compiler.chmod(0o755)
    killed = subprocess.Popen([sys.executable, "-c", ASK, str(source)], env={**os.environ, "CXX": str(compiler)})
    deadline = time.monotonic() + 600
    while not Path(f"{compiler}.begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert answer(source) == 42


def test_a_damaged_library_is_compiled_again(source: Path, tmp_path: Path) -> None:
    # Loaded by nobody yet: the loader knows a file by its name.
    subprocess.run([sys.executable, "-c", ASK, str(source)], check=True, stdout=subprocess.DEVNULL, timeout=600)
    (library,) = libraries(tmp_path)
    library.write_bytes(b"")
    assert answer(source) == 42
    assert library.stat().st_size > 1000


def test_a_folder_that_others_may_write_is_not_trusted(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "dist_transformer" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert answer(source) == 42
    assert libraries(tmp_path) == []


def test_what_does_not_compile_is_said_with_the_compiler_s_words(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text("int broken(")
    assert load_native(str(source), slower="it") is None
    assert libraries(tmp_path) == []
    said = capsys.readouterr().err
    assert said.startswith("note: one.cpp cannot be compiled (")
    assert "one.cpp:1:" in said
    assert said.endswith("), so it is slower\n")


def test_no_compiler_has_a_remedy(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert load_native(str(source), slower="it") is None
    assert (
        "(no C++ compiler: on Debian and Ubuntu, apt-get install g++ installs one), so it is" in capsys.readouterr().err
    )


def test_a_compiler_that_hangs(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = source.with_name("slow")
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "a warning" >&2; exec sleep 9; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "_SECONDS", 1)
    assert load_native(str(source), slower="it") is None
    assert "slow took more than 1 seconds), so it" in capsys.readouterr().err
