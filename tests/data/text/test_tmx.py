"""Translation memories: which texts of a unit become a pair, and what is refused."""

import gzip
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare.settings import TextSettings
from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.tmx import TmxFile
from tests.data.text.reading import refusal, write

TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"><note>no text</note></header><body>
<tu><tuv xml:lang="en-US"><prop>no text</prop><seg>A &lt;b&gt; &amp; c&#233;</seg></tuv>
    <tuv xml:lang="DE"><seg>Ein
Haus</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg>Zwei <bpt i="1">{\\b <sub>no</sub></bpt><hi>fette</hi><ept i="1">}</ept> Wörter</seg></tuv>
    <tuv xml:lang="fr"><seg>Deux</seg></tuv><tuv lang="en"><seg>Two</seg></tuv><tuv lang="en"><seg>Both</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Alone</seg></tuv><tuv xml:lang="fr"><seg>Seul</seg></tuv></tu>
</body></tmx>
"""
PAIRS = [("A <b> & cé", "Ein Haus"), ("Two", "Zwei fette Wörter"), ("Alone", "")]


def source(path: Path, target: str = "de") -> TmxFile:
    return TmxFile(path=path, source_language="en", target_language=target)


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16"])
def test_two_languages_of_each_unit(encoding: str, tmp_path: Path) -> None:
    content = TMX.replace("UTF-8", encoding).encode(encoding)
    assert list(source(write(tmp_path / "t.tmx", content)).pairs()) == PAIRS
    packed = source(write(tmp_path / "t.tmx.gz", gzip.compress(content)))
    assert list(packed.pairs()) == PAIRS
    assert (packed.languages, packed.files()) == (("en", "de"), [tmp_path / "t.tmx.gz"])


def test_a_text_above_the_limit_of_a_line_is_no_pair(tmp_path: Path) -> None:
    content = TMX.replace("Seul", "x").replace("Alone", "a" * (LONGEST_LINE + 1))
    assert list(source(write(tmp_path / "t.tmx", content.encode())).pairs()) == [*PAIRS[:2], None]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Seul", "&nbsp;", "has the entity 'nbsp', which XML itself does not define: replace it"),
        ('SYSTEM "tmx14.dtd"', '[<!ENTITY a "b">]', "has the entity 'a', which XML itself does not define"),
        ("</body>", "", "is not a complete TMX file (mismatched tag: line"),
        ("</tmx>\n", "", "is not a complete TMX file (no element found: line"),
    ],
)
def test_what_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    message = refusal(source(write(tmp_path / "t.tmx", TMX.replace(old, new).encode())))
    assert message.startswith(f"{tmp_path / 't.tmx'} ")
    assert said in message


def test_languages_that_are_not_there(tmp_path: Path) -> None:
    message = refusal(source(write(tmp_path / "t.tmx", TMX.encode()), target="it"))
    assert "has no unit in en and it (it has en-US, DE, de, fr, en): choose the languages with --src-lang" in message
    settings = TextSettings(tmx=(tmp_path / "t.tmx",))
    with pytest.raises(UserError, match="tmx needs its two languages: pass --src-lang and --tgt-lang"):
        settings.sources(("en", None), tmp_path)
    assert settings.sources(("en", "de"), tmp_path)[0] == [source(tmp_path / "t.tmx")]
