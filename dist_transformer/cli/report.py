"""Write the report of a run: figures, curves, samples, scores and settings on one page that opens in any browser.

dist-transformer report runs/mine

The page needs no network and no other file. It can also be written during training.
"""

from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import setting
from dist_transformer.run.outputs import claim_file


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """Run and page."""

    run_dir: Path = setting(position=True)
    """Run folder of a training."""
    out: Path | None = None
    """Page to write; default: RUN_DIR/report.html."""


def main() -> None:
    settings = parse(ReportSettings, Page(text=__doc__))

    from dist_transformer.reporting.html.page import write_report

    claim_file(settings.out, "--out", [settings.run_dir])
    say(write_report(settings.run_dir, settings.out))
