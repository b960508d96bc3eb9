"""Make a data folder from text files or a hub dataset: vocabulary, token shards, validation set.

dist-transformer prepare --src train.en --tgt train.de --vocab-size 10000 --out data
"""

import argparse
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import get_args

from dist_transformer.base.errors import TransientError, UserError, report, say
from dist_transformer.base.paths import usable_place
from dist_transformer.cli.parser import make_parser
from dist_transformer.config.stated import FlagRules
from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.files import JsonlFile, PairSource, TsvFile, expand, line_files
from dist_transformer.data.text.hub import HubDataset
from dist_transformer.data.text.tables import ParquetFile
from dist_transformer.data.text.toy_corpus import MOST_TOY_PAIRS, make_toy_corpus, write_toy_corpus
from dist_transformer.data.vocabulary.learning import DEFAULT_COVERAGE, LearnedKind
from dist_transformer.data.vocabulary.normalization import Normalization
from dist_transformer.model_tags import preparation_caution
from dist_transformer.run.outputs import claim_folder

_RULES = FlagRules(
    needs={
        "--tsv-columns": "--tsv",
        "--src-field --tgt-field": "--jsonl --parquet",
        "--dataset-config --dataset-revision --dataset-split --dataset-valid-split --streaming": "--dataset",
        "--vocabulary --vocab-sample-pairs --byte-fallback --no-byte-fallback --character-coverage": (
            "--vocab-size --src-vocab-size --tgt-vocab-size"
        ),
        "--segmentation-dropout --segmentation-alpha --segmented-side": "--segmentations",
    },
    conflicts={
        ("--valid-pairs", "--valid-src --dataset-valid-split --toy"): "which has validation text",
    },
)


def main() -> None:
    arguments = parse_arguments()
    # A batch system ends a job with SIGTERM. Treat it like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks = MpiRanks.join()
    try:
        run(arguments, ranks)
    except UserError:
        if ranks.is_main:
            raise
        # Rank 0 has the same error and reports it for all ranks.
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        print("interrupted: run the same command again to resume", file=sys.stderr, flush=True)
        status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 128 + signal.SIGINT
        ranks.abort(status)
        raise SystemExit(status) from None
    except Exception as error:
        # Otherwise the other ranks would wait for this one.
        status = report(error)
        ranks.abort(status)
        raise SystemExit(status) from None


def run(arguments: argparse.Namespace, ranks: MpiRanks) -> None:
    workers = arguments.workers if arguments.workers is not None else ranks.cores()
    # The tokenizer's threads in this process use no more cores than the user asked for.
    os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
    with tempfile.TemporaryDirectory() as scratch:
        settings = ranks.together(lambda: settings_from(arguments, Path(scratch), workers))
        lost: list[TransientError] = []
        if ranks.is_main and (caution := preparation_caution(settings)):
            say(f"warning: {caution}", file=sys.stderr)
        prepare(settings, partial(print_line, lost=lost), ranks=ranks, show_progress=sys.stderr.isatty())
    if lost:
        raise UserError(f"{arguments.out} is complete, but {lost[0]}")


