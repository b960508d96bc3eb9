"""Translate a test set with a model folder and score it, on any number of ranks."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.messages import as_kind
from dist_transformer.config.schema import values_of
from dist_transformer.data.text.pairs import read_aligned
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.evaluation.bleu import Scores, score
from dist_transformer.evaluation.languages import warn_of_wrong_side
from dist_transformer.evaluation.published import published_files, published_origin
from dist_transformer.evaluation.report import hypotheses_file, write_report
from dist_transformer.evaluation.settings import EvaluateSettings
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.loading import load_joint, read_joint_info, with_agreed_precision
from dist_transformer.inference.scoring import encode_pairs, longest_line, score_ids
from dist_transformer.inference.translation import count_notes, noted
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo
from dist_transformer.runtime.distributed import broadcast_object, by_main, on_all_ranks, rank, world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scores of one model on one test set."""

    scores: Scores
    info: ModelInfo
    notes: tuple[str, ...]
    """Notes that a reader of the scores needs, one sentence each."""
    hypotheses: list[str]
    decoding: Decoding
    split_over: int | None
    """Tokens above which lines of several sentences were split; None: only lines too long for the model were."""
    split_sentences: int
    """Number of source lines that were translated in parts."""
    seconds: float
    """Time of decoding, without loading and scoring."""
    world_size: int
    precision: str | None = None
    """Arithmetic of decoding, `bf16` or `fp32`; None: that of a model that the caller loaded."""
    model_folders: tuple[Path, ...] = ()
    """Folder of the model, or those of an ensemble; none if it was not read from one."""
    test_set: dict[str, str] | None = None
    """Origin of a published test set; None: files that the caller named."""

    def report(self, hypotheses_file: Path) -> dict[str, Any]:
        """Convert to JSON values; `hypotheses_file` is the caller's file for the hypotheses."""
        chosen, language = self.decoding, self.info.target_language
        mbr = {name: getattr(chosen, name) for name in ("utility", "seed", "epsilon")}
        return {
            **self.scores.report(),
            "notes": list(self.notes),
            "sentences": len(self.hypotheses),
            "precision": self.precision,
            "mbr": chosen.mbr and {"samples": chosen.mbr, "language": language, "nbest": chosen.results, **mbr},
            "split_over": self.split_over,
            "split_sentences": self.split_sentences,
            "hypotheses": str(hypotheses_file),
            "model": " + ".join(map(str, self.model_folders)) or None,
            "steps": list(self.info.steps),
            "corpus": self.info.corpus,
            "test_set": self.test_set,
            "direction": self.info.direction.name,
            "tags": list(self.info.direction.tags),
            "synthetic": self.info.synthetic,
            "seconds": self.seconds,
            "world_size": self.world_size,
        }


def evaluate(
    settings: EvaluateSettings, *, device: torch.device, warn: Callable[[str], object] = lambda _: None
) -> Evaluation:
    """Translate a test set with a model, or an ensemble, and score it. Collective: every rank must call it.

    Every rank must pass the same settings, and gets the same evaluation.

    Args:
        settings: those of a model.
        warn: called on rank 0, before decoding, with a sentence about texts that seem to be swapped.

    Raises:
        UserError: a file is unfit on some rank; every rank raises it.
    """
    texts = on_all_ranks(lambda: _texts(settings) if rank() == 0 else None) or [Path()]
    sources, *references = read_test_set(*texts)
    loading = with_agreed_precision(settings.loading, device)
    model, tokenizer, info = on_all_ranks(lambda: load_joint(settings.model, loading, device))
    if rank() == 0:
        flags = "whether --src and --ref are swapped, and --direction"
        warn_of_wrong_side(warn, info, tokenizer, flags, (sources, texts[0]), (references[0], texts[1]))
    decoding = Decoding(**values_of(settings.decoding))
    evaluation = evaluate_model(
        model, tokenizer, info, sources, references, settings=decoding, device=device, lowercase=settings.lowercase
    )
    origin = published_origin(settings.test_set, info) if settings.test_set else None
    return replace(evaluation, precision=loading.precision, model_folders=settings.model, test_set=origin)


