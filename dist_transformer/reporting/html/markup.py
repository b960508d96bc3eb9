"""HTML with texts that are escaped by construction: only results of `element` are markup, other values are text."""

import html

_VOID = frozenset({"img", "meta"})


class Html(str):
    """Markup that is already escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escape `value` for an element or a quoted attribute, unless it is markup."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(*parts: object) -> Html:
    return Html("".join(text(part) for part in parts))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Make an element: `element("td", "a < b", class_="wide")` → `<td class="wide">a &lt; b</td>`.

    In attribute names a final `_` is dropped, and any other `_` becomes `-`. Attributes with the value None are left
    out.
    """
    named = [
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = f"<{name}{''.join(named)}>"
    return Html(opening) if name in _VOID else Html(f"{opening}{join(*children)}</{name}>")
