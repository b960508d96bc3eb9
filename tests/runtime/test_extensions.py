"""Code of a user that is imported before a command runs."""

import sys
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import run
from dist_transformer.runtime.extensions import import_extension

# Each run adds a line to a file beside it.
CODE = "import pathlib\nwith (pathlib.Path(__file__).parent / 'runs').open('a') as file:\n    print(1, file=file)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # A loaded module has the same name; the file is imported nevertheless.
    for name in ("json.py", "my_own_schedule.py"):
        (tmp_path / name).write_text(CODE, encoding="utf-8")
    return tmp_path


def test_a_file_is_imported_once_whatever_its_name(folder: Path) -> None:
    import_extension("json.py")
    import_extension(str(folder / "json.py"))
    assert (folder / "runs").read_text() == "1\n"
    import json

    assert json.loads("[1]") == [1]


def test_a_module_of_the_current_folder(folder: Path) -> None:
    run(["help"])
    assert not (folder / "runs").exists()
    with pytest.raises(SystemExit, match="0"):
        run(["verify", "--import", "my_own_schedule", "--help"])
    assert (folder / "runs").read_text() == "1\n"
    del sys.modules["my_own_schedule"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.py", "--import absent.py does not exist: check the path"),
        ("absent", "--import absent names no module here: pass the name of a module, or FILE.py"),
        ("absent.inner", "--import absent.inner names no module here: pass the name of a module, or FILE.py"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_absent_is_named(name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        import_extension(name)
    assert str(error.value) == said


def test_an_error_in_the_users_code_is_theirs(folder: Path) -> None:
    """A library that their module lacks is not the module that is missing."""
    (folder / "lacks_a_library.py").write_text("import no_such_library\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_extension("lacks_a_library")
