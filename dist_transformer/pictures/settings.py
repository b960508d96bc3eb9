"""Models and sentences of the pictures. They are apart, because the pictures need torch and matplotlib."""

from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """Models and sentences of the page."""

    model: Path | None = None
    """Model folder whose attention is drawn; needs --src-text."""
    source: str | None = setting(None, flag="src_text")
    """Sentence that the model reads."""
    target: str | None = setting(None, flag="tgt_text")
    """Its translation; default: the model's own."""
    learned_model: Path | None = None
    """Model folder with learned positions; default: that of --model, if it has them."""
    direction: str | None = None
    """Direction of the model, such as en-de; required if it has several."""
    tags: tuple[str, ...] | None = setting(None, flag="tag")
    """Tags in front of the source; default: those of the direction."""
    out: Path
    """Folder to write; it must be new or empty."""

    def __post_init__(self) -> None:
        for name in ("source", "target", "direction", "tags"):
            if self.model is None and getattr(self, name) is not None:
                raise UserError(f"{name} needs a model that reads it: pass --model")
        if self.model is not None and self.source is None:
            raise UserError("model needs a sentence: pass --src-text")
        for name in ("source", "target"):
            text = getattr(self, name)
            if text is not None and (not text.strip() or len(text.splitlines()) > 1):
                raise UserError(f"{name} is {text!r:.200}: pass one sentence in one line")
