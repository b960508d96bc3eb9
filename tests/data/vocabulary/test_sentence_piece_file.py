"""Models that the library of SentencePiece is never given."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary import sentence_piece as module
from dist_transformer.data.vocabulary.files import load_vocabulary
from dist_transformer.data.vocabulary.sentence_piece import wrap_sentence_piece
from dist_transformer.data.vocabulary.sentence_piece_file import check_sentence_piece_file, without_file_names


def message(number: int, content: bytes) -> bytes:
    """A field of Protocol Buffers that holds bytes: tag, length in groups of seven bits, content."""
    length, groups = len(content), []
    while length >= 128:
        groups.append(length % 128 + 128)
        length //= 128
    return bytes([number * 8 + 2, *groups, length]) + content


def piece(text: bytes, score: float = -1.0) -> bytes:
    return message(1, message(1, text) + b"\x15" + struct.pack("<f", score))


def table(units: np.ndarray, replacements: bytes = b"x\0") -> bytes:
    array = units.astype("<u4").tobytes()
    return struct.pack("<I", len(array)) + array + replacements


def model(of_table: bytes = b"", pieces: bytes = b"", rest: bytes = b"") -> bytes:
    return pieces + piece(b"a") + message(3, message(2, of_table)) + rest


def units(**changes: int) -> np.ndarray:
    """An array whose root has children at 0 to 255, none of which is there."""
    found = np.full(512, 1 << 31)
    found[0] = 0
    for place, value in changes.items():
        found[int(place[1:])] = value
    return found


A, ENDS = ord("a"), 1 << 8
FAR = 1 << 9
"""Bit of a distance that is 256 times as long."""

LOOP = A | (A << 10)
"""Unit 97: `a`, whose children are those of the root, so that `a` is its own child."""

HOSTILE = {
    "leads out of it": model(table(units(_97=A | (4 << 10) | FAR))),
    "leads out of its replacements": model(table(units(_97=A | ENDS | (256 << 10), _353=1 << 31 | 2))),
    "too many keys with one beginning": model(table(units(_97=LOOP | ENDS))),
    "another size than it says": model(struct.pack("<I", 4096) + bytes(2048)),
    "have no end": model(table(units(), replacements=b"x")),
    "text of 1 to 512 bytes": model(pieces=piece(b"a" * 100_000)),
    "is not a text": model(pieces=piece(b"\xff\xfe")),
    "a score is not finite": model(pieces=piece(b"b", float("nan"))),
    "a score is not a number": model(pieces=message(1, message(1, b"b") + message(2, b"one"))),
    "its field 3 is not one message": model(rest=message(3, b"")),
    "it has no normalizer": piece(b"a"),
    "it has 0 pieces": message(3, b""),
    "model type 3 is none of": model(rest=message(2, b"\x18\x03")),
    "it is cut off": model()[:-1],
    "does not consist of fields": model(rest=b"\x07"),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_model_is_refused_before_the_library_reads_it(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = HOSTILE[said]
    monkeypatch.setattr(module, "sentencepiece", None)
    with pytest.raises(ValueError, match=said):
        wrap_sentence_piece(content)
    if content.startswith(b"\n"):
        (tmp_path / "own.model").write_bytes(content)
        with pytest.raises(UserError, match=f"own.model is not a tokenizer file, nor a SentencePiece model .*{said}.*"):
            load_vocabulary(tmp_path / "own.model")


@pytest.mark.parametrize(
    "content",
    [b"", table(units()), table(units(_97=A | ENDS | (256 << 10), _353=1 << 31 | 1)), table(units(_97=LOOP))],
    ids=["no table", "no keys", "one key", "a loop without a key"],
)
def test_a_sound_table_is_accepted(content: bytes) -> None:
    assert check_sentence_piece_file(model(content)) == "unigram"


def test_damage_is_refused_or_harmless(small_sentence_piece: bytes) -> None:
    """The library reads what is accepted; it would end this process, were it led astray."""
    drawn = random.Random(1)
    accepted = 0
    for _ in range(30):
        content = bytearray(small_sentence_piece)
        for _ in range(drawn.choice((1, 20))):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        try:
            tokenizer = wrap_sentence_piece(bytes(content))
        except ValueError:
            continue
        accepted += 1
        tokenizer.decode(tokenizer.encode("a Wörld \u00ad 的 e\u0301 ½ ﬁ \0"))
    assert accepted > 2


def test_paths_of_the_machine_that_learned_are_left_out() -> None:
    normalizer = message(1, b"user_defined") + message(6, b"/home/me/table.tsv")
    before, after = piece(b"a"), message(5, b"")
    left = before + message(3, message(1, b"user_defined")) + after
    assert without_file_names(before + message(3, normalizer) + after) == left
    long = message(3, message(2, b"t" * 300) + message(6, b"x"))
    assert without_file_names(before + long) == before + message(3, message(2, b"t" * 300))
