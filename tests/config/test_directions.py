"""Text without the tags of the model that it is for."""

import pytest

from dist_transformer.config.directions import Direction, tag_caution


def way(text: str) -> Direction:
    pair, *tags = text.split()
    source, target = pair.split("-")
    return Direction(source_language=source, target_language=target, tags=tuple(tags))


@pytest.mark.parametrize(
    ("known", "own", "remedy"),
    [
        (["en-deu >>deu<<"], "en-de", "--src-tag '>>deu<<', unless"),
        (["en-deu >>deu<<", "en-nld >>nld<<"], "en-fr", "--src-tag '>>deu<<' or '>>nld<<', unless"),
        (["en-de <2de> <bt>"], "en-de <2de>", "--src-tag '<2de>' '<bt>', unless"),
        (["en-de <2de>"], "en-de <2de>", None),
        (["en-de <2de>"], "en-de <bt> <2de>", None),
        # A new language with a tag of its own, a model without tags, and no model.
        (["en-de <2de>"], "en-fr <2fr>", None),
        (["en-de"], "en-de", None),
        ([], "en-de", None),
    ],
)
def test_missing_tags_are_named(known: list[str], own: str, remedy: str | None) -> None:
    caution = tag_caution(list(map(way, known)), way(own), place="models/a", text="train.en")
    assert (caution is None) == (remedy is None)
    if caution is not None:
        assert caution.startswith(f"train.en ({own}) lacks the tags of models/a (en-de")
        assert remedy in caution
