"""Translate a test set and score it: BLEU, chrF and TER, with signatures.

BLEU is printed side by side: sacreBLEU's on raw text, with case and without, and what older papers print, BLEU on text
tokenised by the rules of Moses and, for German, with hyphens split. BLEU and chrF: 0 to 100, higher is better; TER:
edits per 100 words. The headline `bleu` of the JSON is sacreBLEU's with case, or without case when --lowercase is given
or when the model's tokenizer lowercases (its data was prepared with --lowercase).

dist-transformer evaluate --model MODEL --src test.en --ref test.de --json result.json

A line with more tokens than the model has room for is split at the ends of its sentences, or where the limit is
reached; its parts are translated one by one and joined. Standard error names it, and the JSON counts such lines
(`split_sentences`).

Runs alone or under a launcher (deepspeed, torchrun, srun, mpirun), which shares the work; the result is the same. With
--json OUT.json the hypotheses are written to OUT.hypotheses.txt beside it.
"""

import argparse
import sys
from pathlib import Path

from dist_transformer.cli.parser import make_parser
from dist_transformer.evaluation.evaluate import Evaluation, evaluate, require_writable, write_report
from dist_transformer.inference.options import (
    PRECISIONS,
    add_decoding_options,
    add_direction_options,
    add_model_option,
    beam_settings,
)
from dist_transformer.runtime.distributed import error_of_all
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world


def main() -> None:
    arguments = parse_arguments()
    if arguments.json is not None:
        require_writable(arguments.json)
    world = read_world()
    with process_group(world) as device, error_of_all(world):
        evaluation = evaluate(
            arguments.model,
            source=arguments.src,
            reference=arguments.ref,
            settings=beam_settings(arguments),
            device=device,
            dtype=PRECISIONS[arguments.precision],
            max_batch_tokens=arguments.batch_tokens,
            lowercase=arguments.lowercase,
            direction=arguments.direction,
            tags=arguments.tag,
        )
    if world.is_main:
        print_scores(evaluation)
        if arguments.json is not None:
            write_report(evaluation, arguments.json)


def print_scores(evaluation: Evaluation) -> None:
    for split in evaluation.splits:
        print(f"note: {split}", file=sys.stderr)
    info = evaluation.info
    synthetic = " (SYNTHETIC: the scores say nothing about real text)" if info.synthetic else ""
    print(f"trained on {info.corpus}{synthetic}")
    print(f"{len(evaluation.hypotheses):,} sentences, {info.source_language}-{info.target_language}")
    print(evaluation.scores)
    for note in evaluation.notes:
        print(f"note: {note}")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model_option(parser)
    add_direction_options(parser)
    add_decoding_options(parser)
    parser.add_argument("--src", type=Path, required=True, metavar="F", help="source text, one sentence a line")
    parser.add_argument("--ref", type=Path, required=True, metavar="F", help="raw reference text, line by line")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="write scores here and hypotheses beside (default: no)"
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case (default: only when the model does)")
    # DeepSpeed's launcher adds this one; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
