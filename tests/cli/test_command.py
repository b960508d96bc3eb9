"""The program `dist-transformer`: its commands, what it says of wrong ones, and several processes of one."""

import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.cli.command import COMMANDS, module_of, overview, run
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of
from dist_transformer.runtime.launch import installed_program
from tests.cli.help_pages import ALL, FOLDER, help_of
from tests.conftest import ROOT, allow_interrupts, run_command
from tests.jobs import SMALL

PROGRAM = [sys.executable, "-m", "dist_transformer"]


def test_every_command_has_a_module_and_every_module_a_command() -> None:
    modules = {path.stem for path in (ROOT / "dist_transformer" / "cli").glob("*.py")}
    assert modules - {"__init__", "command"} == {module_of(name).__name__.rpartition(".")[2] for name in COMMANDS}
    assert all(callable(module_of(name).main) for name in COMMANDS)
    assert {path.stem for path in FOLDER.iterdir()} == set(ALL)
    assert all(len(line) <= 80 for line in overview().splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "'trian' is not a command: did you mean train?"),
        (["xyz"], "'xyz' is not a command: see dist-transformer --help"),
        (["train", "--processes", "two"], "--processes is 'two': it must be a number"),
        (["train", "--processes=0"], "--processes is 0: it must be 1 to 1,024"),
        (["translate", "--processes", "1000000000000"], "--processes is 1000000000000: it must be 1 to 1,024"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        run(words)


def test_the_flag_of_deepspeeds_launcher_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `deepspeed --module dist_transformer COMMAND` it stands before the command."""
    run(["--local_rank=1", "--version"])
    assert capsys.readouterr().out.startswith("dist-transformer ")
    with pytest.raises(UserError, match="'trian' is not a command"):
        run(["--local_rank=1", "trian"])


@pytest.mark.system
@pytest.mark.parametrize("name", ALL)
def test_help_at_80_columns(name: str) -> None:
    """Compare with the page of the last change; `python -m tests.cli.help_pages` writes the files again."""
    page = help_of(name)
    assert page == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if len(line) > 80] == []
    assert f"usage: dist-transformer {'COMMAND' if name == 'dist-transformer' else name} " in page


# In a process of its own, because this one has imported the libraries.
EARLY = """
import contextlib, io, sys
from pathlib import Path
from dist_transformer.base.errors import UserError
from dist_transformer.cli import command
from dist_transformer.cli.command import COMMANDS, run

SHARED = [f"{name} --processes 2 --wrong" for name in command.SHARED]
MISSING = ["export --model none --to hf --src a --ref a --out b", "serve --model none", "translate --model none",
    "pictures --model none --src-text a --out b", "translate --model none --input a --output b",
    "evaluate --model none --src a --ref a", "score --model none --src a --tgt a", "train --data none --run-dir b"]
Path("a").touch()
ALONE = [name for name in COMMANDS if name not in ("demo", "doctor", "plan")]
for words in [f"{name} {flag}" for name in COMMANDS for flag in ("--wrong", "--help")] + SHARED + MISSING + ALONE:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run(words.split())
        except (SystemExit, UserError) as error:
            said = str(error)
    late = {"torch", "deepspeed", "transformers", "datasets", "tensorboard", "matplotlib"} & sys.modules.keys()
    of_flags = {"--help": "0", "--wrong": "--wrong is not a flag"}
    expected = of_flags.get(words.split()[-1], "pass" if words in ALONE else "none")
    assert expected in said and not late, (words, said, late)
"""


@pytest.mark.system
def test_wrong_arguments_are_refused_before_the_libraries_are_imported(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", EARLY], check=True, cwd=tmp_path, env=environment)


COMPLETE = """
eval "$(dist-transformer --completion)"
for line in "ev" "train --optimizer.pe" "train --model.norm p" "translate --precision " "serve --mo" "verify runs/x"; do
  COMP_WORDS=(dist-transformer $line)
  [ "${line% }" = "$line" ] || COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _dist_transformer dist-transformer
  echo "${COMPREPLY[*]}"
done
complete -p dist-transformer
"""


@pytest.mark.system
def test_a_shell_completes_commands_flags_and_choices() -> None:
    # In place of the installed program.
    program = f'dist-transformer() {{ {sys.executable} -m dist_transformer "$@"; }}\n'
    done = subprocess.run(["bash", "-c", program + COMPLETE], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "evaluate",
        "--optimizer.peak-lr",
        "post pre",
        "fp32 bf16 int8",
        "--model",
        "",
        "complete -o default -F _dist_transformer dist-transformer",
    ]


@pytest.mark.slow
def test_modules_of_the_current_folder_do_not_run(tmp_path: Path) -> None:
    # Python itself imports these before it runs any code of the package.
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import runpy, sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    own = {name.partition(".")[0] for name in done.stdout.split()}
    libraries = {"torch", "deepspeed", "numpy", "tokenizers", "datasets", "sacrebleu", "safetensors", "pyarrow"}
    for name in {*sys.stdlib_module_names, *libraries} - own:
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\n")
    program = installed_program("dist-transformer")
    for command in (
        [*PROGRAM, "verify", "."],
        [sys.executable, "-m", "dist_transformer.train", "--data", ".", "--run-dir", "run", "--preset", "tiny"],
        [program, "translate", "--model", "."],
        [program, "translate", "--model", ".", "--input", "a", "--output", "b", "--processes", "2"],
    ):
        done = subprocess.run(
            [str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith("error: . is not a "), done.stderr
        assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.slow
def test_two_processes_of_one_command(toy_data: DataFolder, tmp_path: Path) -> None:
    """Lines of the ranks arrive and lines of the launcher do not, also in a file that others write to."""
    log = tmp_path / "log"
    # A torchrun of one process in a shell of one task: both leave variables of their own launch.
    place = "RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 TORCHELASTIC_USE_AGENT_STORE=True SLURM_STEP_ID=0 SLURM_NTASKS=1"
    train = [*PROGRAM, "train", *SMALL, "--data", toy_data.path, "--run-dir", tmp_path / "run", "--max-steps", "4"]
    line = " ".join(map(str, [*train, "--processes", "2"]))
    run_command("bash", "-c", f"{{ echo before; {place} {line}; echo status $?; }} > {log} 2>&1")
    lines = log.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "status 0")
    assert "2 rank(s) on cpu" in log.read_text()
    assert [line for line in lines if "launch" in line or "Traceback" in line or "[INFO]" in line] == []
    assert [checkpoint_problem(path) for path in checkpoints_of(tmp_path / "run")] == [None]


def begin_in_terminal(data: Path, run_dir: Path) -> tuple[int, int]:
    """Start a training in two processes, and wait until it trains; gives its id and its terminal."""
    flags = ("--data", data, "--run-dir", run_dir, "--max-steps", 100000, "--processes", 2)
    words = [str(word) for word in (*PROGRAM, "train", *SMALL, *flags)]
    child, terminal = pty.fork()
    if child == 0:
        allow_interrupts()
        os.chdir(ROOT)
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.execv(words[0], words)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.exists() and metrics.stat().st_size > 0):
        assert time.monotonic() < deadline
        os.read(terminal, 4096)
    return child, terminal


@pytest.mark.slow
def test_ctrl_c_saves_and_shows_no_traceback(toy_data: DataFolder, tmp_path: Path) -> None:
    """In a terminal: Ctrl-C goes to all processes at once."""
    child, terminal = begin_in_terminal(toy_data.path, tmp_path / "run")
    os.write(terminal, b"\x03")
    output = b""
    with suppress(OSError):
        while read := os.read(terminal, 4096):
            output += read
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.decode(errors="replace")
    # As deepspeed gives it: docs/fault_tolerance.md.
    assert status == 130, text
    assert text.count("stopping after this step; press Ctrl-C again to end now") == 1
    assert ", SIGINT on rank " in text
    assert "the same command resumes from here" in text
    assert "Traceback" not in text
    assert "launch.py" not in text
    assert checkpoint_problem(checkpoints_of(tmp_path / "run")[0]) is None


@pytest.mark.slow
def test_a_closed_terminal_saves(toy_data: DataFolder, tmp_path: Path) -> None:
    child, terminal = begin_in_terminal(toy_data.path, tmp_path / "run")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert checkpoint_problem(checkpoints_of(tmp_path / "run")[0]) is None


def test_a_closed_input_is_named_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed: redirect a text to it"):
        run(["translate", "--model", str(tmp_path / "none")])


def refuse_all(*_: object, **__: object) -> None:
    raise TransientError("standard output cannot be written")


def test_scores_are_kept_although_stdout_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.de").write_text("ein Satz\n")
    (tmp_path / "ref.de").write_text("ein Satz\n")
    monkeypatch.setattr("dist_transformer.cli.evaluate.say", refuse_all)
    words = ["--hypotheses", tmp_path / "text.de", "--ref", tmp_path / "ref.de", "--tgt-lang", "de"]
    with pytest.raises(TransientError):
        run(["evaluate", *map(str, words), "--json", str(tmp_path / "bleu.json")])
    assert (tmp_path / "bleu.json").exists()


def test_a_preparation_ends_although_stdout_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.cli.prepare.say", refuse_all)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    flags = ["--toy", "50", "--vocab-size", "300", "--workers", "1", "--out", str(tmp_path / "data")]
    with pytest.raises(UserError, match="data is complete, but standard output cannot be written"):
        run(["prepare", *flags])
    assert (tmp_path / "data" / "index.json").exists()
