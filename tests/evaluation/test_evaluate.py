"""Evaluation in this process: which scores lead, and what is said of them."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dist_transformer.config.command_line import read_keywords
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.evaluation.evaluate import Evaluation, evaluate, reference_nll, write_evaluation
from dist_transformer.evaluation.settings import EvaluateSettings
from dist_transformer.inference.scoring import score_pairs
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from tests.small_model import restate

Lines = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def lowercased_folder(
    toy_lines: Lines, random_model: Transformer, model_info: ModelInfo, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`random_model` with a tokenizer of the same size that lowercases."""
    folder = tmp_path_factory.mktemp("lowercased") / "model"
    tokenizer = learn_byte_bpe([*toy_lines[0], *toy_lines[1]], vocab_size=400, lowercase=True)
    assert tokenizer.vocab_size == model_info.model.vocab_size
    write_model_folder(
        folder,
        info=replace(model_info, tokenizer_sha256=tokenizer.sha256),
        weights=dict(random_model.state_dict()),
        tokenizer_json=tokenizer.content,
    )
    return folder


def run(
    folder: Path, tmp_path: Path, references: list[str], lowercase: bool = False, first: str = "the dog"
) -> Evaluation:
    source, reference = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("".join(f"{first} {i}\n" for i, _ in enumerate(references)), encoding="utf-8")
    reference.write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    values = {"model": folder, "src": source, "ref": reference, "beam": 1, "max_extra_tokens": 5}
    settings = read_keywords(EvaluateSettings, {**values, "lowercase": lowercase}, "run").build(EvaluateSettings)
    return evaluate(settings, device=torch.device("cpu"))


def notes_of(evaluation: Evaluation) -> list[str]:
    """Notes without that of outputs that were cut, as a random model's are."""
    return [note for note in evaluation.notes if "a translation that was cut" not in note]


def test_case_counts_for_a_model_that_keeps_it(model_folder: Path, tmp_path: Path, toy_lines: Lines) -> None:
    evaluation = run(model_folder, tmp_path, toy_lines[1][:5])
    assert "case:mixed" in evaluation.scores.bleu.signature
    assert notes_of(evaluation) == []
    evaluation = run(model_folder, tmp_path, toy_lines[1][:5], lowercase=True)
    assert "case:lc" in evaluation.scores.bleu.signature
    assert notes_of(evaluation) == []


def test_case_is_ignored_for_a_model_without(lowercased_folder: Path, tmp_path: Path, toy_lines: Lines) -> None:
    evaluation = run(lowercased_folder, tmp_path, toy_lines[1][:5])
    assert evaluation.scores.bleu == evaluation.scores.bleu_lowercase
    assert evaluation.scores.bleu_tokenized is not None
    for score in (evaluation.scores.bleu, evaluation.scores.bleu_tokenized, evaluation.scores.chrf):
        assert "case:lc" in score.signature
    assert [note.partition(":")[0] for note in notes_of(evaluation)] == ["lowercased model, references with capitals"]
    assert len(f"note: {notes_of(evaluation)[0]}") <= 80
    write_evaluation(evaluation, tmp_path / "result.json")
    report = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert report["notes"] == list(evaluation.notes)
    assert report["bleu"] == report["bleu_lowercase"]
    assert report["signature"] == report["signatures"]["bleu_lowercase"]
    # References without capitals need no note.
    assert notes_of(run(lowercased_folder, tmp_path, [line.lower() for line in toy_lines[1][:5]])) == []


def test_lines_stand_as_in_the_file_and_those_that_translate_splits_are_counted(
    model_folder: Path, tmp_path: Path, toy_lines: Lines
) -> None:
    before = run(model_folder, tmp_path, toy_lines[1][:5], first="A man. A dog")
    folder = shutil.copytree(model_folder, tmp_path / "captions")
    restate(folder, several_sentences=0.0)
    found = run(folder, tmp_path, toy_lines[1][:5], first="A man. A dog")
    assert found.hypotheses == before.hypotheses
    assert [note for note in found.notes if note not in before.notes] == [
        "5 lines stand as in the file, for scores like published ones; translate splits such lines at their "
        "sentences: --split-over 1 does so here"
    ]
    # A random model's outputs do not end.
    assert any("with a translation that was cut at the limit of source + 5 tokens" in note for note in found.notes)


def test_the_nll_of_references_is_that_of_their_scores(
    random_model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines
) -> None:
    """An empty line is `</s>` alone; a line of 160 tokens does not fit the model's positions and is left out."""
    pairs = [*zip(toy_lines[0][:20], toy_lines[1][:20], strict=True), ("a", ""), ("", "a")]
    found = reference_nll(random_model, toy_tokenizer, [*pairs, ("§" * 80, "a")])
    scores = score_pairs(random_model, toy_tokenizer, *zip(*pairs, strict=True), device=torch.device("cpu"))
    total, tokens = sum(score.log_probability for score in scores), sum(len(score.tokens) for score in scores)
    assert found == pytest.approx(-total / tokens, rel=1e-6)
    assert math.isnan(reference_nll(random_model, toy_tokenizer, [("a", "§" * 80)]))
