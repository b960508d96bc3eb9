"""Sample translations and their attention maps."""

from collections.abc import Sequence
from typing import TypeVar

from dist_transformer.config.language_codes import language_tag
from dist_transformer.evaluation.samples import Sample, SampleSheet
from dist_transformer.reporting.html.document import framed
from dist_transformer.reporting.html.markup import Html, element, join
from dist_transformer.reporting.html.run import Run

T = TypeVar("T")

# Rows of the table that shows one sentence over the run.
_MOST_ROWS = 10
_EVERY_HEAD = 'dist-transformer pictures --model RUN/model --src-text "…" --out FOLDER'
_NO_SAMPLES = "There are no sample translations in this folder: the run has not translated at a validation."


def samples(run: Run) -> Html:
    """Lay out the newest sheet of each direction, and its first sentence over the run."""
    if not run.sheets:
        return element("p", _NO_SAMPLES)
    return join(*(_sheet(run, sheet) for sheet in run.newest_sheets))


def _sheet(run: Run, sheet: SampleSheet) -> Html:
    if not sheet.samples:
        return element("p", f"The sheet of step {sheet.step:,} has no sample.")
    source, target = _languages(run, sheet)
    rows = [
        element(
            "tr",
            _text("Source", sample.source, source),
            _text("Reference", sample.reference, target),
            _text("Hypothesis", sample.hypothesis, target),
        )
        for sample in sheet.samples
    ]
    of_direction = "" if sheet.direction is None else f", {sheet.direction}"
    scores = ", ".join(f"{value:.1f} {name}" for name, (value, _) in sheet.scores.items())
    scored = (
        f"Step {sheet.step:,}{of_direction}: {len(sheet.samples)} of {sheet.sentences:,} validation sentences, "
        f"which score {scores}."
    )
    signatures = " · ".join(signature for _, signature in sheet.scores.values())
    return join(
        element("p", scored, " ", element("span", signatures, class_="mono soft")),
        _table(("Source", "Reference", "Hypothesis"), rows, "texts stacks"),
        _over_the_run(run, sheet, sheet.samples[0]),
    )


def _languages(run: Run, sheet: SampleSheet) -> tuple[str | None, str | None]:
    if sheet.direction is None:
        return run.identity.source_language, run.identity.target_language
    return sheet.source_language, sheet.target_language


def _over_the_run(run: Run, newest: SampleSheet, sample: Sample) -> Html:
    """Lay out at most ten hypotheses of one sentence, spread over the sheets, oldest first."""
    of_direction = [sheet for sheet in run.sheets if sheet.direction == newest.direction]
    found = [(sheet, s.hypothesis) for sheet in of_direction for s in sheet.samples if s.source == sample.source]
    if len(found) < 2:
        return Html()
    source, target = _languages(run, newest)
    rows = [
        element(
            "tr",
            element("td", f"{sheet.step:,}", class_="step number"),
            element("td", f"{sheet.bleu:.1f}", class_="step number"),
            _text("Hypothesis", hypothesis, target),
        )
        for sheet, hypothesis in spread_out(found, _MOST_ROWS)
    ]
    return join(
        element("h3", "The first sentence over the run"),
        element("p", "Source: ", _quoted(sample.source, source)),
        element("p", "Reference: ", _quoted(sample.reference, target)),
        _table(("Step", "BLEU", "Hypothesis"), rows, "texts"),
    )


def spread_out(items: Sequence[T], most: int) -> list[T]:
    """Pick at most `most` of the items evenly, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _table(headings: tuple[str, ...], rows: list[Html], style: str) -> Html:
    narrow = {"Step": "step number", "BLEU": "step number"}
    cells = [element("th", heading, class_=narrow.get(heading), scope="col") for heading in headings]
    return element("table", element("thead", element("tr", *cells)), element("tbody", *rows), class_=style)


def _text(label: str, text: str, language: str | None) -> Html:
    return element("td", text or "(nothing)", data_label=label, dir="auto", lang=language and language_tag(language))


def _quoted(text: str, language: str | None) -> Html:
    return element("span", text, dir="auto", lang=language and language_tag(language))


def attention(run: Run) -> Html:
    """Draw the attention maps of the newest sheets' samples."""
    if not run.sheets:
        return element("p", "Without sample translations there are no attention maps.")
    step = run.sheets[-1].step
    mapped = [(sheet, sample) for sheet in run.newest_sheets for sample in sheet.samples if sample.attention_LTS]
    if not mapped:
        return element("p", f"The samples of step {step:,} have no attention maps.")
    explained = (
        f"Step {step:,}. Each row is a produced piece, each column a piece of the source, each panel a decoder layer. "
        "The weights of a row are the mean over the heads and sum to 1."
    )
    return join(
        element("p", explained),
        element("p", "The weights of every head, and those of self-attention: ", element("code", _EVERY_HEAD)),
        element("div", *(_map(sample, *_languages(run, sheet)) for sheet, sample in mapped), class_="maps"),
    )


def _map(sample: Sample, source: str | None, target: str | None) -> Html:
    from dist_transformer.reporting.figures import attention_picture

    caption = element(
        "figcaption",
        _quoted(sample.source, source),
        " → ",
        _quoted(sample.hypothesis, target),
    )
    return framed(attention_picture(sample), caption, alt=f"Cross-attention for: {sample.source}")
