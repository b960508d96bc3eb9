"""Small faults in the package's code, and which tests find them: a measure of the tests, for when tests are rewritten.

`python -m tests.mutations choose FILE ROOMS` draws faults by a seeded generator and writes them to FILE, once.
`python -m tests.mutations run FILE --out RESULTS` puts each into a copy of the checkout, and runs the tests that mirror
its module until one fails. The copy is of `--checkout`, which may be another commit: a fault is put where its line is.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PER_KIND = 12
SECONDS = 600
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
OPERATORS = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "and": "or", "or": "and"}
# What no machine without a GPU runs, what is a list of words, and what only prints.
LEFT_OUT = re.compile(r"model/(gpu_kernels|compiled)|toy_lexicon|__init__|pictures/")
# Rooms whose whole runs are launched elsewhere than in the mirrored folder.
LAUNCHES = {
    "training": ("tests/distributed/test_stages.py", "tests/distributed/test_runs.py"),
    "run/checkpoint": ("tests/distributed/test_saving.py", "tests/distributed/test_runs.py"),
    "run/": ("tests/distributed/test_verify_run.py",),
    "runtime": ("tests/distributed/test_runs.py",),
    "data/loading": ("tests/distributed/test_data.py",),
    "inference": ("tests/cli/test_translate.py", "tests/cli/test_translate_files.py"),
    "cost": ("tests/cli/test_plan.py", "tests/distributed/test_memory.py"),
    "preflight": ("tests/cli/test_plan.py",),
}


def sign(before: str, signs: dict[str, str]) -> str | None:
    """Replace the one sign that stands between two operands; None if the text has another form."""
    found = before.strip(" ()")
    return before.replace(found, signs[found]) if found in signs else None


def faults_of(tree: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST | None, str]]:
    """Give kind, node, the node after the sign if a sign is replaced, and the text that replaces a node otherwise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield "comparison", node.left, node.comparators[0], ""
        elif isinstance(node, ast.BinOp):
            yield "operator", node.left, node.right, ""
        elif isinstance(node, ast.BoolOp):
            yield "operator", node.values[0], node.values[1], ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            yield "constant", node, None, str(not node.value if isinstance(node.value, bool) else node.value + 1)
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
            yield "return", node, None, "return None"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "dropped call", node, None, "pass"


def candidates(file: Path) -> Iterator[dict[str, Any]]:
    """Give the faults of a module that change one line inside a function, annotations aside."""
    text = file.read_text("utf-8")
    lines = text.splitlines()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    seen = set()
    for statement in itertools.chain.from_iterable(function.body for function in functions):
        for kind, node, after, instead in faults_of(statement):
            first: Any = node
            last: Any = after or node
            if first.lineno != last.end_lineno or first.end_lineno != last.lineno:
                continue
            line = lines[first.lineno - 1].encode()
            start, end = (first.end_col_offset, last.col_offset) if after else (first.col_offset, first.end_col_offset)
            replaced = line[start:end].decode()
            new = sign(replaced, COMPARISONS if kind == "comparison" else OPERATORS) if after else instead
            found = (kind, first.lineno, start)
            if new is None or found in seen or not line.isascii():
                continue
            seen.add(found)
            whole = line[:start].decode() + new + line[end:].decode()
            yield {
                "file": str(file.relative_to(ROOT)),
                "line": first.lineno,
                "kind": kind,
                "before": line.decode(),
                "after": whole,
            }


def choose(out: Path, seed: int, rooms: list[str]) -> None:
    """Draw equally many faults of each kind, at most one of a module."""
    package = ROOT / "dist_transformer"
    found = {file for room in rooms for file in [*(package / room).rglob("*.py"), package / room] if file.is_file()}
    files = [file for file in sorted(found) if not LEFT_OUT.search(str(file))]
    generator = random.Random(seed)
    chosen: list[dict[str, Any]] = []
    for kind in ("comparison", "constant", "operator", "return", "dropped call"):
        generator.shuffle(files)
        drawn = 0
        for file in [file for file in files if str(file.relative_to(ROOT)) not in {each["file"] for each in chosen}]:
            own = [fault for fault in candidates(file) if fault["kind"] == kind]
            if own and drawn < PER_KIND:
                chosen.append(generator.choice(own))
                drawn += 1
    numbered = [{"number": number, **fault} for number, fault in enumerate(chosen, 1)]
    out.write_text(json.dumps(numbered, indent=1) + "\n", encoding="utf-8")


