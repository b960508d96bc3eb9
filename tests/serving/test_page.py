"""The page as a real browser shows it, on a desk and on a phone; skipped where there is none."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.browser import Browser, browser
from tests.serving.page_driver import Page, open_page
from tests.serving.running import RunningServer, running_server

__all__ = ["browser"]

pytestmark = pytest.mark.slice(name="browser")

DESK, PHONE = (1280, 900), (390, 844)
SHOWN = "document.querySelectorAll('.result').length === 2 && document.querySelectorAll('.map tbody td').length > 8"
# Pixels that one has to scroll to the right for; what scrolls in its own frame does not count.
BEYOND = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[RunningServer]:
    with running_server([model_folder, model_folder], "--max-characters", 500) as running:
        yield running


def drive(
    browser: Browser,
    server: RunningServer,
    size: tuple[int, int],
    use: Callable[[Page], Awaitable[None]],
    *,
    dark: bool = False,
) -> None:
    """Open the page, do something with it, and see that neither console nor policy complains."""

    async def main() -> None:
        async with open_page(browser, *size, dark=dark) as page:
            await page.open(server.url)
            await use(page)
            assert page.console == []
            assert await page.value(BEYOND) == 0
            assert await page.value("innerWidth") == size[0]

    asyncio.run(main())


async def submit(page: Page, text: str) -> None:
    """Type and press Enter: the text box has the focus when the page opens."""
    await page.value("document.querySelector('#text').value = ''")
    await page.value("document.querySelector('#text').focus()")
    await page.type(text)
    await page.press("Enter")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_sentence_is_translated_and_its_attention_shown(
    browser: Browser, server: RunningServer, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    async def use(page: Page) -> None:
        await submit(page, "the old man sees a dog")
        await page.wait_for(SHOWN)
        assert await page.value("document.querySelectorAll('.result:first-child .hypothesis').length") == 4
        # Side by side, or one below the other.
        left, right = await page.value(
            "[...document.querySelectorAll('.result')].map(e => [e.offsetLeft, e.offsetTop])"
        )
        assert (left[1] == right[1] and left[0] < right[0]) if size == DESK else left[0] == right[0]
        picture = tmp_path / "page.png"
        await page.screenshot(picture)
        pixels_HWC = np.asarray(Image.open(picture).convert("RGB")).astype(int)
        assert pixels_HWC.shape[1] <= size[0]
        assert (pixels_HWC.mean() < 100) == dark
        # The cells of the map have many shades.
        assert len(np.unique(pixels_HWC.reshape(-1, 3), axis=0)) > 50

    drive(browser, server, size, use, dark=dark)


TRANSLATE_PAGE = """(async () => {
    const request = {q: PAGE, source: 'en', target: 'de', format: 'html'};
    const headers = {'Content-Type': 'application/json'};
    const answer = await fetch('/translate', {method: 'POST', headers, body: JSON.stringify(request)});
    document.body.innerHTML = (await answer.json()).translatedText;
})()"""


def test_a_browser_shows_a_translated_page_with_its_elements(browser: Browser, server: RunningServer) -> None:
    page_of = '<h1>the dog</h1><ul><li>an <b id="x">old</b> man</li><li><i translate="no">cat</i></li></ul><hr>'

    async def use(page: Page) -> None:
        await page.value(TRANSLATE_PAGE.replace("PAGE", json.dumps(page_of)))
        found = await page.value("[...document.body.querySelectorAll('*')].map(e => e.localName).join(' ')")
        assert found == "h1 ul li b li i hr"
        assert await page.value("document.querySelector('li #x').parentElement.localName") == "li"
        assert await page.value("document.querySelector('i').textContent") == "cat"
        assert await page.value("document.querySelector('h1').textContent") not in ("", "the dog")

    drive(browser, server, DESK, use)


def test_what_can_be_chosen(browser: Browser, server: RunningServer) -> None:
    """Another hypothesis, kind and head by what a user's choice sends; words by keys."""

    async def use(page: Page) -> None:
        await submit(page, "the old man sees a dog")
        await page.wait_for(SHOWN)
        first = "document.querySelector('.result')"
        shape = f"[{first}.querySelectorAll('.map tbody tr').length, {first}.querySelectorAll('.map thead th').length]"
        columns = (await page.value(shape))[1]
        weights = f"[...{first}.querySelectorAll('.map tbody td')].map(e => e.title).join()"
        mean = await page.value(weights)
        await page.value(
            f"{first}.querySelector('.head').value = '1', "
            f"{first}.querySelector('.head').dispatchEvent(new Event('change'))"
        )
        assert await page.value(weights) != mean

        # By keys: from word to word, and the words that it looks at are shaded by weight.
        await page.value(f"{first}.querySelector('.lookers .chosen').focus()")
        await page.press("ArrowRight")
        assert (
            await page.value(f"[...{first}.querySelectorAll('.lookers > *')].findIndex(e => e.matches(':focus'))") == 1
        )
        assert await page.value(f"{first}.querySelector('.map tr.chosen').rowIndex") == 2
        assert (await page.value(f"{first}.querySelector('.readout').textContent")).count("looks at") == 1
        shades = await page.value(
            f"[...{first}.querySelectorAll('.targets > *')].map(e => [e.title, e.style.getPropertyValue('--shade')])"
        )
        assert len(shades) == columns
        for weight, shade in shades:
            assert abs(float(shade) - float(weight) ** 0.5) < 0.001

        await page.value(
            f"{first}.querySelector('.kind').value = 'encoder', "
            f"{first}.querySelector('.kind').dispatchEvent(new Event('change'))"
        )
        await page.wait_for(f"JSON.stringify({shape}) === '[{columns},{columns}]'")

        # The second hypothesis by the arrow key of its radio button.
        await page.value(f"{first}.querySelector('input').focus()")
        await page.press("ArrowDown")
        assert await page.value(f"{first}.querySelectorAll('input')[1].checked")
        await page.value(
            f"{first}.querySelector('.kind').value = 'cross', "
            f"{first}.querySelector('.kind').dispatchEvent(new Event('change'))"
        )
        answer = await page.value("ask('api/translate', {text: document.querySelector('#text').value})")
        words = [piece.removeprefix("▁") or "␣" for piece in answer["results"][0]["hypotheses"][1]["pieces"]]
        shown = f"[...{first}.querySelectorAll('.lookers > *')].map(e => e.textContent)"
        await page.wait_for(f"JSON.stringify({shown}) === JSON.stringify({json.dumps(words)})")

    drive(browser, server, DESK, use)


