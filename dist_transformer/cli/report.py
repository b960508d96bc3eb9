"""Write the report of a run: figures, curves, samples, scores and settings on one page that opens in any browser.

dist-transformer report runs/mine

The page needs no network and no other file. It can also be written during training.
"""

from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.cli.parser import add_folder, folder_of, make_parser
from dist_transformer.run.outputs import claim_file


def main() -> None:
    parser = make_parser(__doc__)
    add_folder(parser, "--run-dir", "RUN", "run folder of a training")
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write (default: RUN/report.html)")
    arguments = parser.parse_args()
    run_dir = folder_of(parser, arguments, "--run-dir")

    from dist_transformer.reporting.html.page import write_report

    claim_file(arguments.out, "--out", [run_dir])
    say(write_report(run_dir, arguments.out))
