"""Learning of a vocabulary of any kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.normalization import DEFAULT_NORMALIZATION, Normalization
from dist_transformer.data.vocabulary.sentence_piece import ModelType, learn_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, check_size

LearnedKind = Literal["byte-bpe", "sentencepiece", "sentencepiece-bpe"]

DEFAULT_COVERAGE = 0.9995
_MODEL_TYPES: dict[LearnedKind, ModelType] = {"sentencepiece": "unigram", "sentencepiece-bpe": "bpe"}
# The library's limit.
_LEAST_COVERAGE = 0.98


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """Settings of a vocabulary to learn.

    Raises:
        UserError: the settings exclude each other, or there is no room for the entries that every vocabulary has.
    """

    kind: LearnedKind
    vocab_size: int
    lowercase: bool = False
    normalization: Normalization = DEFAULT_NORMALIZATION
    tags: tuple[str, ...] = ()
    byte_fallback: bool = False
    """Whether SentencePiece writes characters that are no pieces as bytes, not as `<unk>`."""
    character_coverage: float | None = None
    """Share of the characters of the text that are pieces of SentencePiece; None: 0.9995."""

    def __post_init__(self) -> None:
        coverage = self.character_coverage
        if self.kind == "byte-bpe":
            given = "byte_fallback" if self.byte_fallback else "character_coverage" if coverage is not None else None
            if given:
                raise UserError(f"{given} is for SentencePiece: leave it out, or pass --vocabulary sentencepiece")
        elif coverage is not None and not _LEAST_COVERAGE <= coverage <= 1:
            raise UserError(f"character_coverage is {coverage}: it must be {_LEAST_COVERAGE} to 1")
        check_size(self.vocab_size, self.tags, all_bytes=self.kind == "byte-bpe" or self.byte_fallback)

    def learn(self, texts: Iterable[str]) -> Tokenizer:
        """Learn the vocabulary. The same texts give the same file, byte for byte.

        Raises:
            UserError: no such vocabulary can be learned from the texts.
        """
        if self.kind == "byte-bpe":
            return learn_byte_bpe(
                texts,
                vocab_size=self.vocab_size,
                lowercase=self.lowercase,
                normalization=self.normalization,
                tags=self.tags,
            )
        return learn_sentence_piece(
            texts,
            vocab_size=self.vocab_size,
            lowercase=self.lowercase,
            normalization=self.normalization,
            tags=self.tags,
            model_type=_MODEL_TYPES[self.kind],
            byte_fallback=self.byte_fallback,
            character_coverage=DEFAULT_COVERAGE if self.character_coverage is None else self.character_coverage,
        )
