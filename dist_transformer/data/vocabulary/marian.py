"""The vocabulary of a MarianMT folder: two SentencePiece models that share one table of ids, or have one each.

`tokenizer.json` holds the files byte for byte, in base64. A piece has the id of its spelling in the table, whatever
model it comes from; what the table lacks becomes `<unk>`. Their ids are in another order: `</s>` and `<unk>`
come first, `<pad>` last, and there is no `<s>`, because their decoder begins with `<pad>`. Entries such as `>>de<<` are
tags.
"""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import check_tags
from dist_transformer.config.plain import parse_json
from dist_transformer.data.vocabulary.sentence_piece import ModelTokenizer, read_model
from dist_transformer.data.vocabulary.tokenizer import (
    BOS_ID,
    LARGEST_VOCABULARY,
    SPECIALS,
    UNK_ID,
    Tokenizer,
    Vocabulary,
)
from dist_transformer.data.vocabulary.trial import try_in_child

KIND = "marian"

_TAG = re.compile(r">>.+<<")
_SPACE = "\u2581"


class MarianVocabulary(Vocabulary):
    """Vocabulary of a MarianMT folder.

    Args:
        source: model of the sources, `source.spm`; `target`, of the targets; `table`, `vocab.json`.
        target_table: `target_vocab.json`, if the targets have a table of their own.

    Raises:
        ValueError: a file cannot be used; the message continues a sentence that begins with the file's name.
    """

    def __init__(
        self, content: bytes, *, source: bytes, target: bytes, table: bytes, target_table: bytes | None = None
    ) -> None:
        super().__init__(content)
        self.tables = (table,) if target_table is None else (table, target_table)
        """Tables of the sources and the targets, or one of both."""
        names = ("vocab.json", "target_vocab.json")
        read = [_entries(content, name) for content, name in zip(self.tables, names, strict=False)]
        # Those of both sides may be one object.
        entries = (read[0], read[-1])
        self.their_ids = (_order(entries[0]), _order(entries[1]))
        """Id of each entry in the table of a side; that of `<s>` is the one of `<pad>`."""
        self._sides = tuple(
            _side(content, model, _pieces(side, ids))
            for model, side, ids in zip((source, target), entries, self.their_ids, strict=True)
        )

    @property
    def source(self) -> Tokenizer:
        return self._sides[0]

    @property
    def target(self) -> Tokenizer:
        return self._sides[1]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.source.vocab_size, self.target.vocab_size if len(self.tables) > 1 else 0


class SpelledTokenizer(ModelTokenizer):
    """Model whose pieces have the ids of their spellings in a table. What the table lacks becomes `<unk>`.

    Args:
        kind: name for reports.
        pieces: entries by id: special tokens, tags, and the others.
    """

    def __init__(self, content: bytes, kind: str, model: bytes, pieces: Sequence[str], tags: Sequence[str]) -> None:
        super().__init__(content, read_model(model), pieces, None, tags=tags)
        self.kind = kind
        # Text that spells a special token or a tag is not one.
        self._numbers = {piece: i for i, piece in enumerate(pieces) if i >= self.first_piece}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self._ids, self._backend.encode(list(texts), out_type=str, num_threads=1)))

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [self._numbers.get(piece, UNK_ID) for piece in pieces]

    def unknown(self, text: str) -> list[str]:
        pieces = self._backend.encode(text, out_type=str)
        return [character for piece in pieces if piece not in self._numbers for character in piece]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces[i] for i in ids if i >= self.first_piece or i == UNK_ID]
        return self._backend.decode_pieces(pieces).replace(_SPACE, " ").strip(" ")


def _side(content: bytes, model: bytes, pieces: Sequence[str]) -> SpelledTokenizer:
    """Make one of the two models, with its table."""
    tags = [*filter(_TAG.fullmatch, pieces)]
    return SpelledTokenizer(content, "SentencePiece of a MarianMT folder", model, pieces, tags)


def parse_marian(content: bytes, parts: dict[str, Any]) -> MarianVocabulary:
    """Make a vocabulary of the parts of a tokenizer.json.

    Raises:
        ValueError: they do not fit together; the message continues a sentence that begins with the file's name.
    """
    return MarianVocabulary(content, **{name: base64.b64decode(parts[name]) for name in parts.keys() - {"kind"}})


def wrap_marian(*, source: bytes, target: bytes, table: bytes, target_table: bytes | None = None) -> MarianVocabulary:
    """Make a vocabulary of the content of `source.spm`, `target.spm`, `vocab.json` and maybe `target_vocab.json`.

    Raises:
        ValueError: a file cannot be used; the message continues a sentence that begins with the folder's name.
    """
    files = {"source": source, "target": target, "table": table}
    if target_table is not None:
        files["target_table"] = target_table
    parts = {"kind": KIND} | {name: base64.b64encode(file).decode("ascii") for name, file in files.items()}
    content = json.dumps(parts).encode("ascii")
    try_in_child(content)
    return MarianVocabulary(content, **files)


def _entries(table: bytes, file: str) -> dict[str, int]:
    """Read a table of ids.

    Raises:
        ValueError: it is not one.
    """
    try:
        entries = parse_json(table)
    except ValueError as error:
        raise ValueError(f"has a {file} that cannot be read ({error})") from None
    if not isinstance(entries, dict) or not all(type(number) is int for number in entries.values()):
        raise ValueError(f"has a {file} that is not a table of ids")
    if len(entries) > LARGEST_VOCABULARY or {*entries.values()} != {*range(len(entries))}:
        raise ValueError(f"has a {file} whose {len(entries):,} entries do not have the ids 0 to {len(entries) - 1:,}")
    for name in SPECIALS:
        if (name in entries) == (name == SPECIALS[BOS_ID]):
            has = "has" if name in entries else "lacks"
            raise ValueError(f"has a {file} that {has} {name}: their decoder begins with <pad>")
    try:
        check_tags([*filter(_TAG.fullmatch, entries)])
    except UserError as error:
        raise ValueError(f"has a {file} with an entry that is no language ({error})") from None
    return entries


def _order(entries: dict[str, int]) -> list[int]:
    """Return their id of each of our entries: special tokens, tags, and the others in their order."""
    specials = [entries[SPECIALS[0] if name == SPECIALS[BOS_ID] else name] for name in SPECIALS]
    rest = sorted((number, piece) for piece, number in entries.items() if piece not in SPECIALS)
    tags = [number for number, piece in rest if _TAG.fullmatch(piece)]
    return [*specials, *tags, *(number for number, piece in rest if not _TAG.fullmatch(piece))]


def _pieces(entries: dict[str, int], their_ids: Sequence[int]) -> list[str]:
    """Return the spelling of each of our entries."""
    names = {number: piece for piece, number in entries.items()}
    pieces = [names[number] for number in their_ids]
    pieces[BOS_ID] = SPECIALS[BOS_ID]
    return pieces
