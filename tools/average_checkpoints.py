"""Average weights of a run into a model folder.

tools/average_checkpoints.py --run-dir RUN --best 5 --out MODEL

Give one of --last, --best (both with --run-dir) and --checkpoints.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dist_transformer.averaging import average, best_weights, newest_weights
from dist_transformer.errors import UserError, exit_on_user_error


def main() -> None:
    arguments = parse_arguments()
    paths, notes = chosen_weights(arguments)
    info = average(paths, arguments.out, notes=notes)
    print(f"averaged {len(paths)} set(s) of weights, steps {', '.join(map(str, info.steps))}: {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="run folder, with --last or --best")
    parser.add_argument("--last", type=int, metavar="N", help="its newest N weight files")
    parser.add_argument(
        "--best", type=int, metavar="N", help="its N weight files with the best validation, of equal ones the earlier"
    )
    parser.add_argument(
        "--by",
        choices=["nll", "bleu"],
        help="with --best: nll, the lowest loss a target token, not smoothed; bleu, the highest BLEU, 0 to 100, of the "
        "translated validation sentences (default: the run's best_by)",
    )
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", metavar="A", help="weight files, checkpoints or model folders"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder to write")
    return parser.parse_args()


def chosen_weights(arguments: argparse.Namespace) -> tuple[Sequence[Path], list[str]]:
    """The files to average, and what the model card says of the choice."""
    counts = {"--last": arguments.last, "--best": arguments.best}
    if sum(value is not None for value in (*counts.values(), arguments.checkpoints)) != 1:
        raise UserError("give one of --last, --best and --checkpoints")
    if (arguments.run_dir is None) == (arguments.checkpoints is None):
        raise UserError("give --run-dir with --last or --best, and only with them")
    if arguments.by is not None and arguments.best is None:
        raise UserError(f"--by {arguments.by} says what --best compares: give --best, or leave --by out")
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"{flag} is {count}: give a number above 0")
    if arguments.checkpoints is not None:
        return arguments.checkpoints, []
    if arguments.last is not None:
        return newest_weights(arguments.run_dir, arguments.last), []
    best = best_weights(arguments.run_dir, arguments.best, arguments.by)
    if best.better_without_file:
        steps = ", ".join(map(str, best.better_without_file))
        print(f"warning: better by {best.by}, but their weights were not kept: steps {steps}", file=sys.stderr)
    print(best)
    return best.paths, [f"Chosen by {best}"]


if __name__ == "__main__":
    exit_on_user_error(main)
