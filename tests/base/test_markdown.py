"""Names as they come through a renderer of Markdown."""

import lxml.html
import markdown
import pytest

from dist_transformer.base.markdown import code, escaped

HOSTILE = [
    "[a](https://example.org)",
    "<https://example.org> www.example.org me@example.org",
    "![x](y) <img src=x> <script>alert(1)</script> <!-- c",
    "a\n# heading\n\n---\n- item",
    "a | b",
    "` [a](b) `",
    "`` ` <b> ``",
    "`",
    "\\` <b> \\",
    "&lt;b&gt; *a* __b__ ~~c~~",
    "[a]\n\n[a]: https://example.org",
    "\x1b[2J\u2028# a\x85# b",
    "",
]


def rendered(text: str) -> lxml.html.HtmlElement:
    return lxml.html.fragment_fromstring(
        markdown.markdown(text, extensions=["tables", "fenced_code"]), create_parent=True
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_makes_no_element(name: str) -> None:
    page = rendered(
        f"# {code(name)}\n\nFrom {code(name)} to {code(name)}.\n\n- {code(name)}\n\n"
        f"| a | b |\n|---|---|\n| {escaped(name)} | {escaped(name)} |\n"
    )
    assert [element.tag for element in page.iterdescendants()] == [
        *("h1", "code", "p", "code", "code", "ul", "li", "code"),
        *("table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"),
    ]


def test_a_span_of_code_shows_the_name() -> None:
    for name in ("wmt14.de-en", "`` ` <b> ``", "a | [b](c) \\", "&lt;"):
        assert rendered(code(name)).findtext(".//code") == name
