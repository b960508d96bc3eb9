"""The pictures that can be made of what is given, as one folder: a self-contained page, and each as a PNG file.

Some need no model, some a sentence, one learned positions.
"""

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import folder_beside, make_folder, move, sync, write_file
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.trained_model import TrainedModel
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import load_model
from dist_transformer.pictures.attention import attention_pictures
from dist_transformer.pictures.cost import cost_picture
from dist_transformer.pictures.masks import mask_picture
from dist_transformer.pictures.picture import Picture
from dist_transformer.pictures.positions import learned_picture, rotation_picture, sinusoid_picture
from dist_transformer.pictures.schedules import schedule_picture
from dist_transformer.pictures.settings import PictureSettings
from dist_transformer.pictures.softmax import saturation_picture
from dist_transformer.reporting.figures import as_png
from dist_transformer.reporting.html.rendering import render_page

PAGE_FILE = "index.html"
_LEARNED = "learned"


def make_pictures(settings: PictureSettings) -> tuple[list[Picture], list[str]]:
    """Make all pictures for which `settings` has what they need, in the order of the page, and notes for its reader.

    Raises:
        UserError: a model folder cannot be used, or a sentence is too long.
    """
    notes: list[str] = []
    # The models come first, because they may be refused.
    model = None
    if settings.model is not None:
        model = TrainedModel.load(settings.model, device="cpu", direction=settings.direction, tags=settings.tags)
    learned_PD = _learned_positions(None if model is None else model.model, settings.learned_model)
    pictures = [mask_picture()]
    if model is None:
        notes.append("Not here: the attention of a trained model. Pass --model MODEL and --src-text with a sentence.")
    else:
        pictures += _attention(model, settings, notes)
    pictures += [saturation_picture(), sinusoid_picture(), rotation_picture()]
    if learned_PD is None:
        notes.append(
            "Not here: learned positions. Train with --model.positions learned, and pass that model by "
            "--learned-model MODEL."
        )
    else:
        pictures.append(learned_picture(learned_PD))
    return [*pictures, schedule_picture(), cost_picture()], notes


def _attention(model: TrainedModel, settings: PictureSettings, notes: list[str]) -> list[Picture]:
    assert settings.source is not None
    target = settings.target
    if target is None:
        target = model.translate(settings.source)
    by = "given" if settings.target is not None else "the model's translation by beam search"
    pictures = attention_pictures(model.attention(settings.source, target))
    notes.append(f"Sentence of the attention pictures: {settings.source}")
    notes.append(f"Its target, {by}: {target or '(nothing)'}")
    return pictures


def _learned_positions(model: DecodingModel | None, other: Path | None) -> np.ndarray | None:
    """Return the table of learned positions of `other`, or else of `model`; None if there is none."""
    if other is not None:
        model = learned = load_model(other, torch.device("cpu"))[0]
        found = learned.config.positions
        if found != _LEARNED:
            raise UserError(
                f"--learned-model {other} has {found} positions: use a model that was trained with "
                "--model.positions learned"
            )
    if not isinstance(model, Transformer) or model.config.positions != _LEARNED:
        return None
    table_PD: np.ndarray = model.position_vectors(model.config.max_positions).detach().numpy()
    return table_PD


def write_pictures(out: Path, pictures: Sequence[Picture], notes: Sequence[str]) -> Path:
    """Write the page and the PNG files, whole or not at all.

    Args:
        out: folder to write; it must be new or empty.
        notes: paragraphs of the page's head, such as the sentence pair and how to get pictures that are missing.

    Returns:
        the page.

    Raises:
        UserError: the folder cannot be written.
    """
    template, title = Path(__file__).with_name("page.html.j2"), "The Transformer in pictures"
    page = render_page(template, title=title, pictures=pictures, notes=notes, made=datetime.now(UTC))
    make_folder(out.absolute().parent)
    with folder_beside(out) as folder:
        for picture in pictures:
            write_file(folder / f"{picture.name}.png", _small_png(picture))
        # A sentence may hold halves of surrogate pairs, which cannot be encoded.
        write_file(folder / PAGE_FILE, page.encode("utf-8", errors="replace"))
        sync(folder)
        # This also replaces an empty folder.
        move(folder, out)
    return out / PAGE_FILE


def _small_png(picture: Picture) -> bytes:
    """Save a picture in 256 colours, which takes about half of the bytes and looks the same."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(as_png(picture.figure))) as drawn:
        drawn.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
