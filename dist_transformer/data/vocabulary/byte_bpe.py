"""Byte-level BPE.

Text is normalised (cleaned, NFKC or NFC, optionally lowercase) and split into words, and the UTF-8 bytes of each word
are merged into pieces. All 256 bytes are in the vocabulary, so `<unk>` never occurs, and decoding returns exactly the
normalised text. `tokenizer.json` holds everything: the normalisation, the rule for words and the tags.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, get_args

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dist_transformer.data.vocabulary.normalization import (
    DEFAULT_NORMALIZATION,
    Normalization,
    normalizer_of,
    rule_name,
)
from dist_transformer.data.vocabulary.segmentation import merge
from dist_transformer.data.vocabulary.tokenizer import SPECIALS, Tokenizer, check_size

# A combining mark, or the zero-width (non-)joiner that many scripts use inside words; it belongs to what it follows.
_MARK = r"\p{M}\u200c\u200d"
# Maximum characters per run. Learning the vocabulary takes time proportional to text times longest word, and the
# library caches words of less than 256 bytes. 64 characters of 3 bytes are below that; the longest run in 24,000
# Chinese captions has 44.
_LONGEST_RUN = 64
# Maximum successive marks: Unicode's stream-safe format (UAX #15) allows 30, more than any language uses.
_LONGEST_MARKS = 30
# GPT-2's rule (English contractions; runs of letters, digits and other signs, each with the space before it; white
# space), except that marks and joiners do not end a run, and that runs have a maximum length. No run is cut before a
# mark, unless there are more than 30 successive marks.
_WORD = "|".join(
    (
        rf"'(?:[sdmt]|ll|ve|re)(?![{_MARK}])",
        *(
            rf" ?{first}{more}{{0,{_LONGEST_RUN - 1}}}[{_MARK}]{{0,{_LONGEST_MARKS}}}"
            for first, more in (
                (rf"[\p{{L}}{_MARK}]", rf"[\p{{L}}{_MARK}]"),
                (r"\p{N}", rf"[\p{{N}}{_MARK}]"),
                (rf"[^\s\p{{L}}\p{{N}}{_MARK}]", r"[^\s\p{L}\p{N}]"),
            )
        ),
        rf"\s{{1,{_LONGEST_RUN}}}(?!\S)",
        rf"\s{{1,{_LONGEST_RUN}}}",
    )
)
_WORDS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(_WORD), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
# GPT-2's own rule. Tokenizers that earlier versions made keep it, because their ids depend on it.
_FORMER_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# Bytes by the characters that spell them. GPT-2 takes those of Latin-1 that can be seen, and then U+0100 and up.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(0x100) if byte not in _SEEN)
}


class ByteBpe(Tokenizer):
    """Byte-level BPE. `<unk>` never occurs, and decoding returns exactly the normalised text."""

    kind = "byte-level BPE"
    encodes_words_apart = True
    sampled_by = "dropout"
    library = "tokenizers"
    normalization: Normalization

    def __init__(
        self,
        content: bytes,
        backend: Backend,
        normalization: Normalization,
        *,
        lowercase: bool,
        tags: Sequence[str] = (),
    ) -> None:
        super().__init__(content, normalization, lowercase=lowercase, tags=tags)
        self.library_file = content
        self._backend = backend
        # Not part of tokenizer.json: without it "</s>" in a sentence would become the end-of-sentence id.
        self._backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def pieces(self) -> list[str]:
        """Entries of the vocabulary by id, as tokenizer.json spells them: each byte is a printable character."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        return sorted(ids, key=lambda piece: ids[piece])

    @property
    def text_rule(self) -> str:
        return rule_name(self.normalization) + ", lowercase" * self.lowercase

    def normalize(self, text: str) -> str:
        """Return the text that decoding gives back. The tokenizers library computes NFKC and NFC by Unicode 12."""
        return self._backend.normalizer.normalize_str(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    @functools.cached_property
    def _merges(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Ranks of the merges, and ids of the pieces."""
        model = json.loads(self.content)["model"]
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        return {(left, right): rank for rank, (left, right) in enumerate(merges)}, model["vocab"]

    def sample(self, text: str, strength: float, seeds: Sequence[int]) -> list[list[int]]:
        ranks, ids = self._merges
        words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(self.normalize(text))]
        found = []
        for seed in seeds:
            random = Random(seed)
            pieces = (merge(word, lambda *pair: ranks.get(pair), dropout=strength, random=random) for word in words)
            found.append([ids[piece] for row in pieces for piece in row])
        return found

    def token_starts(self, text: str) -> list[int]:
        return [start for start, _ in self._backend.encode(text, add_special_tokens=False).offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([i for i in ids if i >= self.first_piece], skip_special_tokens=False)

    def piece_text(self, token: int) -> str:
        return self.decode([token])

    def piece_bytes(self, token: int) -> bytes:
        return bytes(map(_BYTES.__getitem__, self._backend.id_to_token(token) or ""))


def parse_byte_bpe(file: bytes) -> ByteBpe:
    """Parse the content of a file.

    Raises:
        ValueError: the content is not a tokenizer of this kind; the message continues a sentence that begins with the
            file's name.
    """
    try:
        backend = Backend.from_str(file.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"is not a tokenizer file ({error})") from None
    tags = tuple(entry["content"] for entry in json.loads(backend.to_str())["added_tokens"])[len(SPECIALS) :]
    settings = _settings_of(backend, tags)
    pieces = backend.get_vocab(with_added_tokens=False).keys()
    if settings is None or not pieces >= {*SPECIALS, *tags, *pre_tokenizers.ByteLevel.alphabet()}:
        raise ValueError("is a tokenizer of another kind than dist-transformer prepare trains")
    normalization, lowercase = settings
    return ByteBpe(file, backend, normalization, lowercase=lowercase, tags=tags)


def learn_byte_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    lowercase: bool = False,
    normalization: Normalization = DEFAULT_NORMALIZATION,
    tags: Sequence[str] = (),
) -> ByteBpe:
    """Learn a vocabulary of at most `vocab_size` entries (special tokens, tags and bytes included).

    A small text may give fewer, because pairs that occur only once are not merged: they would not help with other text.
    The same texts and settings give the same file, byte for byte.

    Raises:
        UserError: `vocab_size` has no room for the special tokens, the tags and the 256 bytes, or a tag is not valid.
    """
    check_size(vocab_size, tags, all_bytes=True)
    # The trainer adds the tags at its end. If they were in the pipeline before, it would learn pieces across words.
    backend = _pipeline(normalization, _WORDS, lowercase=lowercase)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIALS, *tags],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    file = backend.to_str(pretty=True).encode("utf-8")
    return ByteBpe(file, backend, normalization, lowercase=lowercase, tags=tags)


def _pipeline(
    normalization: Normalization, words: pre_tokenizers.PreTokenizer, *, lowercase: bool, tags: Sequence[str] = ()
) -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizer_of(normalization, lowercase=lowercase)
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIALS, *tags])
    return backend


def _settings_of(backend: Backend, tags: Sequence[str]) -> tuple[Normalization, bool] | None:
    """Return normalisation and lowercase of a tokenizer that this or an earlier version trained; otherwise None."""
    frame = _frame(backend)
    for normalization, lowercase, words in itertools.product(
        get_args(Normalization), (False, True), (_WORDS, _FORMER_WORDS)
    ):
        if frame == _frame(_pipeline(normalization, words, lowercase=lowercase, tags=tags)):
            return normalization, lowercase
    return None


def _frame(backend: Backend) -> dict[str, Any]:
    """Return the state of a tokenizer without the parts that training learns."""
    state = json.loads(backend.to_str())
    return {key: value for key, value in state.items() if key not in ("version", "model")} | {
        "model": {key: value for key, value in state["model"].items() if key not in ("vocab", "merges")}
    }
