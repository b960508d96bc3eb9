"""Settings of a preparation, and the checks that need no text."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import require_usable
from dist_transformer.config.schema import FLAT, FlagRules, require, setting
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.text.augment import parse_rates
from dist_transformer.data.text.pairs import JsonlFile, LineFiles, PairSource, TsvFile, expand, line_files
from dist_transformer.data.text.tables import HubDataset, ParquetFile
from dist_transformer.data.text.tmx import TmxFile
from dist_transformer.data.text.toy_corpus import MOST_TOY_PAIRS, make_toy_corpus, write_toy_corpus
from dist_transformer.data.vocabulary.kinds import LearnedKind, Learning
from dist_transformer.data.vocabulary.normalization import DEFAULT_NORMALIZATION, Normalization
from dist_transformer.data.vocabulary.placeholders import TERM_TAGS, placeholder_tags
from dist_transformer.data.vocabulary.tokenizer import Vocabulary

PREPARE_RULES = FlagRules(
    needs={
        "--tsv-columns": "--tsv",
        "--alignments": "--src",
        "--toy-alignments": "--toy",
        "--src-field --tgt-field": "--jsonl --parquet",
        "--dataset-config --dataset-revision --dataset-split --dataset-valid-split --streaming": "--dataset",
        "--vocabulary --vocab-sample-pairs --byte-fallback --character-coverage": (
            "--vocab-size --src-vocab-size --tgt-vocab-size"
        ),
        "--segmentation-dropout --segmentation-alpha --segmented-side": "--segmentations",
    },
    conflicts={
        ("--valid-pairs", "--valid-src --dataset-valid-split --toy"): "which has validation text",
    },
)
"""When flags have an effect."""

_FILES = ("src", "tgt", "alignments", "tsv", "jsonl", "tmx", "parquet", "valid_src", "valid_tgt")


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """A vocabulary of a preparation: one that exists, or one that is learned."""

    sides: tuple[int, ...]
    """Sides of the pairs that it is for: 0, the sources; 1, the targets."""
    flags: str
    """Beginning of its flags: `--`, `--src-` or `--tgt-`."""
    tokenizer: Path | None
    vocab_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """Text of one or more kinds, all of which are used.

    Patterns among the files are replaced by what they match.
    """

    src: tuple[Path, ...] = ()
    """Source text, one sentence per line."""
    tgt: tuple[Path, ...] = ()
    """Translations, line by line."""
    alignments: tuple[Path, ...] = ()
    """Words of --src and --tgt that translate each other, line by line as 0-0 1-2, for train --guided-attention."""
    tsv: tuple[Path, ...] = ()
    """Files of tab-separated columns, no quoting, the same number in each row."""
    tsv_columns: tuple[int, int] = (0, 1)
    """Source and target column of --tsv, counted from 0."""
    jsonl: tuple[Path, ...] = ()
    """Files of one JSON object per line."""
    tmx: tuple[Path, ...] = ()
    """Translation memories, of which --src-lang and --tgt-lang choose two languages."""
    parquet: tuple[Path, ...] = ()
    """Parquet files with two columns of text, or two fields of a column."""
    src_field: str | None = None
    """Field of --jsonl and --parquet with the source text; a.b: field b of a."""
    tgt_field: str | None = None
    """Field of --jsonl and --parquet with the target text."""
    dataset: str | None = None
    """Hub dataset, or a local folder of Parquet or JSON files."""
    dataset_config: str | None = None
    """Configuration of --dataset, such as de-en; default: the dataset's."""
    dataset_revision: str | None = None
    """Commit, tag or branch of --dataset; recorded in the index."""
    dataset_split: str = "train"
    """Training split of --dataset."""
    dataset_valid_split: str | None = None
    """Validation split of --dataset; default: hold out pairs."""
    streaming: bool = False
    """Read --dataset as it arrives, without a local copy."""
    toy: int | None = None
    """This many pairs of built-in synthetic English-German text."""
    toy_alignments: bool = False
    """Use the alignments of the words of --toy, too."""
    valid_src: tuple[Path, ...] = ()
    """Source text of the validation; default: hold out pairs."""
    valid_tgt: tuple[Path, ...] = ()
    """Translations of the validation text."""

    def __post_init__(self) -> None:
        for name in _FILES:
            object.__setattr__(self, name, tuple(expand(getattr(self, name), name)))
        for name in ("jsonl", "parquet"):
            if getattr(self, name) and not (self.src_field and self.tgt_field):
                raise UserError(f"{name} needs the names of its two text fields: pass --src-field and --tgt-field")
        if self.dataset is not None:
            require_usable(self.dataset)
        require(len(self.tsv_columns) == 2, "tsv_columns", self.tsv_columns, "it must be the numbers of two columns")
        allowed = self.toy is None or 1 <= self.toy <= MOST_TOY_PAIRS
        require(allowed, "toy", self.toy, f"ask for 1 to {MOST_TOY_PAIRS:,} pairs")

    def sources(self, languages: tuple[str | None, str | None], toy: Path) -> tuple[list[PairSource], list[PairSource]]:
        """Return the sources of the training text and of the validation text.

        Args:
            languages: those of source and target, if they are given.
            toy: folder of the synthetic text.
        """
        source_column, target_column = self.tsv_columns
        fields: dict[str, Any] = {"source_field": self.src_field or "", "target_field": self.tgt_field or ""}
        train: list[PairSource] = [
            *line_files(self.src, self.tgt, self.alignments),
            *(TsvFile(path=path, source_column=source_column, target_column=target_column) for path in self.tsv),
            *(JsonlFile(path=path, **fields) for path in self.jsonl),
            *(ParquetFile(path=path, **fields) for path in self.parquet),
        ]
        valid: list[PairSource] = [*line_files(self.valid_src, self.valid_tgt)]
        source_language, target_language = languages
        if (self.tmx or self.dataset) and not (source_language and target_language):
            raise UserError(
                f"{'tmx' if self.tmx else 'dataset'} needs its two languages: pass --src-lang and --tgt-lang"
            )
        train += [
            TmxFile(path=path, source_language=str(source_language), target_language=str(target_language))
            for path in self.tmx
        ]
        for sources, split in ((train, self.dataset_split), (valid, self.dataset_valid_split)):
            if self.dataset is None or split is None:
                continue
            hub = HubDataset(
                dataset=self.dataset,
                source_language=str(source_language),
                target_language=str(target_language),
                config=self.dataset_config,
                revision=self.dataset_revision,
                split=split,
                streaming=self.streaming,
            )
            sources.append(hub)
        if self.toy is not None:
            links = [toy / "train.links"] if self.toy_alignments else []
            train += line_files([toy / "train.en"], [toy / "train.de"], links)
            valid += line_files([toy / "valid.en"], [toy / "valid.de"])
        return train, valid


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSettings:
    """The data folder and its vocabulary."""

    text: Annotated[TextSettings, FLAT] = field(default_factory=TextSettings)
    out: Path
    """Folder to make; it must be new or empty."""
    sources: tuple[PairSource, ...] = setting((), python_only=True)
    """Text besides `text`: of other kinds, or of several datasets."""
    validation: tuple[PairSource, ...] = setting((), python_only=True)
    """Validation text besides that of `text`."""
    valid_pairs: int = 1_000
    """Pairs to hold out if there is no validation text, at most a tenth of all."""
    vocab_size: int | None = None
    """Entries, both languages together, special tokens and bytes included; required without --tokenizer."""
    source_vocab_size: int | None = setting(None, flag="src_vocab_size")
    """Instead, entries of a vocabulary of the source language alone; the target then has one of its own, too."""
    target_vocab_size: int | None = setting(None, flag="tgt_vocab_size")
    """Entries of a vocabulary of the target language alone."""
    vocabulary: LearnedKind = "byte-bpe"
    """Kind of vocabulary to learn: byte-level BPE, or SentencePiece's unigram model or BPE."""
    vocab_sample_pairs: int = 2_000_000
    """Learn the vocabulary from about this many pairs, drawn by --seed if there are more, which bounds the memory."""
    byte_fallback: bool | None = None
    """Write characters that are no pieces of SentencePiece as bytes instead of <unk>; default: do."""
    character_coverage: float | None = None
    """Share of the characters of the text that are pieces of SentencePiece; default: 0.9995."""
    tokenizer: Path | None = None
    """Vocabulary to use unchanged: a model or data folder, a tokenizer.json, or a .model of SentencePiece; default:
    learn one."""
    source_tokenizer: Path | None = setting(None, flag="src_tokenizer")
    """Instead, a vocabulary for the source language alone: of a folder, its tokenizer of sources."""
    target_tokenizer: Path | None = setting(None, flag="tgt_tokenizer")
    """Vocabulary for the target language alone: of a folder, its tokenizer of targets."""
    tags: tuple[str, ...] = setting((), flag="tag")
    """Tags to reserve in a learned vocabulary, such as <2de>."""
    source_tags: tuple[str, ...] = setting((), flag="src_tag")
    """Tags of the vocabulary to put in front of every source sentence, in this order."""
    placeholders: int = 0
    """Entries of a learned vocabulary that stand for text which is not translated: the tags <ph1>, <ph2>, …"""
    augment: tuple[str, ...] = ()
    """Shares of the training pairs to change, each pair in one way: upper:0.05 (capitals), title:0.05 (capital
    initials), typos:0.05 (errors in the source), punctuation:0.03 (none at the end), copy:0.15 (placeholders),
    terms:0.1 (those of --terms)."""
    terms: Path | None = None
    """File with a source term, a tab and its target term per line; pairs that have both get the latter behind the
    former."""
    segmentations: int = 1
    """Variants to draw of each training sentence, one for each of as many epochs: segmentations, and what --augment
    changes; the shards take as many times the disk; 1: the best segmentation."""
    segmentation_dropout: float | None = None
    """Probability with which BPE leaves a merge out (Provilkov et al. 2020); default: 0.1."""
    segmentation_alpha: float | None = None
    """Exponent of the probabilities by which the 64 best segmentations of a unigram model are drawn (Kudo 2018);
    default: 0.1."""
    segmented_side: Literal["both", "source", "target", "none"] = "both"
    """Side whose segmentations are drawn; the other one has its best one in all epochs."""
    lowercase: bool = False
    """Lowercase all text."""
    normalization: Normalization | None = None
    """Rule for all text. clean removes invisible characters, turns all white space into spaces, and replaces variants
    by plain characters, such as full-width punctuation by ASCII; clean-nfc keeps the variants, as Chinese needs. nfkc
    and nfc do the same without the cleaning; default: that of --tokenizer, or clean."""
    source_language: str | None = setting(None, flag="src_lang")
    """Source language; default: from the file name, train.en → en."""
    target_language: str | None = setting(None, flag="tgt_lang")
    """Target language; default: from the file name."""
    corpus: str = ""
    """Name in reports; default: that of the first source."""
    max_tokens: int = 256
    """Most tokens per side, the special token and the tags included; longer pairs are dropped."""
    max_length_ratio: float = 3.0
    """Most (longer + 5) / (shorter + 5) tokens of text; pairs above it are dropped."""
    keep_overlap: bool = False
    """Keep training pairs that are also validation pairs, instead of counting them and leaving them out; validation
    then looks better than it is."""
    drop_repeats: bool = False
    """Drop pairs that repeat another one exactly, instead of counting them."""
    pairs_per_shard: int = 100_000
    """Pairs per shard, on average; shards differ in size because pairs are assigned by hash."""
    seed: int = 1
    """Seed of the order of pairs, of the held-out pairs and of the synthetic text."""
    keep_text: Path | None = setting(None, python_only=True)
    """Folder of the synthetic text, which is copied to `text/` in the result."""
    workers: int | None = None
    """Processes per rank, on which the result does not depend; default: one for each core that the rank may use, or one
    for a text of less than 50,000 pairs. From Python: one."""

    def __post_init__(self) -> None:
        if not self.training_sources:
            raise UserError(
                "there is no text to prepare: pass --src and --tgt, --tsv, --jsonl, --tmx, --parquet, --dataset "
                "or --toy"
            )
        for name in ("tokenizer", "source_tokenizer", "target_tokenizer"):
            if (path := getattr(self, name)) is not None and path.is_dir():
                object.__setattr__(self, name, path / TOKENIZER_FILE)
        learned = [choice for choice in self.vocabularies if choice.tokenizer is None]
        for choice in learned:
            _ = self.learning(choice)
        if self._learns_tags and (missing := [tag for tag in self.source_tags if tag not in self.tags]):
            raise UserError(f"source_tags {missing[0]} is not in the vocabulary to be learned: pass it to --tag, too")
        of_new = () if learned else ("vocabulary", "byte_fallback", "character_coverage", "placeholders")
        if useless := self._changed(*(() if self._learns_tags else ("tags",)), *of_new):
            raise UserError(
                f"{useless} is for a new vocabulary, but {self.vocabularies[0].flags}tokenizer names an existing one: "
                "leave one of them out"
            )
        for name in ("segmentation_dropout", "segmentation_alpha"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, name, value, "it must be above 0 and at most 1; 0.1 is usual")
        if not self.rates and self.segmented_side == "none":
            raise UserError("segmented_side none leaves nothing to draw: leave it out, or set --augment")
        if (self.terms is None) == ("terms" in self.rates):
            raise UserError("terms and its share belong together: set --augment terms:0.1 --terms FILE, or neither")
        alone = self._changed("segmentation_dropout", "segmentation_alpha", "segmented_side")
        if self.segmentations == 1 and alone:
            raise UserError(f"{alone} is for several segmentations: set --segmentations to 2 or more, or leave it out")
        positive = ("pairs_per_shard", "valid_pairs", "vocab_sample_pairs", "workers", "segmentations")
        for name, least in {"max_tokens": 2, **dict.fromkeys(positive, 1), "seed": 0}.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"it must be at least {least}")
        ratio = self.max_length_ratio
        require(1 <= ratio < math.inf, "max_length_ratio", ratio, "it must be at least 1")
        if self.pairs_per_shard * self.max_tokens >= 2**31:
            raise UserError(
                f"pairs_per_shard {self.pairs_per_shard} × max_tokens {self.max_tokens} exceeds what one Arrow batch "
                "holds (2^31 tokens): lower one of them"
            )

    def _changed(self, *names: str) -> str | None:
        """Return the first of these settings whose value is not the default."""
        defaults = type(self).__dataclass_fields__
        return next((name for name in names if getattr(self, name) != defaults[name].default), None)

    @property
    def training_sources(self) -> tuple[PairSource, ...]:
        """All text to train on."""
        return (*self._of_text[0], *self.sources)

    @property
    def validation_sources(self) -> tuple[PairSource, ...]:
        """All validation text; empty: `valid_pairs` pairs are held out from the training text."""
        return (*self._of_text[1], *self.validation)

    @property
    def _of_text(self) -> tuple[list[PairSource], list[PairSource]]:
        return self.text.sources((self.source_language, self.target_language), self.keep_text or Path())

    def with_toy(self, folder: Path) -> "PrepareSettings":
        """Write the synthetic text to a folder, if it is asked for, and return the settings that read it there."""
        if self.text.toy is None:
            return self
        held_out = max(1, min(1_000, self.text.toy // 10))
        sizes = {"train_pairs": self.text.toy, "valid_pairs": held_out, "test_pairs": held_out}
        text = make_toy_corpus(**sizes, seed=self.seed, links=self.text.toy_alignments)
        write_toy_corpus(folder, text)
        return replace(self, keep_text=folder)

    @property
    def is_aligned(self) -> bool:
        """Whether some text has alignments."""
        return any(isinstance(source, LineFiles) and source.alignments for source in self.training_sources)

    @property
    def rates(self) -> dict[str, float]:
        """Shares of the training pairs that `augment` changes."""
        return parse_rates(self.augment)

    @property
    def sampled_sides(self) -> tuple[int, ...]:
        """Sides whose segmentations are drawn: 0, the sources; 1, the targets."""
        sides = {"both": (0, 1), "source": (0,), "target": (1,), "none": ()}[self.segmented_side]
        return sides if self.segmentations > 1 else ()

    @property
    def vocabularies(self) -> tuple[VocabularyChoice, ...]:
        """One vocabulary for both sides, or one for each.

        Raises:
            UserError: a side has none, or both kinds are asked for.
        """
        joint = VocabularyChoice((0, 1), "--", self.tokenizer, self.vocab_size)
        own = (
            VocabularyChoice((0,), "--src-", self.source_tokenizer, self.source_vocab_size),
            VocabularyChoice((1,), "--tgt-", self.target_tokenizer, self.target_vocab_size),
        )
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
        return own

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
            tags=(
                *(self.tags if 0 in choice.sides else ()),
                *placeholder_tags(self.placeholders),
                *(TERM_TAGS if self.terms else ()),
            ),
            byte_fallback=self.vocabulary != "byte-bpe" if self.byte_fallback is None else self.byte_fallback,
            character_coverage=self.character_coverage,
        )

    def tags_with(self, vocabulary: Vocabulary) -> tuple[str, ...]:
        """Return the tags of the direction: those that are set, or those that the vocabulary has for its languages."""
        return self.source_tags or vocabulary.tags_between(*self.languages)

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, as given or from the file names."""
        given = (self.source_language, self.target_language)
        found = [source.languages for source in (*self.training_sources, *self.validation_sources)]
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
