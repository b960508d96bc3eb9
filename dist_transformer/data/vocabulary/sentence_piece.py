"""SentencePiece (Kudo and Richardson 2018): unigram, BPE or characters, as its library splits text.

`tokenizer.json` holds the library's model byte for byte, in base64, and the ids of its pieces here: the special tokens
come first, then the tags, then the other pieces in the library's order. Text is normalised by the table in the model.
"""

import base64
import functools
import io
import itertools
import json
import re
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.data.vocabulary.normalization import Normalization, cleans, rule_name
from dist_transformer.data.vocabulary.normalization_table import normalization_table
from dist_transformer.data.vocabulary.segmentation import N_BEST, Sampling, draw, merge
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID, Tokenizer

KIND = "sentencepiece"
ModelType = Literal["unigram", "bpe"]

# Types of models, by their names for reports. Models of whole words are not supported.
_MODEL_TYPES = {TrainerSpec.UNIGRAM: "unigram", TrainerSpec.BPE: "BPE", TrainerSpec.CHAR: "character"}
# How the library writes a space.
_SPACE = "\u2581"
# Models whose pieces are characters or words have one segmentation.
_SAMPLED_BY: dict[str, Sampling] = {"unigram": "alpha", "BPE": "dropout"}
# The sums that learning makes depend on the number of threads.
_LEARNING_THREADS = 16
_LONGEST_SENTENCE = 2**16
_NUL = "\0"


@dataclass(frozen=True, slots=True)
class _Model:
    content: bytes
    kind: str
    backend: sentencepiece.SentencePieceProcessor


