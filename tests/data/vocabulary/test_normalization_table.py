"""The rule for text as a table of SentencePiece."""

import unicodedata

import pytest
import sentencepiece

from dist_transformer.data.vocabulary.normalization import Normalization, normalizer_of
from dist_transformer.data.vocabulary.normalization_table import normalization_table
from dist_transformer.export.hostile import HOSTILE

JOINED = ("می\u200cخواهم", "क्\u200dष", "ශ්\u200dරී", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "a\u200cb\u200dc", "\u200d")
LEFT_APART = ("\u2581", "\0")
"""Characters that the library takes for a space, or that its tables cannot hold."""


@pytest.fixture(scope="module", params=["clean", "clean-nfc"])
def rule(request: pytest.FixtureRequest) -> Normalization:
    return request.param


def test_the_table_does_what_the_rule_does(rule: Normalization, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("table") / "table.tsv"
    file.write_text(normalization_table(rule, lowercase=True), encoding="ascii")
    table = sentencepiece.SentencePieceNormalizer(
        rule_tsv=str(file), add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    normalizer = normalizer_of(rule, lowercase=True)
    # The library has tables of its own, so what one version of Unicode does not know is left out.
    single = [c for c in map(chr, range(1, 0x30000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    composed = [unicodedata.normalize("NFD", character) for character in single]
    # A table changes only those of several marks in a row that have a composition, and it does not sort them.
    between = (f"a{text}b" for text in dict.fromkeys((*single, *composed)) if not any(map(unicodedata.combining, text)))
    marked = (text for text in composed if [*map(bool, map(unicodedata.combining, text))] == [False, True])
    hostile = (text for text in HOSTILE if not text.startswith("Z\u0351"))
    texts = (*hostile, *JOINED, *between, *marked)
    known = [text for text in texts if not any(character in text for character in LEFT_APART)]
    differing = [text for text in known if table.normalize(text) != normalizer.normalize_str(text)]
    assert len(known) > 140_000
    assert [*map(ascii, differing)] == []
