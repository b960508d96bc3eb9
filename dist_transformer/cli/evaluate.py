"""Score the translations of a model, or files of translations: BLEU, chrF, chrF++ and TER, with signatures.

dist-transformer evaluate --model MODEL --src test.en --ref test.de --json result.json
dist-transformer evaluate --model MODEL --test-set wmt14/full --direction en-de --json result.json
dist-transformer evaluate --hypotheses ours.de theirs.de --ref test.de --tgt-lang de

Two kinds of BLEU are printed: sacreBLEU on raw text, with case and without; and, as in older papers, BLEU on text
tokenised by the rules of Moses and, for German, with hyphens split. BLEU, chrF and chrF++: 0 to 100, higher is better.
TER: edits per 100 words; it takes about 2 ms per line, and up to 0.2 s if words stand in another order. The `bleu` of
the JSON is sacreBLEU with case, or without case if --lowercase is given or the model's tokenizer lowercases (its data
was prepared with --lowercase). Several files after --ref are several references for each line; every score uses them as
its authors define it.

--test-set takes one of sacreBLEU's test sets (sacrebleu --list) instead of --src and --ref. It is downloaded once, to
~/.sacrebleu or the folder that SACREBLEU names, and the JSON has its name (`test_set`).

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

from functools import partial
from typing import TYPE_CHECKING

from dist_transformer.base.errors import caution, say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import values_of
from dist_transformer.evaluation.compare import compare
from dist_transformer.evaluation.report import hypotheses_file, write_report
from dist_transformer.evaluation.settings import EVALUATE_RULES, EvaluateSettings
from dist_transformer.inference.loading import require_inputs, translate_command
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.agreement import joined
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.evaluation.evaluate import Evaluation


def main() -> None:
    settings = parse_arguments()
    inputs = (*settings.model, settings.src, *settings.hypotheses, *settings.ref)
    beside = [hypotheses_file(settings.json)] if settings.json is not None and settings.model else []
    claim_file(settings.json, "--json", inputs, beside=beside)
    world = read_world()
    if settings.model:
        evaluate_model_folder(settings, world)
    elif world.is_main:
        # One rank is enough: nothing here is a collective.
        score_files(settings)


def parse_arguments() -> EvaluateSettings:
    return parse(EvaluateSettings, Page(text=__doc__, taken=("--processes", "--import")), rules=EVALUATE_RULES)


def evaluate_model_folder(settings: EvaluateSettings, world: World) -> None:
    # Only the first rank reads the texts.
    texts = (settings.src, *settings.ref) if world.is_main else ()
    with joined(world, values_of(settings), partial(require_inputs, settings.model, settings.loading, texts)) as device:
        from dist_transformer.evaluation.evaluate import evaluate, write_evaluation

        evaluation = evaluate(settings, device=device, warn=caution)
    if world.is_main:
        try:
            print_scores(evaluation)
            say(f"next: {translate_command(settings.model, settings.loading)}")
        finally:
            # A standard output that is full does not lose the scores.
            if settings.json is not None:
                write_evaluation(evaluation, settings.json)


def score_files(settings: EvaluateSettings) -> None:
    comparison = compare(
        settings.hypotheses, settings.ref, target_language=settings.tgt_lang, lowercase=settings.lowercase
    )
    try:
        say(f"{comparison.sentences:,} sentences, to {settings.tgt_lang}")
        say(comparison)
    finally:
        if settings.json is not None:
            write_report(comparison.report(), settings.json)


def print_scores(evaluation: "Evaluation") -> None:
    info = evaluation.info
    synthetic = " (SYNTHETIC: the scores say nothing about real text)" if info.synthetic else ""
    say(f"trained on {info.corpus}{synthetic}")
    say(f"{len(evaluation.hypotheses):,} sentences, {info.source_language}-{info.target_language}")
    say(evaluation.scores)
    for note in evaluation.notes:
        say(f"note: {note}")
