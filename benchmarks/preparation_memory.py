"""Peak memory of preparing a text and of preparing ten times as much, each measured in a separate process.

A module of its own: the measured process loads what `prepare` loads, and no more.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import measure_apart, resident_mib
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import LineFiles


def measure_preparation_memory(files: tuple[Path, Path], tokenizer: Path, scratch: Path) -> dict[str, dict[str, float]]:
    """Measure `pairs`, `seconds`, `peak_mib` and `before_mib` for the two texts and for ten times as many lines.

    One worker prepares everything, so its memory is an upper bound: with more `--workers`, each does a part.
    """
    longer = scratch / "longer.source", scratch / "longer.target"
    for file, copy in zip(files, longer, strict=True):
        with copy.open("wb") as end:
            for _ in range(10):
                with file.open("rb") as text:
                    shutil.copyfileobj(text, end)
    found = {}
    for name, (source, target) in {"1x": files, "10x": longer}.items():
        out = scratch / f"memory-{name}"
        request = {"source": str(source), "target": str(target), "tokenizer": str(tokenizer), "out": str(out)}
        remedy = "lower --memory-pairs, or set TMPDIR"
        found[name] = measure_apart(prepare_text, request, failure="a preparation failed", remedy=remedy)
        shutil.rmtree(out)
    return found


def prepare_text(request: dict[str, Any]) -> dict[str, float]:
    """Prepare a text and measure this process."""
    before = resident_mib("VmRSS")
    started = time.perf_counter()
    settings = PrepareSettings(
        out=Path(request["out"]),
        sources=(LineFiles(source=Path(request["source"]), target=Path(request["target"])),),
        tokenizer=Path(request["tokenizer"]),
        source_language="source",
        target_language="target",
        workers=1,
    )
    index = prepare(settings, lambda _: None)
    return {
        "pairs": index.pairs_read,
        "seconds": time.perf_counter() - started,
        "peak_mib": resident_mib("VmHWM"),
        "before_mib": before,
    }
