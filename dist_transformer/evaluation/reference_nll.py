"""Negative log-likelihood of the references of a test set."""

import math
from collections.abc import Sequence

from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.inference.scoring import longest_line, score_ids
from dist_transformer.model.transformer import Transformer


def reference_nll(
    model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, tags: Sequence[str] = ()
) -> float:
    """Return -log p per target token, `</s>` included, without smoothing. Collective: every rank must call it.

    Pairs that are too long for the model's positions are left out; the result is NaN if none is left.

    Args:
        model: model in evaluation mode.
        pairs: source and reference lines, the same on every rank.
        tags: tags in front of every source.
    """
    longest = longest_line(model)
    sources, targets = (tokenizer.encode_batch(list(side)) for side in zip(*pairs, strict=True))
    prefix = tokenizer.tag_ids(tags)
    tagged = [[*prefix, *source] for source in sources]
    ids = [pair for pair in zip(tagged, targets, strict=True) if max(map(len, pair)) <= longest]
    scores = score_ids(model, ids, device=model.embedding.device)
    values = [value for score in scores for value in score.token_log_probabilities]
    # fsum does not depend on the order, and therefore not on the number of ranks.
    return -math.fsum(values) / len(values) if values else math.nan
