"""The report of a run: one self-contained page, without network access and without scripts."""

from datetime import UTC, datetime
from pathlib import Path

from dist_transformer.base.files import write_file
from dist_transformer.reporting.html import summary
from dist_transformer.reporting.html.curves import charts, saving
from dist_transformer.reporting.html.rendering import render_page
from dist_transformer.reporting.html.run import load_run

REPORT_FILE = "report.html"
_TEMPLATE = Path(__file__).parent / "templates" / "report.html.j2"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of `run_dir`, whole or not at all.

    Args:
        out: file to write; default: RUN/report.html.

    Returns:
        the file.

    Raises:
        UserError: it is not a run folder, or the file cannot be written.
    """
    from dist_transformer.reporting.figures import attention_picture

    run = load_run(run_dir)
    page = render_page(
        _TEMPLATE,
        title=f"{run.name}: training report",
        run=run,
        made=datetime.now(UTC),
        described=summary.described(run),
        status=summary.judge(run),
        bleu=summary.headline_bleu(run),
        figures=summary.key_figures(run),
        charts=charts(run),
        maps=[
            (run.languages(sheet), sample, attention_picture(sample))
            for sheet in run.newest_sheets
            for sample in sheet.samples
            if sample.attention_LTS
        ],
        settings=list(summary.settings_groups(run.settings)),
        starts=summary.starts(run.environments),
        saved=summary.saved(run),
        saving=saving(run),
    )
    out = out or run_dir / REPORT_FILE
    write_file(out, page)
    return out
