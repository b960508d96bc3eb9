"""A text for a model that has tags: is it prepared with them?"""

import contextlib

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction, tag_caution
from dist_transformer.data.folder.reader import read_index
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.model_folder import read_model_info


def preparation_caution(settings: PrepareSettings) -> str | None:
    """Describe a text without the tags of the model folder, or data folder, whose vocabulary it is prepared with."""
    tokenizer, known = settings.vocabularies[0].tokenizer, list[Direction]()
    if tokenizer is None:
        return None
    with contextlib.suppress(UserError):
        known += read_model_info(tokenizer.parent).all_directions
    with contextlib.suppress(UserError):
        known.append(read_index(tokenizer.parent).direction)
    if not known:
        return None
    source, target = settings.languages
    tags = settings.tags_with(load_vocabulary(tokenizer))
    own = Direction(source_language=source, target_language=target, tags=tags)
    return tag_caution(known, own, place=tokenizer.parent, text=settings.training_sources[0].name)
