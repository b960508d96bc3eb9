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


def files() -> Iterator[Path]:
    """List the texts of the project, except for this file, which has the words."""
    for place in (*_SOURCES, *_PAGES):
        path = ROOT / place
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        texts = (file for file in found if file.is_file() and file.suffix not in _BINARY)
        yield from (file for file in texts if file != Path(__file__))


def old_words(line: str) -> list[str]:
    """List the forbidden words of a line; a name such as `begin_anew` consists of words."""
    return [word.lower() for word in _WORDS.findall(line.replace("_", " "))]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """List line and text of the docstrings of a module, of its classes and functions, and of its fields."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_old_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}"
        for path in files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for word in old_words(line)
    ]
    assert found == []


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.split()[0]}"
        for folder in (*_SOURCES, "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if text.split() and text.split()[0].rstrip(",:") in OPENERS
    ]
    assert found == []


def test_messages_do_not_ask_to_give() -> None:
    """Users pass flags, set settings and use files."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for folder in _SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "toy_lexicon.py"
        for node in _messages(ast.parse(path.read_text("utf-8")))
        if re.search(r"\bgives?\b", node.value, re.IGNORECASE)
    ]
    assert found == []


def _messages(tree: ast.Module) -> Iterator[ast.Constant]:
    """List the strings of a module that are not docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node
