"""The modules of the package, each with the first sentence of its docstring, as a nested list in Markdown.

`python docs/site/modules.py` prints it; a hook of mkdocs puts it on the page about the architecture.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dist_transformer", "benchmarks")
MARK = "<!-- modules -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    return markdown.replace(MARK, outline()) if MARK in markdown else markdown


def outline() -> str:
    return "\n".join(line for name in PACKAGES for line in _folder(ROOT / name, ""))


def _folder(folder: Path, indent: str) -> Iterator[str]:
    yield f"{indent}- **`{folder.name}/`**: {_first_sentence(folder / '__init__.py')}"
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            yield from _folder(path, f"{indent}    ")
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield f"{indent}    - `{path.name}`: {_first_sentence(path)}"


def _first_sentence(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) (?=[A-Z`\"])", paragraph)[0].rstrip(".")


if __name__ == "__main__":
    print(outline())
