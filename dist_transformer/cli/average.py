"""Average weights of a run into a model folder.

dist-transformer average --run-dir RUN --out MODEL
dist-transformer average --run-dir RUN --last 5 --out MODEL
dist-transformer average --run-dir RUN --every 10 --last 20 --out MODEL
dist-transformer average --interpolate BASE:0.5 TUNED:0.5 --out MODEL
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

--interpolate mixes the weights of a model with those of another that was trained from it (--init-from), by shares; such
a mixture usually keeps more of what the first one could do.

--sweep averages the last N weight files for each N (with --best the best N; with --every spaced in time), translates a
dev set with each mean and scores it. It writes the table to OUT.sweep.json and OUT.sweep.md, and the mean with the
highest BLEU to --out; among equal scores the smallest N wins. It runs in one process or under a launcher (deepspeed,
torchrun, srun, mpirun), which shares the decoding; the result is the same.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.averaging.settings import AVERAGE_RULES, AverageSettings
from dist_transformer.base.errors import caution, say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import values_of
from dist_transformer.data.text.lines import require_readable
from dist_transformer.inference.decoding import Loading
from dist_transformer.inference.loading import translate_command
from dist_transformer.model_folder import ModelInfo, refuse_other_content, with_share
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.agreement import joined
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.averaging.sweep import Candidate, Sweep


def main() -> None:
    settings, world = parse_arguments(), read_world()
    named = [with_share(path)[0] for path in settings.interpolate]
    inputs = (settings.run_dir, *settings.checkpoints, *named, settings.src, settings.ref)
    claim_folder(settings.out, "--out", inputs, beside=settings.tables)
    if settings.sweep:
        run_sweep(settings, world)
    # One rank is enough: nothing here is a collective.
    elif world.is_main and settings.interpolate:
        from dist_transformer.averaging.interpolation import interpolate

        info = interpolate(settings.interpolate, settings.out)
        say(f"interpolated {' '.join(map(str, settings.interpolate))}: {settings.out}")
        say_next(settings.out, info)
    elif world.is_main:
        average_once(settings)


def parse_arguments() -> AverageSettings:
    return parse(AverageSettings, Page(text=__doc__, taken=("--processes", "--import")), rules=AVERAGE_RULES)


def average_once(settings: AverageSettings) -> None:
    from tqdm import tqdm

    from dist_transformer.averaging.mean import write_mean
    from dist_transformer.averaging.sweep import choose_better

    with tqdm(bar_format="{desc}", desc="comparing with the newest weight file", disable=None, leave=False):
        chosen = choose_better(settings)
    for warning in chosen.warnings:
        caution(warning)
    if chosen.how:
        say(f"chosen: {chosen.how}")
    info = write_mean(chosen, settings.out)
    say(f"averaged {len(chosen.paths)} set(s) of weights, steps {', '.join(map(str, info.steps))}: {settings.out}")
    say_next(settings.out, info)


def say_next(out: Path, info: ModelInfo) -> None:
    first, *others = info.all_directions
    say(f"next: {translate_command([out], Loading(direction=first.name if others else None))}")


def run_sweep(settings: AverageSettings, world: World) -> None:
    from dist_transformer.averaging.sweep import choose, sweep
    from dist_transformer.runtime.distributed import by_main

    def check() -> None:
        refuse_other_content(settings.out)
        for count in settings.sweep:
            choose(settings, count)
        # Only the first rank reads the texts.
        for path in filter(None, (settings.src, settings.ref)) if world.is_main else ():
            require_readable(path)

    with joined(world, values_of(settings), check) as device:
        result = sweep(settings, device, print_candidate if world.is_main else lambda _: None)
        by_main(lambda: print_best(result))


def print_candidate(candidate: "Candidate") -> None:
    """Print a candidate's score as soon as it is known."""
    for warning in candidate.chosen.warnings:
        caution(warning)
    say(f"N = {candidate.count}: {candidate.bleu:.2f} BLEU, {candidate.evaluation.seconds:.0f} s", file=sys.stderr)


def print_best(result: "Sweep") -> None:
    from dist_transformer.averaging.sweep import write_best

    try:
        # The table is printed first, so that a full disk does not lose the results.
        say(result.table())
    finally:
        # A standard output that is full does not lose them either.
        info = write_best(result)
    say(f"averaged {result.best.count} set(s) of weights: {result.settings.out}")
    say_next(result.settings.out, info)
