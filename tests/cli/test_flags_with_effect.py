"""Every flag of translate changes what is decoded or written in every mode, or is refused there."""

import sys
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli import translate
from dist_transformer.cli.translate import TranslateSettings
from dist_transformer.config.schema import values_of
from dist_transformer.config.wrong_names import LIST_FLAGS

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


def test_every_flag_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        with_flags(monkeypatch, LIST_FLAGS)
    flags = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert flags == {*VALUES, "--config", "--print-config", "--help", "--help-all", "--processes", "--import"}


@pytest.mark.parametrize("mode", MODES)
def test_a_flag_has_an_effect_or_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "m", *FILES, *mode.split()]
    alone = decoded(with_flags(monkeypatch, *words))
    refused: set[tuple[str, bool]] = set()
    for flag, value in VALUES.items():
        kept = list(words)
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 1 + bool(value)]
        if not value and flag in words:
            continue
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
    [
        "--beam 4 --sample",
        "--beam=4 --mbr 8",
        "--length-penalty 0.6 --mbr 8",
        "--seed 1",
        "--seed 1 --nbest 2",
    ],
)
def test_a_stated_default_is_refused_too(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--[a-z-]+ (has no effect with|needs) --.*: (leave|add) .* out$"):
        with_flags(monkeypatch, "--model", "m", *FILES, *words.split())
