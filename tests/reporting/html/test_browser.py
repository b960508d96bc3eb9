"""The page as a real browser shows it; skipped where there is none."""

import json
from html import escape
from pathlib import Path

import lxml.html
import numpy as np
import pytest
from PIL import Image

from dist_transformer.reporting.html.page import write_report
from tests.browser import Browser, browser
from tests.reporting.html.conftest import RECORDS, sample, train, write_run, write_samples

__all__ = ["browser"]

WIDTHS = (1280, 420)

# Appended to a copy of the page, which it unfolds: how wide it is, and what sticks out. What may scroll in its own
# frame does not count.
MEASURE = """<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(fold => fold.open = true);
  const outside = [...document.querySelectorAll("main *")].filter(
    e => !e.closest(".scroll > *") && !e.closest("svg > *") && e.getBoundingClientRect().right > innerWidth + 1);
  parent.document.documentElement.dataset.measured = JSON.stringify({
    window: innerWidth,
    content: document.documentElement.scrollWidth,
    outside: outside.map(e => e.outerHTML.slice(0, 80)),
    pictures: [...document.images].filter(image => image.naturalWidth > 0).length});
});
</script>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Make a page with content that is likely to be too wide: long words, long lines, large numbers, a large map."""
    records = [*RECORDS, *(train(step, nll=1 + 100 / step, loss=2.0, gradient_norm=1.0) for step in range(100, 9999))]
    run = write_run(tmp_path / ("unbroken_name_" * 12), records, extra={"a_long_name_" * 9: "a_long_value_" * 9})
    wide = sample("wide " * 30, "long" * 60, "map " * 20, with_map=True)
    write_samples(run, 40, 10.0, wide)
    write_samples(run, 80, 20.0, wide, sample("der Hund", "狗在睡觉", "الكلب نائم", with_map=True))
    return write_report(run)


@pytest.mark.slice(name="browser")
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out(browser: Browser, page: Path, tmp_path: Path, width: int) -> None:
    html = page.read_text(encoding="utf-8")
    (policy,) = lxml.html.document_fromstring(html).xpath("//meta[@http-equiv]")
    # The page refuses scripts: the copy that is measured must not.
    start = html.index('<meta http-equiv="Content-Security-Policy"')
    html = html[:start] + html[html.index(">", start) + 1 :]
    assert policy.get("content").startswith("default-src 'none'")
    html = html.replace("</body>", f"{MEASURE}</body>")
    # In a frame: a window is at least 500 pixels wide.
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{escape(html)}">', encoding="utf-8")
    shown = lxml.html.document_fromstring(browser.run(frame.as_uri(), 1400, "--dump-dom").stdout)
    measured = json.loads(shown.get("data-measured"))
    assert measured == {"window": width, "content": width, "outside": [], "pictures": 2}


@pytest.mark.slice(name="browser")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_browser_shows_the_page(browser: Browser, page: Path, tmp_path: Path, width: int) -> None:
    picture = tmp_path / "page.png"
    told = browser.run(page.as_uri(), width, f"--screenshot={picture}").stderr
    # Such as something that the page's own policy refused.
    assert "CONSOLE" not in told
    pixels_HWC = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels_HWC.shape == (1600, width, 3)
    # Something is drawn in every fifth of the window, and the first series of the curves in its colour.
    for part_HWC in np.array_split(pixels_HWC, 5):
        assert part_HWC.std() > 2
    assert (np.abs(pixels_HWC - (0x22, 0x63, 0xA8)).max(axis=2) < 3).sum() > 50