def _texts(settings: EvaluateSettings) -> list[Path]:
    """Return the file of the sources and those of the references."""
    if settings.test_set:
        return published_files(settings.test_set, read_joint_info(settings.model, settings.loading))
    assert settings.src is not None
    return [settings.src, *settings.ref]


def read_test_set(source: Path, *references: Path) -> list[list[str]]:
    """Read source lines and those of each reference, the same on every rank. Collective: every rank must call it.

    Raises:
        UserError: the files cannot be read, are empty or of different length; every rank raises it.
    """
    # One rank reads, so that all have the same text even if a file changes meanwhile.
    return broadcast_object(by_main(lambda: read_aligned(source, *references))) or []


def evaluate_model(
    model: DecodingModel,
    tokenizer: Vocabulary,
    info: ModelInfo,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Decoding,
    device: torch.device,
    lowercase: bool = False,
) -> Evaluation:
    """Evaluate a loaded model, for the direction of `info`, on loaded text. Collective: every rank must call it."""
    translator = on_all_ranks(lambda: Translator(model, tokenizer, device, settings, info))
    start = time.perf_counter()
    translations = translator.translate_distributed(sources)
    seconds = time.perf_counter() - start
    hypotheses = [translation.text for translation in translations]
    ignore_case = lowercase or tokenizer.target.lowercase
    has_capitals = tokenizer.target.lowercase and any(line != line.lower() for lines in references for line in lines)
    language = info.target_language
    scores = by_main(lambda: score(hypotheses, *references, target_language=language, lowercase=ignore_case))
    return Evaluation(
        scores=as_kind(Scores, broadcast_object(scores)),
        info=info,
        notes=(
            *noted(count_notes(translations)),
            *_unsplit(translator, info, sources),
            *(["lowercased model, references with capitals: the cased BLEU has no meaning"] if has_capitals else []),
        ),
        hypotheses=hypotheses,
        decoding=settings,
        split_over=translator.split_over,
        split_sentences=sum(translation.split is not None for translation in translations),
        seconds=seconds,
        world_size=world_size(),
    )


def _unsplit(translator: Translator, info: ModelInfo, sources: Sequence[str]) -> tuple[str, ...]:
    """Note the lines that `translate` would split, unless `split_over` was given."""
    if translator.split_over is not None or not (count := translator.count_splits(sources, info.split_over)):
        return ()
    lines = "line stands" if count == 1 else "lines stand"
    return (
        f"{count:,} {lines} as in the file, for scores like published ones; translate splits such lines at their "
        f"sentences: --split-over {info.split_over or 1} does so here",
    )


def write_evaluation(evaluation: Evaluation, file: Path) -> None:
    """Write the JSON `file`, such as result.json, and the hypotheses, one per line, to result.hypotheses.txt."""
    hypotheses = hypotheses_file(file)
    text = "".join(f"{line}\n" for line in evaluation.hypotheses)
    write_report(evaluation.report(hypotheses), file, beside={hypotheses: text})


def reference_nll(
    model: Transformer, tokenizer: Vocabulary, pairs: Sequence[tuple[str, str]], *, tags: Sequence[str] = ()
) -> float:
    """Return -log p per target token, `</s>` included, without smoothing. Collective: every rank must call it.

    Pairs that are too long for the model's positions are left out; the result is NaN if none is left.

    Args:
        model: model in evaluation mode.
        pairs: source and reference lines, the same on every rank.
        tags: tags of the direction.
    """
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    encoded = encode_pairs(tokenizer, sources, targets, tags)
    ids = [pair for pair in encoded if max(map(len, pair)) <= longest_line(model)]
    scores = score_ids(model, ids, given=len(tokenizer.fronts(tags)[1]), device=model.device)
    values = [value for score in scores for value in score.token_log_probabilities]
    # fsum does not depend on the order, and therefore not on the number of ranks.
    return -math.fsum(values) / len(values) if values else math.nan
