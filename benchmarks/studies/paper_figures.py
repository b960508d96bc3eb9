"""Results of the paper's Table 3, and descriptions of its rows."""

from dataclasses import dataclass

from dist_transformer.config.settings import TrainConfig


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """The paper's results for a row: newstest2013 English-German, beam search, no averaging of checkpoints."""

    perplexity: float
    """Perplexity per token, with 37k byte pairs."""
    bleu: float
    parameters: int | None = None
    """Millions of parameters; None if the paper leaves the column empty because they are about those of base."""


PAPER: dict[str, PaperFigures] = {
    "base": PaperFigures(4.92, 25.8, 65),
    "A1": PaperFigures(5.29, 24.9),
    "A2": PaperFigures(5.00, 25.5),
    "A3": PaperFigures(4.91, 25.8),
    "A4": PaperFigures(5.01, 25.4),
    "B1": PaperFigures(5.16, 25.1, 58),
    "B2": PaperFigures(5.01, 25.4, 60),
    "C1": PaperFigures(6.11, 23.7, 36),
    "C2": PaperFigures(5.19, 25.3, 50),
    "C3": PaperFigures(4.88, 25.5, 80),
    "C4": PaperFigures(5.75, 24.5, 28),
    "C5": PaperFigures(4.66, 26.0, 168),
    "C6": PaperFigures(5.12, 25.4, 53),
    "C7": PaperFigures(4.75, 26.2, 90),
    "D1": PaperFigures(5.77, 24.6),
    "D2": PaperFigures(4.95, 25.5),
    "D3": PaperFigures(4.67, 25.3),
    "D4": PaperFigures(5.47, 25.7),
    "E": PaperFigures(4.92, 25.7),
    "big": PaperFigures(4.33, 26.4, 213),
}
"""Table 3 of the proceedings (NeurIPS 2017, arXiv 1706.03762)."""


def changes(base: TrainConfig, config: TrainConfig) -> str:
    """Describe how `config` differs from `base` in settings of rows: `heads 4 → 8, head width 32 → 16`, or `-`."""
    before, after = _settings(base), _settings(config)
    return ", ".join(f"{name} {before[name]} → {after[name]}" for name in before if before[name] != after[name]) or "-"


def _settings(config: TrainConfig) -> dict[str, object]:
    """Return the settings that rows may change, by the names that reports use."""
    model, optimizer = config.model, config.optimizer
    layers = (model.encoder_layers, model.decoder_layers)
    settings: dict[str, object] = {
        "layers": "{}+{}".format(*layers),
        "width": model.width,
        "feed-forward width": model.ffn_width,
        "heads": model.heads,
        "head width": model.attention_head_width,
        "dropout": model.dropout,
        "label smoothing": optimizer.label_smoothing,
        "positions": model.positions,
        "steps": config.max_steps,
    }
    if optimizer.schedule != "noam":
        settings["peak rate"] = f"{optimizer.peak_lr:.2g}"
    return settings
