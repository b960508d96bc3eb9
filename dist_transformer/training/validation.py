"""Validate a model: loss on all validation pairs, scores of translations by beam search, sample translations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.config.measures import LABELS
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.collate import Collator, epoch_steps
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.plan import Plan
from dist_transformer.evaluation.bleu import Score, corpus_bleu, corpus_chrf, count_edits, edit_rate
from dist_transformer.evaluation.samples import SampleSheet, make_samples
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import perplexity
from dist_transformer.runtime import distributed
from dist_transformer.training.engine.deepspeed_engine import Engine

# Samples per validation, and how many of them have cross-attention maps.
_SAMPLES, _MAPS = 8, 3
# Entries of a validation's record that count pairs; absent if 0.
COUNTS = ("longer_pairs", "unscored_pairs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """The result of one direction at one validation, the same on every rank."""

    direction: Direction
    loss: float
    """Training loss (label-smoothed) per token."""
    nll: float
    """-log p per token, without label smoothing."""
    hypotheses: list[str]
    """Translations of the validator's `sources`."""
    sheet: SampleSheet | None
    """Scores and samples; None if no sentence is translated."""
    longer: int = 0
    """Pairs in the loss that are longer than a pack of the training; versions up to 0.2.0 left them out."""
    unscored: int = 0
    """Pairs that are longer than the model's positions, and not in the loss."""
    command: float | None = None
    """Score by the program of `validation_command`, if there is one and it has succeeded."""

    @property
    def values(self) -> dict[str, float]:
        sheet = self.sheet
        scores = {} if sheet is None else {"bleu": sheet.bleu, "chrf": sheet.chrf, "ter": sheet.ter}
        scores["command"] = self.command
        known = {name: score for name, score in scores.items() if score is not None}
        counts = dict(zip(COUNTS, (self.longer, self.unscored), strict=True))
        left = {name: count for name, count in counts.items() if count}
        return {"loss": self.loss, "nll": self.nll, "ppl": perplexity(self.nll), **known, **left}

    @property
    def text(self) -> str:
        lines = "" if self.sheet is None else f" ({self.sheet.sentences} lines)"
        return _describe(self.values) + lines


def summarize(results: Sequence[ValidationResult]) -> tuple[dict[str, float], str]:
    """Return the values of a validation for its record, and a text for the user.

    Every direction has equal weight: the values are means over the directions (`ppl` is that of the mean `nll`). If
    there are several directions, the values of each follow, with names such as `en-de/nll`. A measure that one of them
    lacks has no mean.
    """
    if len(results) == 1:
        return results[0].values, results[0].text
    mean = {
        name: sum(result.values[name] for result in results) / len(results)
        for name in results[0].values
        if name not in ("ppl", *COUNTS) and all(name in result.values for result in results)
    }
    totals = {name: sum(result.values.get(name, 0) for result in results) for name in COUNTS}
    values = {**mean, "ppl": perplexity(mean["nll"]), **{name: total for name, total in totals.items() if total}}
    text = f"{_describe(values)}, mean of {len(results)} directions"
    for result in results:
        values |= {f"{result.direction.name}/{name}": value for name, value in result.values.items()}
    return values, text


def _describe(values: Mapping[str, float]) -> str:
    scores = "".join(f", {LABELS[name]} {values[name]:.1f}" for name in ("bleu", "chrf", "ter") if name in values)
    # Its scale is not known: COMET is below 1.
    command = f", {LABELS['command']} {values['command']:.4g}" if "command" in values else ""
    return f"nll {values['nll']:.3f}, ppl {values['ppl']:.2f}{scores}{command}"


