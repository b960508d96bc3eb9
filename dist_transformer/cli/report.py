"""Write the report of a run: figures, curves, samples, scores and settings on one page that opens in any browser.

tools/report.py runs/mine

The page needs no network and no other file. It can be written while the run trains.
"""

import argparse
from pathlib import Path

from dist_transformer.reporting.html.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: the --run-dir of a training")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    arguments = parser.parse_args()
    print(write_report(arguments.run, arguments.out))
