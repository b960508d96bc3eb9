"""Models of the hub, over HTTP from a local stand-in."""

import json
from pathlib import Path

import pytest

from dist_transformer.model_folder import no_model
from dist_transformer.runtime.launch import as_typed, own_command
from tests.conftest import run_python
from tests.hub_server import BRANCHES, serve_hub

NAME = "org/opus-mt-en-de"
FIND = "import sys; from pathlib import Path; from dist_transformer.export.hub import find_folder; \
print(find_folder(Path(sys.argv[1])))"
PUSH = "import sys; from pathlib import Path; from dist_transformer.export.hub import push; \
print(push(Path(sys.argv[1]), sys.argv[2]))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "opus"
    path.mkdir()
    for name in ("README.md", "config.json", "source.spm", "tf_model.h5"):
        (path / name).write_text(f"{name}\n", encoding="utf-8")
    return path


def say(program: str, *words: object, tmp_path: Path, url: str) -> tuple[int, str]:
    """Run a program; give its status and the last line that it wrote."""
    places = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": url, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    done = run_python("-c", program, *words, cwd=tmp_path, **places)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).splitlines()[-1]


@pytest.mark.system
def test_a_model_is_downloaded_and_then_found_without_a_network(folder: Path, tmp_path: Path) -> None:
    with serve_hub({"main": folder}, f"models/{NAME}") as url:
        status, line = say(FIND, NAME, tmp_path=tmp_path, url=url)
        assert status == 0, line
        assert Path(line).name == BRANCHES["main"]
        # Not the weights of other programs.
        assert {file.name for file in Path(line).iterdir()} == {"config.json", "source.spm"}
        assert (Path(line) / "source.spm").read_bytes() == b"source.spm\n"
        # Missing, or private: the hub does not say which.
        status, refusal = say(FIND, "org/nothing", tmp_path=tmp_path, url=url)
        assert (
            status,
            "UserError: org/nothing is no folder here, and cannot be downloaded from the hub (4" in refusal,
        ) == (
            1,
            True,
        )
        assert refusal.endswith("check the name and the network; a private model needs hf auth login")
    assert say(FIND, NAME, tmp_path=tmp_path, url=url) == (0, line)
    status, refusal = say(FIND, "org/nothing", tmp_path=tmp_path, url=url)
    assert (status, "is no folder here, and cannot be downloaded from the hub (" in refusal) == (1, True)
    # A folder that is here is not asked for.
    assert say(FIND, "opus", tmp_path=tmp_path, url=url) == (0, "opus")


@pytest.mark.system
def test_a_folder_is_pushed_to_a_private_model(folder: Path, tmp_path: Path) -> None:
    uploads: dict[str, bytes] = {}
    with serve_hub({"main": folder}, f"models/{NAME}", uploads) as url:
        assert say(PUSH, folder, NAME, tmp_path=tmp_path, url=url) == (0, f"{url}/{NAME}")
    # Versions of the library name it differently.
    asked = json.loads(uploads.pop("create"))
    assert asked.get("visibility", "private" if asked.get("private") else "public") == "private"
    assert uploads == {file.name: file.read_bytes() for file in folder.iterdir()}
    with serve_hub({"main": folder}, f"models/{NAME}") as url:
        status, refusal = say(PUSH, folder, NAME, tmp_path=tmp_path, url=url)
    assert (status, f"UserError: {folder} is written, but the hub does not take it as {NAME} (" in refusal) == (1, True)
    assert refusal.endswith(f"then hf upload {NAME} {folder}")


def test_a_name_of_the_hub_in_place_of_a_model_folder_names_the_import() -> None:
    command = as_typed(own_command("import", NAME, "--out", "MODEL"))
    assert str(no_model(Path(NAME), "config.json")).endswith(f"or take one of the hub with {command}")
    assert "the hub" not in str(no_model(Path("/org/opus"), "config.json"))
