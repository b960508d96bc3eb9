"""HTML whose texts are escaped by construction: only what `element` made is markup, every other value is text."""

import html

_VOID = frozenset({"img", "meta"})


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def text(value: object) -> Html:
    """`value` as text that no browser reads as markup, in an element or in a quoted attribute."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(*parts: object) -> Html:
    return Html("".join(text(part) for part in parts))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """`element("td", "a < b", class_="wide")` → `<td class="wide">a &lt; b</td>`.

    A `_` at the end of an attribute's name is dropped, within it `_` stands for `-`; attributes that are None are left
    out.
    """
    named = [
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = f"<{name}{''.join(named)}>"
    return Html(opening) if name in _VOID else Html(f"{opening}{join(*children)}</{name}>")
