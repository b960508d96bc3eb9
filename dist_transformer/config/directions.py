"""Directions of translation: two languages, and the tags in front of the source that select them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import is_same_language

# Pieces of the vocabulary are letters, digits or signs, never a mixture, so no piece of text has this spelling.
_TAG = re.compile(r"<[A-Za-z0-9][A-Za-z0-9_.:+-]*>|>>[A-Za-z0-9][A-Za-z0-9_.:+-]*<<")
# Special tokens with this spelling.
_TAKEN = frozenset({"<pad>", "<unk>", "<s>"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """A direction from one language to another."""

    source_language: str
    target_language: str
    tags: tuple[str, ...] = ()
    """Tags in front of every source sentence, in this order; vocabularies of M2M100 put the last one in front of every
    target."""

    @property
    def name(self) -> str:
        return f"{self.source_language}-{self.target_language}"

    def __str__(self) -> str:
        return " ".join((self.name, *self.tags))


def check_tags(tags: Sequence[str]) -> None:
    """Raise a UserError unless all of `tags` can be tags of one vocabulary."""
    for tag in tags:
        if not _TAG.fullmatch(tag) or tag in _TAKEN:
            raise UserError(
                f'"{tag}" cannot be a tag: use a name between < and >, such as <2de>, or between >> and <<, of '
                "letters, digits and _.:+- that begins with a letter or digit, and none of <pad>, <unk> and <s>"
            )
        if tags.count(tag) > 1:
            raise UserError(f"the tag {tag} appears twice: name each tag once")


def tag_caution(known: Sequence[Direction], own: Direction, *, place: object, text: str) -> str | None:
    """Describe sources that lack the tags that a model, or other data for it, has for that target language.

    Args:
        known: directions of the model folder or data folder `place`.
        own: direction of the text, with its tags; `text` names it.

    Returns:
        one sentence with the remedy; None if nothing is missing.
    """
    same = [way for way in known if is_same_language(way.target_language, own.target_language)]
    # Another tag may stand for a new language.
    ways = same or ([] if own.tags else known)
    if not ways or any(set(way.tags) <= set(own.tags) for way in ways):
        return None
    tags = dict.fromkeys(shlex.join(way.tags) for way in ways)
    return (
        f"{text} ({own}) lacks the tags of {place} ({', '.join(map(str, ways))}), so its sources differ from those "
        f"that the model knows: prepare the text with --src-tag {' or '.join(tags)}, unless that is meant"
    )


def worth_stating(directions: Sequence[Direction]) -> tuple[Direction, ...]:
    """Return the directions, or none if there is only one, without tags."""
    return () if len(directions) == 1 and not directions[0].tags else tuple(directions)


def choose_direction(
    directions: Sequence[Direction], name: str | None = None, tags: Sequence[str] | None = None
) -> Direction:
    """Choose one of a model's directions.

    Args:
        name: name such as `en-de`; optional if there is only one direction.
        tags: tags instead of the direction's.

    Raises:
        UserError: there are several directions and no name, or there is none of that name.
    """
    known = ", ".join(direction.name for direction in directions)
    if name is None and len(directions) > 1:
        raise UserError(f"the model has several directions: choose one of {known} with --direction")
    chosen = next((direction for direction in directions if name in (None, direction.name)), None)
    if chosen is None:
        raise UserError(f"the model has no direction {name}: pass --direction {known.replace(', ', ' or ')}")
    return chosen if tags is None else replace(chosen, tags=tuple(tags))
