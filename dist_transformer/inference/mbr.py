"""Minimum Bayes risk decoding: among the samples of a line, the one that resembles the others most.

    expected utility of h = mean over all samples r of u(h, r)

The samples are candidates, and pseudo-references for each other (Freitag et al. 2022, "High Quality Rather than High
Model Probability"). They are drawn by epsilon sampling, which suits this best (Freitag et al. 2023, "Epsilon Sampling
Rocks"). A text that was drawn more often counts more often. u equals sacreBLEU's score of a sentence, chrF or BLEU; the
n-grams of a text are extracted once for all pairs.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from dist_transformer.config.language_codes import bleu_tokenizer
from dist_transformer.inference.decoding import Decoding

# n-grams that are compared at a time.
_BLOCK = 2**13
_CHRF_ORDER, _CHRF_BETA = 6, 2
_BLEU_ORDER = 4


def choose(texts: Sequence[str], settings: Decoding, *, language: str) -> list[tuple[int, float]]:
    """Return the place and the expected utility of the `nbest` best distinct texts, best first.

    Equal ones are in the order of the texts; a text that occurs several times has its first place.

    Args:
        language: target language, by which BLEU splits text into words.
    """
    counts = Counter(texts)
    distinct = list(counts)
    utilities = pairwise_utilities(distinct, settings.utility, language=language)
    expected = utilities @ np.array([counts[text] for text in distinct]) / len(texts)
    order = sorted(range(len(distinct)), key=lambda i: -expected[i])[: settings.results]
    return [(texts.index(distinct[i]), float(expected[i])) for i in order]


def pairwise_utilities(texts: Sequence[str], utility: str, *, language: str) -> np.ndarray:
    """Return sacreBLEU's score of each text, by row, against each text as the only reference, by column: 0 to 100."""
    return _chrf(texts) if utility == "chrf" else _bleu(texts, bleu_tokenizer(language))


def _chrf(texts: Sequence[str]) -> np.ndarray:
    """Compute chrF: the F-score of the mean precision and recall over the orders that both texts have."""
    letters = ["".join(text.split()) for text in texts]
    orders = np.zeros((len(texts),) * 2)
    precision, recall = np.zeros_like(orders), np.zeros_like(orders)
    for order in range(1, _CHRF_ORDER + 1):
        grams = [[text[i : i + order] for i in range(len(text) - order + 1)] for text in letters]
        counts = np.array([len(each) for each in grams], dtype=float)
        both = (counts[:, None] > 0) & (counts > 0)
        matches = _matches(grams)
        precision += np.divide(matches, counts[:, None], where=both, out=np.zeros_like(matches))
        recall += np.divide(matches, counts, where=both, out=np.zeros_like(matches))
        orders += both
    precision, recall = precision / orders.clip(min=1), recall / orders.clip(min=1)
    below = _CHRF_BETA**2 * precision + recall
    product = (1 + _CHRF_BETA**2) * precision * recall
    return 100 * np.divide(product, below, where=below > 0, out=np.zeros_like(below))


def _bleu(texts: Sequence[str], tokenizer: str) -> np.ndarray:
    """Compute BLEU of sentences: exponential smoothing, and only the orders that a text has."""
    # Loading it takes a while, and only this utility needs it.
    from sacrebleu.metrics.bleu import BLEU

    tokenize = BLEU(tokenize=tokenizer).tokenizer
    words = [tokenize(text.rstrip()).split() for text in texts]
    grams = [
        [[tuple(each[i : i + order]) for i in range(len(each) - order + 1)] for each in words]
        for order in range(1, _BLEU_ORDER + 1)
    ]
    matches = [_matches(of_order).astype(int) for of_order in grams]
    scores = np.zeros((len(texts),) * 2)
    for i, j in np.ndindex(scores.shape):
        scores[i, j] = BLEU.compute_bleu(
            [int(of_order[i, j]) for of_order in matches],
            [len(of_order[i]) for of_order in grams],
            len(words[i]),
            len(words[j]),
            smooth_method="exp",
            effective_order=True,
        ).score
    return scores


def _matches(grams: Sequence[Sequence[Hashable]]) -> np.ndarray:
    """Count the n-grams that each two texts share, the t-th occurrence in one with the t-th in the other."""
    numbers: dict[tuple[Hashable, int], int] = {}
    rows, columns = [], []
    for row, each in enumerate(grams):
        seen = Counter[Hashable]()
        for gram in each:
            seen[gram] += 1
            rows.append(row)
            columns.append(numbers.setdefault((gram, seen[gram]), len(numbers)))
    found, places = np.zeros((len(grams),) * 2), (np.array(rows, dtype=int), np.array(columns, dtype=int))
    for start in range(0, len(numbers), _BLOCK):
        inside = (places[1] >= start) & (places[1] < start + _BLOCK)
        has = np.zeros((len(grams), min(_BLOCK, len(numbers) - start)), dtype=np.float32)
        has[places[0][inside], places[1][inside] - start] = 1
        found += has @ has.T
    return found
