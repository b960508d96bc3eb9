"""Settings of a preparation, and the checks that need no text."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.text.files import PairSource
from dist_transformer.data.vocabulary.learning import LearnedKind, Learning
from dist_transformer.data.vocabulary.normalization import DEFAULT_NORMALIZATION, Normalization
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

_STRENGTH = 0.1
_SIDES = (("source", "--src-", (0,)), ("target", "--tgt-", (1,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyChoice:
    """A vocabulary of a preparation: one that exists, or one that is learned."""

    sides: tuple[int, ...]
    """Sides of the pairs that it is for: 0, the sources; 1, the targets."""
    flags: str
    """Beginning of its flags: `--`, `--src-` or `--tgt-`."""
    tokenizer: Path | None
    vocab_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSettings:
    out: Path
    """Folder to make; it must be new or empty."""
    sources: tuple[PairSource, ...]
    validation: tuple[PairSource, ...] = ()
    """Validation text; empty: `valid_pairs` pairs are held out from the sources."""
    vocab_size: int | None = None
    """Vocabulary entries, special tokens and bytes included; required unless a tokenizer is given."""
    source_vocab_size: int | None = None
    """Entries of a vocabulary of the sources alone; the targets then have one of their own, too."""
    target_vocab_size: int | None = None
    vocabulary: LearnedKind = "byte-bpe"
    """Kind of vocabulary to learn: byte-level BPE, or SentencePiece's unigram or BPE."""
    byte_fallback: bool | None = None
    """Whether SentencePiece writes characters that are no pieces as bytes, not as `<unk>`; None: yes."""
    character_coverage: float | None = None
    """Share of the characters of the text that are pieces of SentencePiece; None: 0.9995."""
    tokenizer: Path | None = None
    """A model or data folder, its tokenizer.json, or a model of SentencePiece: use its vocabulary unchanged."""
    source_tokenizer: Path | None = None
    """Vocabulary for the sources alone, named as `tokenizer` is: its tokenizer of sources is used."""
    target_tokenizer: Path | None = None
    """Vocabulary for the targets alone: its tokenizer of targets is used."""
    tags: tuple[str, ...] = ()
    """Tags to reserve in a vocabulary that is learned."""
    source_tags: tuple[str, ...] = ()
    """Tags of the vocabulary in front of every source sentence, in this order."""
    lowercase: bool = False
    normalization: Normalization | None = None
    """Rule of a learned vocabulary for text; None: that of the given tokenizer, or clean."""
    segmentations: int = 1
    """Segmentations of each training sentence: epoch e trains on number e modulo this. They are drawn if there are
    several, and the shards need as many times the disk."""
    segmentation_dropout: float | None = None
    """Probability with which BPE leaves a merge out (Provilkov et al. 2020); None: 0.1."""
    segmentation_alpha: float | None = None
    """Exponent of the probabilities by which a unigram model's 64 best segmentations are drawn (Kudo 2018); None:
    0.1."""
    segmented_side: Literal["both", "source", "target"] = "both"
    """Side whose segmentations are drawn; the other one has its best one in all epochs."""
    max_tokens: int = 256
    """Maximum tokens per side, the special token and the tags included; longer pairs are dropped."""
    max_length_ratio: float = 3.0
    """Maximum of (longer + 5) / (shorter + 5) tokens of text; pairs above it are dropped."""
    keep_overlap: bool = False
    """Keep training pairs that are also validation pairs; validation then looks better than it is."""
    pairs_per_shard: int = 100_000
    """Average pairs per shard; shards differ in size because pairs are assigned by hash."""
    vocab_sample_pairs: int = 2_000_000
    """Maximum pairs, approximately, that the vocabulary is learned from. Larger corpora are sampled, by seed, to bound
    the memory."""
    seed: int = 1
    valid_pairs: int = 1_000
    """Pairs that are held out if no validation text is given; at most a tenth of the pairs."""
    source_language: str | None = None
    """Source language; None: taken from the names of the files."""
    target_language: str | None = None
    corpus: str = ""
    """Name for reports; empty: the name of the first source."""
    synthetic: bool = False
    keep_text: Path | None = None
    """Folder to copy to `text/` in the result."""
    workers: int = 1
    """Processes per rank; the result does not depend on it."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(
                "there is no text to prepare: pass --src and --tgt, --tsv, --jsonl, --parquet, --dataset or --toy"
            )
        for name in ("tokenizer", "source_tokenizer", "target_tokenizer"):
            if (path := getattr(self, name)) is not None and path.is_dir():
                object.__setattr__(self, name, path / TOKENIZER_FILE)
        learned = [choice for choice in self.vocabularies if choice.tokenizer is None]
        for choice in learned:
            _ = self.learning(choice)
        if self._learns_tags and (missing := [tag for tag in self.source_tags if tag not in self.tags]):
            raise UserError(f"--src-tag {missing[0]} is not in the vocabulary to be learned: pass it to --tag, too")
        new = {
            f"--vocabulary {self.vocabulary} learns a new vocabulary": self.vocabulary != "byte-bpe",
            "--byte-fallback is for a new vocabulary": self.byte_fallback is not None,
            "--character-coverage is for a new vocabulary": self.character_coverage is not None,
        }
        useless = [text for text, value in new.items() if value and not learned]
        if self.tags and not self._learns_tags:
            useless.insert(0, f"--tag reserves {' '.join(self.tags)} in a new vocabulary")
        if useless:
            flag = f"{self.vocabularies[0].flags}tokenizer"
            raise UserError(
                f"{useless[0]}, but {flag} names an existing one: leave out {useless[0].split()[0]} or {flag}"
            )
        self._check_segmentations()
        positive = ("pairs_per_shard", "valid_pairs", "vocab_sample_pairs", "workers", "segmentations")
        for field, least in {"max_tokens": 2, **dict.fromkeys(positive, 1), "seed": 0}.items():
            if (value := getattr(self, field)) < least:
                raise UserError(f"{field} is {value}: it must be at least {least}")
        if not 1 <= self.max_length_ratio < math.inf:
            raise UserError(f"max_length_ratio is {self.max_length_ratio}: it must be at least 1")
        if self.pairs_per_shard * self.max_tokens >= 2**31:
            raise UserError(
                f"pairs_per_shard {self.pairs_per_shard} × max_tokens {self.max_tokens} exceeds what one Arrow batch "
                "holds (2^31 tokens): lower one of them"
            )

    def _check_segmentations(self) -> None:
        for name in ("segmentation_dropout", "segmentation_alpha"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UserError(f"{name} is {value}: it must be above 0 and at most 1; 0.1 is usual")
        set_alone = {
            "--segmentation-dropout": self.segmentation_dropout is not None,
            "--segmentation-alpha": self.segmentation_alpha is not None,
            "--segmented-side": self.segmented_side != "both",
        }
        if self.segmentations == 1 and (flag := next((flag for flag, value in set_alone.items() if value), None)):
            raise UserError(f"{flag} is for several segmentations: set --segmentations to 2 or more, or leave it out")

    @property
    def sampled_sides(self) -> tuple[int, ...]:
        """Sides whose segmentations are drawn: 0, the sources; 1, the targets."""
        sides = {"both": (0, 1), "source": (0,), "target": (1,)}[self.segmented_side]
        return sides if self.segmentations > 1 else ()

    def strength(self, tokenizer: Tokenizer) -> float:
        """Return what `Tokenizer.sample` takes for a side.

        Raises:
            UserError: its kind of vocabulary is not sampled, or by another setting.
        """
        values = {"dropout": self.segmentation_dropout, "alpha": self.segmentation_alpha}
        if tokenizer.sampled_by is None:
            raise UserError(
                f"--segmentations {self.segmentations} needs BPE or a unigram model, and a {tokenizer.kind} vocabulary "
                "has one segmentation of a text: leave it out"
            )
        own = values.pop(tokenizer.sampled_by)
        if own is None and any(value is not None for value in values.values()):
            raise UserError(
                f"--segmentation-{next(iter(values))} is not for a {tokenizer.kind} vocabulary: set "
                f"--segmentation-{tokenizer.sampled_by}"
            )
        return _STRENGTH if own is None else own

    @property
    def vocabularies(self) -> tuple[VocabularyChoice, ...]:
        """One vocabulary for both sides, or one for each.

        Raises:
            UserError: a side has none, or both kinds are asked for.
        """
        own = [
            VocabularyChoice(
                sides=sides,
                flags=flags,
                tokenizer=getattr(self, f"{name}_tokenizer"),
                vocab_size=getattr(self, f"{name}_vocab_size"),
            )
            for name, flags, sides in _SIDES
        ]
        joint = VocabularyChoice(sides=(0, 1), flags="--", tokenizer=self.tokenizer, vocab_size=self.vocab_size)
        chosen = [one for one in (joint, *own) if one.tokenizer is not None or one.vocab_size is not None]
        if not chosen:
            raise UserError(
                "vocab_size is missing: set --vocab-size (37000 is the paper's, 10000 suits 30,000 pairs), or pass a "
                "model folder, a tokenizer.json or a SentencePiece model to --tokenizer"
            )
        if chosen == [joint]:
            return (joint,)
        if joint in chosen:
            raise UserError(
                f"--vocab-size and --tokenizer are for one vocabulary of both languages, {chosen[1].flags}vocab-size "
                f"and {chosen[1].flags}tokenizer for one of their own: leave out one kind"
            )
        if missing := [one.flags for one in own if one not in chosen]:
            raise UserError(
                f"{chosen[0].flags}vocab-size and {chosen[0].flags}tokenizer are for one language, and the other has "
                f"no vocabulary: set {missing[0]}vocab-size or {missing[0]}tokenizer, too"
            )
        return tuple(own)

    @property
    def _learns_tags(self) -> bool:
        """Whether the vocabulary of the sources, which has the tags, is a new one."""
        return self.vocabularies[0].tokenizer is None

    def learning(self, choice: VocabularyChoice) -> Learning:
        """Return how a vocabulary is learned."""
        assert choice.vocab_size is not None
        return Learning(
            kind=self.vocabulary,
            vocab_size=choice.vocab_size,
            lowercase=self.lowercase,
            normalization=self.normalization or DEFAULT_NORMALIZATION,
            tags=self.tags if 0 in choice.sides else (),
            byte_fallback=self.vocabulary != "byte-bpe" if self.byte_fallback is None else self.byte_fallback,
            character_coverage=self.character_coverage,
        )

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, as given or from the file names."""
        given = (self.source_language, self.target_language)
        found = [source.languages for source in (*self.sources, *self.validation)]
        named = [_one_language(given[side], {pair[side] for pair in found}, side) for side in (0, 1)]
        return named[0], named[1]


def _one_language(given: str | None, found: set[str | None], side: int) -> str:
    flag, side_name = (("--src-lang", "source"), ("--tgt-lang", "target"))[side]
    if given:
        return given
    named = sorted(language for language in found if language)
    if not named:
        raise UserError(f"the {side_name} language is not in the file names: pass it with {flag}")
    if len(named) > 1:
        raise UserError(
            f"the {side_name} files seem to be in several languages ({', '.join(named)}): "
            f"check the files, or pass the language with {flag}"
        )
    return named[0]
