"""All kinds of vocabulary: how a file of each is read, how one is learned, and how two are kept in one file."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import parse_json
from dist_transformer.data.vocabulary import m2m100, marian, sentence_piece
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe, parse_byte_bpe
from dist_transformer.data.vocabulary.normalization import DEFAULT_NORMALIZATION, Normalization
from dist_transformer.data.vocabulary.sentence_piece import ModelType, learn_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary, check_size
from dist_transformer.data.vocabulary.trial import try_in_child

LearnedKind = Literal["byte-bpe", "sentencepiece", "sentencepiece-bpe"]
DEFAULT_COVERAGE = 0.9995

_MODEL_TYPES: dict[LearnedKind, ModelType] = {"sentencepiece": "unigram", "sentencepiece-bpe": "bpe"}
# The library's limit.
_LEAST_COVERAGE = 0.98
_PAIR = "two vocabularies"
_SIDES = ("source", "target")
# How our own files and the models of SentencePiece begin: its first field is a piece.
_OURS = re.compile(rb'\s*\{\s*"kind"')
_MODEL = b"\n"


def load_vocabulary(path: Path, *, sha256: str | None = None, is_foreign: bool = False) -> Vocabulary:
    """Read a vocabulary that `Vocabulary.save` wrote, or a model of SentencePiece.

    Args:
        sha256: recorded hash of the file, checked before a library reads it.
        is_foreign: whether the file is from elsewhere, so that a child process tries it first.

    Raises:
        UserError: the file is missing or has another hash, or holds no vocabulary of a kind that this room describes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        published = ", or convert that folder with dist-transformer import" * (path.parent / "vocab.json").exists()
        raise UserError(f"tokenizer {path} cannot be read ({error.strerror}): check the name{published}") from None
    if sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise UserError(f"{path} is not the tokenizer of its folder, or is damaged: restore it from the data folder")
    try:
        if is_foreign:
            try_in_child(content)
        return parse(content)
    except ValueError as error:
        raise UserError(f"{path} {error}: use the tokenizer.json of a data or model folder, or a .model file") from None


@functools.lru_cache(maxsize=3)
def parse(content: bytes) -> Vocabulary:
    """Parse the content of a file.

    The last results are cached, those of two sides and of both together, because every chunk and stage of a preparation
    needs them.

    Raises:
        ValueError: the content is no vocabulary; the message continues a sentence that begins with the file's name.
    """
    if _OURS.match(content):
        parts = parse_json(content)
        kind = parts["kind"] if isinstance(parts, dict) else None
        if kind == marian.KIND:
            return marian.parse_marian(content, parts)
        if kind == m2m100.KIND:
            return m2m100.parse_m2m100(content, parts)
        if kind == _PAIR:
            return VocabularyPair(content, *(parse(parts[name].encode("utf-8")) for name in _SIDES))
        if kind == sentence_piece.KIND:
            return sentence_piece.parse_sentence_piece(content, parts)
    if content.startswith(_MODEL) and not content.lstrip().startswith(b"{"):
        return sentence_piece.wrap_sentence_piece(content)
    return parse_byte_bpe(content)


class VocabularyPair(Vocabulary):
    """The tokenizer of the sources of one vocabulary, and that of the targets of another one.

    `tokenizer.json` holds both files byte for byte, as strings of JSON.
    """

    def __init__(self, content: bytes, source: Vocabulary, target: Vocabulary) -> None:
        super().__init__(content)
        self._source, self._target = source.source, target.target

    @property
    def source(self) -> Tokenizer:
        return self._source

    @property
    def target(self) -> Tokenizer:
        return self._target

    @property
    def sizes(self) -> tuple[int, int]:
        return self.source.vocab_size, self.target.vocab_size


def wrap_pair(source: Vocabulary, target: Vocabulary) -> VocabularyPair:
    """Make a vocabulary whose sides are those of two others."""
    files = (source.source.content, target.target.content)
    parts = {"kind": _PAIR} | {name: file.decode("utf-8") for name, file in zip(_SIDES, files, strict=True)}
    return VocabularyPair(json.dumps(parts, ensure_ascii=False).encode("utf-8"), source, target)


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
        shared: dict[str, Any] = {
            name: getattr(self, name) for name in ("vocab_size", "lowercase", "normalization", "tags")
        }
        if self.kind == "byte-bpe":
            return learn_byte_bpe(texts, **shared)
        return learn_sentence_piece(
            texts,
            **shared,
            model_type=_MODEL_TYPES[self.kind],
            byte_fallback=self.byte_fallback,
            character_coverage=DEFAULT_COVERAGE if self.character_coverage is None else self.character_coverage,
        )
