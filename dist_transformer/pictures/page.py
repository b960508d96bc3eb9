"""All pictures as one folder: a self-contained page, and each picture as a PNG file."""

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dist_transformer.base.files import folder_beside, make_folder, move, sync, write_file
from dist_transformer.pictures.picture import Picture
from dist_transformer.reporting.figures import as_png
from dist_transformer.reporting.html.rendering import render_page

PAGE_FILE = "index.html"
_TEMPLATE = Path(__file__).with_name("page.html.j2")


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
    page = render(pictures, notes, made=datetime.now(UTC))
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


def render(pictures: Sequence[Picture], notes: Sequence[str], *, made: datetime) -> str:
    """Render the page; `made` is the time in its footer."""
    return render_page(_TEMPLATE, title="The Transformer in pictures", pictures=pictures, notes=notes, made=made)


def _small_png(picture: Picture) -> bytes:
    """Save a picture in 256 colours, which takes about half of the bytes and looks the same."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(as_png(picture.figure))) as drawn:
        drawn.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
