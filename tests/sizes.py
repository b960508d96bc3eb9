"""Count the lines of code of each room of the package, of tests and of benchmarks, as JSON.

Python without blank lines, comments and docstrings; templates, C++, styles and tables without blank lines.
`python tests/sizes.py > tests/sizes.json` records them, and a test fails when a room is 3% larger than recorded.
"""

import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_OTHER = {".cpp", ".css", ".html", ".j2", ".js", ".json", ".toml", ".txt"}


def code_lines(file: Path) -> int:
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return sum(bool(line.strip()) for line in text.splitlines())
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def rooms() -> dict[str, int]:
    """Return the lines of each room by its name, and those of the whole package."""
    package, sizes = ROOT / "dist_transformer", Counter[str]()
    for file in package.rglob("*"):
        if file.suffix in {".py", *_OTHER}:
            parts = file.relative_to(package).parts[:-1]
            room = "/".join(parts[: 2 if parts[:1] == ("data",) else 1]) or "modules"
            sizes.update({room: code_lines(file), "package": 0})
            sizes["package"] += code_lines(file)
    for folder in ("tests", "benchmarks"):
        sizes[folder] = sum(map(code_lines, (ROOT / folder).rglob("*.py")))
    return dict(sorted(sizes.items()))


if __name__ == "__main__":
    print(json.dumps(rooms(), indent=1))
