"""The translation, among several of a line, that is closest to its reference."""

from dataclasses import replace
from typing import TYPE_CHECKING

from dist_transformer.config.language_codes import bleu_tokenizer

if TYPE_CHECKING:
    from dist_transformer.inference.translator import Translation


class Closest:
    """Choice of the hypothesis with the best sentence BLEU, as Kim and Rush (2016) make targets for a student.

    The BLEU of a sentence is sacreBLEU's, with only the orders that the hypothesis has.

    Args:
        lowercase: compare without case, for a model that writes no capitals.
    """

    def __init__(self, language: str, *, lowercase: bool) -> None:
        # Imported late, because it loads readers of many formats.
        from sacrebleu.metrics.bleu import BLEU

        self._metric = BLEU(tokenize=bleu_tokenizer(language), effective_order=True, lowercase=lowercase)

    def __call__(self, translation: "Translation", reference: str) -> "Translation":
        """Keep one hypothesis of a line; among equal ones, the one that the model finds best."""
        best = max(translation.hypotheses, key=lambda one: self._metric.sentence_score(one.text, [reference]).score)
        return replace(translation, hypotheses=(best,))
