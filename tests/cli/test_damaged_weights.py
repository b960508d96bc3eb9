"""Commands that read weights of which one bit is another: one sentence that names the file, and nothing is written."""

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.cli.command import run
from tests.averaging.conftest import save

Screen = pytest.CaptureFixture[str]
Damage = Callable[[Path], str]
# How each command is asked to read the model folder MODEL and to write OUT.
COMMANDS = {
    "translate": "translate --model MODEL --input TEXT --output OUT",
    "evaluate": "evaluate --model MODEL --src TEXT --ref TEXT --json OUT",
    "score": "score --model MODEL --src TEXT --tgt TEXT --out OUT",
    "serve": "serve --model MODEL --port 0",
    "average": "average --checkpoints MODEL --out OUT",
}


def call(monkeypatch: pytest.MonkeyPatch, tool: str, *arguments: object) -> int:
    """Exit status, in this process: a launch costs seconds."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        exit_on_user_error(lambda: run([tool, *map(str, arguments)]))
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def flip(file: Path, part: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(part * (len(content) - 1))] ^= 64
    file.write_bytes(content)


def flipped(name: str, part: float) -> Damage:
    def damage(model: Path) -> str:
        flip(model / name, part)
        return name

    return damage


DAMAGES: dict[str, Damage] = {
    "header": flipped("model.safetensors", 0.001),
    "a number": flipped("model.safetensors", 0.5),
    "settings": flipped("config.json", 0.3),
    "tokenizer": flipped("tokenizer.json", 0.9),
}


def assert_refused(status: int, file: str, screen: Screen) -> None:
    out, err = screen.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, len(errors)) == (1, 1), err
    assert file in errors[0]
    assert "Traceback" not in err
    # What was chosen is said before it is read.
    assert out == "" or (out.startswith("chosen: ") and out.count("\n") == 1)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_model_is_refused(
    command: str, damage: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    places = {"MODEL": tmp_path / "model", "TEXT": tmp_path / "text", "OUT": tmp_path / "out"}
    shutil.copytree(model_folder, places["MODEL"])
    places["TEXT"].write_text("Our hungry guests sing.\n")
    file = DAMAGES[damage](places["MODEL"])
    tool, *words = COMMANDS[command].split()
    if tool != "serve":
        words += [] if tool == "average" else ["--device", "cpu"]
    status = call(monkeypatch, tool, *(places.get(word, word) for word in words))
    assert_refused(status, file, capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "text"}


@pytest.mark.parametrize("how", [["--last", "3"], ["--sweep", "2,3", "--device", "cpu"]], ids=["last", "sweep"])
@pytest.mark.parametrize("damage", ["flipped", "not recorded"])
def test_a_damaged_weight_file_is_in_no_mean(
    how: list[str], damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
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
        status = call(monkeypatch, "average", "--run-dir", run, *how, "--out", tmp_path / "out")
        assert_refused(status, str(files[1]), capsys)
        assert {path.name for path in tmp_path.iterdir()} == {"run", "text"}
