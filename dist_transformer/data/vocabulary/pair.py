"""Two vocabularies: one for each side. `tokenizer.json` holds both files byte for byte, as strings of JSON."""

import json
from collections.abc import Callable
from typing import Any

from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary

KIND = "two vocabularies"
_SIDES = ("source", "target")


class VocabularyPair(Vocabulary):
    """The tokenizer of the sources of one vocabulary, and that of the targets of another one."""

    def __init__(self, content: bytes, *, source: Vocabulary, target: Vocabulary) -> None:
        super().__init__(content)
        self._source, self._target = source.source, target.target

    @property
    def source(self) -> Tokenizer:
        return self._source

    @property
    def target(self) -> Tokenizer:
        return self._target

    @property
    def sizes(self) -> tuple[int, int]:
        return self.source.vocab_size, self.target.vocab_size


def wrap_pair(source: Vocabulary, target: Vocabulary) -> VocabularyPair:
    """Make a vocabulary whose sides are those of two others."""
    files = (source.source.content, target.target.content)
    parts = {"kind": KIND} | {name: file.decode("utf-8") for name, file in zip(_SIDES, files, strict=True)}
    return VocabularyPair(json.dumps(parts, ensure_ascii=False).encode("utf-8"), source=source, target=target)


def parse_pair(content: bytes, parts: dict[str, Any], parse: Callable[[bytes], Vocabulary]) -> VocabularyPair:
    """Make a vocabulary of the parts of a tokenizer.json.

    Args:
        parse: reads the file of one side.

    Raises:
        ValueError: the file of a side cannot be used; the message continues a sentence that begins with its name.
    """
    return VocabularyPair(content, **{name: parse(parts[name].encode("utf-8")) for name in _SIDES})
