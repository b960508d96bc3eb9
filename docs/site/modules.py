"""The map of the package, as architecture.md has it: its rooms from top to bottom, with the first sentence of each.

`python docs/site/modules.py` prints it.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dist_transformer"


def layers() -> list[list[str]]:
    """List the rooms of each layer, from top to bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    return [layer.split(" | ") for each in contracts if each["type"] == "layers" for layer in each["layers"]]


def rooms() -> str:
    rows = [_row(name) for layer in layers() for name in layer]
    return "\n".join(["| room | contents |", "|---|---|", *rows])


def _row(name: str) -> str:
    path = PACKAGE / name.replace(".", "/")
    is_folder = path.is_dir()
    place = f"{name.replace('.', '/')}/" if is_folder else f"{name}.py"
    text = (path / "__init__.py" if is_folder else path.with_suffix(".py")).read_text("utf-8")
    sentence = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
    return f"| `{place}` | {sentence.rstrip('.')} |"


if __name__ == "__main__":
    print(rooms())
