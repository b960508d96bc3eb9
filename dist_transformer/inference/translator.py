"""Translation of lines of text: tokens, batches of similar length, beam search, text; on one or several ranks."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.messages import as_kind
from dist_transformer.data.text.protect import ProtectedLine
from dist_transformer.data.text.sentences import has_several_sentences, split_sentences
from dist_transformer.data.text.terms import Terms, count_terms
from dist_transformer.data.vocabulary.placeholders import (
    decode_marked,
    encode_all,
    placeholders_of,
    shared_placeholders,
    term_marks_of,
    without_marks,
)
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.inference.aligned.alignment import add_alignments
from dist_transformer.inference.aligned.markup import translate_documents
from dist_transformer.inference.batches import Batch, make_batches
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import BATCH_TOKENS, Decoding
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.mbr import choose
from dist_transformer.inference.prefixes import PieceTexts, Prefix, Prefixes
from dist_transformer.inference.sampling import sample_several
from dist_transformer.inference.scoring import not_finite
from dist_transformer.inference.translation import ScoredText, Split, Translation, join_hypotheses, split_text
from dist_transformer.model.products import Products
from dist_transformer.model_folder import ModelInfo
from dist_transformer.runtime.distributed import gather_objects, on_all_ranks, rank, world_size

# Whether the next sentence takes the slot of one that ended. On a CPU this took 1.5 times as long as steps that get
# smaller, because every step attends to the room of the longest sentence.
_REFILLS = {"cpu": False, "cuda": True}


@dataclass(frozen=True, slots=True)
class Sources:
    """Tokens to decode of some lines."""

    ids: list[list[int]]
    places: list[range]
    """Sources of each line: none, the line, or its parts."""
    prefixes: list[Prefix | None]
    """Beginning of the output of each source."""
    whole_for_prefix: set[int]
    """Numbers of the lines that would be split without their prefix."""
    lines: list[ProtectedLine]


_EMPTY = (ScoredText(text="", score=0.0, tokens=()),)


class Translator:
    """Translator with one model.

    Batches are formed from the whole input, sorted by length, so the same lines give the same batches in any order and
    on any number of ranks.

    Args:
        settings: settings of the search or of samples. The score of a choice among samples is their expected utility.
        info: description of the model, for one direction; None: nothing is known about its training and languages.
        tags: without `info`, tags of the direction, in front of every source and of every part of a split line; some
            vocabularies begin every target with the last one.
        products: packed weights of the model, which must not change during use; None: new ones.

    Attributes:
        split_over: lines of several sentences with more tokens, tags included, are split at the ends of the sentences,
            which are translated one by one and joined; 0: all lines. None: only those above `max_source_tokens`.
        max_source_tokens: all longer lines are split (`split_text`), also inside of sentences: as many tokens as leave
            positions for an output of `max_extra_tokens` more, but at least half of the positions.
    """

    def __init__(
        self,
        model: DecodingModel,
        tokenizer: Vocabulary,
        device: torch.device,
        settings: Decoding,
        info: ModelInfo | None = None,
        *,
        tags: Sequence[str] = (),
        products: Products | None = None,
    ) -> None:
        self.tag_ids, self.target_tag_ids = tokenizer.fronts(tags if info is None else info.direction.tags)
        # The source's `</s>`, or the target's `<s>`, takes a position, and so does each tag.
        positions = model.config.max_positions - 1 - max(len(self.tag_ids), len(self.target_tag_ids))
        self.placeholders = shared_placeholders(tokenizer) if settings.protect else {}
        of_sources = placeholders_of(tokenizer.source)
        self.placeholders_of_source = {mark: of_sources[mark] for mark in self.placeholders}
        if settings.protect and not self.placeholders:
            raise UserError(
                "protect needs a model whose vocabulary has placeholders: prepare its text with --placeholders 8 "
                "--augment copy:0.15, or leave it out"
            )
        self._terms = None if settings.terms is None else Terms.read(settings.terms)
        if self._terms is not None and not term_marks_of(tokenizer.source):
            raise UserError(
                "terms needs a model that was trained on them: prepare its text with --augment terms:0.1 --terms FILE, "
                "or leave it out"
            )
        # Of the hypotheses of a beam, those come first that leave out the fewest spans and terms.
        self._keeps_spans = (bool(self.placeholders) or self._terms is not None) and not settings.samples
        model.to(device)
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.products = products or Products(in_int8=model.in_int8)
        self.refills = not settings.samples and _REFILLS[device.type]
        self.batch_tokens = settings.batch_tokens or BATCH_TOKENS[device.type]
        self.max_source_tokens = max(positions - settings.max_extra_tokens, (positions + 1) // 2)
        # Without the language, the choice among samples splits text into words at spaces.
        self.language = "" if info is None else info.target_language
        self.source_language = "" if info is None else info.source_language
        self.longest_trained = None if info is None else info.longest_source
        usual = None if info is None else info.split_over
        wanted = usual if settings.split_over is None else settings.split_over
        self.split_over = None if wanted == "no" else wanted

    def translate(
        self, lines: Sequence[str], *, first: int = 0, prefixes: Sequence[str] | None = None, align: bool = True
    ) -> list[Translation]:
        """Translate each line, in order.

        Args:
            first: number of the first line, from 0, if the lines are a part of a longer text.
            prefixes: text that the translation of each line begins with, as the target vocabulary normalizes it; blank
                for no prefix. Of a line that is split, the first part has the prefix; if the prefix has several
                sentences, the line is translated as a whole.
            align: whether to align, if the settings say so.

        Raises:
            UserError: there are more or fewer prefixes than lines; or a prefix has characters that the vocabulary
                lacks, or is too long for the model, or belongs to a line that is blank or too long.
        """
        if self.settings.markup is None:
            return self._translate(lines, first, prefixes, align=align and self.settings.alignment)
        if prefixes is not None:
            raise UserError("prefixes are for text without markup: leave one of them out")
        return self.translate_markup(lines)

    def translate_markup(self, documents: Sequence[str]) -> list[Translation]:
        """Translate documents with HTML tags, which may have several lines; each gets one hypothesis."""
        return translate_documents(documents, lambda texts: self._translate(texts, 0, None, align=True))

    def _translate(
        self, lines: Sequence[str], first: int, prefixes: Sequence[str] | None, *, align: bool
    ) -> list[Translation]:
        sources = self._sources(lines, first, prefixes)
        decoded = self._decode(self._batches(sources.ids), sources, first)
        found = self._assemble(sources, decoded)
        return add_alignments(self, lines, sources, decoded, found) if align else found

    def translate_distributed(self, lines: Sequence[str]) -> list[Translation]:
        """Translate as `translate` does; each rank decodes its share of the batches, and all get all translations.

        Collective: every rank must call it. All ranks must give the same lines.

        Raises:
            UserError: decoding failed on some rank; the error is the same on every rank.
        """
        sources = self._sources(lines, 0, None)
        share = self._batches(sources.ids)[rank() :: world_size()]
        decoded = on_all_ranks(lambda: self._decode(share, sources, 0))
        parts = as_kind(list[dict[int, tuple[ScoredText, ...]]], gather_objects(decoded))
        everything = {i: texts for part in parts for i, texts in part.items()}
        return self._assemble(sources, everything)

    def source_ids(self, line: str, prefix: str = "") -> list[int]:
        """Return the ids that the model reads of a line that is translated as a whole, without the `</s>`."""
        (ids,) = encode_all(self.tokenizer.source, [self._protected(line, prefix).text])
        return [*self.tag_ids, *ids]

    def _sources(self, lines: Sequence[str], first: int, prefixes: Sequence[str] | None) -> Sources:
        """Return everything to decode."""
        beginnings = self._prefixes(lines, first, prefixes)
        protected = map(self._protected, lines, [""] * len(lines) if prefixes is None else prefixes)
        sources = Sources([], [], [], set(), [*protected])
        texts = [line.text for line in sources.lines]
        encoded_lines = encode_all(self.tokenizer.source, texts)
        for number, (line, ids, beginning) in enumerate(zip(texts, encoded_lines, beginnings, strict=True), first + 1):
            start = len(sources.ids)
            if ids and not self.tokenizer.source.is_blank(line):
                if beginning is not None and len(ids) > self.max_source_tokens:
                    raise UserError(
                        f"line {number:,} has a prefix and {len(ids):,} tokens, and lines of more than "
                        f"{self.max_source_tokens:,} are translated in parts: split the line, or leave its prefix empty"
                    )
                spans = {mark: span for mark, (span, *_) in sources.lines[len(sources.places)].spans.items()}
                parts = self._parts(line, len(ids), self.split_over, spans)
                several = prefixes is not None and has_several_sentences(prefixes[number - first - 1])
                if beginning is not None and several and len(parts) > 1:
                    sources.whole_for_prefix.add(len(sources.places))
                    parts = [line]
                # The vocabulary may leave nothing of a part.
                encoded = [*filter(None, encode_all(self.tokenizer.source, parts))] if parts != [line] else [ids]
                sources.ids.extend([*self.tag_ids, *part] for part in encoded)
                sources.prefixes.extend([beginning, *[None] * (len(encoded) - 1)])
            elif beginning is not None:
                raise UserError(f"line {number:,} is blank and has a prefix: leave its prefix empty, or fill the line")
            sources.places.append(range(start, len(sources.ids)))
        return sources

    def _protected(self, line: str, prefix: str = "") -> ProtectedLine:
        # What the vocabulary removes would hide ends of sentences, and could be a part on its own.
        cleaned = self.tokenizer.source.clean(line)
        kinds, recase = self.settings.protect, self.settings.recase == "auto"
        how: dict[str, Any] = {"recase": recase, "language": self.source_language, "terms": self._terms}
        return ProtectedLine.of(cleaned, kinds, list(self.placeholders), prefix=prefix.strip(), **how)

    def _prefixes(self, lines: Sequence[str], first: int, prefixes: Sequence[str] | None) -> list[Prefix | None]:
        """Encode the prefix of each line."""
        if prefixes is None:
            return [None] * len(lines)
        if len(prefixes) != len(lines):
            raise UserError(
                f"there are {len(prefixes):,} prefixes and {len(lines):,} lines: pass one prefix for each line, empty "
                "for none"
            )
        encoded: list[Prefix | None] = []
        longest = self.model.config.max_positions - 1 - len(self.target_tag_ids)
        for number, text in enumerate(prefixes, first + 1):
            if self.tokenizer.target.is_blank(text):
                encoded.append(None)
                continue
            try:
                prefix = self._piece_texts.encode(without_marks(text))
            except UserError as error:
                raise UserError(f"line {number:,} {error}") from None
            if prefix.most_tokens > longest:
                raise UserError(
                    f"line {number:,} has a prefix that may take {prefix.most_tokens:,} tokens, and the model has room "
                    f"for {longest:,}: shorten it"
                )
            encoded.append(prefix)
        return encoded

    def count_splits(self, lines: Sequence[str], split_over: int | None) -> int:
        """Count the lines that are translated as they stand and would be split with another `split_over`."""
        cleaned = [self.tokenizer.source.clean(line) for line in lines]
        return sum(
            len(self._parts(line, len(ids), self.split_over)) <= 1 < len(self._parts(line, len(ids), split_over))
            for line, ids in zip(cleaned, self.tokenizer.source.encode_batch(cleaned), strict=True)
        )

    def _parts(self, line: str, tokens: int, split_over: int | None, spans: Mapping[str, str] = {}) -> list[str]:
        """Return what is translated one by one: the line, its sentences if it is long, or smaller parts.

        Args:
            spans: what marks of the line stand for.
        """
        if tokens > self.max_source_tokens:
            return split_text(line, self.tokenizer.source, self.max_source_tokens)
        if split_over is None or len(self.tag_ids) + tokens <= split_over:
            return [line]
        sentences = split_sentences(line, spans)
        return sentences if len(sentences) > 1 else [line]

    @functools.cached_property
    def _piece_texts(self) -> PieceTexts:
        return PieceTexts(self.tokenizer.target)

    def _batches(self, sources: Sequence[Sequence[int]]) -> list[Batch]:
        return make_batches(
            range(len(sources)),
            [len(source) + 1 for source in sources],
            beam_size=self.settings.samples or self.settings.beam,
            max_tokens=self.batch_tokens,
            refills=self.refills,
        )

    def _decode(self, batches: list[Batch], sources: Sources, first: int) -> dict[int, tuple[ScoredText, ...]]:
        # The line and part of each source, which seed its random numbers.
        keys = [(line, part) for line, parts in enumerate(sources.places, first) for part in range(len(parts))]
        decoded = {}
        for batch in batches:
            try:
                found = self._search(batch, sources, [keys[i] for i in batch.places])
            except torch.OutOfMemoryError:
                raise UserError(f"out of memory with batch_tokens {self.batch_tokens}: lower it") from None
            for i, hypotheses in zip(batch.places, found, strict=True):
                # Where nothing is finite, a search has no hypothesis.
                if not hypotheses or not all(math.isfinite(one.score) for one in hypotheses):
                    raise not_finite("a translation")
                texts = [
                    ScoredText(
                        text=self._text_of(one.tokens), score=one.score, tokens=tuple(one.tokens), is_cut=one.is_cut
                    )
                    for one in hypotheses
                ]
                if self.settings.mbr is not None:
                    # The score of a chosen sample is its expected utility.
                    chosen = choose([one.text for one in texts], self.settings, language=self.language)
                    texts = [replace(texts[place], score=utility) for place, utility in chosen]
                decoded[i] = tuple(texts)
        return decoded

    def _search(self, batch: Batch, sources: Sources, keys: Sequence[tuple[int, int]]) -> list[list[Hypothesis]]:
        ids, rows = [sources.ids[i] for i in batch.places], [self._begun(sources.prefixes[i]) for i in batch.places]
        target = self.tokenizer.target
        how: dict[str, Any] = {
            "settings": replace(self.settings, nbest=self.settings.beam) if self._keeps_spans else self.settings,
            "never": [*{*target.tag_ids(target.tags)} - {*self.placeholders.values()}],
            "prefixes": Prefixes(self._piece_texts, rows) if any(rows) else None,
            "given": self.target_tag_ids,
            "linear": self.products,
        }
        if self.settings.samples:
            return sample_several(self.model, ids, keys, text_of=self._text_of, **how)
        found = beam_search(self.model, ids, slots=batch.slots, **how)
        if not self._keeps_spans:
            return found
        lines = [line for line, parts in zip(sources.lines, sources.places, strict=True) for _ in parts]
        return [
            sorted(hypotheses, key=functools.partial(self._left_out, {*source}, lines[i].terms))[
                : self.settings.results
            ]
            for hypotheses, source, i in zip(found, ids, batch.places, strict=True)
        ]

    def _left_out(self, source: set[int], terms: Sequence[str], one: Hypothesis) -> int:
        """Count the spans that a hypothesis leaves out, and less the terms that it has."""
        wanted = [self.placeholders[mark] for mark, token in self.placeholders_of_source.items() if token in source]
        return len({*wanted}.difference(one.tokens)) - (count_terms(terms, self._text_of(one.tokens)) if terms else 0)

    def _begun(self, prefix: Prefix | None) -> Prefix | None:
        """Put the target's tags in front of a prefix."""
        return prefix and replace(prefix, forced=(*self.target_tag_ids, *prefix.forced))

    def _text_of(self, tokens: Sequence[int]) -> str:
        return " ".join(decode_marked(self.tokenizer.target, tokens).splitlines())

    def _assemble(self, sources: Sources, decoded: dict[int, tuple[ScoredText, ...]]) -> list[Translation]:
        limit = self.max_source_tokens if self.split_over is None else min(self.max_source_tokens, self.split_over)
        translations = []
        for line, parts in enumerate(sources.places):
            hypotheses = join_hypotheses([decoded[i] for i in parts]) if parts else _EMPTY
            append = self.settings.missing_spans == "append"
            protected = sources.lines[line]
            restored = [
                (one, *protected.restore(one.text, append=append, language=self.language)) for one in hypotheses
            ]
            translation = Translation(
                hypotheses=tuple(
                    replace(one, text=text, missing_spans=missing, terms_kept=count_terms(protected.terms, text))
                    for one, text, missing in restored
                ),
                split=Split(limit=limit, parts=len(parts)) if len(parts) > 1 else None,
                beyond_training=any(len(sources.ids[i]) > (self.longest_trained or len(sources.ids[i])) for i in parts),
                whole_for_prefix=line in sources.whole_for_prefix,
                max_extra_tokens=self.settings.max_extra_tokens,
                terms=len(protected.terms),
            )
            translations.append(translation)
        return translations
