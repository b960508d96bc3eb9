"""Show the contents of a data folder: counts, sentence lengths, how full the packs of an epoch are, some sentences.

dist-transformer inspect data/mine
dist-transformer inspect data/mine --max-target-tokens 8192 --examples 10 --png lengths.png --verify

Token counts include the one special token of each side. A pack is a group of sentence pairs that fit fixed budgets of
tokens; fill is the share of these budgets that is text, over one epoch.
"""

from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.base.files import write_file
from dist_transformer.base.templates import fill
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import require_not_negative, setting
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.run.outputs import claim_file


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
    index, train = folder.index, folder.train
    budgets = resolve_budgets(batch, source_tokens=train.info.source_tokens, target_tokens=train.info.target_tokens)
    names = [f"source, {index.source_language}", f"target, {index.target_language}"]
    lengths = count_lengths(train)
    screen = fill(
        Path(__file__).parents[1] / "data" / "folder" / "inspect.txt.j2",
        filters={"sizes": show_sizes},
        verified=settings.verify,
        index=index,
        histograms=length_histograms(lengths, names),
        sides=list(zip(names, lengths, strict=True)),
        epoch=first_epoch(train, budgets, window_shards=batch.window_shards, seed=settings.seed),
        examples=list(random_examples(train, folder.tokenizer(), settings.examples, seed=settings.seed)),
    )
    say(screen.rstrip("\n"))
    if settings.png is not None:
        write_file(settings.png, as_png(length_picture(lengths, names)))
