"""Alignments from text to translation: preparation, training, model folder, and what reads them."""

import warnings
from pathlib import Path

import pytest

import dist_transformer
from dist_transformer import api
from dist_transformer.base.errors import UserError
from tests.api.test_api import SMALL


def test_alignments_go_from_the_text_to_translations(tmp_path: Path) -> None:
    for name, aligned in (("plain", False), ("aligned", True)):
        api.prepare(out=tmp_path / name, toy=60, toy_alignments=aligned, vocab_size=400, report=lambda _: None)
    with pytest.raises(UserError, match="guided_attention needs alignments: prepare the data with --alignments"):
        api.train(data=tmp_path / "plain", run_dir=tmp_path / "run", preset="tiny", **SMALL, guided_attention=0.5)
    losses = []
    for weight in (0.0, 0.5):
        run = api.train(
            data=tmp_path / "aligned", run_dir=tmp_path / f"{weight}", preset="tiny", **SMALL, guided_attention=weight
        )
        losses.append(run.records("train")[0]["loss"])
        api.average(run_dir=run.path, last=1, out=tmp_path / f"model{weight}")
    # At first the weights of about forty tokens are equal.
    assert 1.5 < losses[1] - losses[0] < 2.5
    model = dist_transformer.load(tmp_path / "model0.5")
    assert model.info.guided
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((one,),) = model.translate(["the dog sees"], nbest=1, alignment=True, max_extra_tokens=0)
    assert one.alignment.is_guided
    (given,) = model.align(["the dog sees"], [one.text])
    assert given == one.alignment
    unguided = dist_transformer.load(tmp_path / "model0.0")
    assert not unguided.info.guided
    with pytest.warns(UserWarning, match="1 line aligned by attention that no alignments guided"):
        unguided.translate(["the dog sees"], nbest=1, alignment=True, max_extra_tokens=0)
    with pytest.raises(UserError, match="alignment"):
        model.translate(["the dog"], alignment=True)
