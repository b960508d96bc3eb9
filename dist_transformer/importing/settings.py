"""Settings of an import. They are apart, because it imports torch."""

from dataclasses import dataclass
from pathlib import Path

from dist_transformer.config.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSettings:
    """The published model, and the text for its checks."""

    folder: Path = setting(position=True)
    """Folder of MarianMTModel, M2M100, NLLB or Marian, a decoder.yml, or a model of the hub: ORG/NAME."""
    out: Path
    """Model folder to write."""
    source: Path | None = setting(None, flag="src")
    """Text to compare with, one sentence per line, 1,000 lines or more; default: synthetic English."""
    source_language: str | None = setting(None, flag="src_lang")
    """Source language; default: as the folder names it."""
    target_language: str | None = setting(None, flag="tgt_lang")
    """Target language; default: as the folder names it."""
    keep_text: tuple[Path, ...] = ()
    """Files whose text the vocabulary must still split as before: the entries of M2M100 or NLLB that it does not need
    are left out."""
    program: str | None = setting(None, flag="marian", program=True)
    """Program to compare a model of Marian with; default: marian or pymarian in PATH."""
    device: str | None = None
    """cpu, cuda or cuda:N; default: cuda if there is one."""
