"""Interpolation of a model and what was trained from it."""

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dist_transformer import api
from dist_transformer.averaging.interpolation import interpolate
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.model_folder import read_model_info
from tests.averaging.conftest import MODEL, random_weights, save


def test_each_number_is_mixed_by_the_shares(tmp_path: Path) -> None:
    """Two runs, which a mean refuses, have dropout rates of their own."""
    base = save(tmp_path / "base", 4, corpus="general", synthetic=False)
    changed = {"run": "another", "corpus": "own", "model": dataclasses.replace(MODEL, dropout=0.3), "synthetic": True}
    tuned = save(tmp_path / "tuned", 2, **changed)
    info = api.average(interpolate=[f"{base}:3", f"{tuned}:1"], out=tmp_path / "out")
    stored, first, other = (
        safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"),
        random_weights(4),
        random_weights(2),
    )
    for name, tensor in stored.items():
        expected = (0.75 * first[name].double() + 0.25 * other[name].double()).float()
        assert torch.equal(tensor, expected), name
    assert info == read_model_info(tmp_path / "out")
    assert (info.steps, info.run, info.corpus, info.synthetic) == ((2, 4), None, "general, own", True)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"Interpolated: 0.75 of {base}, 0.25 of {tuned}" in card


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": dataclasses.replace(MODEL, norm="pre")}, "norm"),
        ({"tokenizer": learn_byte_bpe(["a b"], vocab_size=300, lowercase=True)}, "vocabulary"),
        ({"target_language": "fr"}, "direction"),
    ],
)
def test_models_that_do_not_correspond_are_refused(changes: dict[str, object], what: str, tmp_path: Path) -> None:
    paths = [save(tmp_path / "base", 1), save(tmp_path / "tuned", 2, **changes)]
    with pytest.raises(UserError) as refused:
        interpolate(paths, tmp_path / "out")
    assert str(refused.value).startswith(f"{paths[1]} has another {what} than {paths[0]}: interpolate a model and what")
    assert not (tmp_path / "out").exists()
