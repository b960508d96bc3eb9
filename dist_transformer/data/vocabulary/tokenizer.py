"""The interface of all vocabularies: a tokenizer for each side, in one file.

Other rooms see these classes and `load_vocabulary`: which kinds there are is known in this room. Every kind has the
special tokens as its first ids, and the tags after them.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.directions import check_tags
from dist_transformer.data.vocabulary.normalization import Normalization, clean, is_blank
from dist_transformer.data.vocabulary.segmentation import Sampling

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)

LARGEST_VOCABULARY = 2**24


def check_size(vocab_size: int, tags: Sequence[str], *, all_bytes: bool) -> None:
    """Raise a UserError unless a vocabulary of that size, with these tags, and maybe all bytes, can be learned."""
    check_tags(tags)
    least = len(SPECIALS) + len(tags) + 256 * all_bytes
    if vocab_size < least + (not all_bytes):
        entries = "the special tokens" + ", the tags" * bool(tags) + " and the 256 bytes" * all_bytes
        raise UserError(f"vocab_size {vocab_size} is too small: {entries} take {least}, and 8,000 to 40,000 is usual")
    if vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"vocab_size {vocab_size} is too large: use at most {LARGEST_VOCABULARY:,}")


def show_sizes(sizes: tuple[int, int]) -> str:
    """Write sizes of vocabularies for reports, such as "8,000" or "4,000 + 8,000"."""
    return " + ".join(f"{size:,}" for size in sizes if size)


class Vocabulary(ABC):
    """Tokenizers of the sources and of the targets; one object for both if the vocabulary is joint.

    Args:
        content: exact bytes of its file, `tokenizer.json`.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the exact bytes of the file: the identity of the vocabulary."""
        return hashlib.sha256(self.content).hexdigest()

    def save(self, path: Path) -> None:
        write_file(path, self.content)

    @property
    @abstractmethod
    def source(self) -> "Tokenizer":
        """Tokenizer of the sources."""

    @property
    @abstractmethod
    def target(self) -> "Tokenizer":
        """Tokenizer of the targets."""

    def fronts(self, tags: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the ids in front of every source, and those that every target begins with, for tags of a direction.

        Raises:
            UserError: the vocabulary lacks a tag.
        """
        return self.source.tag_ids(tags), []

    def tags_between(self, source_language: str, target_language: str) -> tuple[str, ...]:
        """Return the tags of a direction that text is prepared with by default.

        Raises:
            UserError: the vocabulary has languages, and lacks one of these.
        """
        return ()

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries of the sources and, if they have entries of their own, of the targets; otherwise 0."""
        return self.source.vocab_size, 0


class Tokenizer(Vocabulary):
    """Tokenizer between text and ids, for both sides.

    Text that spells a special token or a tag, such as `</s>`, is encoded as text, and decoding returns it.

    Args:
        normalization: rule of the vocabulary; None: one that its file describes in its own way.
        tags: entries that no text is encoded to, such as `<2de>`; they are put in front of a source as ids. Their ids
            follow those of the special tokens, in this order.
    """

    kind: str
    """Name for reports."""
    library: str
    """Name of the library that other programs read its file with."""
    library_file: bytes
    """Content of the file of that library."""
    encodes_words_apart: bool
    """Whether `a b` is encoded as `a` and then ` b`, so that ids of words can be looked up."""
    sampled_by: Sampling | None
    """Number that `sample` takes; None if the kind has only one segmentation."""

    def __init__(
        self, content: bytes, normalization: Normalization | None, *, lowercase: bool, tags: Sequence[str] = ()
    ) -> None:
        super().__init__(content)
        self.normalization: Normalization | None = normalization
        self.tags: tuple[str, ...] = tuple(tags)
        self.lowercase = lowercase
        self.first_piece = len(SPECIALS) + len(self.tags)
        """Id of the first piece of text."""

    @property
    def source(self) -> "Tokenizer":
        return self

    @property
    def target(self) -> "Tokenizer":
        return self

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def pieces(self) -> list[str]:
        """Entries of the vocabulary by id, as the kind spells them."""

    @property
    @abstractmethod
    def text_rule(self) -> str:
        """Name of the normalisation for reports, such as "clean text, NFKC, lowercase"."""

    @abstractmethod
    def normalize(self, text: str) -> str:
        """Return the text as its kind splits it into pieces."""

    def clean(self, text: str) -> str:
        """Do the first step of the normalisation: the text without characters that are removed, in the same pieces."""
        return clean(text, self.normalization)

    def is_blank(self, text: str) -> bool:
        """Return whether a text has nothing to translate: its normalisation leaves nothing but white space."""
        return is_blank(text, self.normalization)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, without special tokens."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def sample(self, text: str, strength: float, seeds: Sequence[int]) -> list[list[int]]:
        """Encode a text once for each seed, in a segmentation that is drawn.

        Args:
            strength: the dropout of BPE, or the alpha of a unigram model, as `sampled_by` says.
        """

    @abstractmethod
    def token_starts(self, text: str) -> list[int]:
        """Return the index of the character where each token of a normalised text begins.

        Tokens that begin within the same character share its index.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens and tags are left out."""

    def unknown(self, text: str) -> list[str]:
        """Return the characters of a text that became `<unk>`."""
        return []

    @abstractmethod
    def piece_text(self, token: int) -> str:
        """Return the text of one piece, with the space that it begins with; U+FFFD for a part of a character."""

    @abstractmethod
    def piece_bytes(self, token: int) -> bytes:
        """Return what one piece of text adds to a text, in UTF-8; a piece may be a part of a character."""

    def tag_ids(self, tags: Sequence[str]) -> list[int]:
        """Return the ids of tags.

        Raises:
            UserError: the vocabulary lacks a tag.
        """
        for tag in tags:
            if tag not in self.tags:
                known = f"its tags are {' '.join(self.tags)}" if self.tags else "it was learned without tags"
                raise UserError(
                    f"the vocabulary has no tag {tag}, {known}: check the name, or learn a vocabulary with --tag {tag}"
                )
        return [len(SPECIALS) + self.tags.index(tag) for tag in tags]

    def tag_of(self, token: int) -> str | None:
        """Return the tag of an id; None for a piece of text or a special token."""
        return self.tags[token - len(SPECIALS)] if len(SPECIALS) <= token < self.first_piece else None
