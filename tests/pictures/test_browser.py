"""The page as a real browser shows it; skipped where there is none."""

import json
from html import escape
from pathlib import Path

import lxml.html
import numpy as np
import pytest
from PIL import Image

from dist_transformer.pictures.collection import write_pictures
from dist_transformer.pictures.cost import cost_picture
from dist_transformer.pictures.positions import sinusoid_picture
from tests.browser import Browser, browser
from tests.reporting.html.test_browser import MEASURE

__all__ = ["browser"]


@pytest.mark.slice(name="browser")
def test_the_page_fits_a_phone_and_a_wide_window(browser: Browser, tmp_path: Path) -> None:
    page = write_pictures(tmp_path / "out", [sinusoid_picture(), cost_picture()], ["word" * 50])
    html = page.read_text(encoding="utf-8")
    # The page refuses scripts: the copy that is measured must not.
    start = html.index('<meta http-equiv="Content-Security-Policy"')
    html = (html[:start] + html[html.index(">", start) + 1 :]).replace("</body>", f"{MEASURE}</body>")
    for width in (375, 1280):
        # In a frame: a window is at least 500 pixels wide.
        frame = tmp_path / "frame.html"
        content = f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{escape(html)}">'
        frame.write_text(content, encoding="utf-8")
        shown = lxml.html.document_fromstring(browser.run(frame.as_uri(), 1400, "--dump-dom").stdout)
        measured = json.loads(shown.get("data-measured"))
        assert measured == {"window": width, "content": width, "outside": [], "pictures": 2}


@pytest.mark.slice(name="browser")
@pytest.mark.parametrize("is_dark", [False, True])
def test_pictures_are_light_or_dark_as_the_page(browser: Browser, tmp_path: Path, is_dark: bool) -> None:
    page = write_pictures(tmp_path / "out", [cost_picture()], [])
    html = page.read_text(encoding="utf-8")
    # Only the picture, on the ground of the page.
    page.write_text(
        html.replace(
            "</style>", "main > *, figcaption, h2 { display: none } section { display: block !important }</style>"
        )
    )
    shot = tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    # A line of the console would be something that the page's own policy refused.
    assert "CONSOLE" not in browser.run(page.as_uri(), 1280, f"--screenshot={shot}", scheme).stderr
    pixels_HW = np.asarray(Image.open(shot).convert("L"))
    assert (pixels_HW.mean() < 60) == is_dark
    # Its text and lines differ from the ground.
    assert (abs(pixels_HW.astype(int) - int(pixels_HW[0, 0])) > 150).sum() > 1000