def test_text_is_never_markup(browser: Browser, server: RunningServer) -> None:
    async def use(page: Page) -> None:
        await submit(page, "<img src=x onerror=\"document.title='bad'\"><b>bold</b>")
        await page.wait_for(SHOWN)
        assert await page.value("document.querySelectorAll('img').length") == 0
        assert await page.value("document.title") != "bad"
        source = await page.value("[...document.querySelector('.targets').children].map(e => e.textContent).join('')")
        assert source.startswith("<img")
        # A model may learn markup, and a folder may be named so.
        markup = "<img src=x onerror=alert(1)>"
        hypothesis = {"text": markup, "score": -1, "tokens": [], "pieces": [markup, "</s>"]}
        answer = {"name": markup, "target_language": "de", "hypotheses": [hypothesis], "has_maps": False}
        made = f"new Result({json.dumps(answer)}, 0, '').section"
        assert await page.value(f"{made}.querySelector('.text').textContent") == markup
        assert await page.value(f"{made}.querySelectorAll('img').length") == 0
        weights = {"rows": [markup], "columns": [markup], "weights": [[[1]], [[1]]]}
        await page.value(
            f"document.body.append((r => (r.map = {json.dumps(weights)}, r.listHeads(), r.listLayers(), r.draw(),"
            f" r.section))(new Result({json.dumps({**answer, 'heads': 2, 'layers': {'cross': 1}})}, 0, '')))"
        )
        assert await page.value("document.querySelectorAll('img').length") == 0

    drive(browser, server, PHONE, use)


def test_long_words_and_right_to_left(browser: Browser, server: RunningServer) -> None:
    async def use(page: Page) -> None:
        await submit(page, "Donaudampfschiff" * 4)
        await page.wait_for(SHOWN)
        assert await page.value(BEYOND) == 0
        # The map is wider than its frame, which scrolls.
        assert await page.value("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.scroll'))")
        await submit(page, "السلام عليكم")
        assert await page.value("getComputedStyle(document.querySelector('#text')).direction") == "rtl"

    drive(browser, server, PHONE, use)


def test_errors_and_notes_are_in_the_page(browser: Browser, server: RunningServer) -> None:
    async def use(page: Page) -> None:
        error = "document.querySelector('#error')"
        await submit(page, "w" * 501)
        await page.wait_for(f"!{error}.hidden")
        assert await page.value(f"{error}.textContent") == (
            "The text has 501 characters, and at most 500 are allowed: send a shorter one."
        )
        # The browser's own note of a 400 is no mistake of the page.
        assert all("status of 400" in told for told in page.console)
        page.console.clear()
        await submit(page, "word " * 99)
        await page.wait_for("document.querySelectorAll('.result').length === 2")
        assert await page.value(f"{error}.hidden")
        assert "parts were translated one by one" in await page.value("document.querySelector('.note').textContent")
        assert await page.value("document.querySelector('.attention').hidden")

    drive(browser, server, PHONE, use)


def test_a_server_that_has_ended_is_named(browser: Browser, model_folder: Path) -> None:
    with running_server([model_folder]) as server:

        async def use(page: Page) -> None:
            server.end()
            await submit(page, "a dog")
            await page.wait_for("!document.querySelector('#error').hidden")
            sentence = await page.value("document.querySelector('#error').textContent")
            assert sentence == "The server cannot be reached: is it still running?"
            page.console.clear()

        drive(browser, server, DESK, use)
