"""Read pairs from TMX, the exchange format of translation memories: XML with a unit per pair, in any languages."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import is_same_language
from dist_transformer.data.text.compressed import DAMAGED, open_content
from dist_transformer.data.text.pairs import OneFile, Pair, listed, one_line, short_pair

_PIECE = 2**20
# Elements within a segment that hold codes of a program, not text.
_CODES = {"bpt", "ept", "it", "ph", "ut"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TmxFile(OneFile):
    """A TMX file. Entities other than those of XML itself are refused, and nothing outside the file is read.

    A unit with several texts of a language gives the first; one that lacks a language is a pair of empty texts.
    """

    source_language: str
    target_language: str

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return self.source_language, self.target_language

    def pairs(self) -> Iterator[Pair | None]:
        units = _Units(self.path)
        wanted, found, seen = (self.source_language, self.target_language), 0, Counter[str]()
        try:
            with open_content(self.path) as file:
                while True:
                    units.read(piece := file.read(_PIECE))
                    for unit in units.done:
                        seen.update(unit.keys())
                        texts = [next((unit[key] for key in unit if is_same_language(key, one)), "") for one in wanted]
                        found += all(texts)
                        where = f"{self.path} near line {units.line}"
                        yield short_pair(*(one_line(text, where) for text in texts))
                    units.done.clear()
                    if not piece:
                        break
        except FileNotFoundError:
            raise UserError(f"{self.path} does not exist: check the name") from None
        except (expat.ExpatError, *DAMAGED, OSError) as error:
            raise UserError(f"{self.path} is not a complete TMX file ({error}): download it again") from None
        if not found:
            raise UserError(
                f"{self.path} has no unit in {' and '.join(wanted)} (it has {listed(seen)}): choose the languages with "
                "--src-lang and --tgt-lang"
            )


class _Units:
    """Texts of units by language, from the events of the parser."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: list[dict[str, str]] = []
        self._unit: dict[str, str] = {}
        self._language, self._text, self._in_segment, self._codes = "", list[str](), False, 0
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler, self._parser.EndElementHandler = self._start, self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.EntityDeclHandler = self._parser.SkippedEntityHandler = self._refuse

    @property
    def line(self) -> int:
        return self._parser.CurrentLineNumber

    def read(self, piece: bytes) -> None:
        self._parser.Parse(piece, not piece)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang", "")
        self._in_segment |= name == "seg"
        self._codes += name in _CODES

    def _end(self, name: str) -> None:
        self._codes -= name in _CODES
        if name == "seg":
            self._unit.setdefault(self._language, "".join(self._text))
            self._text, self._in_segment = [], False
        elif name == "tu":
            self.done.append(self._unit)
            self._unit = {}

    def _characters(self, text: str) -> None:
        if self._in_segment and not self._codes:
            self._text.append(text)

    def _refuse(self, name: str, *_: Any) -> None:
        raise UserError(f"{self.path} has the entity {name!r:.60}, which XML itself does not define: replace it")
