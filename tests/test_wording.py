"""The unambiguous part of our English: words that are never used, and how no docstring begins.

The lists are here and nowhere else. They hold for code, names, messages, comments, scripts, pages and tests.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

# Old or unclear words; write "again", "so that … not", "without end".
FORBIDDEN = [
    *("lest", "anew", "mend", "mended", "amiss", "thereof", "whence", "hence", "thus", "hitherto", "henceforth"),
    *("nought", "betimes", "asunder", "behold", "somebody", "heed", "befall", "forsake", "come to naught"),
    *("tokens a second", "bytes a second", "steps a second", "go on", "goes on", "went on", "going on", "for ever"),
    *("in vain", "falls silent", "fell silent", "of the highest", "that which"),
]
# A function's docstring opens with an imperative verb, a field's with a noun phrase.
OPENERS = {
    *("Of", "What", "That", "Those", "Where", "Which", "Who", "Whose", "How", "For", "By", "From", "With", "Among"),
    "As",
}
_SOURCES = ("dist_transformer", "benchmarks", "tools")
_PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "slurm", "containers", "ds_configs"),
    *("Makefile", ".ci", "tests"),
)
_WORDS = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)


_BINARY = {".pyc", ".png", ".svg", ".arrow", ".npy", ".safetensors"}


def files(*places: str, suffix: str = "") -> Iterator[tuple[Path, str]]:
    """List the texts of some places with their contents, except for this file, which has the words."""
    for path in (ROOT / place for place in places):
        for file in sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix not in _BINARY and file != Path(__file__):
                yield file.relative_to(ROOT), file.read_text("utf-8")


def strings(text: str) -> Iterator[tuple[ast.Constant, bool]]:
    """List the strings of a module, and whether each is a docstring of the module, a class, a function or a field."""
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip():
            yield node, id(node) in alone


def test_no_old_word() -> None:
    """A name such as `begin_anew` consists of words."""
    found = [
        f"{path}:{number}: {words}"
        for path, text in files(*_SOURCES, *_PAGES)
        for number, line in enumerate(text.splitlines(), 1)
        if (words := _WORDS.findall(line.replace("_", " ")))
    ]
    assert found == []


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path}:{node.lineno}: {node.value.split()[0]}"
        for path, text in files(*_SOURCES, "tests", suffix=".py")
        for node, is_docstring in strings(text)
        if is_docstring and node.value.split()[0].rstrip(",:") in OPENERS
    ]
    assert found == []


def test_messages_do_not_ask_to_give() -> None:
    """Users pass flags, set settings and use files."""
    found = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path, text in files(*_SOURCES, suffix=".py")
        if path.name != "toy_lexicon.py"
        for node, is_docstring in strings(text)
        if not is_docstring and re.search(r"\bgives?\b", node.value, re.IGNORECASE)
    ]
    assert found == []
