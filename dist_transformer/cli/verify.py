"""Check a run folder: every hash of every checkpoint, the pointer, the weights, the hash chain of the sample ledger
(the record of what each step trained on), and the trained models in the folder.

dist-transformer verify runs/mine
dist-transformer verify runs/mine --data data/mine

With --data, the planned sentences of each step are computed again from the data folder alone, without a model, and
compared with the ledger's record of the sentences that the processes computed. Shards that the run left out are left
out again, and named. Prints a table; the exit status is 1 if anything is wrong. No link is followed, and nothing is
written except the cache of shards behind URLs.
"""

import argparse
from pathlib import Path

from tqdm import tqdm

from dist_transformer.base.checks import check_table, failed
from dist_transformer.base.errors import UserError, say
from dist_transformer.base.paths import usable_place
from dist_transformer.cli.parser import add_folder, folder_of, make_parser
from dist_transformer.run.outputs import claim_folder


def main() -> None:
    arguments = parse_arguments()

    from dist_transformer.run.verify import verify_run

    claim_folder(arguments.cache_dir, "--cache-dir", (arguments.run_dir, *arguments.data))
    # disable=None: a bar in a terminal, nothing in a file.
    with tqdm(unit=" steps", disable=None, leave=False) as bar:
        checks = verify_run(arguments.run_dir, arguments.data, cache_dir=arguments.cache_dir, on_step=bar.update)
    say(check_table(checks))
    if names := failed(checks):
        count = f"{len(names)} of {len(checks)} checks failed"
        raise UserError(f"{count} for {arguments.run_dir}: see FAIL in the table above")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_folder(parser, "--run-dir", "RUN", "run folder of a training")
    parser.add_argument(
        "--data",
        nargs="+",
        type=usable_place,
        default=[],
        metavar="DATA",
        help="data folders of the run in its order, or their URLs: also compare every step with them (default: no)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="cache of shards behind URLs, on local disk (default: the run's)",
    )
    arguments = parser.parse_args()
    arguments.run_dir = folder_of(parser, arguments, "--run-dir")
    return arguments
