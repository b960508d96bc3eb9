"""Reading of vocabulary files of every kind."""

import functools
import hashlib
import re
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import parse_json
from dist_transformer.data.vocabulary import marian, pair, sentence_piece
from dist_transformer.data.vocabulary.byte_bpe import parse_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.data.vocabulary.trial import try_in_child

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


@functools.lru_cache(maxsize=1)
def parse(content: bytes) -> Vocabulary:
    """Parse the content of a file. The last result is cached, because every chunk and stage of a preparation needs it.

    Raises:
        ValueError: the content is no vocabulary; the message continues a sentence that begins with the file's name.
    """
    return _parse_any(content)


def _parse_any(content: bytes) -> Vocabulary:
    if _OURS.match(content):
        parts = parse_json(content)
        kind = parts["kind"] if isinstance(parts, dict) else None
        if kind == marian.KIND:
            return marian.parse_marian(content, parts)
        if kind == pair.KIND:
            return pair.parse_pair(content, parts, _parse_any)
        if kind == sentence_piece.KIND:
            return sentence_piece.parse_sentence_piece(content, parts)
    if content.startswith(_MODEL) and not content.lstrip().startswith(b"{"):
        return sentence_piece.wrap_sentence_piece(content)
    return parse_byte_bpe(content)
