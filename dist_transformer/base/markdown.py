"""Untrusted text in the Markdown of model cards and tables, where it has no markup."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import printable
from dist_transformer.base.templates import fill

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

# Characters with a meaning in HTML, in Markdown or in its tables.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in '&<>"\\`*_{}[]()#+-!|~^:=$'})


class _Safe(str):
    """A text that a template takes as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def fill_card(template: Path, metadata: "ModelCardData", **values: Any) -> str:
    """Fill the template of a model card, whose head is the metadata that model hubs read.

    A template writes each text by the filter `code` or `escaped`, and inside of code by `json`.
    """
    filters = {
        "code": lambda text: _Safe(code(text)),
        "escaped": lambda value: _Safe(escaped(str(value))),
        "json": lambda value: _Safe(json.dumps(value, ensure_ascii=False)),
    }
    return f"---\n{metadata.to_yaml()}\n---\n{fill(template, filters=filters, **values)}"


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


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
