"""No output of any command replaces an input, or a file of a data, model or run folder."""

import re
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import COMMANDS
from dist_transformer.run.outputs import claim_file, claim_folder
from tests.cli.conftest import Call

# Of each command, what else it needs before it writes, and the input that its output could replace.
OUTPUTS = {
    ("average", "--out"): ("--checkpoints {model}", "{model}"),
    ("demo", "--run-dir"): ("", None),
    ("doctor", "--cache-dir"): ("--data {data}", "{data}"),
    ("evaluate", "--json"): ("--model {model} --src {src} --ref {src} {ref}", "{ref}"),
    ("export", "--out"): ("--model {model} --to hf --src {src} --ref {ref}", "{ref}"),
    ("export", "--json"): ("--model {model} --to hf --src {src} --ref {ref} --out new", "{src}"),
    ("import", "--out"): ("marian --src {src}", "{src}"),
    ("inspect", "--png"): ("{data}", "{data}/index.json"),
    ("pictures", "--out"): ("--model {model} --src-text a", "{model}"),
    ("plan", "--json"): ("--against {run}", "{run}/ledger.jsonl"),
    ("prepare", "--out"): ("--src {src} --tgt {ref} --vocab-size 300 --src-lang en --tgt-lang de", "{src}"),
    ("report", "--out"): ("{run}", "{run}/ledger.jsonl"),
    ("score", "--out"): ("--model {model} --src {src} --tgt {ref}", "{src}"),
    ("train", "--cache-dir"): ("--preset tiny --data {data} --run-dir new", "{data}"),
    ("train", "--run-dir"): ("--preset tiny --data {data}", "{data}"),
    ("translate", "--output"): ("--model {model} --input {src}", "{src}"),
    ("verify", "--cache-dir"): ("{run} --data {data}", "{data}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_output_is_tested(command: str, call: Call) -> None:
    flags = set(re.findall(r"^  (--\S+)", call(command, "--help-all")[0], re.MULTILINE))
    assert flags & {"--out", "--output", "--json", "--png"} <= {flag for name, flag in OUTPUTS if name == command}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Text, and folders that are recognised; no command comes to read them."""
    files = {
        "src": ["src.en"],
        "ref": ["ref.hypotheses.txt"],
        "data": ["data/index.json", "data/tokenizer.json", "data/valid/source.txt"],
        "model": ["model/config.json", "model/tokenizer.json", "model/model.safetensors"],
        "run": ["run/config.json", "run/ledger.jsonl", "run/checkpoints/latest", "run/result.json"],
    }
    for name in (name for names in files.values() for name in names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return {name: tmp_path / names[0].partition("/")[0] for name, names in files.items()}


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(("command", "flag"), OUTPUTS)
def test_an_output_that_would_replace_something_is_refused(
    command: str, flag: str, places: dict[str, Path], call: Call
) -> None:
    given, replaced = OUTPUTS[command, flag]
    targets = [places["data"] / "new", places["model"] / "new", places["run"] / "ledger.jsonl"]
    targets += [places["data"] / "valid/source.txt", places["run"] / "checkpoints/new"]
    if replaced is not None:
        taken = Path(replaced.format(**places))
        targets += [taken, taken.parent / "." / ".." / taken.parent.name / taken.name]
    before = content(Path())
    for target in targets:
        words = [command, *(word.format(**places) for word in given.split()), flag, str(target)]
        assert call(*words, status=1)[1].startswith(f"error: {flag} {target}")
    assert content(Path()) == before


def test_an_input_under_another_name_is_not_replaced(places: dict[str, Path]) -> None:
    Path("link").symlink_to(places["src"])
    Path("hard").hardlink_to(places["src"])
    for name in ("link", "hard"):
        with pytest.raises(UserError, match=f"--out {name} is also an input of this command: choose another name"):
            claim_file(Path(name), "--out", [places["src"]])


def test_files_beside_an_output_replace_nothing_either(places: dict[str, Path], call: Call) -> None:
    words = f"--model {places['model']} --src {places['src']} --ref {places['ref']} --json ref.json"
    said = "error: --json ref.hypotheses.txt is also an input of this command"
    assert call("evaluate", *words.split(), status=1)[1].startswith(said)


def test_what_is_new_or_of_nobody_may_be_written(places: dict[str, Path]) -> None:
    for name in ("new.json", "run/result.json", "run/model/scores.txt", "src.en.json", "/dev/null", "/dev/stdout"):
        claim_file(Path(name), "--out", [*places.values(), "/dev/null", "s3://bucket/data", None])
    for name in ("new", "run/model", "model", "run"):
        claim_folder(Path(name), "--out", [places["src"]])