def print_line(line: str, lost: list[TransientError]) -> None:
    """Print a line; if standard output does not accept it, continue, because ranks work together here.

    Args:
        lost: receives the error.
    """
    try:
        say(line)
    except BrokenPipeError:
        # The reader has read enough, such as `| head`.
        pass
    except TransientError as error:
        lost.append(error)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rules=_RULES)
    defaults = {field.name: field.default for field in PrepareSettings.__dataclass_fields__.values()}

    text = parser.add_argument_group(
        "text (one or more kinds; all are used)",
        "Text files may be plain, .gz, .xz, .bz2 or .zst. A file F may be a pattern in quotes: "
        '"part-*.en" means all files that match it, sorted by name.',
    )
    text.add_argument("--src", nargs="+", type=Path, default=[], metavar="F", help="source text, one sentence per line")
    text.add_argument("--tgt", nargs="+", type=Path, default=[], metavar="F", help="translations, line by line")
    text.add_argument(
        "--tsv",
        nargs="+",
        type=Path,
        default=[],
        metavar="F",
        help="tab-separated columns, no quoting, the same number in each row",
    )
    text.add_argument(
        "--tsv-columns", nargs=2, type=int, default=[0, 1], metavar="N", help="source and target column (default 0 1)"
    )
    text.add_argument("--jsonl", nargs="+", type=Path, default=[], metavar="F", help="one JSON object per line")
    text.add_argument(
        "--parquet", nargs="+", type=Path, default=[], metavar="F", help="two columns, or two fields of a column"
    )
    text.add_argument(
        "--src-field", metavar="NAME", help="field of --jsonl and --parquet with the source text; a.b: field b of a"
    )
    text.add_argument("--tgt-field", metavar="NAME", help="field of --jsonl and --parquet with the target text")
    text.add_argument(
        "--dataset", type=usable_place, metavar="NAME", help="hub dataset, or a local folder of Parquet or JSON files"
    )
    text.add_argument("--dataset-config", metavar="C", help="its configuration, such as de-en (default: the dataset's)")
    text.add_argument("--dataset-revision", metavar="REV", help="its commit, tag or branch; recorded in the index")
    text.add_argument("--dataset-split", default="train", metavar="S", help="its training split (default train)")
    text.add_argument("--dataset-valid-split", metavar="S", help="its validation split (default: hold out pairs)")
    text.add_argument("--streaming", action="store_true", help="read --dataset as it arrives, without a local copy")
    text.add_argument(
        "--toy", type=int, metavar="PAIRS", help="this many pairs of built-in synthetic English-German text"
    )

    valid = parser.add_argument_group("validation")
    valid.add_argument("--valid-src", nargs="+", type=Path, default=[], metavar="F", help="source text")
    valid.add_argument("--valid-tgt", nargs="+", type=Path, default=[], metavar="F", help="translations")
    valid.add_argument(
        "--valid-pairs",
        type=int,
        default=defaults["valid_pairs"],
        metavar="N",
        help="without validation text: pairs to hold out, at most a tenth of all (default %(default)s)",
    )

    parser.add_argument(
        "--out", type=Path, required=True, metavar="DATA", help="folder to make; it must be new or empty"
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="entries, both languages together (required without --tokenizer)"
    )
    for flag, side in (("--src-vocab-size", "source"), ("--tgt-vocab-size", "target")):
        parser.add_argument(
            flag, type=int, metavar="N", help=f"instead, entries of a vocabulary of the {side} language alone"
        )
    parser.add_argument(
        "--vocab-sample-pairs",
        type=int,
        default=defaults["vocab_sample_pairs"],
        metavar="N",
        help="learn the vocabulary from about N pairs, drawn by --seed if there are more (default %(default)s)",
    )
    parser.add_argument(
        "--vocabulary",
        choices=get_args(LearnedKind),
        default=defaults["vocabulary"],
        metavar="KIND",
        help=f"kind of vocabulary to learn: {', '.join(get_args(LearnedKind)[:-1])} (SentencePiece's unigram model) or "
        f"{get_args(LearnedKind)[-1]} (default %(default)s)",
    )
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        help="SentencePiece writes characters that are no pieces as bytes (default), or as <unk>",
    )
    parser.add_argument(
        "--character-coverage",
        type=float,
        metavar="C",
        help=f"share of the characters of the text that are pieces of SentencePiece (default {DEFAULT_COVERAGE})",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="T",
        help="vocabulary to use: a model folder, a tokenizer.json, or a .model of SentencePiece (default: learn one)",
    )
    for flag, side in (("--src-tokenizer", "source"), ("--tgt-tokenizer", "target")):
        parser.add_argument(flag, type=Path, metavar="T", help=f"instead, a vocabulary for the {side} language alone")
    parser.add_argument(
        "--tag",
        nargs="+",
        default=[],
        metavar="TAG",
        help="tags to reserve in the learned vocabulary, such as <2de>",
    )
    parser.add_argument(
        "--src-tag",
        nargs="+",
        default=[],
        metavar="TAG",
        help="tags of the vocabulary to put in front of every source sentence, in this order (default: none)",
    )
    parser.add_argument(
        "--segmentations",
        type=int,
        default=defaults["segmentations"],
        metavar="K",
        help="draw K segmentations of each training sentence, one for each of K epochs; takes K times the disk "
        "(default %(default)s: the best one)",
    )
    parser.add_argument(
        "--segmentation-dropout",
        type=float,
        metavar="P",
        help="probability with which BPE leaves a merge out (Provilkov et al. 2020; default 0.1)",
    )
    parser.add_argument(
        "--segmentation-alpha",
        type=float,
        metavar="A",
        help="exponent of the probabilities by which the 64 best segmentations of a unigram model are drawn (Kudo "
        "2018; default 0.1)",
    )
    parser.add_argument(
        "--segmented-side",
        choices=("both", "source", "target"),
        default=defaults["segmented_side"],
        help="side whose segmentations are drawn (default %(default)s)",
    )
    parser.add_argument("--lowercase", action="store_true", help="lowercase all text (default: keep case)")
    parser.add_argument(
        "--normalization",
        choices=get_args(Normalization),
        help="what is done to all text. clean removes invisible characters, turns all white space into spaces, and "
        "replaces variants by plain characters, such as full-width punctuation by ASCII; clean-nfc keeps the variants, "
        "as Chinese needs. nfkc and nfc do the same without the cleaning (default: that of --tokenizer, or clean)",
    )
    parser.add_argument("--src-lang", metavar="L", help="source language (default: from the file name, train.en → en)")
    parser.add_argument("--tgt-lang", metavar="L", help="target language (default: from the file name)")
    parser.add_argument("--corpus", default="", metavar="NAME", help="name in reports (default: the first source)")
    for name, kind, meaning in (
        ("max_tokens", int, "drop pairs with more tokens on a side, its special token included"),
        ("max_length_ratio", float, "drop pairs with a larger (longer + 5) / (shorter + 5), in tokens"),
        ("pairs_per_shard", int, "pairs per shard, on average"),
        ("seed", int, "seed of the order of pairs and of the held-out pairs"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=kind, default=defaults[name], metavar="N", help=f"{meaning} (default %(default)s)"
        )
    parser.add_argument(
        "--keep-overlap",
        action="store_true",
        help="keep training pairs that are also validation pairs (default: count them and leave them out)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes per rank (default: one for each core that the rank may use, or one for a text of less than "
        "50,000 pairs)",
    )
    return parser.parse_args()


def settings_from(arguments: argparse.Namespace, scratch: Path, workers: int) -> PrepareSettings:
    """Convert the flags to the library's settings. A toy corpus is first written to `scratch`."""
    sources = file_sources(arguments)
    valid_src, valid_tgt = expand(arguments.valid_src, "--valid-src"), expand(arguments.valid_tgt, "--valid-tgt")
    validation: list[PairSource] = list(line_files(valid_src, valid_tgt))
    if arguments.dataset:
        if not (arguments.src_lang and arguments.tgt_lang):
            raise UserError("--dataset needs its two languages: pass --src-lang and --tgt-lang")
        sources.append(_dataset(arguments, arguments.dataset_split))
        if arguments.dataset_valid_split:
            validation.append(_dataset(arguments, arguments.dataset_valid_split))
    if arguments.toy is not None:
        if not 1 <= arguments.toy <= MOST_TOY_PAIRS:
            raise UserError(f"--toy is {arguments.toy}: ask for 1 to {MOST_TOY_PAIRS:,} pairs")
        held_out = max(1, min(1_000, arguments.toy // 10))
        write_toy_corpus(
            scratch,
            make_toy_corpus(train_pairs=arguments.toy, valid_pairs=held_out, test_pairs=held_out, seed=arguments.seed),
        )
        sources += line_files([scratch / "train.en"], [scratch / "train.de"])
        validation += line_files([scratch / "valid.en"], [scratch / "valid.de"])
    read = [file for source in (*sources, *validation) for file in source.files()]
    tokenizers = (arguments.tokenizer, arguments.src_tokenizer, arguments.tgt_tokenizer)
    claim_folder(arguments.out, "--out", (*read, arguments.dataset, *tokenizers))
    return PrepareSettings(
        out=arguments.out,
        sources=tuple(sources),
        validation=tuple(validation),
        vocab_size=arguments.vocab_size,
        source_vocab_size=arguments.src_vocab_size,
        target_vocab_size=arguments.tgt_vocab_size,
        vocabulary=arguments.vocabulary,
        byte_fallback=arguments.byte_fallback,
        character_coverage=arguments.character_coverage,
        tokenizer=arguments.tokenizer,
        source_tokenizer=arguments.src_tokenizer,
        target_tokenizer=arguments.tgt_tokenizer,
        segmentations=arguments.segmentations,
        segmentation_dropout=arguments.segmentation_dropout,
        segmentation_alpha=arguments.segmentation_alpha,
        segmented_side=arguments.segmented_side,
        tags=tuple(arguments.tag),
        source_tags=tuple(arguments.src_tag),
        lowercase=arguments.lowercase,
        normalization=arguments.normalization,
        max_tokens=arguments.max_tokens,
        max_length_ratio=arguments.max_length_ratio,
        keep_overlap=arguments.keep_overlap,
        pairs_per_shard=arguments.pairs_per_shard,
        seed=arguments.seed,
        valid_pairs=arguments.valid_pairs,
        source_language=arguments.src_lang,
        target_language=arguments.tgt_lang,
        corpus=arguments.corpus or ("toy grammar" if arguments.toy is not None else ""),
        synthetic=arguments.toy is not None,
        keep_text=scratch if arguments.toy is not None else None,
        vocab_sample_pairs=arguments.vocab_sample_pairs,
        workers=workers,
    )


def file_sources(arguments: argparse.Namespace) -> list[PairSource]:
    sources: list[PairSource] = list(line_files(expand(arguments.src, "--src"), expand(arguments.tgt, "--tgt")))
    source_column, target_column = arguments.tsv_columns
    sources += [
        TsvFile(path=path, source_column=source_column, target_column=target_column)
        for path in expand(arguments.tsv, "--tsv")
    ]
    kinds: list[tuple[str, type[JsonlFile] | type[ParquetFile]]] = [("jsonl", JsonlFile), ("parquet", ParquetFile)]
    for name, kind in kinds:
        paths = expand(getattr(arguments, name), f"--{name}")
        if paths and not (arguments.src_field and arguments.tgt_field):
            raise UserError(f"--{name} needs the names of its two text fields: pass --src-field and --tgt-field")
        sources += [
            kind(path=path, source_field=arguments.src_field, target_field=arguments.tgt_field) for path in paths
        ]
    return sources


def _dataset(arguments: argparse.Namespace, split: str) -> HubDataset:
    return HubDataset(
        dataset=arguments.dataset,
        config=arguments.dataset_config,
        revision=arguments.dataset_revision,
        split=split,
        source_language=arguments.src_lang,
        target_language=arguments.tgt_lang,
        streaming=arguments.streaming,
    )
