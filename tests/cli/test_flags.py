"""Flags of all commands: texts, files that they name, and settings of decoding, which have an effect or are refused."""

import io
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli import translate
from dist_transformer.cli.command import COMMANDS
from dist_transformer.cli.score import ScoreSettings
from dist_transformer.cli.translate import TranslateSettings
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.plain import to_plain
from dist_transformer.config.schema import settings_of, values_of
from dist_transformer.config.settings_file import read_settings, write_settings
from dist_transformer.config.wrong_names import LIST_FLAGS
from dist_transformer.evaluation.settings import EvaluateSettings
from dist_transformer.inference import decoding, scoring
from tests.averaging.conftest import save
from tests.cli.conftest import Call


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_text_with_its_default_once(name: str, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """A default that its text has, too, would soon be another one."""
    monkeypatch.setenv("COLUMNS", "1000")
    entries = re.split(r"\n  (?=--)", call(name, "--help-all")[0])[1:]
    for flag, text in (entry.split(maxsplit=1) for entry in entries):
        assert text.count("default: ") <= 1, (flag, text)


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_number_that_other_commands_get_is_refused_before_they_start(count: str, call: Call) -> None:
    for flag in ("--processes", "--average", "--train-pairs"):
        assert call("demo", flag, count, status=1)[1].startswith(f"error: {flag} is {count}: it must be above 0")


PREPARE = ("--src-lang", "en", "--tgt-lang", "de", "--vocab-size", 400, "--out", "OUT")
FIELDS = ("--src-field", "en", "--tgt-field", "de")
SEARCH = ("--model", "MODEL", "--beam", 2, "--max-extra-tokens", 1, "--device", "cpu")
TEXTS = ("--src", "TEXT", "--tgt", "TEXT2")
# BAD is the flag's file, TEXT and TEXT2 are of as many lines.
CASES: list[tuple[str, tuple[object, ...]]] = [
    ("prepare", ("--src", "BAD", "--tgt", "TEXT", *PREPARE)),
    ("prepare", ("--src", "TEXT", "--tgt", "BAD", *PREPARE)),
    ("prepare", ("--tsv", "BAD", *PREPARE)),
    ("prepare", ("--jsonl", "BAD", *FIELDS, *PREPARE)),
    ("prepare", (*TEXTS, "--valid-src", "BAD", "--valid-tgt", "TEXT", *PREPARE)),
    ("prepare", (*TEXTS, "--valid-src", "TEXT", "--valid-tgt", "BAD", *PREPARE)),
    ("translate", ("--input", "TEXT", "BAD", "--output", "OUT", *SEARCH)),
    ("translate", ("--prefix", "BAD", *SEARCH)),
    ("translate", ("--closest-to", "BAD", *SEARCH)),
    ("translate", ("--input", "TEXT", "--output", "OUT", "--prefix", "BAD", *SEARCH)),
    ("evaluate", ("--src", "BAD", "--ref", "TEXT", "--json", "OUT", *SEARCH)),
    ("evaluate", ("--src", "TEXT", "--ref", "TEXT2", "BAD", "--json", "OUT", *SEARCH)),
    ("evaluate", ("--hypotheses", "TEXT", "BAD", "--ref", "TEXT", "--tgt-lang", "de", "--json", "OUT")),
    ("score", ("--src", "BAD", "--tgt", "TEXT", "--model", "MODEL", "--out", "OUT", "--device", "cpu")),
    ("score", ("--src", "TEXT", "--tgt", "BAD", "--model", "MODEL", "--out", "OUT", "--device", "cpu")),
    ("export", ("--src", "BAD", "--ref", "TEXT", "--to", "hf", "--model", "MODEL", "--out", "OUT")),
    ("average", ("--run-dir", "RUN", "--sweep", "1", "--src", "TEXT", "--ref", "BAD", "--out", "OUT")),
]


@pytest.mark.parametrize(("command", "words"), CASES, ids=str)
def test_what_cannot_be_read_as_a_whole(
    command: str,
    words: tuple[object, ...],
    model_folder: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    bad, text = tmp_path / "bad.xz", b'{"en": "a\\tb", "de": "c"}\t\n' * 200
    bad.write_bytes(lzma.compress(text[: len(text) // 2]) + b"not xz" + lzma.compress(text[len(text) // 2 :]))
    for name in ("text", "text2"):
        (tmp_path / name).write_bytes(text)
    if command == "average":
        save(run, 1)
    places = {"BAD": bad, "TEXT": tmp_path / "text", "TEXT2": tmp_path / "text2", "OUT": tmp_path / "new" / "out"}
    places |= {"MODEL": model_folder, "RUN": run}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
    out, errors = call(command, *(places.get(str(word), word) for word in words), status=1)
    assert errors.splitlines()[-1].startswith(f"error: {bad} is not a complete .xz file (after line ")
    assert "OUT" in words or not out
    assert not list(places["OUT"].parent.glob("**/*"))


FILES = ["--input", "in", "--output", "out"]
MODES = [
    "",
    "--nbest 2",
    "--sample",
    "--sample --nbest 2",
    "--mbr 8",
    "--mbr 8 --nbest 2",
    "--noise",
    "--closest-to f",
    "--prefix f",
    "--sample --prefix f",
]
# A value other than the default.
VALUES = {
    "--input": "other",
    "--output": "other",
    "--model": "other",
    "--direction": "de-en",
    "--tag": "<bt>",
    "--beam": "3",
    "--length-penalty": "1.5",
    "--max-extra-tokens": "9",
    "--no-repeat-ngram-size": "3",
    "--repetition-penalty": "1.2",
    "--protect": "urls",
    "--missing-spans": "leave",
    "--recase": "auto",
    "--terms": "t",
    "--markup": "html",
    "--precision": "bf16",
    "--batch-tokens": "99",
    "--split-over": "9",
    "--prefix": "g",
    "--closest-to": "g",
    "--nbest": "3",
    "--format": "tsv",
    "--sample": "",
    "--top-k": "5",
    "--top-p": "0.5",
    "--distinct": "",
    "--mbr": "9",
    "--utility": "bleu",
    "--epsilon": "0.5",
    "--seed": "7",
    "--temperature": "2",
    "--noise": "",
    "--alignment": "",
    "--chunk-lines": "9",
    "--device": "cuda",
}


def with_flags(monkeypatch: pytest.MonkeyPatch, *words: str) -> TranslateSettings:
    monkeypatch.setattr(sys, "argv", ["dist-transformer translate", *words])
    return translate.parse_arguments()


def decoded(settings: TranslateSettings) -> dict[str, Any]:
    """Return everything that decides the output: of the settings of decoding, those that the mode uses."""
    values, decoding = values_of(settings), settings.decoding
    unused = {"beam", "least_growth"} if decoding.samples else {"seed", "epsilon", "temperature", "top_k", "top_p"}
    if decoding.mbr or (decoding.sample and decoding.nbest is None):
        unused.add("length_penalty")
    if settings.noise:
        unused.discard("seed")
    if decoding.nbest is None:
        unused.add("format")
    if not decoding.mbr:
        unused.add("utility")
    return {name: value for name, value in values.items() if name not in unused}


def test_every_flag_is_tried(call: Call) -> None:
    flags = {line.split()[0] for line in call("translate", LIST_FLAGS)[0].splitlines()}
    assert flags == {*VALUES, "--config", "--print-config", "--help", "--help-all", "--processes", "--import"}


@pytest.mark.parametrize("mode", MODES)
def test_a_flag_has_an_effect_or_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "m", *FILES, *mode.split()]
    alone = decoded(with_flags(monkeypatch, *words))
    refused: set[tuple[str, bool]] = set()
    for flag, value in VALUES.items():
        if flag in words and not value:
            continue
        kept = list(words)
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
        try:
            changed = decoded(with_flags(monkeypatch, *kept, flag, *value.split()))
        except UserError as error:
            refused.add((flag, str(error).count("--") >= 2))
        else:
            assert changed != alone, flag
    assert all(names_both for _, names_both in refused), refused
    flags = {flag for flag, _ in refused}
    # Flags that every mode has.
    assert not flags & {"--max-extra-tokens", "--batch-tokens", "--precision", "--tag", "--split-over", "--device"}
    assert ("--beam" in flags) == ("--sample" in mode or "--mbr" in mode)
    assert ("--seed" in flags) == (mode in ("", "--nbest 2", "--closest-to f", "--prefix f"))


@pytest.mark.parametrize(
    "words",
    ["--beam 4 --sample", "--beam=4 --mbr 8", "--length-penalty 0.6 --mbr 8", "--seed 1", "--seed 1 --nbest 2"],
)
def test_a_stated_default_is_refused_too(words: str, call: Call) -> None:
    _, said = call("translate", "--model", "m", *FILES, *words.split(), status=1)
    assert re.fullmatch(r"error: --[a-z-]+ (has no effect with|needs) --.*: (leave|add) .* out\n", said)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            TranslateSettings,
            "translate --model a b --direction en-de --tag <bt> <2de> --precision bf16 --sample --nbest 3 --distinct "
            "--top-p 0.75 --temperature 2.0 --seed 0 --format jsonl --split-over no",
        ),
        (
            EvaluateSettings,
            "evaluate --model a --src s --ref r r2 --lowercase --mbr 8 --utility bleu --max-extra-tokens 9 "
            "--split-over 20 --device cpu",
        ),
    ],
)
def test_flags_files_and_keywords_give_the_same_settings(kind: type, words: str, tmp_path: Path, call: Call) -> None:
    command, *flags = words.split()
    printed, _ = call(command, *flags, "--print-config")
    for flag in (word for word in flags if word.startswith("--") and word != "--tag"):
        assert re.search(rf"^{flag[2:].replace('-', '_')}:(?! (null|false)$)", printed, re.MULTILINE), flag
    (tmp_path / "a.yaml").write_text(printed, encoding="utf-8")
    values = {name: value for name, value in read_settings(tmp_path / "a.yaml")[0].items() if value is not None}
    (tmp_path / "a.json").write_text(json.dumps(values), encoding="utf-8")
    for name in ("a.yaml", "a.json"):
        assert call(command, "--config", tmp_path / name, "--print-config")[0] == printed
    in_python: Any = read_keywords(kind, values, "f").build(kind)
    assert write_settings(to_plain(in_python)) == printed


def test_a_setting_without_effect_is_refused_in_a_file_too(tmp_path: Path, call: Call) -> None:
    """One that has its default is no setting, because a printed file has them all."""
    words = ("translate", "--model", "m", "--config", tmp_path / "a.yaml", "--print-config")
    (tmp_path / "a.yaml").write_text("mbr: 8\nbeam: 4\nsample: false\ntop_k: null")
    assert "\nmbr: 8\n" in call(*words)[0]
    (tmp_path / "a.yaml").write_text("mbr: 8\nbeam: 3")
    said = "error: --beam has no effect with --mbr, which draws samples without a search: "
    assert call(*words, status=1)[1].startswith(said)


@pytest.mark.parametrize(
    ("kind", "name", "numbers"),
    [
        (TranslateSettings, "batch_tokens", decoding.BATCH_TOKENS),
        (TranslateSettings, "chunk_lines", translate._CHUNK_LINES),
        (ScoreSettings, "batch_tokens", scoring.BATCH_TOKENS),
    ],
)
def test_help_has_the_defaults_of_each_device(kind: type, name: str, numbers: dict[str, int]) -> None:
    (text,) = (each.text for each in settings_of(kind) if each.name == name)
    assert f"default: {numbers['cpu']} on a CPU, {numbers['cuda']} on a GPU" in text