def mirrored(checkout: Path, file: str) -> list[tuple[str, list[str]]]:
    """Give the tests of a module, as marks and places: those with its name, its folder's quick ones, launches."""
    inside = Path(file).relative_to("dist_transformer")
    # A template is tested with the modules that fill it.
    folder = Path("tests") / str(inside.parent).removesuffix("/templates")
    own = [folder / f"test_{inside.stem}.py", folder / f"test_{inside.stem}_*.py"]
    named = [str(path.relative_to(checkout)) for pattern in own for path in sorted(checkout.glob(str(pattern)))]
    quick = [str(folder)] if inside.parent != Path() and (checkout / folder).exists() else []
    launches = [place for room, places in LAUNCHES.items() if str(inside).startswith(room) for place in places]
    parts = [("", named), ("not slow", quick), ("", [place for place in launches if (checkout / place).exists()])]
    return [(marks, places) for marks, places in parts if places]


def first_failure(copy: Path, marks: str, places: list[str]) -> str | None:
    """Run tests of a checkout until one fails; gives its name, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, "-p", "no:cacheprovider", *places]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{' '.join(places)} ran out of time"
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[0] if found else None if process.returncode in (0, 5) else output[-300:]


def examine(checkout: Path, fault: dict[str, Any], marks: str) -> dict[str, Any]:
    """Run the mirrored tests on a copy with one fault; gives the test that fails first, or None."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch) / "checkout"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", "runs"))
        file = copy / fault["file"]
        lines = file.read_text("utf-8").split("\n") if file.exists() else []
        places = [index for index, line in enumerate(lines) if line == fault["before"]]
        if not places:
            return {**fault, "found_by": "the line is gone", "seconds": 0.0}
        lines[min(places, key=lambda index: abs(index + 1 - fault["line"]))] = fault["after"]
        file.write_text("\n".join(lines), encoding="utf-8")
        begin, by = time.monotonic(), None
        for more, tests in mirrored(checkout, fault["file"]):
            by = first_failure(copy, " and ".join(filter(None, [marks, more])), tests)
            if by:
                break
        return {**fault, "found_by": by, "seconds": round(time.monotonic() - begin, 1)}


def run(drawn: Path, checkout: Path, out: Path, marks: str, numbers: list[int]) -> None:
    faults = json.loads(drawn.read_text("utf-8"))
    results = json.loads(out.read_text("utf-8")) if out.exists() else []
    left = [fault for fault in faults if fault["number"] not in {each["number"] for each in results}]
    left = [fault for fault in left if not numbers or fault["number"] in numbers]
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda fault: examine(checkout, fault, marks), left):
            results.append(result)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(result["number"], result["file"], result["kind"], result["found_by"] or "NOT FOUND", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("choose")
    drawing.add_argument("file", type=Path, help="where the faults are written")
    drawing.add_argument("--seed", type=int, default=2026)
    drawing.add_argument("rooms", nargs="+", help="folders or modules of dist_transformer/")
    running = commands.add_parser("run")
    running.add_argument("file", type=Path, help="the faults")
    running.add_argument("--checkout", type=Path, default=ROOT)
    running.add_argument("--out", type=Path, required=True, help="results so far are kept, and the rest is run")
    running.add_argument("--marks", default="not slice and not gpu", help="pytest's -m for the tests that are run")
    running.add_argument("--numbers", type=int, nargs="*", default=[], help="of faults; otherwise all")
    given = parser.parse_args()
    if given.command == "choose":
        choose(given.file, given.seed, given.rooms)
    else:
        run(given.file, given.checkout, given.out, given.marks, given.numbers)


if __name__ == "__main__":
    main()