class Validator:
    """Validate a model on a data folder's validation set; each rank computes a share.

    Args:
        positions: positions of the model; a longer pair cannot be scored.
        sentences: number of sentences to translate, spread evenly over the set.
        named: samples state their languages, because the run has several directions.

    Raises:
        UserError: the set cannot be used. It is raised at construction, so that a run ends before it starts.
    """

    def __init__(
        self, folder: DataFolder, budgets: Budgets, batch: BatchConfig, *, positions: int, sentences: int, named: bool
    ) -> None:
        split = folder.valid
        longest = split.lengths.max(axis=1)
        fits = (split.lengths <= budgets.tokens).all(axis=1) & (longest <= positions)
        is_longer = ~fits & (longest <= positions)
        self.pairs, self.longer = len(longest), int(is_longer.sum())
        self.unscored = int((longest > positions).sum())
        if self.unscored == self.pairs:
            raise UserError(
                f"validation set of {folder.path}: none of the {self.pairs} pairs fits {positions} positions: raise "
                "--model.max-positions, or set --validate-every 0"
            )
        # Kept in memory as training does: a file that changes between two validations does not change the results.
        for problem in split.hold(range(len(split.info.shards))).values():
            raise UserError(f"validation set of {folder.path}: {problem}")
        # Longer pairs have packs of their own, one at a time: a buffer has room for the longest pair, and no more.
        own = [int(size) for size in split.lengths.max(axis=0, where=is_longer[:, None], initial=1)]
        larger = Budgets(max_source_tokens=own[0], max_target_tokens=own[1], max_sentences=budgets.max_sentences)
        groups = ((fits, budgets, batch.packs_at_once), (is_longer, larger, 1))
        self.parts = [self._part(split, *group) for group in groups if group[0].any()]
        self.direction, self.named = folder.index.direction, named
        self.tokenizer = folder.tokenizer()
        self.tokenizer.fronts(self.direction.tags)
        texts = folder.valid_text()
        chosen = np.linspace(0, len(texts[0]) - 1, min(sentences, len(texts[0]))).round().astype(int)
        self.sources, self.references = ([text[i] for i in chosen] for text in texts)

    @staticmethod
    def _part(split: Split, chosen: np.ndarray, budgets: Budgets, packs_at_once: int) -> tuple[Plan, Collator]:
        """Plan the chosen pairs; the others fit no pack."""
        lengths = np.where(chosen[:, None], split.lengths, np.iinfo(np.int32).max)
        shards = len(split.shard_starts)
        plan = Plan(lengths, split.shard_starts, budgets=budgets, window_shards=shards, seed=0)
        source, target = split.lengths[chosen].max(axis=0).tolist()
        return plan, Collator(split, budgets, packs_per_micro_batch=packs_at_once, longest=(source, target))

    @property
    def note(self) -> str | None:
        """Line for the user about pairs that cannot be scored."""
        if not self.unscored:
            return None
        return (
            f"validation set {self.direction.name}: {self.unscored:,} of {self.pairs:,} pairs are longer than "
            "model.max_positions, so the validation loss leaves them out"
        )

    def run(self, engine: Engine, *, step: int) -> ValidationResult:
        """Measure loss and scores. Collective: every rank must call it."""
        loss, nll = self._losses(engine)
        sheet, hypotheses = None, list[str]()
        if self.sources:
            sheet, hypotheses = self._translate(engine.plain_model(), engine.device, step)
        return ValidationResult(
            direction=self.direction,
            loss=loss,
            nll=nll,
            sheet=sheet,
            hypotheses=hypotheses,
            longer=self.longer,
            unscored=self.unscored,
        )

    @torch.no_grad()
    def _losses(self, engine: Engine) -> tuple[float, float]:
        engine.module.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
        world = distributed.world_size()
        for plan, collator in self.parts:
            for step in epoch_steps(plan, packs_per_step=collator.packs_per_micro_batch * world):
                for micro in collator.micro_batches(step, rank=distributed.rank(), world_size=world):
                    part = engine.evaluate(micro.batch.to(engine.device))
                    sums += torch.stack([value.double() for value in part])
        engine.module.train()
        loss, nll, tokens = distributed.all_reduce_sum(sums).tolist()
        return loss / tokens, nll / tokens

    def _translate(self, model: Transformer, device: torch.device, step: int) -> tuple[SampleSheet, list[str]]:
        translator = Translator(model, self.tokenizer, device, Decoding(), tags=self.direction.tags)
        hypotheses = [translation.text for translation in translator.translate_distributed(self.sources)]
        target_language, lowercase = self.direction.target_language, self.tokenizer.target.lowercase
        bleu = corpus_bleu(hypotheses, self.references, target_language=target_language, lowercase=lowercase)
        chrf = corpus_chrf(hypotheses, self.references, lowercase=lowercase)
        ter = _shared_ter(hypotheses, self.references, target_language=target_language)
        samples = make_samples(
            translator, self.sources, self.references, hypotheses, count=_SAMPLES, with_attention=_MAPS
        )
        languages = (self.direction.source_language, target_language) if self.named else (None, None)
        sheet = SampleSheet(
            step=step,
            sentences=len(hypotheses),
            bleu=bleu.value,
            signature=bleu.signature,
            chrf=chrf.value,
            ter=ter.value,
            signatures={"chrf": chrf.signature, "ter": ter.signature},
            samples=samples,
            source_language=languages[0],
            target_language=languages[1],
        )
        return sheet, hypotheses


def _shared_ter(hypotheses: Sequence[str], references: Sequence[str], *, target_language: str) -> Score:
    """Compute sacreBLEU's TER; each rank counts the edits of its share. Collective: every rank must call it."""
    share = slice(distributed.rank(), None, distributed.world_size())
    counted = count_edits(hypotheses[share], references[share], target_language=target_language)
    parts = distributed.gather_objects(counted)
    # Sums of whole numbers do not depend on the shares.
    edits, words = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return Score(edit_rate(edits, words), parts[0][2])
