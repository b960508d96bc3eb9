"""Average weights of a run into a model folder.

dist-transformer average --run-dir RUN --out MODEL
dist-transformer average --run-dir RUN --last 5 --out MODEL
dist-transformer average --run-dir RUN --every 10 --last 20 --out MODEL
dist-transformer average --run-dir RUN --sweep 1,5,10,20 --src dev.en --ref dev.de --out MODEL

Without --last, --best, --sweep or --checkpoints, the newest weight files are chosen, at most five, without those that
were saved by an interruption or during the warm-up. The model folder gets their mean or the newest weight file alone,
whichever has the lower loss (nll) on at most 500 validation pairs of the run's data folder. --last N is obeyed; a
warning states both figures if the newest file alone is better. Without the data folder, nothing is compared.

--last N takes the newest N weight files at any distance: those of save_every, of validations, of interruptions and of
the last step, and files of the best validations that are kept beyond keep_weights. It warns if their steps are not
evenly spaced. --every MINUTES --last N spaces them in time, as the paper does (N files at 10-minute intervals): it
takes the newest file, then repeatedly the file nearest to MINUTES earlier. Only training time counts: pauses between
jobs, validation and saving do not. A distance that is off by more than half of MINUTES is an error.

All weights must come from one run: the same model, tokenizer, data, seed and batch. Each step counts once. A model
folder that is the mean of k steps counts k times, so that the result is the mean of all steps.

--sweep averages the last N weight files for each N (with --best the best N; with --every spaced in time), translates a
dev set with each mean and scores it. It writes the table to OUT.sweep.json and OUT.sweep.md, and the mean with the
highest BLEU to --out; among equal scores the smallest N wins. It runs in one process or under a launcher (deepspeed,
torchrun, srun, mpirun), which shares the decoding; the result is the same.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError, say
from dist_transformer.cli.parser import add_folder, folder_of, make_parser
from dist_transformer.config.measures import MEASURES
from dist_transformer.config.stated import FlagRules
from dist_transformer.data.text.lines import require_readable
from dist_transformer.inference.options import (
    DECODING_FLAGS,
    add_decoding_options,
    add_device_option,
    add_direction_options,
    agreed_precision,
    beam_settings,
    translate_command,
)
from dist_transformer.model_folder import ModelInfo, refuse_other_content
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.averaging.choice import ChosenWeights
    from dist_transformer.averaging.sweep import Candidate, Sweep

# Value of `--best` without a number; --sweep gives the numbers then.
_NO_NUMBER = "N"
_RULES = FlagRules(needs={"--by": "--best", DECODING_FLAGS: "--sweep"})


def main() -> None:
    arguments = parse_arguments()

    from dist_transformer.averaging.sweep import sweep_files

    check_arguments(arguments)
    inputs = (arguments.run_dir, *(arguments.checkpoints or ()), arguments.src, arguments.ref)
    tables = sweep_files(arguments.out) if arguments.sweep is not None else ()
    claim_folder(arguments.out, "--out", inputs, beside=tables)
    world = read_world()
    if arguments.sweep is not None:
        run_sweep(arguments, world)
    elif world.is_main:
        # One rank is enough: nothing here is a collective.
        average_once(arguments)


def average_once(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from dist_transformer.averaging.comparison import compare_with_newest
    from dist_transformer.averaging.mean import average

    paths, notes = arguments.checkpoints, []
    if paths is None:
        chosen = choose(arguments, arguments.best if arguments.last is None else arguments.last)
        if arguments.best is None:
            refuse_other_content(arguments.out)
            with tqdm(bar_format="{desc}", desc="comparing with the newest weight file", disable=None, leave=False):
                chosen = compare_with_newest(chosen, arguments.run_dir, arguments.out, obey=arguments.last is not None)
        print_warnings(chosen)
        say(f"chosen: {chosen.how}")
        paths, notes = chosen.paths, [f"Chosen: {chosen.how}"]
    info = average(paths, arguments.out, notes=notes)
    say(f"averaged {len(paths)} set(s) of weights, steps {', '.join(map(str, info.steps))}: {arguments.out}")
    say_next(arguments.out, info)


def say_next(out: Path, info: ModelInfo) -> None:
    first, *others = info.all_directions
    say(f"next: {translate_command([out], first.name if others else None)}")


def print_warnings(chosen: "ChosenWeights") -> None:
    for warning in chosen.warnings:
        say(f"warning: {warning}", file=sys.stderr)


def choose(arguments: argparse.Namespace, count: int | None) -> "ChosenWeights":
    from dist_transformer.averaging.choice import choose_weights

    rule = {"last": count} if arguments.best is None else {"best": count}
    return choose_weights(arguments.run_dir, **rule, every=arguments.every, by=arguments.by)


def run_sweep(arguments: argparse.Namespace, world: World) -> None:
    from dist_transformer.averaging.sweep import DevSet, sweep, validation_text
    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.distributed import error_of_all, on_all_ranks, rank
    from dist_transformer.runtime.process_group import process_group

    counts = parse_counts(arguments.sweep)

    def check_files() -> None:
        refuse_other_content(arguments.out)
        for count in counts:
            choose(arguments, count)
        # Only the first rank reads the texts.
        for path in (arguments.src, arguments.ref) if world.is_main and arguments.src is not None else ():
            require_readable(path)

    group = process_group(world, device_name=arguments.device, ready=check_files)
    with group as device, error_of_all(world):
        require_agreement(vars(arguments))
        source, reference = arguments.src, arguments.ref
        if source is None:
            source, reference = on_all_ranks(lambda: validation_text(arguments.run_dir, arguments.direction))
        dev = DevSet(
            source=source,
            reference=reference,
            settings=beam_settings(arguments),
            precision=agreed_precision(arguments.precision, device),
            max_batch_tokens=arguments.batch_tokens,
            direction=arguments.direction,
            tags=None if arguments.tag is None else tuple(arguments.tag),
        )
        report = print_candidate if world.is_main else lambda _: None
        result = sweep(counts, partial(choose, arguments), dev, device, report)
        on_all_ranks(lambda: write_best(result, arguments.out) if rank() == 0 else None)


def print_candidate(candidate: "Candidate") -> None:
    """Print a candidate's score as soon as it is known."""
    print_warnings(candidate.chosen)
    say(f"N = {candidate.count}: {candidate.bleu:.2f} BLEU, {candidate.evaluation.seconds:.0f} s", file=sys.stderr)


