"""Names that a command does not have: those of other toolkits, near misses, and completion in a shell."""

import re
import tomllib
from collections.abc import Sequence

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import COMMANDS, run
from dist_transformer.config import wrong_names
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.wrong_names import LIST_FLAGS, plain_name
from dist_transformer.inference.decoding import Decoding
from tests.conftest import ROOT


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Sequence[str]]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run([command, LIST_FLAGS])
    assert not ended.value.code
    rows = (line.split() for line in capsys.readouterr().out.splitlines())
    return {flag: choices for flag, *choices in rows}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("translate --beam-size 3", "--beam-size is not a flag here: use --beam"),
        ("translate --output-file a --src-lang de", "for --output-file use --output; for --src-lang use --direction"),
        ("translate -model a", "-model is not a flag here: did you mean --model?"),
        ("translate --lenght-penalty 1", "--lenght-penalty is not a flag here: did you mean --length-penalty?"),
        ("translate --xyz", "--xyz is not a flag here: see dist-transformer translate --help"),
        ("serve --gpus 2", "--gpus is not a flag here: use --device"),
        ("prepare --srcdict a --source-lang de", "for --srcdict use --src-tokenizer; for --source-lang use --src-lang"),
        ("train --cpu", "--cpu is not a flag here: use CUDA_VISIBLE_DEVICES= in the environment"),
        ("train --max-tokens 4096 --update-freq=4", "and --update-freq use --batch.target-tokens-per-step"),
        ("train --source a --input b", "for --source and --input use --data with a folder that"),
        ("plan --job-hour 2", "--job-hour is not a flag here: did you mean --job-hours?"),
        ("verify --run a", "--run is not a flag here: use --run-dir"),
        ("train --optimizer muon", "--optimizer is not a flag here: use --optimizer.kind"),
        ("train --adafactor", "--adafactor is not a flag here: there is no optimizer other than Adam and Muon"),
        (
            "train --lora-rank 8 --lr 1",
            "for --lora-rank there are no adapters such as LoRA, but a training with --freeze",
        ),
        ("train --num-workers 2", "--num-workers is not a flag here: there is no number of workers, because"),
        ("prepare --num-workers 2", "--num-workers is not a flag here: use --workers"),
        ("fairseq-train", "'fairseq-train' is not a command: did you mean train?"),
        ("evalute", "'evalute' is not a command: did you mean evaluate?"),
        ("translate --model a --precision fp16", "--precision fp16 is unknown: did you mean bf16?"),
    ],
)
def test_a_wrong_name_leads_to_ours(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        run(words.split())
    assert said in str(refused.value)


def test_a_remedy_names_flags_and_commands_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {plain_name(flag) for command in COMMANDS for flag in flags_of(command, capsys)}
    # Parameters of `prepare` in Python, and a flag of fairseq whose value ours is computed from.
    ours |= {"source-language", "target-language", "update-freq"}
    remedies = set(wrong_names._foreign_names("flags", "missing").values())
    named = {plain_name(flag) for remedy in remedies for flag in re.findall(r"--[a-z](?:[\w.-]*\w)?", remedy)}
    assert named - ours == set()
    assert set(wrong_names._foreign_names("commands").values()) <= COMMANDS.keys()


def test_each_foreign_name_has_one_meaning() -> None:
    tables = tomllib.loads((ROOT / "dist_transformer" / "config" / "foreign_flags.toml").read_text("utf-8"))
    flags = [
        name.rpartition(":")[2]
        for kind in ("flags", "missing")
        for row in tables[kind].values()
        for name in row.split()
    ]
    assert sorted(flags) == sorted(set(flags))
    assert all(re.match("there (is|are) no", sentence) for sentence in tables["missing"])


def test_a_command_line_without_wrong_names_does_not_read_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_names, "_foreign_names", None)
    wrong_names.refuse_wrong_flags(["--beam", "3"], ["--beam"])
    wrong_names.refuse_wrong_settings(["beam"], ["beam"], "f")


def test_an_unknown_keyword_of_a_function_leads_to_ours() -> None:
    def search(**keywords: object) -> Decoding:
        return read_keywords(Decoding, keywords, "search").build(Decoding)

    assert search(beam=2) == Decoding(beam=2)
    with pytest.raises(UserError, match=r"^in search, beam_size is not a setting here: use beam$"):
        search(beam_size=2)
    with pytest.raises(UserError, match=r"^in search, temprature is not a setting here: did you mean temperature\?$"):
        search(temprature=0.5)
    with pytest.raises(UserError, match=r"^in search, xyz, lenpen are not settings here: for xyz leave it out"):
        search(xyz=2, lenpen=1)


def test_words_that_are_no_flags_are_taken() -> None:
    check = wrong_names.refuse_wrong_flags
    check(["-0.5", "-", "a-b", "-- a", "-d a b", "--", "--xyz"], [])
    check(["--a_b", "--no-a-b", "--x.no-y"], ["--a-b", "--x.y"])