class ModelTokenizer(Tokenizer):
    """Parts that all tokenizers with a model of the library share.

    Args:
        pieces: entries by id.
    """

    encodes_words_apart = False
    library = "sentencepiece"

    def __init__(
        self,
        content: bytes,
        model: _Model,
        pieces: Sequence[str],
        normalization: Normalization | None,
        *,
        tags: Sequence[str],
    ) -> None:
        self._backend = model.backend
        self.sampled_by: Sampling | None = _SAMPLED_BY.get(model.kind)
        if self.sampled_by == "dropout" and any(_SPACE in piece.lstrip(_SPACE) for piece in pieces):
            # Words are merged apart here.
            self.sampled_by = None
        lowercase = self._backend.normalize("ABC") == self._backend.normalize("abc")
        super().__init__(content, normalization, lowercase=lowercase, tags=tags)
        self.library_file = model.content
        self._has_bytes = any(map(self._backend.is_byte, range(self._backend.get_piece_size())))
        self._pieces = list(pieces)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def pieces(self) -> list[str]:
        return list(self._pieces)

    @property
    def text_rule(self) -> str:
        rule = rule_name(self.normalization) if self.normalization else "the model's own rule for text"
        return rule + ", lowercase" * self.lowercase

    def normalize(self, text: str) -> str:
        return self._backend.normalize(self._readable(text)).replace(_SPACE, " ").strip(" ")

    def is_blank(self, text: str) -> bool:
        # What a table of its own removes is not known here.
        tries = self.normalization is None and not any(map(str.isalnum, text))
        return super().is_blank(text) or (tries and not self.encode(text))

    def sample(self, text: str, strength: float, seeds: Sequence[int]) -> list[list[int]]:
        if self.sampled_by == "alpha":
            best = self._backend.nbest_encode(
                self._readable(text), nbest_size=N_BEST, out_type="immutable_proto"
            ).nbests
            rows = [self._ids([piece.piece for piece in each.pieces]) for each in best]
            scores = [each.score for each in best]
            return [draw(rows, scores, alpha=strength, random=Random(seed)) for seed in seeds]
        words = re.split(f"(?={_SPACE})", self._backend.normalize(self._readable(text)))
        found = []
        for seed in seeds:
            random = Random(seed)
            merged = (merge(word, self._rank, dropout=strength, random=random) for word in words)
            found.append(self._ids(self._as_encoded(itertools.chain.from_iterable(merged))))
        return found

    def _as_encoded(self, pieces: Iterable[str]) -> list[str]:
        """Write characters that are no pieces as the library does: as bytes, or those in a row as one unknown piece."""
        found: list[str] = []
        for is_known, group in itertools.groupby(pieces, key=self._ranks.__contains__):
            if is_known:
                found += group
            elif self._has_bytes:
                found += (f"<0x{byte:02X}>" for byte in "".join(group).encode("utf-8"))
            else:
                found.append("".join(group))
        return found

    @abstractmethod
    def _ids(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of pieces of the library, or of characters that it lacks."""

    @functools.cached_property
    def _ranks(self) -> dict[str, float]:
        backend = self._backend
        no_text = (backend.is_control, backend.is_byte, backend.is_unused)
        numbers = (i for i in range(backend.get_piece_size()) if not any(holds(i) for holds in no_text))
        return {backend.id_to_piece(i): -backend.get_score(i) for i in numbers}

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(left + right)

    def token_starts(self, text: str) -> list[int]:
        return [piece.begin for piece in self._backend.encode(text, out_type="immutable_proto").pieces]

    def piece_text(self, token: int) -> str:
        piece = self._pieces[token]
        return "\ufffd" if self._is_byte(piece) else piece.replace(_SPACE, " ")

    def piece_bytes(self, token: int) -> bytes:
        piece = self._pieces[token]
        return bytes([int(piece[1:-1], 16)]) if self._is_byte(piece) else piece.replace(_SPACE, " ").encode("utf-8")

    def _is_byte(self, piece: str) -> bool:
        """Return whether a piece such as `<0x0A>` stands for a byte."""
        return bool(self._backend.is_byte(self._backend.piece_to_id(piece)))

    def _readable(self, text: str) -> str:
        """Return a text without U+0000, which no table of the library can remove."""
        return text.replace(_NUL, "") if cleans(self.normalization) else text


class SentencePiece(ModelTokenizer):
    """SentencePiece model. Characters that it does not know become `<unk>`, unless it falls back to bytes.

    Decoding returns the text that the model's own table makes, without spaces around it, and U+2047 for `<unk>`.
    """

    def __init__(
        self,
        content: bytes,
        model: _Model,
        ids: Sequence[int],
        normalization: Normalization | None,
        *,
        tags: Sequence[str] = (),
    ) -> None:
        """Make a tokenizer.

        Args:
            ids: our id of each piece of the model.
            normalization: rule that the model's table was made from; None: its own.

        Raises:
            ValueError: a piece of text is spelled like an entry that is none; the message continues a sentence that
                begins with the file's name.
        """
        backend, first = model.backend, len(SPECIALS) + len(tags)
        others = sorted(ours for ours in ids if ours >= first)
        self._ours = list(ids)
        self._theirs = {ours: piece for piece, ours in enumerate(ids)}
        pieces = [backend.id_to_piece(self._theirs[ours]) for ours in others]
        if taken := {*SPECIALS, *tags} & {*pieces}:
            raise ValueError(f"has a piece of text that is spelled {min(taken)}, like a special token or a tag")
        super().__init__(content, model, [*SPECIALS, *tags, *pieces], normalization, tags=tags)
        self.kind = f"SentencePiece {model.kind}" + " with byte fallback" * self._has_bytes

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: preparations and servers have processes of their own.
        rows = self._backend.encode([self._readable(text) for text in texts], num_threads=1)
        return [[self._ours[piece] for piece in row] for row in rows]

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [self._ours[self._backend.piece_to_id(piece)] for piece in pieces]

    def unknown(self, text: str) -> list[str]:
        found = self._backend.encode(self._readable(text), out_type="immutable_proto").pieces
        unknown = self._backend.unk_id()
        return [character for piece in found if piece.id == unknown for character in piece.piece]

    def decode(self, ids: Sequence[int]) -> str:
        known = [self._theirs[i] for i in ids if (i >= self.first_piece or i == UNK_ID) and i in self._theirs]
        return self._backend.decode(known).strip(" ")


def parse_sentence_piece(content: bytes, parts: dict[str, Any]) -> SentencePiece:
    """Make a tokenizer of the parts of a tokenizer.json.

    Raises:
        ValueError: they do not fit together; the message continues a sentence that begins with the file's name.
    """
    model = read_model(base64.b64decode(parts["model"]))
    return SentencePiece(content, model, parts["ids"], parts["normalization"], tags=parts["tags"])


def wrap_sentence_piece(
    model: bytes, normalization: Normalization | None = None, tags: Sequence[str] = ()
) -> SentencePiece:
    """Make a tokenizer of the content of the library's file.

    Raises:
        ValueError: it cannot be used; the message continues a sentence that begins with the file's name.
    """
    read = read_model(model)
    specials, numbers = _specials(read.backend), itertools.count(len(SPECIALS) + len(tags))
    ids = [specials[piece] if piece in specials else next(numbers) for piece in range(read.backend.get_piece_size())]
    parts = {
        "kind": KIND,
        "normalization": normalization,
        "tags": list(tags),
        "ids": ids,
        "model": base64.b64encode(model).decode("ascii"),
    }
    return SentencePiece(json.dumps(parts).encode("ascii"), read, ids, normalization, tags=tags)


def learn_sentence_piece(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: ModelType,
    byte_fallback: bool,
    character_coverage: float,
    normalization: Normalization,
    lowercase: bool = False,
    tags: Sequence[str] = (),
) -> SentencePiece:
    """Learn a vocabulary of at most `vocab_size` entries (special tokens and tags included).

    The same texts and settings give the same file, byte for byte.

    Args:
        byte_fallback: keep the 256 bytes as pieces, and write unknown characters with them.
        character_coverage: share of the characters of the texts that become pieces.

    Raises:
        UserError: the library cannot learn that many entries from these texts.
    """
    writer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.tsv")
        write_file(table, normalization_table(normalization, lowercase=lowercase))
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(text.replace(_NUL, "") for text in texts),
                model_writer=writer,
                model_type=model_type,
                vocab_size=vocab_size - len(tags),
                hard_vocab_limit=False,
                byte_fallback=byte_fallback,
                character_coverage=character_coverage,
                normalization_rule_tsv=str(table),
                max_sentence_length=_LONGEST_SENTENCE,
                num_threads=_LEARNING_THREADS,
                pad_id=PAD_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                pad_piece=SPECIALS[PAD_ID],
                minloglevel=2,
            )
        except RuntimeError as error:
            raise UserError(
                f"SentencePiece cannot learn {vocab_size:,} entries from this text ({_reason(error)}): use another "
                "--vocab-size or --character-coverage"
            ) from None
    learned = ModelProto.FromString(writer.getvalue())
    # The path of the table on this machine.
    learned.normalizer_spec.ClearField("normalization_rule_tsv")
    return wrap_sentence_piece(learned.SerializeToString(), normalization, tags)


def _reason(error: Exception) -> str:
    """Return the last sentence of the library's error, without the place in its code."""
    return str(error).rpartition("] ")[2].strip().rstrip(".")


def read_model(model: bytes) -> _Model:
    """Read the content of the library's file.

    Raises:
        ValueError: it cannot be used; the message continues a sentence that begins with the file's name.
    """
    backend = sentencepiece.SentencePieceProcessor()
    try:
        number = ModelProto.FromString(model).trainer_spec.model_type
        backend.LoadFromSerializedProto(model)
    except (DecodeError, RuntimeError) as error:
        reason = _reason(error)
        raise ValueError(f"is not a tokenizer file, nor a SentencePiece model that can be used ({reason})") from None
    if number not in _MODEL_TYPES:
        raise ValueError(f"is a SentencePiece model of a type that is none of {', '.join(_MODEL_TYPES.values())}")
    return _Model(model, _MODEL_TYPES[number], backend)


def _specials(backend: sentencepiece.SentencePieceProcessor) -> dict[int, int]:
    """Return our ids of the special tokens of a model, by its own."""
    ids = {PAD_ID: backend.pad_id(), BOS_ID: backend.bos_id(), EOS_ID: backend.eos_id(), UNK_ID: backend.unk_id()}
    return {theirs: ours for ours, theirs in ids.items() if theirs >= 0}
