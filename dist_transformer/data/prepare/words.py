"""Encoding of texts word by word: a word that was seen before is looked up instead of being encoded again.

Byte-level BPE encodes `a b` as it encodes `a` and then ` b`. Texts are cleaned first, so that no word vanishes. What
else normalization does never joins an ASCII space with the character before it, and a pre-token begins at each ASCII
space between two characters that are not white space. Texts with any other white space are encoded as a whole, and so
are all texts of the kinds that do not split like that.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_transformer.data.folder.format import TokenLists
from dist_transformer.data.vocabulary.normalization import may_be_cleaned
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary

# Maximum words of a dictionary, about 30 MB. Beyond it, the less frequent words are removed, down to half this number.
_MOST_WORDS = 2**17
# Texts without spaces between words, such as Chinese, are encoded as a whole: after this number of words, a dictionary
# is no longer used if more than half of the last block were new.
_TRIED_WORDS = 2**15


class WordIds:
    """Dictionary from words to ids, for the texts of one language.

    Args:
        dtype: dtype of the ids.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: Any) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._looked_up, self._gains = 0, tokenizer.encodes_words_apart
        self._number_of: dict[str, int] = {}
        self._begins, self._lengths, self._uses = (np.empty(0, dtype=np.int64) for _ in range(3))
        self._values = np.empty(0, dtype=dtype)

    def encode(self, texts: Sequence[str]) -> TokenLists:
        """Return the ids of each text, equal to those of `Tokenizer.encode_batch`."""
        if not self._gains or not texts:
            return self._encode_whole(texts)
        joined = " ".join(texts)
        # All texts at once: the checks for each text would take a third of the time.
        if may_be_cleaned(joined):
            texts = [self._tokenizer.clean(text) for text in texts]
            joined = " ".join(texts)
        words = joined.split()
        if not words or " ".join(words) != joined:
            is_regular = np.array([" ".join(text.split()) == text != "" for text in texts])
            if not is_regular.all():
                return self._encode_apart(texts, is_regular)
        counts = np.fromiter((text.count(" ") + 1 for text in texts), dtype=np.int64, count=len(texts))
        firsts = np.cumsum(counts) - counts
        # The first word of a text has no space before it. Its key begins with a space, unlike all other keys.
        for place in firsts.tolist():
            words[place] = " " + words[place]
        numbers = self._numbers(words)
        lengths = self._lengths[numbers]
        before = np.cumsum(lengths) - lengths
        index = np.repeat(self._begins[numbers] - before, lengths)
        index += np.arange(len(index))
        offsets = np.concatenate([[0], np.cumsum(np.add.reduceat(lengths, firsts))])
        return TokenLists(self._values[index], offsets)

    def _encode_whole(self, texts: Sequence[str]) -> TokenLists:
        return TokenLists.from_lists(self._tokenizer.encode_batch(texts), self._dtype)

    def _encode_apart(self, texts: Sequence[str], is_regular: np.ndarray) -> TokenLists:
        """Encode the regular texts word by word and the others as a whole."""
        by_kind = [np.flatnonzero(~is_regular), np.flatnonzero(is_regular)]
        whole, regular = ([texts[place] for place in places.tolist()] for places in by_kind)
        found = TokenLists.concatenate([self._encode_whole(whole), self.encode(regular)])
        return found.take(np.argsort(np.concatenate(by_kind)))

    def _numbers(self, words: list[str]) -> np.ndarray:
        if len(self._number_of) > _MOST_WORDS:
            self._forget_rare()
        found = list(map(self._number_of.get, words))
        if None in found:
            new = list(dict.fromkeys(word for word, number in zip(words, found, strict=True) if number is None))
            self._learn(new)
            found = [self._number_of[word] for word in words]
            self._looked_up += len(words)
            self._gains = self._looked_up < _TRIED_WORDS or 2 * len(new) < len(words)
        numbers = np.array(found, dtype=np.int64)
        self._uses += np.bincount(numbers, minlength=len(self._uses))
        return numbers

    def _learn(self, words: list[str]) -> None:
        texts = [word[1:] if word.startswith(" ") else " " + word for word in words]
        lists = TokenLists.from_lists(self._tokenizer.encode_batch(texts), self._dtype)
        self._number_of.update(zip(words, range(len(self._begins), len(self._begins) + len(words)), strict=True))
        self._begins = np.concatenate([self._begins, lists.offsets[:-1] + len(self._values)])
        self._lengths = np.concatenate([self._lengths, lists.lengths])
        self._uses = np.concatenate([self._uses, np.zeros(len(words), dtype=np.int64)])
        self._values = np.concatenate([self._values, lists.values])

    def _forget_rare(self) -> None:
        kept = np.sort(np.argsort(-self._uses, kind="stable")[: _MOST_WORDS // 2])
        words = list(self._number_of)
        self._number_of = {words[number]: place for place, number in enumerate(kept.tolist())}
        lists = TokenLists(self._values, np.append(self._begins, len(self._values))).take(kept)
        self._begins, self._values = lists.offsets[:-1], lists.values
        # Counts are halved, so that the words of later texts can replace others.
        self._lengths, self._uses = self._lengths[kept], self._uses[kept] // 2


def id_type(tokenizer: Tokenizer) -> Any:
    """Return the dtype of the ids of a side."""
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


@functools.lru_cache(maxsize=2)
def words_of(vocabulary: Vocabulary, side: int) -> WordIds:
    """Return the dictionary of the sources (0) or the targets (1), which a process keeps between chunks."""
    tokenizer = (vocabulary.source, vocabulary.target)[side]
    return WordIds(tokenizer, id_type(tokenizer))
