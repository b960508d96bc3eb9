"""Text files or a hub dataset → a data folder: vocabulary, token shards, validation set.

tools/prepare_data.py --src train.en --tgt train.de --valid-src val.en --valid-tgt val.de --vocab-size 10000 --out data
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from dist_transformer.data.prepare import prepare
from dist_transformer.data.prepare_settings import PrepareSettings
from dist_transformer.data.sources import HubDataset, JsonlFile, PairSource, TsvFile, line_files
from dist_transformer.data.toy_corpus import make_toy_corpus, write_toy_corpus
from dist_transformer.errors import UserError, exit_on_user_error


def main() -> None:
    arguments = parse_arguments()
    # A batch system ends a job with SIGTERM: leave nothing behind then, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            prepare(settings_from(arguments, Path(scratch)), print_line)
        except KeyboardInterrupt:
            print("interrupted: nothing was written", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None


def print_line(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # `| head` has read enough; the preparation goes on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    defaults = {field.name: field.default for field in PrepareSettings.__dataclass_fields__.values()}

    text = parser.add_argument_group(
        "text (several kinds may be given; all are used). Files may be plain, .gz, .xz, .bz2"
    )
    text.add_argument("--src", nargs="+", type=Path, default=[], metavar="F", help="source text, one sentence a line")
    text.add_argument("--tgt", nargs="+", type=Path, default=[], metavar="F", help="its translations, line by line")
    text.add_argument("--tsv", nargs="+", type=Path, default=[], metavar="F", help="tab-separated columns, no quoting")
    text.add_argument(
        "--tsv-columns", nargs=2, type=int, default=[0, 1], metavar="N", help="source and target column (default 0 1)"
    )
    text.add_argument("--jsonl", nargs="+", type=Path, default=[], metavar="F", help="one JSON object a line")
    text.add_argument("--src-field", metavar="NAME", help="field of --jsonl with the source text")
    text.add_argument("--tgt-field", metavar="NAME", help="field of --jsonl with the target text")
    text.add_argument("--dataset", metavar="NAME", help="hub dataset, or a local folder of Parquet or JSON files")
    text.add_argument("--dataset-config", metavar="C", help="its configuration, such as de-en (default: its own)")
    text.add_argument("--dataset-split", default="train", metavar="S", help="its training split (default train)")
    text.add_argument("--dataset-valid-split", metavar="S", help="its validation split (default: pairs are held out)")
    text.add_argument(
        "--toy", type=int, metavar="PAIRS", help="the built-in synthetic English-German text, this many pairs"
    )

    valid = parser.add_argument_group("validation")
    valid.add_argument("--valid-src", nargs="+", type=Path, default=[], metavar="F", help="source text")
    valid.add_argument("--valid-tgt", nargs="+", type=Path, default=[], metavar="F", help="its translations")
    valid.add_argument(
        "--valid-pairs",
        type=int,
        default=defaults["valid_pairs"],
        metavar="N",
        help="without validation text: pairs held out, at most a tenth of all (default %(default)s)",
    )

    parser.add_argument(
        "--out", type=Path, required=True, metavar="DATA", help="the folder to make; must not exist, or be empty"
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="entries, both languages together (needed without --tokenizer)"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="T", help="use this tokenizer.json (default: learn one)")
    parser.add_argument("--lowercase", action="store_true", help="lowercase all text (default: case is kept)")
    parser.add_argument(
        "--normalization",
        choices=["nfkc", "nfc"],
        help="of all text: nfkc turns variants into plain characters, such as full-width punctuation into ASCII; nfc "
        "keeps them, as Chinese wants it (default: that of --tokenizer, or nfkc)",
    )
    parser.add_argument("--src-lang", metavar="L", help="source language (default: from the file name, train.en → en)")
    parser.add_argument("--tgt-lang", metavar="L", help="target language (default: from the file name)")
    parser.add_argument("--corpus", default="", metavar="NAME", help="name in reports (default: the first source)")
    for name, kind, meaning in (
        ("max_tokens", int, "tokens of the longest side kept, its special token included"),
        ("max_length_ratio", float, "(longer + 5) / (shorter + 5) tokens above which a pair is dropped"),
        ("pairs_per_shard", int, "pairs in a shard, on average"),
        ("seed", int, "of the order of pairs and of the held-out choice"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=kind, default=defaults[name], metavar="N", help=f"{meaning} (default %(default)s)"
        )
    return parser.parse_args()


def settings_from(arguments: argparse.Namespace, scratch: Path) -> PrepareSettings:
    """The library's settings; the toy corpus is written to `scratch` first."""
    sources: list[PairSource] = list(line_files(arguments.src, arguments.tgt))
    validation: list[PairSource] = list(line_files(arguments.valid_src, arguments.valid_tgt))
    source_column, target_column = arguments.tsv_columns
    sources += [TsvFile(path=path, source_column=source_column, target_column=target_column) for path in arguments.tsv]
    if arguments.jsonl and not (arguments.src_field and arguments.tgt_field):
        raise UserError("--jsonl needs the names of its two text fields: give --src-field and --tgt-field")
    sources += [
        JsonlFile(path=path, source_field=arguments.src_field, target_field=arguments.tgt_field)
        for path in arguments.jsonl
    ]
    if arguments.dataset:
        if not (arguments.src_lang and arguments.tgt_lang):
            raise UserError("--dataset needs its two languages: give --src-lang and --tgt-lang")
        sources.append(_dataset(arguments, arguments.dataset_split))
        if arguments.dataset_valid_split:
            validation.append(_dataset(arguments, arguments.dataset_valid_split))
    if arguments.toy is not None:
        if arguments.toy < 1:
            raise UserError(f"--toy {arguments.toy} gives no text: ask for at least 1 pair")
        held_out = max(1, min(1_000, arguments.toy // 10))
        write_toy_corpus(
            scratch,
            make_toy_corpus(train_pairs=arguments.toy, valid_pairs=held_out, test_pairs=held_out, seed=arguments.seed),
        )
        sources += line_files([scratch / "train.en"], [scratch / "train.de"])
        validation += line_files([scratch / "valid.en"], [scratch / "valid.de"])
    return PrepareSettings(
        out=arguments.out,
        sources=tuple(sources),
        validation=tuple(validation),
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        lowercase=arguments.lowercase,
        normalization=arguments.normalization,
        max_tokens=arguments.max_tokens,
        max_length_ratio=arguments.max_length_ratio,
        pairs_per_shard=arguments.pairs_per_shard,
        seed=arguments.seed,
        valid_pairs=arguments.valid_pairs,
        source_language=arguments.src_lang,
        target_language=arguments.tgt_lang,
        corpus=arguments.corpus or ("toy grammar" if arguments.toy is not None else ""),
        synthetic=arguments.toy is not None,
        keep_text=scratch if arguments.toy is not None else None,
    )


def _dataset(arguments: argparse.Namespace, split: str) -> HubDataset:
    return HubDataset(
        dataset=arguments.dataset,
        config=arguments.dataset_config,
        split=split,
        source_language=arguments.src_lang,
        target_language=arguments.tgt_lang,
    )


if __name__ == "__main__":
    exit_on_user_error(main)
