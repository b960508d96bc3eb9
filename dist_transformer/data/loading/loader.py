"""Open the data of a run: the folders of `--data`, the plan over them, and the collator of their micro-batches."""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dist_transformer.base.errors import UserError
from dist_transformer.base.urls import is_url
from dist_transformer.config.directions import Direction
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.folder.storage import CacheSettings
from dist_transformer.data.loading.collate import Collator
from dist_transformer.data.loading.mixture import Corpora, Mixture, temperature_shares
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.plan import Plan, Step, Window, resolve_budgets
from dist_transformer.data.text.sentences import has_several_sentences

# Past shards that stay in memory: 1,024 open files are a usual limit. 200 of 100,000 pairs are 2 GB.
_PAST_SHARDS = 200

Admit = Callable[[Split, Window], Mapping[int, int]]


class Planner(Protocol):
    """A `Plan` or a `Mixture` of several, each with its own kind of position."""

    skipped: int

    def start(self) -> Any: ...

    def steps(self, position: Any, packs_per_step: int) -> Iterator[Step]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The opened data of a run."""

    folders: tuple[DataFolder, ...]
    shares: tuple[float, ...]
    """Share of each folder in the target tokens of the run."""
    budgets: Budgets
    plan: Planner
    skipped: tuple[int, ...]
    """Number of pairs per corpus that fit no pack."""
    collator: Collator

    def at_once(self, packs: int) -> "TrainingData":
        """Return the same data with `packs` packs per micro-batch."""
        collator = Collator(self.collator.pairs, self.budgets, packs_per_micro_batch=packs)
        return dataclasses.replace(self, collator=collator)

    def with_links(self) -> "TrainingData":
        """Return the same data with the alignments in its micro-batches.

        Raises:
            UserError: no folder has any.
        """
        if not any(folder.index.aligned for folder in self.folders):
            raise UserError("guided_attention needs alignments: prepare the data with --alignments, or leave it out")
        packs = self.collator.packs_per_micro_batch
        collator = Collator(self.collator.pairs, self.budgets, packs_per_micro_batch=packs, links=True)
        return dataclasses.replace(self, collator=collator)

    @property
    def first(self) -> DataFolder:
        """The folder whose vocabulary the run uses."""
        return self.folders[0]

    @property
    def of_directions(self) -> tuple[DataFolder, ...]:
        """The first folder of each language pair; its validation set and tags are those of the direction."""
        found: dict[str, DataFolder] = {}
        for folder in self.folders:
            found.setdefault(folder.index.direction.name, folder)
        return tuple(found.values())

    def several_sentences(self) -> float:
        """Return the share of the sources of the run that have more than one sentence.

        For a folder of an older version it is that of its validation text.

        Raises:
            UserError: that text is damaged.
        """
        pairs = [
            share * folder.index.train.pairs / folder.index.train.target_tokens
            for share, folder in zip(self.shares, self.folders, strict=True)
        ]
        found = map(_several_sentences, self.folders)
        return sum(weight * share for weight, share in zip(pairs, found, strict=True)) / sum(pairs)

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(folder.index.direction for folder in self.of_directions)


def open_folders(corpora: DataConfig) -> tuple[DataFolder, ...]:
    """Open the data folders of a run.

    Raises:
        UserError: a folder cannot be used, or several do not fit together.
    """
    if not corpora.data:
        raise UserError("--data is empty: pass a data folder made by dist-transformer prepare")
    limit = int(corpora.cache_gib * 2**30 / len(corpora.data))
    folders = tuple(
        DataFolder.open(
            place,
            CacheSettings(folder=_cache_folder(corpora, place), limit_bytes=limit),
            shards_may_be_bad=corpora.on_bad_shard == "skip",
        )
        for place in corpora.data
    )
    first = folders[0].index
    for place, folder in zip(corpora.data, folders, strict=True):
        index = folder.index
        if index.train.target_tokens == 0:
            raise UserError(f"{place} has no training pairs: prepare it again with dist-transformer prepare")
        if index.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                f"{place} has another vocabulary than {corpora.data[0]}: prepare it again with "
                f"--tokenizer {corpora.data[0]}/tokenizer.json"
            )
    _check_tags(corpora.data, folders)
    return folders


def _check_tags(places: Sequence[str], folders: Sequence[DataFolder]) -> None:
    """Refuse two target languages with the same tags, because the source would not show which one is meant."""
    for (place, one), (other_place, other) in itertools.combinations(zip(places, folders, strict=True), 2):
        first, second = one.index.direction, other.index.direction
        if first.target_language != second.target_language and first.tags == second.tags:
            tags = f"the same tags ({' '.join(first.tags)})" if first.tags else "no tags"
            raise UserError(
                f"{place} is {first.name} and {other_place} is {second.name}, but both have {tags}, so a model cannot "
                "know which language to write: prepare them with another --src-tag each"
            )


def open_training_data(
    corpora: DataConfig,
    batch: BatchConfig,
    *,
    seed: int,
    admit: Admit = lambda *_: {},
    folders: Sequence[DataFolder] | None = None,
    skipped: Sequence[int] | None = None,
) -> TrainingData:
    """Open the data folders of a run and plan it.

    Args:
        admit: as for `Plan`, with the split as first argument.
        folders: the data folders, if they are open already.
        skipped: number of pairs per folder that fit no pack, if they were counted already.

    Raises:
        UserError: a folder cannot be used, or several do not fit together.
    """
    folders = open_folders(corpora) if folders is None else tuple(folders)
    splits = [folder.train for folder in folders]
    for split in splits:
        split.kept_bytes = int(corpora.memory_gib * 2**30 / len(splits))
        split.kept_shards = _PAST_SHARDS // len(splits)
    pairs = Corpora(splits)
    weights, tokens = corpora.data_weights, [split.info.target_tokens for split in splits]
    shares = tuple(weight / sum(weights) for weight in weights) or temperature_shares(tokens, corpora.data_temperature)
    # Source tokens per target token in the mixture.
    ratio = sum(
        (
            Fraction(share) * Fraction(split.info.source_tokens, split.info.target_tokens)
            for share, split in zip(shares, splits, strict=True)
        ),
        start=Fraction(0),
    )
    budgets = resolve_budgets(batch, source_tokens=ratio.numerator, target_tokens=ratio.denominator)
    plans = [
        Plan(
            split.lengths,
            split.shard_starts,
            budgets=budgets,
            window_shards=batch.window_shards,
            seed=seed,
            admit=partial(admit, split),
            corpus=corpus,
            first_id=int(first_id),
            skipped=None if skipped is None else skipped[corpus],
            segmentations=split.info.segmentations,
        )
        for corpus, (split, first_id) in enumerate(zip(splits, pairs.first_ids, strict=False))
    ]
    several = len(plans) > 1
    return TrainingData(
        folders=folders,
        shares=shares,
        budgets=budgets,
        plan=Mixture(plans, shares) if several else plans[0],
        skipped=tuple(plan.skipped for plan in plans),
        collator=Collator(pairs if several else splits[0], budgets, packs_per_micro_batch=batch.packs_at_once),
    )


def _several_sentences(folder: DataFolder) -> float:
    index = folder.index
    if index.several_sentences is not None:
        return index.several_sentences / index.train.pairs
    sources, _ = folder.valid_text()
    return sum(map(has_several_sentences, sources)) / len(sources)


def _cache_folder(corpora: DataConfig, place: str) -> Path:
    name = hashlib.sha256(os.fsencode(place.rstrip("/"))).hexdigest()[:16]
    return (corpora.cache_dir or Path.home() / ".cache" / "dist_transformer") / name if is_url(place) else Path(place)
