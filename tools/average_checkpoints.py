"""Average weights of a run into a model folder."""

import argparse
from pathlib import Path

from dist_transformer.averaging import average, newest_weights
from dist_transformer.errors import UserError, exit_on_user_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, help="run folder: its newest weight files are taken")
    parser.add_argument(
        "--last", type=int, default=5, metavar="N", help="with --run-dir: how many (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="A",
        help="weight files, checkpoints or model folders, instead of --run-dir",
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    arguments = parser.parse_args()
    if (arguments.run_dir is None) == (arguments.checkpoints is None):
        raise UserError("give either --run-dir or --checkpoints")
    if arguments.last < 1:
        raise UserError(f"--last is {arguments.last}: give a number above 0")
    paths = arguments.checkpoints or newest_weights(arguments.run_dir, arguments.last)
    info = average(paths, arguments.out)
    print(f"averaged {len(paths)} set(s) of weights, steps {', '.join(map(str, info.steps))}: {arguments.out}")


if __name__ == "__main__":
    exit_on_user_error(main)
