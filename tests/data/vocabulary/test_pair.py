"""Two vocabularies in one file."""

import json
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import Learning, load_vocabulary, wrap_pair
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

TEXTS = ("the cat and the hat 北京", "die Katze und der Hut")


@pytest.fixture(scope="module")
def sides() -> tuple[Tokenizer, Tokenizer]:
    """Two kinds, and a tag that only the sources have."""
    source = learn_byte_bpe([TEXTS[0]] * 3, vocab_size=280, tags=["<2de>"])
    return source, Learning(kind="sentencepiece-bpe", vocab_size=40).learn([TEXTS[1]] * 3)


def test_each_side_is_that_of_its_own_file(sides: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    pair = wrap_pair(*sides)
    pair.save(tmp_path / "tokenizer.json")
    again = load_vocabulary(tmp_path / "tokenizer.json")
    assert again.sha256 == pair.sha256
    assert again.sizes == pair.sizes == tuple(side.vocab_size for side in sides)
    for text in TEXTS:
        assert again.source.encode(text) == sides[0].encode(text)
        assert again.target.encode(text) == sides[1].encode(text)
    assert (again.source.tags, again.target.tags) == (("<2de>",), ())
    # A pair that is given for a side gives that side.
    assert wrap_pair(again, again).content == pair.content
    turned = wrap_pair(sides[1], sides[0])
    assert wrap_pair(again, turned).target.encode(TEXTS[0]) == sides[0].encode(TEXTS[0])


def test_a_damaged_side_is_named(sides: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    pair = wrap_pair(*sides)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(pair.content), "target": "no"}))
    with pytest.raises(UserError, match="is not a tokenizer file"):
        load_vocabulary(tmp_path / "tokenizer.json")
