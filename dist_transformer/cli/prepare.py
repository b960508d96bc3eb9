"""Make a data folder from text files or a hub dataset: vocabulary, token shards, validation set.

dist-transformer prepare --src train.en --tgt train.de --vocab-size 10000 --out data

Text files may be plain, .gz, .xz, .bz2 or .zst. A pattern in quotes, such as "part-*.en", means all files that match
it, sorted by name.
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial

from dist_transformer.base.errors import TransientError, UserError, report, say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PREPARE_RULES, PrepareSettings
from dist_transformer.model_tags import preparation_caution
from dist_transformer.run.outputs import claim_folder

_COMMON = (
    *("src", "tgt", "tsv", "jsonl", "tmx", "parquet", "dataset", "toy", "valid_src", "valid_tgt", "out", "vocab_size"),
    *("vocabulary", "tokenizer", "source_language", "target_language", "max_tokens", "workers"),
)


def main() -> None:
    # A batch system ends a job with SIGTERM. Treat it like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks = MpiRanks.join()
    try:
        run(ranks.together(parse_arguments), ranks)
    except UserError:
        if ranks.is_main:
            raise
        # Rank 0 has the same error and reports it for all ranks.
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        # The end of --help has no status.
        if status := getattr(stop, "code", 128 + signal.SIGINT):
            print("interrupted: run the same command again to resume", file=sys.stderr, flush=True)
            ranks.abort(status)
        raise SystemExit(status) from None
    except Exception as error:
        # Otherwise the other ranks would wait for this one.
        status = report(error)
        ranks.abort(status)
        raise SystemExit(status) from None


def run(settings: PrepareSettings, ranks: MpiRanks) -> None:
    workers = settings.workers or ranks.cores()
    # The tokenizer's threads in this process use no more cores than the user asked for.
    os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
    lost: list[TransientError] = []
    if ranks.is_main and (caution := preparation_caution(settings)):
        say(f"warning: {caution}", file=sys.stderr)
    settings = replace(settings, workers=workers)
    prepare(settings, partial(print_line, lost=lost), ranks=ranks, show_progress=sys.stderr.isatty())
    if lost:
        raise UserError(f"{settings.out} is complete, but {lost[0]}")


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


def parse_arguments() -> PrepareSettings:
    settings = parse(PrepareSettings, Page(text=__doc__, common=_COMMON), rules=PREPARE_RULES)
    sources = (*settings.training_sources, *settings.validation_sources)
    tokenizers = (settings.tokenizer, settings.source_tokenizer, settings.target_tokenizer)
    files = (file for source in sources for file in source.files())
    claim_folder(settings.out, "--out", (*files, settings.text.dataset, settings.terms, *tokenizers))
    return settings
