"""The picture of a race: BLEU against CPU seconds, a line per training."""

import textwrap
from typing import Any

from dist_transformer.reporting.figures import as_png, new_figure, picture_style

_NOTE_CHARACTERS = 120


def race_picture(figures: dict[str, Any], *, note: str) -> bytes:
    """Draw the curves of all toolkits that ran, as PNG."""
    with picture_style():
        figure = new_figure(8.0, 4.6)
        panel = figure.subplots()
        for number, found in enumerate(found for found in figures["toolkits"].values() if "curves" in found):
            for curve in found["curves"]:
                (line,) = panel.plot(curve["cpu_seconds"], curve["bleu"], color=f"C{number}", linewidth=1.2)
            line.set_label(found["label"])
        for goal in figures["goals"]:
            panel.axhline(goal, color="0.85", linewidth=0.6, zorder=0)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("CPU seconds of all processes, start-up included")
        panel.set_ylabel("BLEU of the validation text, greedy")
        panel.legend(frameon=False, loc="lower right", fontsize=8)
        figure.supxlabel("\n".join(textwrap.wrap(note, _NOTE_CHARACTERS)), fontsize=6, color="0.4")
    return as_png(figure)
