"""Directions of translation: two languages, and the tags in front of the source that ask for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dist_transformer.errors import UserError

# Words of the vocabulary are letters, digits or signs, never a mixture: no piece of text is ever spelled like this.
_TAG = re.compile(r"<[A-Za-z0-9][A-Za-z0-9_.:+-]*>")
# Special tokens of this spelling.
_TAKEN = frozenset({"<pad>", "<unk>", "<s>"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """From one language to another."""

    source_language: str
    target_language: str
    tags: tuple[str, ...] = ()
    """In front of every source sentence, in this order."""

    @property
    def name(self) -> str:
        return f"{self.source_language}-{self.target_language}"

    def __str__(self) -> str:
        return " ".join((self.name, *self.tags))


def check_tags(tags: Sequence[str]) -> None:
    """Raise a UserError unless all may be tags of one vocabulary."""
    for tag in tags:
        if not _TAG.fullmatch(tag) or tag in _TAKEN:
            raise UserError(
                f'"{tag}" cannot be a tag: give a name between < and >, such as <2de>, of letters, digits and _.:+- '
                "that begins with a letter or digit, and none of <pad>, <unk> and <s>"
            )
        if tags.count(tag) > 1:
            raise UserError(f"the tag {tag} is given twice: name each tag once")


def worth_stating(directions: Sequence[Direction]) -> tuple[Direction, ...]:
    """The directions, or none where the two languages say everything."""
    return () if len(directions) == 1 and not directions[0].tags else tuple(directions)


def choose_direction(
    directions: Sequence[Direction], name: str | None = None, tags: Sequence[str] | None = None
) -> Direction:
    """One of a model's directions.

    Args:
        name: such as `en-de`; may be left out where there is one direction only.
        tags: in place of the direction's.

    Raises:
        UserError: there are several and no name, or none of that name.
    """
    known = ", ".join(direction.name for direction in directions)
    if name is None and len(directions) > 1:
        raise UserError(f"the model has several directions: choose one of {known} by --direction")
    chosen = next((direction for direction in directions if name in (None, direction.name)), None)
    if chosen is None:
        raise UserError(f"the model has no direction {name}: give --direction {known.replace(', ', ' or ')}")
    languages = {"source_language": chosen.source_language, "target_language": chosen.target_language}
    return chosen if tags is None else Direction(**languages, tags=tuple(tags))
