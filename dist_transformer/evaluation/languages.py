"""A warning about text on the wrong side: a source in the model's target language, or the reverse."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dist_transformer.config.language_codes import is_same_language
from dist_transformer.data.text.compressed import is_compressed
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.model_folder import ModelInfo

_MOST_LINES = 1000


def warn_of_wrong_side(
    warn: Callable[[str], object],
    info: ModelInfo,
    tokenizer: Vocabulary,
    flags: str,
    *texts: tuple[Sequence[str], Path | None],
) -> None:
    """Warn of text whose language is that of the other side, by the pieces that are typical of a side of the training.

    If these do not decide, as in a few lines or for a model of an older version, the ending of the file's name does.

    Args:
        warn: called with one sentence, unless nothing is wrong or nothing is known.
        info: description of the model, for one direction.
        flags: flags that the user should check.
        texts: lines of the source and their file, if there is one; then those of references or translations.
    """
    languages = {"source": info.source_language, "target": info.target_language}
    if languages["source"] == languages["target"]:
        return
    found = []
    for (own, other), (lines, file) in zip((("source", "target"), ("target", "source")), texts, strict=False):
        rows = tokenizer.source.encode_batch(list(lines[:: max(1, len(lines) // _MOST_LINES)][:_MOST_LINES]))
        side = info.marks_of_direction.side_of(rows) or _side_by_name(file, languages)
        if side == other:
            text = f"the {own} text" if file is None else str(file)
            found.append(f"{text} looks like {languages[other]}, the model's {other} language")
    if found:
        warn(f"{' and '.join(found)} (direction {info.source_language}-{info.target_language}): check {flags}")


def _side_by_name(file: Path | None, languages: dict[str, str]) -> str | None:
    """Return the side whose language a file's name ends with, such as `test.de` or `test.de.gz`."""
    if file is None:
        return None
    ending = Path(file.stem if is_compressed(file) else file.name).suffix.removeprefix(".")
    sides = [side for side, language in languages.items() if is_same_language(ending, language)]
    return sides[0] if len(sides) == 1 else None
