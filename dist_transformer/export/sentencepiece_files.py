"""A SentencePiece vocabulary for other programs: the files of transformers' `MarianTokenizer`, and of CTranslate2."""

import json
from collections.abc import Sequence

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, SPECIALS, UNK_ID, Vocabulary
from dist_transformer.export.marian import is_of_marian
from dist_transformer.export.tokenizer_files import CONFIG_FILE, tokenizer_config
from dist_transformer.model_folder import ModelInfo

SOURCE_FILE = "source.spm"
MODEL_FILE = "sentencepiece.model"
"""File for CTranslate2, whose own file of the vocabulary lists the pieces by id."""


def marian_tokenizer_files(tokenizer: Vocabulary, info: ModelInfo) -> dict[str, str | bytes]:
    """Return the files of a `MarianTokenizer` by name.

    Raises:
        UserError: it cannot put these tags in front of a text.
    """
    direction = info.direction
    if len(tags := direction.tags) > 1:
        raise UserError(
            f"transformers' MarianTokenizer takes one tag in front of a text, and this direction has {' '.join(tags)}: "
            "export it with --to ctranslate2"
        )
    is_theirs = is_of_marian(tokenizer, info.model)
    tables = tokenizer.tables if is_of_marian(tokenizer, info.model) else _tables(tokenizer)
    return {
        SOURCE_FILE: tokenizer.source.library_file,
        "target.spm": tokenizer.target.library_file,
        **dict(zip(("vocab.json", "target_vocab.json"), tables, strict=False)),
        # Their table has no <s>: a tokenizer that names one would add it.
        CONFIG_FILE: tokenizer_config(
            info.model.max_positions,
            "MarianTokenizer",
            has_begin=not is_theirs,
            has_two=len(tables) > 1,
            languages=(direction.source_language, direction.target_language),
        ),
    }


def _tables(tokenizer: Vocabulary) -> list[str]:
    """Write the table of ids, or one of the sources and one of the targets."""
    sides = [tokenizer.source, tokenizer.target] if tokenizer.sizes[1] else [tokenizer.source]
    tables = [
        {language_code(piece) if piece in side.tags else piece: i for i, piece in enumerate(side.pieces)}
        for side in sides
    ]
    return [json.dumps(table, indent=1, ensure_ascii=False) + "\n" for table in tables]


def language_code(*tags: str) -> str:
    """Return a tag as `MarianTokenizer` reads it at the beginning of a text: `<2de>` becomes `>>2de<<`."""
    return "".join(tag if tag.startswith(">>") else f">>{tag[1:-1]}<<" for tag in tags)


class PieceTokenizer:
    """SentencePiece with a table of ids, as a user of CTranslate2 has it.

    Args:
        model: path of its file.
        pieces: pieces by id.
        front: tags in front of every text.
    """

    def __init__(self, model: str, pieces: Sequence[str], front: Sequence[str]) -> None:
        import sentencepiece

        self._backend = sentencepiece.SentencePieceProcessor(model_file=model)
        self._pieces, self._front = pieces, front
        self._ids = {piece: i for i, piece in enumerate(pieces)}

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        rows = self._backend.encode(list(lines), out_type=str)
        return [[self._ids.get(piece, UNK_ID) for piece in (*self._front, *row, SPECIALS[EOS_ID])] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._backend.decode_pieces([self._pieces[token] for token in row]).strip(" ") for row in ids]
