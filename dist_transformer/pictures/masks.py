"""Masks of attention: padding, causal, both, and those of packed sentences (section 3.2.3)."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from dist_transformer.inference.batches import pack_sentences
from dist_transformer.model.packed import PackedTokens
from dist_transformer.pictures.picture import COLORS, Picture
from dist_transformer.reporting.figures import new_figure, picture_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The encoder's and the decoder's input of three sentence pairs.
_SOURCES = ("we sing </s>", "a dog runs </s>", "two men sit outside . </s>")
_TARGETS = ("<s> wir singen", "<s> ein Hund rennt", "<s> zwei Männer sitzen im Freien .")
# The sentence that the upper panels show.
_PADDED = 1
_HIDDEN, _VISIBLE = "#E3E6EA", COLORS[0]


def packed_mask(queries: PackedTokens, keys: PackedTokens, *, causal: bool) -> np.ndarray:
    """Return which keys each query of a pack sees: those of its own sentence; bool, shape (T, S).

    Args:
        causal: whether a token sees only itself and the tokens before it.
    """
    (query_sentence, query_place), (key_sentence, key_place) = (_places(side) for side in (queries, keys))
    visible_TS: np.ndarray = query_sentence[:, None] == key_sentence
    return visible_TS & (query_place[:, None] >= key_place) if causal else visible_TS


def _places(side: PackedTokens) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the sentence and the position in it of each token."""
    tokens = np.arange(len(side.tokens_T))
    return np.searchsorted(side.offsets_N.numpy(), tokens, side="right"), side.positions_T.numpy()


def mask_picture() -> Picture:
    """Draw the masks of three sentence pairs, padded and packed."""
    from matplotlib.patches import Patch

    sources, targets = ([text.split() for text in texts] for texts in (_SOURCES, _TARGETS))
    widest = max(map(len, targets))
    padded = targets[_PADDED] + ["<pad>"] * (widest - len(targets[_PADDED]))
    # A query sees all keys that are not padding; a query of a decoder sees itself and the keys before it.
    padding = np.broadcast_to(np.arange(widest) < len(targets[_PADDED]), (widest, widest))
    causal = np.tri(widest, dtype=bool)
    # The masks depend on the lengths of the sentences alone.
    source, target = (
        pack_sentences([range(len(words)) for words in side], torch.device("cpu")) for side in (sources, targets)
    )
    source_words, target_words = (" ".join(texts).split() for texts in (_SOURCES, _TARGETS))
    of_pack = packed_mask(target, target, causal=True)
    panels = (
        ("Padding", padding, padded, padded),
        ("Causal", causal, padded, padded),
        ("Padding and causal", padding & causal, padded, padded),
        ("Packed: encoder", packed_mask(source, source, causal=False), source_words, source_words),
        ("Packed: decoder", of_pack, target_words, target_words),
        ("Packed: cross-attention", packed_mask(target, source, causal=False), target_words, source_words),
    )
    with picture_style():
        figure = new_figure(10.0, 7.6)
        figure.set_layout_engine("constrained", hspace=0.08)
        grid = figure.subplots(2, 3)
        for axes, (title, visible_TS, queries, keys) in zip(grid.ravel(), panels, strict=True):
            _draw(axes, title, visible_TS, queries, keys)
        for row in grid:
            row[0].set_ylabel("query")
        patches = [Patch(color=_VISIBLE, label="visible"), Patch(color=_HIDDEN, label="hidden")]
        figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
        # The layout needs a second drawing; after the first one, titles can be outside.
        figure.draw_without_rendering()
    computed, needed = len(targets) * widest**2, sum(len(words) ** 2 for words in targets)
    return Picture(
        name="masks",
        title="Masks",
        section="3.2.3",
        caption=(
            "Row: the token that attends. Column: the token that it may attend to. Upper row: one decoder input of "
            f"{len(targets[_PADDED])} tokens in a batch that is padded to {widest}. Lower row: three sentence pairs as "
            "a pack of this project, end to end and without padding; no sentence sees another one. In the decoder, "
            f"each head of the padded batch has {computed} scores, of the pack {needed}; {int(of_pack.sum())} of them "
            "are visible."
        ),
        alt=(
            "Six grids of queries and keys. Padding hides columns, the causal mask hides the triangle above the "
            "diagonal, and in packs only blocks along the diagonal are visible."
        ),
        figure=figure,
    )


def _draw(axes: "Axes", title: str, visible_TS: np.ndarray, queries: list[str], keys: list[str]) -> None:
    from matplotlib.colors import ListedColormap

    # The panels of a row have one size, so the cells of cross-attention are not quite square.
    axes.imshow(visible_TS, aspect="auto", cmap=ListedColormap([_HIDDEN, _VISIBLE]), vmin=0, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=8)
    axes.set_yticks(range(len(queries)), queries, fontsize=8)
    axes.set_xlabel("key")
    # White lines between the cells.
    axes.set_xticks(np.arange(len(keys) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(queries) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_box_aspect(1)
