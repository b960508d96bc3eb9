"""The vocabulary of a folder of M2M100 or NLLB: a SentencePiece model of all languages, and a code of each language.

The code of the source's language is in front of every source, and that of the target's language begins every target.
Here the codes are tags, two for a direction: `eng_Latn deu_Latn`, or `__en__ __de__`. `tokenizer.json` holds the files
of the tokenizer byte for byte, and the spelling of each of their ids.
"""

import base64
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.marian import SpelledTokenizer
from dist_transformer.data.vocabulary.tokenizer import SPECIALS
from dist_transformer.data.vocabulary.trial import try_in_child

KIND = "m2m100"
MODEL_FILE = "sentencepiece.bpe.model"

_CODE = re.compile(r"__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}")
_MASK = "<mask>"


class M2M100Vocabulary(SpelledTokenizer):
    """Vocabulary of a folder of M2M100 or NLLB, of both sides.

    Args:
        files: files of their tokenizer by name.
        entries: spellings by their ids.
    """

    def __init__(self, content: bytes, files: dict[str, bytes], entries: Sequence[str]) -> None:
        tags = [name for name in entries if _CODE.fullmatch(name) or name == _MASK]
        fixed = [*SPECIALS, *tags]
        number = {name: i for i, name in enumerate(entries)}
        if len(number) < len(entries) or not number.keys() >= {*SPECIALS}:
            raise ValueError(f"has a tokenizer with two entries of one spelling, or without {', '.join(SPECIALS)}")
        taken = set(fixed)
        pieces = [*fixed, *(name for name in entries if name not in taken)]
        super().__init__(content, "SentencePiece of M2M100 or NLLB", files[MODEL_FILE], pieces, tags)
        self.files, self.entries = files, tuple(entries)
        ids = [number[name] for name in pieces]
        self.their_ids = (ids, ids)
        """Id in their folder of each entry, for sources and targets."""

    @property
    def codes(self) -> list[str]:
        return [tag for tag in self.tags if tag != _MASK]

    def fronts(self, tags: Sequence[str]) -> tuple[list[int], list[int]]:
        if len(tags) != 2:
            raise UserError(
                f"the vocabulary needs two tags, the codes of both languages, not {' '.join(tags) or 'none'}: "
                f"pass two of {', '.join(self.codes[:3])}, …"
            )
        source, target = self.tag_ids(tags)
        return [source], [target]

    def tags_between(self, source_language: str, target_language: str) -> tuple[str, ...]:
        return self.code_of(source_language), self.code_of(target_language)

    def code_of(self, language: str) -> str:
        """Return the code of a language: `eng_Latn` is its own, and that of `en` is `__en__`.

        Raises:
            UserError: there is none.
        """
        found = [code for code in self.codes if language in (code, code.strip("_"))]
        if not found:
            known = ", ".join(code.strip("_") for code in self.codes)
            raise UserError(f"the vocabulary has no language {language}: name one of {known}")
        return found[0]


def parse_m2m100(content: bytes, parts: dict[str, Any]) -> M2M100Vocabulary:
    """Make a vocabulary of the parts of a tokenizer.json.

    Raises:
        ValueError: they do not fit together; the message continues a sentence that begins with the file's name.
    """
    files = {name: zlib.decompress(base64.b64decode(text)) for name, text in parts["files"].items()}
    return M2M100Vocabulary(content, files, parts["entries"])


def wrap_m2m100(files: dict[str, bytes], entries: Sequence[str]) -> M2M100Vocabulary:
    """Make a vocabulary of the files of a tokenizer, and the spellings of its ids.

    Raises:
        ValueError: a file cannot be used; the message continues a sentence that begins with the folder's name.
    """
    packed = {name: base64.b64encode(zlib.compress(file)).decode("ascii") for name, file in files.items()}
    content = json.dumps({"kind": KIND, "files": packed, "entries": list(entries)}).encode("ascii")
    try_in_child(content)
    return M2M100Vocabulary(content, files, entries)
