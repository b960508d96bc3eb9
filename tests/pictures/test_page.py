"""The folder: a self-contained page and PNG files, whole or not there."""

import base64
import io
from datetime import UTC, datetime
from pathlib import Path

import lxml.html
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dist_transformer.base.errors import UserError
from dist_transformer.pictures import page as module
from dist_transformer.pictures.page import render, write_pictures
from dist_transformer.pictures.picture import Picture

HOSTILE = '"><script>alert(1)</script>'


def picture(name: str, title: str, inches: float = 4.0) -> Picture:
    figure = Figure(figsize=(inches, 1))
    figure.add_subplot().plot([0, 1], [0, 1])
    return Picture(
        name=name, title=title, section="3.5", caption=f"{title} <in> words.", alt=f"{title} drawn", figure=figure
    )


def test_the_folder_has_a_page_and_png_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert write_pictures(out, [picture("one", "First one"), picture("two", "Second")], []) == out / "index.html"
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "one.png", "two.png"]
    with Image.open(out / "one.png") as image:
        assert (image.size, image.mode) == ((400, 100), "P")
        assert len(image.convert("RGB").getcolors(10_000)) > 1
    # No temporary folder is left.
    assert list(out.parent.iterdir()) == [out]


def test_the_page_is_self_contained_and_says_what_to_see() -> None:
    html = render([picture("one", "First one"), picture("two", "Second", 10.0)], [HOSTILE], made=datetime.now(UTC))
    page = lxml.html.document_fromstring(html)
    assert [section.get("id") for section in page.xpath("//section")] == ["first-one", "second"]
    assert page.xpath("//ul/li/a/@href") == ["#first-one", "#second"]
    assert page.xpath("//figcaption/text()") == [f"{name} <in> words. Section 3.5." for name in ("First one", "Second")]
    assert page.xpath("//img/@alt") == ["First one drawn", "Second drawn"]
    for source in page.xpath("//img/@src"):
        kind, content = source.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(content).startswith(b"<svg")
    # A wide picture scrolls at full size on a phone.
    assert page.xpath("//figure/@class") == ["map", "map wide"]
    assert page.xpath("//meta[@http-equiv]/@content")[0].startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in html
    # A sentence is text, not markup.
    assert HOSTILE in page.xpath("//header//p/text()")
    assert page.xpath("//script") == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write_pictures(tmp_path, [picture("one", "One")], ["half of a pair: \ud800"])
    assert "half of a pair: ?" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_nothing_is_left_of_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second picture."""
    drawn: list[object] = []

    def fail(figure: Figure) -> bytes:
        drawn.append(figure)
        if len(drawn) == 2:
            raise OSError(28, "No space left on device")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    monkeypatch.setattr(module, "as_png", fail)
    with pytest.raises(UserError, match=r"out cannot be written \(No space left on device\): free"):
        write_pictures(tmp_path / "out", [picture("one", "One"), picture("two", "Two")], [])
    assert list(tmp_path.iterdir()) == []
