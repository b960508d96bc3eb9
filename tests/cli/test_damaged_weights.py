"""Commands that read weights of which one bit is another: one sentence that names the file, and nothing is written."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.averaging.conftest import save
from tests.cli.conftest import Call, Screen

# How each command is asked to read the model folder MODEL and to write OUT.
COMMANDS = {
    "translate": "translate --model MODEL --input TEXT --output OUT",
    "evaluate": "evaluate --model MODEL --src TEXT --ref TEXT --json OUT",
    "score": "score --model MODEL --src TEXT --tgt TEXT --out OUT",
    "serve": "serve --model MODEL --port 0",
    "average": "average --checkpoints MODEL --out OUT",
}


def flip(file: Path, part: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(part * (len(content) - 1))] ^= 64
    file.write_bytes(content)


# The file, and the part of it where a bit is another.
DAMAGES = {
    "header": ("model.safetensors", 0.001),
    "a number": ("model.safetensors", 0.5),
    "settings": ("config.json", 0.3),
    "tokenizer": ("tokenizer.json", 0.9),
}


def assert_refused(screen: Screen, file: str) -> None:
    out, err = screen
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert file in error
    assert "Traceback" not in err
    # What was chosen is said before it is read.
    assert out == "" or (out.startswith("chosen: ") and out.count("\n") == 1)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_model_is_refused(command: str, damage: str, model_folder: Path, tmp_path: Path, call: Call) -> None:
    places = {"MODEL": tmp_path / "model", "TEXT": tmp_path / "text", "OUT": tmp_path / "out"}
    shutil.copytree(model_folder, places["MODEL"])
    places["TEXT"].write_text("Our hungry guests sing.\n")
    file, part = DAMAGES[damage]
    flip(places["MODEL"] / file, part)
    words = COMMANDS[command].split() + (["--device", "cpu"] if command not in ("serve", "average") else [])
    assert_refused(call(*(places.get(word, word) for word in words), status=1), file)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "text"}


@pytest.mark.parametrize("how", [["--last", "3"], ["--sweep", "2,3", "--device", "cpu"]], ids=["last", "sweep"])
@pytest.mark.parametrize("damage", ["flipped", "not recorded"])
def test_a_damaged_weight_file_is_in_no_mean(how: list[str], damage: str, tmp_path: Path, call: Call) -> None:
    run, text = tmp_path / "run", tmp_path / "text"
    files = [save(run, step) for step in (1, 2, 3)]
    text.write_text("a b\n")
    sums, whole = files[1].parent / "SHA256SUMS", files[1].read_bytes()
    if "--sweep" in how:
        how = [*how, "--src", str(text), "--ref", str(text)]
    if damage == "not recorded":
        sums.write_text("".join(line for line in sums.read_text().splitlines(True) if files[1].name not in line))
    for part in np.linspace(0, 1, 5):
        if damage == "flipped":
            files[1].write_bytes(whole)
            flip(files[1], part)
        screen = call("average", "--run-dir", run, *how, "--out", tmp_path / "out", status=1)
        assert_refused(screen, str(files[1]))
        assert {path.name for path in tmp_path.iterdir()} == {"run", "text"}
