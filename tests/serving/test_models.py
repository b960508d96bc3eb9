import copy
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.inference.attention_maps import attention_maps
from dist_transformer.inference.decoding import Decoding, ExactLoading
from dist_transformer.inference.translator import Translator
from dist_transformer.serving.models import LONGEST_MAP, ServedModel, load_models, short_names
from dist_transformer.serving.requests import AttentionRequest, Kind
from tests.small_model import restate

Lines = tuple[list[str], list[str]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def served(model_folder: Path) -> ServedModel:
    (model,) = load_models([[model_folder]], ExactLoading(), Decoding(nbest=3, max_extra_tokens=5), CPU)
    return model


def ask(text: str, tokens: list[int], **settings: Any) -> AttentionRequest:
    values = {"model": 0, "text": text, "tokens": list(tokens), "kind": "cross", "layer": 0, **settings}
    return AttentionRequest(**values)


def test_translations_are_those_of_the_translator(served: ServedModel, toy_lines: Lines) -> None:
    line = toy_lines[0][0]
    answer = served.translate(line)
    (expected,) = served.translator.translate([line])
    assert [each["text"] for each in answer["hypotheses"]] == [each.text for each in expected.hypotheses]
    assert len(answer["hypotheses"]) == 3
    np.testing.assert_allclose(
        [each["score"] for each in answer["hypotheses"]], [each.score for each in expected.hypotheses], atol=1e-4
    )
    for each in answer["hypotheses"]:
        # The text is one line, even if the random model writes a line break.
        assert served.translator.tokenizer.decode(each["tokens"]).split() == each["text"].split()
        assert len(each["pieces"]) == len(each["tokens"]) + 1
    assert "".join(answer["source_pieces"]).replace("▁", " ") == f"{line}</s>"
    assert (answer["source_language"], answer["target_language"], answer["split"]) == ("en", "de", None)
    assert answer["has_maps"]
    # JSON of a strict reader.
    json.dumps(answer, allow_nan=False)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_rows_sum_to_1(served: ServedModel, toy_lines: Lines, kind: str) -> None:
    line = toy_lines[0][0]
    found = served.translate(line)
    first = found["hypotheses"][0]
    answer = served.attention(ask(line, first["tokens"], kind=kind))
    weights_HTS = np.array(answer["weights"])
    assert weights_HTS.shape == (2, len(answer["rows"]), len(answer["columns"]))
    # Each of so many weights is off by half of 0.001 at most.
    np.testing.assert_allclose(weights_HTS.sum(-1), 1, atol=0.0005 * len(answer["columns"]))
    assert answer["rows"] == (found["source_pieces"] if kind == "encoder" else first["pieces"])
    assert answer["columns"] == (["<s>", *first["pieces"][:-1]] if kind == "decoder" else found["source_pieces"])
    if kind == "decoder":
        assert not np.triu(weights_HTS, 1).any()


def test_cross_attention_is_that_of_a_validation(served: ServedModel, toy_lines: Lines) -> None:
    line = toy_lines[0][0]
    tokens = served.translate(line)["hypotheses"][1]["tokens"]
    source = served.translator.tokenizer.encode(line)
    maps_LHTS = attention_maps(served.translator.model, source, list(tokens), "cross")["cross"]
    weights_HTS = served.attention(ask(line, tokens))["weights"]
    np.testing.assert_allclose(weights_HTS, maps_LHTS[0], atol=0.00051)


def test_an_ensemble_has_no_maps(model_folder: Path, other_folder: Path, toy_lines: Lines) -> None:
    settings = Decoding(nbest=2, max_extra_tokens=5)
    alone, joint = load_models([[model_folder], [model_folder, other_folder]], ExactLoading(), settings, CPU)
    assert joint.name == " + ".join(short_names([model_folder, other_folder]))
    first, both = (model.translate(toy_lines[0][0]) for model in (alone, joint))
    assert (first["has_maps"], both["has_maps"]) == (True, False)
    assert first["hypotheses"] != both["hypotheses"]
    with pytest.raises(UserError, match="attention is that of one model, and this is an ensemble"):
        joint.attention(ask("a", [5]))


def test_a_served_model_splits_lines_longer_than_its_training(
    model_folder: Path, toy_lines: Lines, tmp_path: Path
) -> None:
    first, second = [line for line in toy_lines[0] if line.endswith(".")][:2]
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    restate(folder, longest_source=max(len(first), len(second)))
    (served,) = load_models([[folder]], ExactLoading(), Decoding(), CPU)
    both, long = (served.translate(text) for text in (f"{first} {second} {first}", "word " * 35))
    assert (both["split"]["parts"], both["has_maps"], both["beyond_training"]) == (3, False, False)
    assert (long["split"], long["beyond_training"]) == (None, True)
    restate(folder, several_sentences=0.0199)
    (served,) = load_models([[folder]], ExactLoading(), Decoding(max_extra_tokens=0), CPU)
    two = served.translate("A man. A dog.", "d")
    assert two["split"] == {"parts": 2, "limit": 0}
    assert two["hypotheses"][0]["text"].startswith("d")
    assert any(one["cut"] for one in two["hypotheses"])


def test_a_long_text_has_no_maps(served: ServedModel) -> None:
    tokenizer = served.translator.tokenizer
    longest, longer = ("a " * (LONGEST_MAP - 1)).strip(), ("a " * LONGEST_MAP).strip()
    assert len(tokenizer.encode(longer)) == LONGEST_MAP
    assert not served.translate(longer)["has_maps"]
    assert len(served.attention(ask(longest, []))["columns"]) == LONGEST_MAP
    with pytest.raises(UserError, match="attention is shown for up to 127 word pieces"):
        served.attention(ask(longer, []))
    with pytest.raises(UserError, match="attention is shown for up to 127 word pieces"):
        served.attention(ask("a", [5] * LONGEST_MAP))


def test_a_model_that_has_diverged_is_one_sentence(served: ServedModel) -> None:
    broken = copy.deepcopy(served.translator.model)
    broken.embedding.data.fill_(float("nan"))
    translator = Translator(broken, served.translator.tokenizer, CPU, Decoding())
    model = ServedModel(name="broken", info=served.info, translator=translator)
    with pytest.raises(UserError, match="the model computes numbers that are not finite"):
        model.translate("a dog")


def test_names_are_short_and_differ() -> None:
    assert short_names([Path("/runs/base")]) == ["base"]
    assert short_names([Path("/runs/base/model")]) == ["base/model"]
    assert short_names([Path("/runs/a/model"), Path("/runs/b/model")]) == ["a/model", "b/model"]
    assert short_names([Path("/runs/en/x/best"), Path("/runs/de/x/best")]) == ["en/x/best", "de/x/best"]
    assert short_names([Path("/runs/base"), Path("/runs/base")]) == ["base", "base"]
    assert short_names([Path("/model")]) == ["model"]
