"""Measure a part of dist_transformer on this machine, side by side with its peers.

tools/benchmark.py data --data data/mine --json results/data.json
tools/benchmark.py train --data data/mine --preset tiny --json results/train-tiny.json
tools/benchmark.py decode --model runs/mine/model --src test.en --ref test.de
tools/benchmark.py step --data data/mine --preset big -- --compile on
tools/benchmark.py kernels --preset big
tools/benchmark.py race --data data/mine --work runs/race --pymarian marian/bin/pymarian --eole eole/bin/eole
tools/benchmark.py optimizers --data texts --work runs/optimizers --json results/quality/optimizers.json
tools/benchmark.py stall --data data/mine --preset base --rate 600000

Prints a table; --json also writes a result file in the layout of tools/results_table.py. Flags after -- are those of
dist-transformer train, for parts that train.
"""

import shlex
import sys
import time
from pkgutil import resolve_name

from benchmarks.measure import Part, read_flags, result_of, write_result
from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import summary_of

PARTS = {
    "data": "data:DataBenchmark",
    "train": "training.field:TrainBenchmark",
    "stall": "training.stall:StallBenchmark",
    "decode": "decoding:DecodeBenchmark",
    "step": "training.step:StepBenchmark",
    "kernels": "kernels:KernelBenchmark",
    "race": "race.race:RaceBenchmark",
    "optimizers": "studies.optimizers:OptimizerStudy",
    "start": "start:StartBenchmark",
}
"""Classes of the parts, imported when they are needed: one part needs few of the libraries of all."""


def main() -> None:
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        parts = "\n".join(f"  {name:10} {summary_of(part_of(name))}" for name in PARTS)
        print(f"{__doc__}\nParts, each with its own --help:\n{parts}")
        return
    kind = part_of(name)
    sys.argv[:] = [f"{sys.argv[0]} {name}", *words]
    part = read_flags(kind)
    if part.json is not None and not part.json.absolute().parent.is_dir():
        raise UserError(f"--json {part.json} is in no folder that exists: make the folder first")
    started = time.monotonic()
    measured = part.measure()
    print(measured.table)
    if part.json is not None:
        result = result_of(
            measured.text,
            what=measured.what,
            command=shlex.join(["python", "tools/benchmark.py", name, *part.words()]),
            seeds=measured.seeds,
            wall_seconds=round(measured.wall_seconds or time.monotonic() - started, 1),
            figures=measured.figures,
            rows=measured.rows,
        )
        write_result(part.json, result)
    if measured.flaw is not None:
        raise UserError(measured.flaw)


def part_of(name: str) -> type[Part]:
    """Import the class of a part.

    Raises:
        UserError: there is no such part.
    """
    if name not in PARTS:
        raise UserError(f"{name!r} is no part: choose one of {', '.join(PARTS)}")
    found: type[Part] = resolve_name(f"benchmarks.{PARTS[name]}")
    return found
