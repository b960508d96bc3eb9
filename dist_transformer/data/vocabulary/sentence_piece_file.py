"""Checks of a SentencePiece model before its library reads it.

The library trusts its files: the table of a normalizer is a double array (Aoe 1989) that it follows without a look at
the bounds, and a trie of long pieces is built by recursion. So the fields that lead to these are checked first. Sources
of the layouts: `sentencepiece_model.proto` and `normalizer.cc` of google/sentencepiece, and `darts.h` of
s-yata/darts-clone.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_transformer.data.vocabulary.tokenizer import LARGEST_VOCABULARY

# Bytes. Training makes pieces of up to 16 characters unless it is told otherwise.
_LONGEST_PIECE = 512
# The library keeps that many prefixes of a text that are in the table.
_MOST_PREFIXES = 32
# Nodes of a table that are followed at a time, to bound the memory.
_NODES = 4096

# Wire types of Protocol Buffers, and fields of ModelProto and of the messages in it.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECE, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_PIECE_TEXT, _PIECE_SCORE = 1, 2
_MODEL_TYPE = 3
_TABLE, _TABLE_FILE = 2, 6

_MODEL_TYPES = {1: "unigram", 2: "BPE", 4: "character"}


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    value: int | bytes
    raw: bytes
    """The field with its tag."""


def check_sentence_piece_file(model: bytes) -> str:
    """Refuse a file that the library should not read; return the type of the model for reports.

    Raises:
        ValueError: the file is refused; the message continues a sentence that begins with the file's name.
    """
    try:
        fields = list(_fields(model))
        trainer, normalizer, denormalizer = (
            _single(fields, number) for number in (_TRAINER, _NORMALIZER, _DENORMALIZER)
        )
        if normalizer is None:
            raise ValueError("it has no normalizer")
        _check_pieces([field.value for field in fields if field.number == _PIECE])
        for spec in (normalizer, denormalizer or b""):
            _check_table(_single(list(_fields(spec)), _TABLE) or b"")
        number = next((f.value for f in _fields(trainer or b"") if f.number == _MODEL_TYPE), 1)
        if number not in _MODEL_TYPES:
            raise ValueError(f"its model type {number!r} is none of {', '.join(_MODEL_TYPES.values())}")
    except ValueError as error:
        raise ValueError(f"is not a tokenizer file, nor a SentencePiece model that can be used ({error})") from None
    return _MODEL_TYPES[int(number)]


def without_file_names(model: bytes) -> bytes:
    """Return a model without the path of the table that its normalizer was made from."""

    def kept(fields: Sequence[_Field], number: int) -> Iterator[bytes]:
        for field in fields:
            if field.number == _NORMALIZER and number == 0:
                assert isinstance(field.value, bytes)
                inner = b"".join(kept(list(_fields(field.value)), _NORMALIZER))
                yield bytes([_NORMALIZER << 3 | _BYTES]) + _varint(len(inner)) + inner
            elif not (field.number == _TABLE_FILE and number == _NORMALIZER):
                yield field.raw

    return b"".join(kept(list(_fields(model)), 0))


def _fields(message: bytes) -> Iterator[_Field]:
    """Yield the fields of a message of Protocol Buffers.

    Raises:
        ValueError: it is not one.
    """
    place = 0
    while place < len(message):
        first = place
        tag, place = _read_varint(message, place)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == _VARINT:
            value, place = _read_varint(message, place)
        elif wire in (_FIXED64, _BYTES, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
            if wire == _BYTES:
                size, place = _read_varint(message, place)
            value, place = message[place : place + size], place + size
            if place > len(message):
                raise ValueError("it is cut off")
        else:
            raise ValueError("it does not consist of fields")
        if number == 0:
            raise ValueError("it does not consist of fields")
        yield _Field(number, value, message[first:place])


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """Return a number, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it is cut off")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("it does not consist of fields")


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _single(fields: Sequence[_Field], number: int) -> bytes | None:
    """Return the content of a message within a message."""
    found = [field.value for field in fields if field.number == number]
    if len(found) > 1 or not all(isinstance(value, bytes) for value in found):
        raise ValueError(f"its field {number} is not one message")
    return found[0] if found and isinstance(found[0], bytes) else None


def _check_pieces(pieces: Sequence[int | bytes]) -> None:
    if not 0 < len(pieces) <= LARGEST_VOCABULARY:
        raise ValueError(f"it has {len(pieces):,} pieces")
    for message in pieces:
        if not isinstance(message, bytes):
            raise ValueError("its pieces are not messages")
        for field in _fields(message):
            if field.number == _PIECE_TEXT and not (isinstance(field.value, bytes) and _is_piece(field.value)):
                raise ValueError(f"a piece is not a text of 1 to {_LONGEST_PIECE} bytes")
            if field.number == _PIECE_SCORE:
                if not (isinstance(field.value, bytes) and len(field.value) == 4):
                    raise ValueError("a score is not a number")
                if not np.isfinite(struct.unpack("<f", field.value)[0]):
                    raise ValueError("a score is not finite")


def _is_piece(content: bytes) -> bool:
    if not 0 < len(content) <= _LONGEST_PIECE:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _check_table(table: bytes) -> None:
    """Follow every path of a normalizer's table: the size of a double array, the array, and the replacements of keys.

    A unit of the array has 32 bits: bit 31 tells a value from a node; of a node, bits 0 to 7 are its byte, bit 8 tells
    that a key ends here, and the rest is the distance to its children.
    """
    if not table:
        return
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 1024 or not 0 < size < len(table) - 4:
        raise ValueError("the table of a normalizer has another size than it says")
    units = np.frombuffer(table, dtype="<u4", count=size // 4, offset=4).astype(np.int64)
    replacements = table[4 + size :]
    if replacements[-1:] != b"\0":
        raise ValueError("the replacements of a normalizer have no end")
    labels = np.arange(256)
    # Keys that end on the way to a node, by node; a loop of nodes without such a key is harmless.
    most = np.full(len(units), -1)
    pending, visits = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))], 0
    while pending:
        nodes, keys = pending.pop()
        of_nodes = units[nodes]
        bases = nodes ^ ((of_nodes >> 10) << ((of_nodes & (1 << 9)) >> 6))
        if (bases | 0xFF).max() >= len(units):
            raise ValueError("the table of a normalizer leads out of it")
        ends = (of_nodes >> 8) & 1 == 1
        keys = keys + ends
        visits += len(nodes)
        if keys.max() > _MOST_PREFIXES or visits > 2 * len(units):
            raise ValueError("the table of a normalizer has too many keys with one beginning")
        if (units[bases[ends]] & (2**31 - 1) >= len(replacements)).any():
            raise ValueError("the table of a normalizer leads out of its replacements")
        children = bases[:, None] ^ labels
        parents, label = np.nonzero((units[children] & (1 << 31 | 0xFF)) == labels)
        children, keys = children[parents, label], keys[parents]
        new = keys > most[children]
        children, keys = children[new], keys[new]
        np.maximum.at(most, children, keys)
        blocks = range(0, len(children), _NODES)
        pending += [(children[first : first + _NODES], keys[first : first + _NODES]) for first in blocks]
