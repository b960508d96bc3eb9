"""Show the contents of a data folder: counts, sentence lengths, how full the packs of an epoch are, some sentences.

dist-transformer inspect data/mine
dist-transformer inspect data/mine --max-target-tokens 8192 --examples 10 --png lengths.png --verify

Token counts include the one special token of each side. A pack is a group of sentence pairs that fit fixed budgets of
tokens; fill is the share of these budgets that is text, over one epoch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import say
from dist_transformer.base.files import write_file
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import require_not_negative, setting
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.format import SplitInfo
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.run.outputs import claim_file

if TYPE_CHECKING:
    from dist_transformer.data.loading.events import EpochSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectSettings:
    """Contents to show, and packs of training."""

    data: Path = setting(position=True)
    """Data folder made by dist-transformer prepare."""
    max_target_tokens: int = BatchConfig().max_target_tokens
    """Most target tokens per pack."""
    max_source_tokens: int | None = None
    """Most source tokens per pack; default: --max-target-tokens times the data's ratio of source to target tokens."""
    max_sentences: int | None = None
    """Most sentence pairs per pack; default: an eighth of --max-target-tokens."""
    examples: int = 5
    """Random training pairs to print."""
    seed: int = 1
    """Seed of the examples and the epoch."""
    png: Path | None = None
    """Picture of the sentence lengths to draw."""
    verify: bool = False
    """First check the SHA-256 of every file."""

    def __post_init__(self) -> None:
        require_not_negative(self, "examples", "seed")
        _ = self.batch

    @property
    def batch(self) -> BatchConfig:
        names = ("max_target_tokens", "max_source_tokens", "max_sentences")
        return BatchConfig(**{name: getattr(self, name) for name in names})


def main() -> None:
    settings = parse(InspectSettings, Page(text=__doc__))

    from dist_transformer.data.loading.plan import resolve_budgets
    from dist_transformer.data.loading.statistics import count_lengths, first_epoch, length_histograms, random_examples
    from dist_transformer.reporting.figures import as_png, length_picture

    claim_file(settings.png, "--png", [settings.data])
    batch = settings.batch
    folder = DataFolder.open(settings.data)
    if settings.verify:
        folder.verify()
        say("hashes: every file matches the index\n")
    index, train = folder.index, folder.train
    budgets = resolve_budgets(batch, source_tokens=train.info.source_tokens, target_tokens=train.info.target_tokens)
    names = [f"source, {index.source_language}", f"target, {index.target_language}"]
    say(describe(folder))
    lengths = count_lengths(train)
    say("\n" + length_histograms(lengths, names))
    for name, side in zip(names, lengths, strict=True):
        marks = ", ".join(f"{share:.0%} up to {side.quantile(share)}" for share in (0.5, 0.9, 0.99))
        say(f"{name}: mean {side.mean:.1f} tokens, {marks}, longest {side.longest}")
    say("\n" + describe_epoch(first_epoch(train, budgets, window_shards=batch.window_shards, seed=settings.seed)))
    if settings.examples:
        say()
        for source, target in random_examples(train, folder.tokenizer(), settings.examples, seed=settings.seed):
            say(f"{source} ||| {target}")
    if settings.png is not None:
        write_file(settings.png, as_png(length_picture(lengths, names)))


def describe(folder: DataFolder) -> str:
    index = folder.index
    tags = f", {' '.join(index.source_tags)} in front of every source" if index.source_tags else ""
    lines = [
        f"{index.corpus} ({index.source_language}-{index.target_language}{', synthetic' if index.synthetic else ''}), "
        f"vocabulary {show_sizes(index.vocab_sizes)}{', lowercased' if index.lowercase else ''}{tags}"
    ]
    rows: list[tuple[str, SplitInfo, dict[str, int]]] = [
        ("train", index.train, index.dropped),
        ("valid", index.valid, index.valid_dropped),
    ]
    for name, split, dropped in rows:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
        drawn = f", {split.segmentations:,} segmentations of each" if split.segmentations > 1 else ""
        lines += [
            f"{name}: {split.pairs:,} pairs in {len(split.shards):,} shard(s){drawn}; dropped: {reasons}",
            f"       {split.source_tokens:,} source and {split.target_tokens:,} target tokens",
        ]
    return "\n".join(lines)


def describe_epoch(epoch: "EpochSummary") -> str:
    budgets, totals = epoch.budgets, epoch.totals
    return (
        f"an epoch: {totals.packs:,} packs of at most {budgets.max_source_tokens:,} source tokens, "
        f"{budgets.max_target_tokens:,} target tokens,\n          {budgets.max_sentences:,} pairs; "
        f"{totals.pairs / totals.packs:.1f} pairs per pack; {epoch.unfit_pairs:,} pairs fit no pack\n"
        f"fill:     source {epoch.source_fill:.2%}, target {epoch.target_fill:.2%}, together {epoch.fill:.2%}"
    )
