import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.evaluation.samples import (
    LONGEST_MAP,
    Sample,
    SampleSheet,
    lines_of,
    make_samples,
    read_sheets,
    write_sheet,
)
from dist_transformer.inference.attention_maps import attention_maps
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.fixture
def translator(random_model: Transformer, toy_tokenizer: Tokenizer) -> Translator:
    return Translator(random_model, toy_tokenizer, CPU, Decoding(beam=1))


def make(translator: Translator, toy_lines: tuple[list[str], list[str]], **settings: int) -> tuple[Sample, ...]:
    sources, references = (lines[:10] for lines in toy_lines)
    return make_samples(translator, sources, references, [f"{line} Ende" for line in references], **settings)


def test_samples_are_spread_evenly(translator: Translator, toy_lines: tuple[list[str], list[str]]) -> None:
    samples = make(translator, toy_lines, count=4, with_attention=2)
    chosen = (0, 2, 5, 7)
    assert [sample.source for sample in samples] == [toy_lines[0][i] for i in chosen]
    assert [sample.reference for sample in samples] == [toy_lines[1][i] for i in chosen]
    assert [sample.hypothesis for sample in samples] == [f"{toy_lines[1][i]} Ende" for i in chosen]
    assert make(translator, toy_lines, count=4, with_attention=2) == samples
    # No more than there are sentences.
    assert [sample.source for sample in make(translator, toy_lines, count=50, with_attention=0)] == toy_lines[0][:10]
    assert make_samples(translator, [], [], [], count=5, with_attention=5) == ()


def test_the_first_samples_have_the_mean_of_their_maps(
    translator: Translator, toy_tokenizer: Tokenizer, toy_lines: tuple[list[str], list[str]]
) -> None:
    samples = make(translator, toy_lines, count=4, with_attention=2)
    assert [sample.attention_LTS is None for sample in samples] == [False, False, True, True]
    for sample in samples[:2]:
        source, target = toy_tokenizer.encode(sample.source), toy_tokenizer.encode(sample.hypothesis)
        maps_LHTS = attention_maps(translator.model, source, target, "cross")["cross"].numpy()
        assert maps_LHTS.shape[1] == 2
        expected = (maps_LHTS[:, 0] + maps_LHTS[:, 1]) / 2
        np.testing.assert_allclose(np.array(sample.attention_LTS), expected, atol=5.1e-4)
        assert expected.shape[1:] == (len(sample.target_tokens), len(sample.source_tokens))
        # Three decimals in the file, not the seventeen of a float.
        assert all(len(repr(weight)) <= 5 for rows in sample.attention_LTS for row in rows for weight in row)


def test_long_sentences_have_no_map(translator: Translator) -> None:
    long, longest, short = "a " * LONGEST_MAP, "a " * (LONGEST_MAP - 1), "a a"
    assert len(translator.tokenizer.encode(longest.strip())) == LONGEST_MAP - 1
    sources = [long.strip(), longest.strip(), short, short, short]
    hypotheses = [short, short, long.strip(), short, short]
    samples = make_samples(translator, sources, hypotheses, hypotheses, count=5, with_attention=2)
    assert [sample.attention_LTS is not None for sample in samples] == [False, True, False, True, False]


def test_a_model_with_few_positions_is_not_asked_for_more(translator: Translator) -> None:
    settings = dataclasses.replace(translator.model.config, max_positions=8)
    small = Translator(Transformer(settings), translator.tokenizer, CPU, Decoding(max_extra_tokens=3))
    seven, eight = " ".join("a" * 7), " ".join("a" * 8)
    samples = make_samples(small, [eight, seven], [seven] * 2, [seven] * 2, count=2, with_attention=2)
    assert samples[0].attention_LTS is None
    assert samples[1].attention_LTS is not None


