"""Tables of docs/coming_from.md: names of other toolkits, from dist_transformer/config/foreign_flags.toml."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from dist_transformer.config import wrong_names

_FILE = Path(wrong_names.__file__).with_name("foreign_flags.toml")
# A flag, with its value where that is no English word; a word of vocabularies; a variable of the environment.
_CODE = re.compile(r"--[a-z][\w.-]*\w( (?=\S*[A-Z\d_])[\w.-]*\w)?|<unk>|\b[A-Z]+(_[A-Z]+)+=?")


class Toolkit(NamedTuple):
    """A toolkit of the page: the name of its table, its heading, and whether it has settings rather than flags."""

    table: str
    heading: str
    settings: bool


TOOLKITS = {
    "f": Toolkit("fairseq", "fairseq", settings=False),
    "m": Toolkit("marian", "Marian", settings=False),
    "o": Toolkit("opennmt", "OpenNMT-py, Eole", settings=True),
    "t": Toolkit("transformers", "transformers", settings=True),
}
"""Toolkits by their letters in the file."""


def foreign_tables() -> dict[str, str]:
    """Make a Markdown table of each toolkit's names, and one of all names of what does not exist here."""
    file = tomllib.loads(_FILE.read_text("utf-8"))
    tables = {}
    for letter, toolkit in TOOLKITS.items():
        rows = [(_names(names, letter, dashes=""), f"`{ours}`") for ours, names in file["commands"].items()]
        for ours, names in file["flags"].items():
            # The page says once that text becomes a folder of data.
            remedy = ours.removesuffix(" | {data}").format(**file["phrases"])
            rows.append(
                (
                    _names(names, letter),
                    _marked(remedy).replace(" | there", "; otherwise there").replace(" | ", ", or "),
                )
            )
        tables[toolkit.table] = _table(toolkit.heading, rows)
    missing = [
        (_names(names, "fmot"), _marked(f"{why[0].upper()}{why[1:]}.")) for why, names in file["missing"].items()
    ]
    return {**tables, "missing": _table("elsewhere", missing)}


def _names(words: str, letters: str, *, dashes: str = "--") -> str:
    """Write the names that toolkits of these letters have, in the form of the first that has it."""
    written = []
    for marks, _, name in (word.rpartition(":") for word in words.split()):
        if found := [TOOLKITS[letter] for letter in letters if letter in marks]:
            written.append(f"`{name.replace('-', '_')}`" if found[0].settings else f"`{dashes}{name}`")
    return ", ".join(written)


def _marked(text: str) -> str:
    return _CODE.sub(r"`\g<0>`", text)


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        [f"| {heading} | here |", "|---|---|", *(f"| {names} | {ours} |" for names, ours in rows if names)]
    )
