"""Settings of an export, and the libraries that a model is exported for. They need neither torch nor the libraries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import setting

Target = Literal["hf", "ctranslate2"]
LIBRARIES: dict[Target, str] = {"hf": "transformers", "ctranslate2": "ctranslate2"}
"""Names of the libraries that load an export."""
Quantization = Literal["int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]
"""Kinds of weights that CTranslate2 can store instead of fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """The model to export, and the text for its checks."""

    model: Path
    """Model folder."""
    to: Target
    """Library that will load it."""
    quantization: Quantization | None = setting(None, flag="quantize")
    """Kind of the weights, with --to ctranslate2; default: fp32."""
    out: Path
    """Folder to write; it must be new or empty."""
    source: Path | None = setting(None, flag="src")
    """Text to compare on, one sentence per line, 1,000 lines or more; default: a built-in text."""
    reference: Path | None = setting(None, flag="ref")
    """Raw reference text, line by line; with it, the card states BLEU."""
    name: str | None = None
    """Name of the model in its card; default: that of the folder."""
    license: str | None = None
    """License in the card, in the hub's notation, such as cc-by-4.0; default: none."""
    direction: str | None = None
    """Direction of the model, such as en-de; required if it has several."""
    tags: tuple[str, ...] | None = setting(None, flag="tag")
    """Tags in front of every source; default: those of the direction."""

    def __post_init__(self) -> None:
        if self.reference is not None and self.source is None:
            raise UserError("reference needs source: pass --src, or leave --ref out")
        if self.quantization is not None and self.to != "ctranslate2":
            raise UserError(
                f"quantization {self.quantization} is for CTranslate2: pass --to ctranslate2, or leave it out"
            )
