"""Vocabularies from elsewhere, which a child process tries first."""

import json
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.sentence_piece import wrap_sentence_piece


def test_a_file_that_crashes_its_library_gets_one_sentence(tmp_path: Path) -> None:
    parts = json.loads(learn_byte_bpe(["hello"], vocab_size=262).content)
    # The library allocates an entry for each id up to the last.
    parts["model"]["vocab"]["<pad>"] = 4 * 10**9
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(parts))
    with pytest.raises(UserError, match=r"^\S+tokenizer\.json crashed the library that reads it, .*: use the [^\n]+$"):
        load_vocabulary(file, is_foreign=True)


def test_a_sound_file_is_read_and_a_wrong_one_is_refused_as_without_a_trial(
    tmp_path: Path, small_sentence_piece: bytes
) -> None:
    file = tmp_path / "own.model"
    file.write_bytes(small_sentence_piece)
    assert load_vocabulary(file, is_foreign=True).sizes == (32, 0)
    file.write_bytes(small_sentence_piece[:-1000])
    with pytest.raises(UserError, match=r"own\.model is not a tokenizer file, nor a SentencePiece model that"):
        load_vocabulary(file, is_foreign=True)


def test_another_file_than_recorded_is_refused_before_a_library_reads_it(
    tmp_path: Path, small_sentence_piece: bytes
) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = wrap_sentence_piece(small_sentence_piece)
    vocabulary.save(file)
    assert load_vocabulary(file, sha256=vocabulary.sha256).sizes == vocabulary.sizes
    file.write_bytes(b"\n" + vocabulary.content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer of its folder, or is damaged: restore"):
        load_vocabulary(file, sha256=vocabulary.sha256)
