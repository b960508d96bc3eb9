"""Untrusted text in the Markdown and YAML of model cards and tables, where it has no markup."""

import json
import re

from dist_transformer.base.errors import printable

# Characters with a meaning in HTML, in Markdown or in its tables.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in '&<>"\\`*_{}[]()#+-!|~^:=$'})
# Characters outside YAML's printable set, its line breaks, and the mark that begins a file.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def code(text: str) -> str:
    """Show a text as one code span, in which Markdown has no links, no HTML and no other markup.

    White space becomes single spaces, and control characters are escaped. Not for cells of a table, which a `|` ends.
    """
    line = _one_line(text) or " "
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    # A backtick at an end would belong to the fence.
    pad = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def escaped(text: str) -> str:
    """Escape a text as one line of plain text, also for cells of a table."""
    return _one_line(text).translate(_ENTITIES)


def yaml_string(text: str) -> str:
    """Quote a string for YAML, where a plain one may be a number, a date, a truth value such as `no`, or structure."""
    # A JSON string is one of YAML, except for what YAML does not read as it stands, and for pairs of surrogates.
    return _NOT_YAML.sub(lambda character: f"\\u{ord(character[0]):04x}", json.dumps(text, ensure_ascii=False))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
