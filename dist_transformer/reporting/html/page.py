"""The report of a run: one self-contained page, without network access and without scripts."""

from datetime import UTC, datetime
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.reporting.html.document import document, minute, section
from dist_transformer.reporting.html.markup import Html, element, join
from dist_transformer.reporting.html.overview import checkpoints, curves, headline, key_figures
from dist_transformer.reporting.html.run import Run, load_run
from dist_transformer.reporting.html.tables import environment, scores, settings
from dist_transformer.reporting.html.texts import attention, samples
from dist_transformer.version import __version__

REPORT_FILE = "report.html"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of `run_dir`, whole or not at all.

    Args:
        out: file to write; default: RUN/report.html.

    Returns:
        the file.

    Raises:
        UserError: it is not a run folder, or the file cannot be written.
    """
    page = render(load_run(run_dir), made=datetime.now(UTC))
    out = out or run_dir / REPORT_FILE
    try:
        write_file(out, page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another place with --out") from None
    return out


def render(run: Run, *, made: datetime) -> str:
    """Render the page; `made` is the time in its footer."""
    return document(
        f"{run.name}: training report",
        headline(run),
        section("Key figures", key_figures(run)),
        section("Curves", curves(run)),
        section("Sample translations", samples(run)),
        section("Cross-attention", attention(run)),
        section("Scores", scores(run)),
        section("Settings", settings(run)),
        section("Environment", environment(run)),
        section("Checkpoints", checkpoints(run)),
        _footer(run, made),
    )


def _footer(run: Run, made: datetime) -> Html:
    written = f", metrics.jsonl last written {minute(run.metrics_written)}" if run.metrics_written else ""
    damaged = ""
    if run.damaged_lines:
        lines = ", ".join(f"{line:,}" for line in run.damaged_lines[:10])
        more = " and more" if len(run.damaged_lines) > 10 else ""
        damaged = (
            f" metrics.jsonl has {len(run.damaged_lines):,} damaged line(s), left out here: {lines}{more}. "
            "A killed run can leave one at its end."
        )
    return element("footer", join(f"Made {minute(made)} by dist_transformer {__version__}{written}.", damaged))
