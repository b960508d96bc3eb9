"""Score the translations of a model, or files of translations: BLEU, chrF, chrF++ and TER, with signatures.

dist-transformer evaluate --model MODEL --src test.en --ref test.de --json result.json
dist-transformer evaluate --hypotheses ours.de theirs.de --ref test.de --tgt-lang de

Two kinds of BLEU are printed: sacreBLEU on raw text, with case and without; and, as in older papers, BLEU on text
tokenised by the rules of Moses and, for German, with hyphens split. BLEU, chrF and chrF++: 0 to 100, higher is better.
TER: edits per 100 words. The `bleu` of the JSON is sacreBLEU with case, or without case if --lowercase is given or the
model's tokenizer lowercases (its data was prepared with --lowercase). Several files after --ref are several references
for each line; every score uses them as its authors define it.

With --model: lines are translated as they stand, except those with more tokens than the model has positions: they are
split at the ends of their sentences, or where the limit is reached, and their parts are joined. --split-over splits
more. A note and the JSON count such lines (`split_sentences`); notes count those that `translate` would split, those
with a sentence that is longer than any in the training, and translations that were cut at the maximum length. The
command runs in one process or under a launcher (deepspeed, torchrun, srun, mpirun), which shares the work; the result
is the same. With --json OUT.json the hypotheses are written to OUT.hypotheses.txt in the same folder.

--mbr N draws N samples of each line by --seed and scores the one with the best expected utility, instead of a search.

With --hypotheses no model is needed. Several files are compared with the first one by sacreBLEU's paired bootstrap, for
BLEU and chrF++: the mean and the 95% interval over 1,000 test sets that are resampled from the lines, and the p-value
of the difference. It takes 100 kB of memory per line.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError, say
from dist_transformer.cli.parser import make_parser
from dist_transformer.config.stated import FlagRules
from dist_transformer.data.text.lines import require_readable
from dist_transformer.evaluation.compare import compare
from dist_transformer.evaluation.report import hypotheses_file, write_report
from dist_transformer.inference.loading import read_joint_info
from dist_transformer.inference.options import (
    DECODING_FLAGS,
    MBR_CONFLICTS,
    add_decoding_options,
    add_device_option,
    add_direction_options,
    add_mbr_options,
    add_models_option,
    add_split_option,
    beam_settings,
    choose_split_over,
    mbr_settings,
    translate_command,
)
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.evaluation.evaluate import Evaluation
    from dist_transformer.inference.sampling.mbr import MbrSettings

_RULES = FlagRules(
    needs={"--utility --epsilon --seed with --model": "--mbr"},
    conflicts={
        (f"--src {DECODING_FLAGS}", "--hypotheses"): "which are translations already",
        ("--tgt-lang", "--model"): "which has its own",
        **MBR_CONFLICTS,
    },
)


def main() -> None:
    arguments = parse_arguments()
    check_arguments(arguments)
    inputs = (*(arguments.model or ()), arguments.src, *(arguments.hypotheses or ()), *arguments.ref)
    beside = [hypotheses_file(arguments.json)] if arguments.json is not None and arguments.model is not None else []
    claim_file(arguments.json, "--json", inputs, beside=beside)
    world = read_world()
    if arguments.hypotheses is None:
        evaluate_model_folder(arguments, world)
    elif world.is_main:
        # One rank is enough: nothing here is a collective.
        score_files(arguments)


def evaluate_model_folder(arguments: argparse.Namespace, world: World) -> None:
    def check_files() -> None:
        mbr_of(arguments)
        # Only the first rank reads the texts.
        for path in (arguments.src, *arguments.ref) if world.is_main else ():
            require_readable(path)
        beam_settings(arguments)

    if world.size == 1:
        # Early, because the imports below take seconds.
        check_files()

    from dist_transformer.evaluation.evaluate import evaluate, write_evaluation
    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.distributed import error_of_all, on_all_ranks
    from dist_transformer.runtime.process_group import process_group

    group = process_group(world, device_name=arguments.device, ready=check_files)
    with group as device, error_of_all(world):
        require_agreement(vars(arguments))
        evaluation = evaluate(
            arguments.model,
            source=arguments.src,
            references=arguments.ref,
            settings=beam_settings(arguments),
            mbr=on_all_ranks(lambda: mbr_of(arguments)),
            device=device,
            precision=arguments.precision,
            max_batch_tokens=arguments.batch_tokens,
            split_over=choose_split_over(arguments.split_over, None),
            lowercase=arguments.lowercase,
            direction=arguments.direction,
            tags=arguments.tag,
            warn=lambda caution: say(f"warning: {caution}", file=sys.stderr),
        )
    if world.is_main:
        try:
            print_scores(evaluation)
            say(f"next: {translate_command(arguments.model, arguments.direction, arguments.tag)}")
        finally:
            # A standard output that is full does not lose the scores.
            if arguments.json is not None:
                write_evaluation(evaluation, arguments.json)


def mbr_of(arguments: argparse.Namespace) -> "MbrSettings | None":
    """Read the model's description, and the flags of minimum Bayes risk decoding."""
    info = read_joint_info(arguments.model, arguments.direction, arguments.tag)
    return mbr_settings(arguments, language=info.target_language)


def score_files(arguments: argparse.Namespace) -> None:
    comparison = compare(
        arguments.hypotheses, arguments.ref, target_language=arguments.tgt_lang, lowercase=arguments.lowercase
    )
    try:
        say(f"{comparison.sentences:,} sentences, to {arguments.tgt_lang}")
        say(comparison)
    finally:
        if arguments.json is not None:
            write_report(comparison.report(), arguments.json)


def print_scores(evaluation: "Evaluation") -> None:
    info = evaluation.info
    synthetic = " (SYNTHETIC: the scores say nothing about real text)" if info.synthetic else ""
    say(f"trained on {info.corpus}{synthetic}")
    say(f"{len(evaluation.hypotheses):,} sentences, {info.source_language}-{info.target_language}")
    say(evaluation.scores)
    for note in evaluation.notes:
        say(f"note: {note}")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse a command line without a flag that it needs."""
    if (arguments.model is None) == (arguments.hypotheses is None):
        raise UserError("pass either --model or --hypotheses")
    if arguments.model is not None and arguments.src is None:
        raise UserError("--model needs a text to translate: pass it with --src")
    if arguments.hypotheses is not None and arguments.tgt_lang is None:
        raise UserError("--hypotheses do not state their language: pass it with --tgt-lang, such as de")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, shares_work=True, rules=_RULES)
    add_models_option(parser, required=False)
    parser.add_argument("--src", type=Path, metavar="F", help="source text for --model, one sentence per line")
    parser.add_argument("--hypotheses", type=Path, nargs="+", metavar="F", help="files of translations, line by line")
    parser.add_argument("--tgt-lang", metavar="L", help="language of --hypotheses, such as de, for the tokenisation")
    text = "raw reference text, line by line; several files if each line has several references"
    parser.add_argument("--ref", type=Path, nargs="+", required=True, metavar="F", help=text)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="OUT",
        help="write scores to OUT, and a model's hypotheses to the same folder",
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case (default: only if the model does)")
    group = parser.add_argument_group("with --model")
    add_direction_options(group)
    add_decoding_options(group)
    add_mbr_options(group)
    add_split_option(group, default="no")
    add_device_option(group, several_processes=True)
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
