"""Tags: entries of a vocabulary that no text becomes, and the directions that they ask for."""

import json
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction, choose_direction, worth_stating
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Tokenizer
from dist_transformer.inference.attention_maps import readable_pieces

TAGS = ("<bt>", "<2de>")
# Merges of all that the tags are spelled with are learned, if anything lets them be.
TEXTS = ["a <bt> b <2de> c", "<bt><2de>", "＜bt＞", "cat sat on the mat"] * 20
SPELLED = ["<bt>", "<2de> cat", "a<bt>b <2de><bt>", "＜2de＞", "</s> <bt> <s>", " <bt> "]


@pytest.fixture(scope="module")
def made() -> Tokenizer:
    return learn_byte_bpe(TEXTS, vocab_size=330, tags=TAGS)


@pytest.fixture(scope="module")
def loaded(made: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tags") / "t.json"
    made.save(file)
    return load_vocabulary(file)


@pytest.mark.parametrize("which", ["made", "loaded"])
def test_tags_have_one_id_each_after_the_special_tokens(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    assert tokenizer.tags == TAGS
    assert tokenizer.tag_ids(TAGS) == [4, 5]
    assert tokenizer.tag_ids(["<2de>", "<bt>", "<2de>"]) == [5, 4, 5]
    assert [tokenizer.tag_of(i) for i in (3, 4, 5, 6)] == [None, "<bt>", "<2de>", None]
    assert readable_pieces(tokenizer, [5, *tokenizer.encode("cat")])[0] == "<2de>"


@pytest.mark.parametrize("which", ["made", "loaded"])
@pytest.mark.parametrize("text", SPELLED)
def test_text_that_spells_a_tag_stays_text(which: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text, text])[1]):
        assert min(ids) > 5
        assert tokenizer.decode(ids) == tokenizer.normalize(text)
        assert tokenizer.decode([5, 4, *ids, EOS_ID]) == tokenizer.normalize(text)


def test_the_pieces_are_those_that_are_learned_without_tags(made: Tokenizer) -> None:
    plain = learn_byte_bpe(TEXTS, vocab_size=328)
    assert made.vocab_size == plain.vocab_size + 2
    for text in SPELLED:
        assert made.encode(text) == [i + 2 for i in plain.encode(text)]


def test_the_file_states_the_tags(made: Tokenizer, loaded: Tokenizer, tmp_path: Path) -> None:
    assert loaded.sha256 == made.sha256
    made.save(tmp_path / "t.json")
    state = json.loads((tmp_path / "t.json").read_text())
    # Moved behind the pieces, entries are no tags of ours.
    state["added_tokens"][4]["id"], state["added_tokens"][5]["id"] = 5, 4
    vocabulary = state["model"]["vocab"]
    vocabulary["<bt>"], vocabulary["<2de>"] = 5, 4
    (tmp_path / "t.json").write_text(json.dumps(state))
    # The library sorts them by id: still two tags, in the other order.
    assert load_vocabulary(tmp_path / "t.json").tags == ("<2de>", "<bt>")
    del state["model"]["vocab"]["<bt>"]
    (tmp_path / "t.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"t\.json is "):
        load_vocabulary(tmp_path / "t.json")


@pytest.mark.parametrize(
    "tag", ["the", "<s>", "</s>", "<pad>", "<>", "<_>", "<a b>", "<ä>", "bt>", "<bt", "<a><b>", ""]
)
def test_what_cannot_be_a_tag_is_refused(tag: str) -> None:
    with pytest.raises(UserError, match="cannot be a tag: use a name between < and >"):
        learn_byte_bpe(TEXTS, vocab_size=330, tags=("<bt>", tag))


def test_tags_need_room_and_are_named_once() -> None:
    with pytest.raises(UserError, match="the special tokens, the tags and the 256 bytes take 262"):
        learn_byte_bpe(TEXTS, vocab_size=261, tags=TAGS)
    with pytest.raises(UserError, match="<bt> appears twice"):
        learn_byte_bpe(TEXTS, vocab_size=330, tags=("<bt>", "<bt>"))


def test_an_unknown_tag_is_named_with_those_there_are(loaded: Tokenizer) -> None:
    with pytest.raises(UserError, match="no tag <2fr>, its tags are <bt> <2de>: check the name"):
        loaded.tag_ids(["<bt>", "<2fr>"])
    with pytest.raises(UserError, match="no tag <bt>, it was learned without tags"):
        learn_byte_bpe([], vocab_size=260).tag_ids(["<bt>"])


def test_a_direction_is_chosen_by_name() -> None:
    plain = Direction(source_language="en", target_language="de")
    back = Direction(source_language="de", target_language="en", tags=("<2en>",))
    assert choose_direction([plain]) == choose_direction([plain], "en-de") == plain
    assert choose_direction([plain, back], "de-en") == back
    assert choose_direction([plain, back], "de-en", []).tags == ()
    assert choose_direction([back], None, ["<bt>", "<2en>"]).tags == ("<bt>", "<2en>")
    with pytest.raises(UserError, match="several directions: choose one of en-de, de-en with --direction"):
        choose_direction([plain, back], None, ["<2en>"])
    with pytest.raises(UserError, match="no direction en-fr: pass --direction en-de or de-en"):
        choose_direction([plain, back], "en-fr")
    assert (worth_stating([plain]), worth_stating([back])) == ((), (back,))
    assert worth_stating([plain, back]) == (plain, back)
