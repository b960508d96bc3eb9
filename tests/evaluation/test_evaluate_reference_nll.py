import math

import pytest
import torch

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, Tokenizer
from dist_transformer.evaluation.evaluate import reference_nll
from dist_transformer.inference.attention_maps import _one_sentence
from dist_transformer.model.transformer import Transformer

Lines = tuple[list[str], list[str]]


@torch.no_grad()
def one_by_one(model: Transformer, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> float:
    """Compute the nll from the logits of each sentence alone."""
    total, tokens = 0.0, 0
    for source, target in pairs:
        labels = [*tokenizer.encode(target), EOS_ID]
        side = _one_sentence([*tokenizer.encode(source), EOS_ID])
        hidden_TD = model.decode(_one_sentence([BOS_ID, *labels[:-1]]), model.encode(side), side)
        log_p_TV = torch.log_softmax(model.logits(hidden_TD).double(), dim=-1)
        total -= sum(log_p_TV[place, label].item() for place, label in enumerate(labels))
        tokens += len(labels)
    return total / tokens


def test_it_is_that_of_single_sentences(random_model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines) -> None:
    """An empty line is `</s>` alone; a line of 160 tokens does not fit the model's positions and is left out."""
    pairs = [*zip(toy_lines[0][:20], toy_lines[1][:20], strict=True), ("a", ""), ("", "a")]
    found = reference_nll(random_model, toy_tokenizer, [*pairs, ("§" * 80, "a")])
    assert found == pytest.approx(one_by_one(random_model, toy_tokenizer, pairs), rel=1e-6)


def test_no_pair_that_fits_is_not_a_number(random_model: Transformer, toy_tokenizer: Tokenizer) -> None:
    assert math.isnan(reference_nll(random_model, toy_tokenizer, [("a", "§" * 80)]))
