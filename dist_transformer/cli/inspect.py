"""Show the contents of a data folder: counts, sentence lengths, how full the packs of an epoch are, some sentences.

dist-transformer inspect data/mine
dist-transformer inspect data/mine --max-target-tokens 8192 --examples 10 --png lengths.png --verify

Token counts include the one special token of each side. A pack is a group of sentence pairs that fit fixed budgets of
tokens; fill is the share of these budgets that is text, over one epoch.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import write_file
from dist_transformer.cli.parser import add_folder, folder_of, make_parser
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.format import SplitInfo
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.run.outputs import claim_file

if TYPE_CHECKING:
    from dist_transformer.data.loading.events import EpochSummary


def main() -> None:
    arguments = parse_arguments()

    from dist_transformer.data.loading.plan import resolve_budgets
    from dist_transformer.data.loading.statistics import count_lengths, first_epoch, length_histograms, random_examples
    from dist_transformer.reporting.figures import as_png, length_picture

    claim_file(arguments.png, "--png", [arguments.data])
    for name in ("examples", "seed"):
        if (value := getattr(arguments, name)) < 0:
            raise UserError(f"--{name} is {value}: it must be 0 or more")
    batch = dataclasses.replace(BatchConfig(), **given(arguments))
    folder = DataFolder.open(arguments.data)
    if arguments.verify:
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
    say("\n" + describe_epoch(first_epoch(train, budgets, window_shards=batch.window_shards, seed=arguments.seed)))
    if arguments.examples:
        say()
        for source, target in random_examples(train, folder.tokenizer(), arguments.examples, seed=arguments.seed):
            say(f"{source} ||| {target}")
    if arguments.png is not None:
        write_picture(arguments.png, as_png(length_picture(lengths, names)))


def given(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the budgets that were given; the others keep the defaults of training."""
    names = ("max_target_tokens", "max_source_tokens", "max_sentences")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


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


def write_picture(path: Path, content: bytes) -> None:
    try:
        write_file(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another --png") from None


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    default = BatchConfig().max_target_tokens
    add_folder(parser, "--data", "DATA", "data folder made by dist-transformer prepare")
    parser.add_argument(
        "--max-target-tokens", type=int, metavar="N", help=f"most target tokens per pack (default: {default})"
    )
    parser.add_argument(
        "--max-source-tokens",
        type=int,
        metavar="N",
        help="most source tokens per pack (default: --max-target-tokens times the data's ratio of source to target "
        "tokens)",
    )
    parser.add_argument(
        "--max-sentences",
        type=int,
        metavar="N",
        help="most sentence pairs per pack (default: an eighth of --max-target-tokens)",
    )
    parser.add_argument(
        "--examples", type=int, default=5, metavar="K", help="random training pairs to print (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the examples and the epoch (default: %(default)s)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the sentence lengths (default: no picture)")
    parser.add_argument("--verify", action="store_true", help="first check the SHA-256 of every file (default: no)")
    arguments = parser.parse_args()
    arguments.data = folder_of(parser, arguments, "--data")
    return arguments
