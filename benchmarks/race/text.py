"""Text of a race: the ids of a data folder as words, so that every toolkit trains on the same segments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_transformer.base.files import write_file
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import SPECIALS
from dist_transformer.evaluation.bleu import corpus_bleu


@dataclass(frozen=True, slots=True)
class RaceText:
    """Files of words, with a word for each entry of the vocabulary that is no special token."""

    data: DataFolder
    folder: Path

    @property
    def train(self) -> tuple[Path, Path]:
        return self.folder / "train.source", self.folder / "train.target"

    @property
    def valid(self) -> Path:
        return self.folder / "valid.source"

    @property
    def pairs(self) -> int:
        return self.data.train.info.pairs

    def words(self) -> list[str]:
        return [_word(token) for token in range(len(SPECIALS), self.data.index.vocab_size)]

    def write(self) -> None:
        """Write the training text, in an order that is drawn once, and the validation sources."""
        self.folder.mkdir(parents=True, exist_ok=True)
        split = self.data.train
        order = np.random.default_rng(1).permutation(self.pairs)
        source, source_lengths, target, target_lengths = split.tokens(order)
        for path, ids, lengths in zip(self.train, (source, target), (source_lengths, target_lengths), strict=True):
            write_file(path, _lines(part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])))
        write_file(self.valid, _lines(self.data.tokenizer().source.encode_batch(self.data.valid_text()[0])))

    def texts_of(self, lines: Sequence[str]) -> list[str]:
        """Return the texts of lines of words; words that are no entries, such as `<unk>`, are left out."""
        target, known = self.data.tokenizer().target, set(self.words())
        return [target.decode([int(word[1:]) for word in line.split() if word in known]) for line in lines]

    def bleu(self, translations: Sequence[str]) -> float:
        """Score translations of the validation sources."""
        _, references = self.data.valid_text()
        index = self.data.index
        language = index.target_language
        return corpus_bleu(translations, references, target_language=language, lowercase=index.lowercase).value


def _word(token: int) -> str:
    return f"p{token}"


def _lines(sentences: Iterable[Sequence[int]]) -> str:
    return "".join(" ".join(map(_word, sentence)) + "\n" for sentence in sentences)