def write_best(result: "Sweep", out: Path) -> None:
    """Write the table and the best mean."""
    # The table is printed first, so that a full disk does not lose the results.

    from dist_transformer.averaging.mean import average
    from dist_transformer.averaging.sweep import write_sweep

    best = result.best
    try:
        say(result.table())
    finally:
        # A standard output that is full does not lose them either.
        write_sweep(result, out)
        info = average(best.chosen.paths, out, notes=[f"Chosen: {best.chosen.how}", result.note()])
    say(f"averaged {best.count} set(s) of weights: {out}")
    say_next(out, info)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, shares_work=True, rules=_RULES)
    add_folder(parser, "--run-dir", "RUN", "run folder")
    parser.add_argument("--last", type=int, metavar="N", help="average the newest N weight files")
    parser.add_argument(
        "--every", type=float, metavar="MINUTES", help="with --last or --sweep: minutes of training between files"
    )
    parser.add_argument(
        "--best",
        nargs="?",
        const=_NO_NUMBER,
        metavar="N",
        help="average the N weight files with the best validation scores; among equal scores the earlier file wins; "
        "with --sweep, leave N out",
    )
    parser.add_argument(
        "--by",
        choices=MEASURES,
        help="score for --best: nll, lowest loss per target token without label smoothing; bleu or chrf, highest score "
        "(0 to 100) of the translated validation sentences; ter, lowest; command, highest score of the run's "
        "validation_command (default: the run's best_by)",
    )
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", metavar="A", help="weight files, checkpoints or model folders"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder to write")
    group = parser.add_argument_group("with --sweep")
    group.add_argument("--sweep", metavar="N,N,…", help="numbers of weight files to average and compare")
    group.add_argument("--src", type=Path, metavar="F", help="dev set: source text, one sentence per line")
    text = "dev set: raw reference text, line by line (default: the validation text of the run's data folder)"
    group.add_argument("--ref", type=Path, metavar="F", help=text)
    add_direction_options(group)
    add_decoding_options(group)
    add_device_option(group, several_processes=True)
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None or arguments.run_dir is not None:
        arguments.run_dir = folder_of(parser, arguments, "--run-dir")
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together. Except for a sweep, convert `--last` and `--best` to numbers."""
    by_best = arguments.best is not None
    given = (arguments.last, arguments.best if arguments.sweep is None else arguments.sweep, arguments.checkpoints)
    if sum(value is not None for value in given) > 1:
        raise UserError("--last, --best, --sweep and --checkpoints exclude each other: pass at most one of them")
    if (arguments.run_dir is None) == (arguments.checkpoints is None):
        raise UserError(
            "pass either --run-dir or --checkpoints; --last, --best and --sweep choose among the files of a run"
        )
    if arguments.every is not None:
        if arguments.last is None and (by_best or arguments.sweep is None):
            raise UserError("--every works only with --last or a --sweep of the last files: leave --every out")
        if not 0 < arguments.every < float("inf"):
            raise UserError(f"--every is {arguments.every}: it must be a number of minutes above 0")
    if (arguments.src is None) != (arguments.ref is None) or (arguments.sweep is None and arguments.src is not None):
        raise UserError("--src and --ref are the dev set of --sweep: pass both with it, or neither")
    if by_best and arguments.sweep is not None and arguments.best != _NO_NUMBER:
        raise UserError(f"--best {arguments.best} with --sweep has two numbers: leave that of --best out")
    if arguments.sweep is None and arguments.checkpoints is None:
        arguments.last, arguments.best = (
            None if value is None else parse_count(flag, str(value))
            for flag, value in (("--last", arguments.last), ("--best", arguments.best))
        )


def parse_counts(text: str) -> list[int]:
    return [parse_count("--sweep", number) for number in text.split(",")]


def parse_count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        example = "; separate several by commas" if flag == "--sweep" else ""
        raise UserError(f"{flag} is {text}: it must be a whole number above 0{example}")
    return int(text)