def test_weights_that_are_not_finite_leave_the_text(
    translator: Translator, toy_lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    broken = copy.deepcopy(translator.model)
    broken.embedding.data[5:] = float("nan")
    samples = make(Translator(broken, translator.tokenizer, CPU, Decoding()), toy_lines, count=2, with_attention=2)
    assert [sample.attention_LTS for sample in samples] == [None, None]
    write_sheet(tmp_path, SampleSheet(step=1, sentences=2, bleu=0.0, signature="s", samples=samples))


def sample_sheet(step: int = 1000, **settings: Any) -> SampleSheet:
    first = Sample(
        source="a street",
        reference="eine Straße",
        hypothesis="die 你好",
        source_tokens=["a", "▁street", "</s>"],
        target_tokens=["die", "</s>"],
        attention_LTS=[[[0.5, 0.25, 0.25], [0.0, 0.125, 0.875]]] * 2,
    )
    second = dataclasses.replace(first, source="", source_tokens=["</s>"], attention_LTS=None)
    values = {"step": step, "sentences": 500, "bleu": 12.5, "signature": "nrefs:1|tok:13a", "samples": (first, second)}
    values |= {"chrf": 40.5, "ter": 70.25, "signatures": {"chrf": "nrefs:1|nc:6", "ter": "nrefs:1|tok:tercom"}}
    return SampleSheet(**{**values, **settings})


def test_the_log_shows_the_first_sample_shortened() -> None:
    """59 of 61 characters are left, and a sign, also without spaces; white space cannot start a line."""
    texts = {"source": "中" * 61, "hypothesis": "a\u2028b\n c", "reference": "d" * 60}
    first = dataclasses.replace(sample_sheet().samples[0], **texts)
    assert lines_of(sample_sheet(samples=(first, *sample_sheet().samples))).splitlines() == [
        f"  source:     {'中' * 59}…",
        "  hypothesis: a b c",
        f"  reference:  {'d' * 60}",
    ]


def test_a_sheet_comes_back(tmp_path: Path) -> None:
    sheet = sample_sheet()
    path = write_sheet(tmp_path / "run", sheet)
    assert path == tmp_path / "run" / "samples" / "step-00001000.json"
    assert read_sheets(tmp_path / "run") == [sheet]
    assert list(path.parent.iterdir()) == [path]
    text = path.read_text(encoding="utf-8")
    assert "eine Straße" in text
    assert json.loads(text)["bleu"] == 12.5


def test_a_sheet_of_an_earlier_version_has_bleu_alone(tmp_path: Path) -> None:
    path = write_sheet(tmp_path, sample_sheet())
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: values[name] for name in values.keys() - {"chrf", "ter", "signatures"}}))
    (sheet,) = read_sheets(tmp_path)
    assert (sheet.chrf, sheet.ter) == (None, None)
    assert sheet.scores == {"BLEU": (12.5, "nrefs:1|tok:13a")}
    assert [*sample_sheet().scores.items()] == [
        ("BLEU", (12.5, "nrefs:1|tok:13a")),
        ("chrF", (40.5, "nrefs:1|nc:6")),
        ("TER", (70.25, "nrefs:1|tok:tercom")),
    ]


def test_the_sheets_of_several_directions_come_back(tmp_path: Path) -> None:
    both = [
        sample_sheet(source_language=source, target_language=target, bleu=bleu)
        for source, target, bleu in (("en", "de", 1.0), ("de", "en", 2.0))
    ]
    path = write_sheet(tmp_path, *both)
    write_sheet(tmp_path, sample_sheet(250))
    assert path.name == "step-00001000.json"
    assert read_sheets(tmp_path) == [sample_sheet(250), *both]
    assert [sheet.direction for sheet in read_sheets(tmp_path)] == [None, "en-de", "de-en"]
    # A run of one direction writes what it always did.
    assert "language" not in (tmp_path / "samples/step-00000250.json").read_text()


def test_sheets_come_in_order_of_step_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    assert read_sheets(tmp_path) == []
    for step, bleu in ((2000, 1.0), (100_000_000, 1.0), (250, 1.0), (2000, 2.0)):
        write_sheet(tmp_path, sample_sheet(step, bleu=bleu))
    found = [(sheet.step, sheet.bleu) for sheet in read_sheets(tmp_path)]
    assert found == [(250, 1.0), (2000, 2.0), (100_000_000, 1.0)]


def test_a_sheet_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sheet(tmp_path, sample_sheet(bleu=1.0))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=f"{path}.*No space left on device.*free space"):
        write_sheet(tmp_path, sample_sheet(bleu=2.0))
    # What was written so far is there under another name, and is not read.
    assert [sheet.bleu for sheet in read_sheets(tmp_path)] == [1.0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"samples"', b'"sample"'),
        (b'"hypothesis"', b'"hypotheses"'),
        (b'"bleu"', b'"extra": 1, "bleu"'),
        (b'{"step"', b'[{"step"'),
        (b'"eine', b'"\xff'),
    ],
)
def test_a_damaged_sheet_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    write_sheet(tmp_path, sample_sheet(250))
    path = write_sheet(tmp_path, sample_sheet(1000))
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UserError, match=str(path)):
        read_sheets(tmp_path)
