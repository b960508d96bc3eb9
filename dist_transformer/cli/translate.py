"""Translate text line by line: standard input to standard output, or files to one file.

dist-transformer translate --model MODEL < input.txt > output.txt

dist-transformer translate --model MODEL --input mono.en.gz --output mono.de

A blank line gives a blank line. A line of several sentences is split at the ends of its sentences: always, if less than
2% of the training's lines had several, and otherwise if it has more tokens than any of them (--split-over changes
this). A line with more tokens than the model has positions is also split where the limit is reached. The parts are
translated one by one and joined: with a space, or without one next to Chinese and Japanese characters. Standard error
tells how many lines were split, and how many translations were cut at the maximum length (--max-extra-tokens).

Files may be compressed (.gz, .xz, .bz2, .zst). They are read one after the other into one output, as by cat. The
command runs in one process, with --processes N, or under a launcher (deepspeed, torchrun, srun, mpirun); the output is
the same. Finished parts are kept in OUT.parts. After an interruption, the same command resumes; other settings are
refused. OUT appears when it is complete.

With --prefix FILE the translation of line i begins with line i of FILE, as the vocabulary normalizes it; an empty line
is no prefix. A prefix may end inside a word. A line whose prefix has several sentences is translated as a whole.

With --nbest K every line gives its K best translations, best first. The score is log p / ((5 + length) / 6)^penalty;
input lines are numbered from 0. For a split line, the k-th translation joins the k-th of each part, and its score is
their mean. Formats:

  moses   NUMBER ||| TEXT ||| SCORE, one line per translation
  tsv     NUMBER, RANK (from 0), SCORE, TEXT, separated by tabs
  jsonl   {"line": NUMBER,
           "translations": [{"text": TEXT, "score": SCORE}, ...]}, and "cut": true after a score if it was cut

Two ways to make text for back-translation: --sample draws each token from the model; --noise drops words of the best
translation (1 in 10), replaces others by <BLANK> (1 in 10), and moves words by up to 3 positions. Random choices depend
on --seed and the line's number only.

--top-k, --top-p and --epsilon leave out improbable tokens of a sample. --sample --nbest N writes N samples of each
line, in the order in which they were drawn; with --distinct, samples whose text was drawn before are replaced by
further ones, and a line has fewer than N if 10 N samples have fewer texts.

--closest-to FILE writes, of all hypotheses of the beam, the one with the best sentence BLEU against line i of FILE. If
FILE has the references, this is the text from which a student learns (Kim and Rush 2016).

--mbr N draws N samples of each line and writes the one with the best expected utility (minimum Bayes risk): the mean of
its chrF, or BLEU, with all samples as references. With --nbest K, the K best texts, with the utility as score.

At a terminal, each line is translated as you type it; Ctrl-D ends.
"""

import argparse
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import leaving_at_sigterm
from dist_transformer.cli.parser import make_parser
from dist_transformer.config.stated import FlagRules
from dist_transformer.data.text.files import expand
from dist_transformer.data.text.lines import decode_lines, read_stream, require_readable
from dist_transformer.evaluation.closest import Closest
from dist_transformer.evaluation.languages import wrong_side
from dist_transformer.inference.files.formats import FORMATS, OutputFormat
from dist_transformer.inference.files.parts import parts_of
from dist_transformer.inference.loading import load_joint, read_joint_info
from dist_transformer.inference.options import (
    MBR_CONFLICTS,
    add_decoding_options,
    add_device_option,
    add_direction_options,
    add_mbr_options,
    add_models_option,
    add_split_option,
    agreed_precision,
    as_arithmetic,
    beam_settings,
    choose_split_over,
    mbr_settings,
)
from dist_transformer.model_folder import ModelInfo
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    import torch

    from dist_transformer.inference.beam import BeamSettings
    from dist_transformer.inference.files.corpus import Translate
    from dist_transformer.inference.sampling.mbr import MbrSettings
    from dist_transformer.inference.sampling.sampling import SamplingSettings
    from dist_transformer.inference.translator import Translation, Translator

# Lines that are in memory at a time; batches are formed from them.
_CHUNK_LINES = {"cpu": 2_000, "cuda": 10_000}
_INPUT = "standard input"
# Finished ranks wait for the others this long. A rank that dies is noticed by the launcher.
_LONGEST_WAIT_MINUTES = 7 * 24 * 60.0
# Flags for what to translate and where to write it; all other flags affect the translations.
_PLACES = ("model", "input", "output", "device", "local_rank")
_RULES = FlagRules(
    needs={
        "--input": "--output",
        "--output": "--input",
        "--format": "--nbest",
        "--top-k --top-p --temperature --distinct": "--sample",
        "--distinct": "--nbest",
        # Only the scores of samples depend on it.
        "--length-penalty with --sample": "--nbest",
        "--epsilon": "--sample --mbr",
        "--utility": "--mbr",
        "--seed": "--sample --mbr --noise",
    },
    conflicts={
        **MBR_CONFLICTS,
        ("--beam", "--sample"): "which draws samples without a search",
        ("--sample", "--mbr"): "which draws samples of its own",
        ("--noise", "--sample --mbr --nbest"): "because noise is for the best translation of a search",
        ("--prefix", "--noise"): "which changes its words",
        ("--closest-to", "--nbest --sample --noise --mbr"): "because it chooses one of the hypotheses of a beam",
    },
)
# Files with a line for each input line.
_BESIDE = ("prefix", "closest_to")


def main() -> None:
    arguments = parse_arguments()
    world = read_world()
    if world.size == 1:
        # Early, because the imports below take seconds.
        _require_fitting(arguments, world)
        if arguments.input is None:
            translate_stream(arguments)
            return
        check_model(arguments)

    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.distributed import error_of_all
    from dist_transformer.runtime.process_group import process_group

    group = process_group(
        world,
        device_name=arguments.device,
        timeout_minutes=_LONGEST_WAIT_MINUTES,
        ready=lambda: check_files(arguments, world),
    )
    with resumable(world), group as device, error_of_all(world):
        require_agreement(vars(arguments))
        translate_files(arguments, device)


@contextmanager
def resumable(world: World) -> Iterator[None]:
    """Say how to resume when Ctrl-C or SIGTERM ends the block.

    A rank that waits for others in a collective runs no handler of Python. So SIGTERM ends one of several at once.
    """
    try:
        with leaving_at_sigterm() if world.size == 1 else nullcontext():
            yield
    except (KeyboardInterrupt, SystemExit) as stop:
        status = 128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.code
        if status in (128 + signal.SIGINT, 128 + signal.SIGTERM) and world.is_main:
            print("interrupted: run the same command again to resume", file=sys.stderr, flush=True)
        raise SystemExit(status) from None


def check_files(arguments: argparse.Namespace, world: World) -> None:
    """Check what one rank can check alone: flags, places, the model's description, and that the inputs can be read."""
    from dist_transformer.inference.files.corpus import require_free

    _require_fitting(arguments, world)
    decoding_settings(arguments, check_model(arguments))
    chunk_lines(arguments, "cpu")
    require_free(arguments.output)
    for path in (*expand(arguments.input, "--input"), *files_beside(arguments).values()):
        require_readable(path)


def check_model(arguments: argparse.Namespace) -> ModelInfo:
    return read_joint_info(arguments.model, arguments.direction, arguments.tag)


def translate_stream(arguments: argparse.Namespace) -> None:
    """Translate standard input to standard output."""
    if sys.stdin is None:
        raise UserError("standard input is closed: redirect a text to it with < FILE, or pass --input and --output")
    output = output_format(arguments)
    # Early, because the imports below take seconds.
    check_model(arguments)
    for path in files_beside(arguments).values():
        require_readable(path)

    from dist_transformer.inference.files.corpus import aligned
    from dist_transformer.inference.translator import count_notes
    from dist_transformer.runtime.device import find_device

    device = find_device(arguments.device)
    translator, info = load_translator(arguments, device, agreed_precision(arguments.precision, device))
    at_terminal = sys.stdin.isatty()
    prompt = f"{info.direction.name}> " if at_terminal and sys.stderr.isatty() else ""
    lines = decode_lines(typed_lines(prompt), _INPUT) if at_terminal else read_stream(sys.stdin.buffer, _INPUT)
    first, lines_at_once = 0, 1 if at_terminal else chunk_lines(arguments, device.type)
    notes = Counter[str]()
    beside, translate = files_beside(arguments), translation_of(arguments, translator, info)
    rows = aligned(lines, beside)
    while chunk := list(itertools.islice(rows, lines_at_once)):
        sources, *others = map(list, zip(*chunk, strict=True))
        if first == 0:
            warn_of_wrong_side(sources, translator, info)
        translations = translate(sources, first, dict(zip(beside, others, strict=True)))
        texts = [output.text_of(number, translation) for number, translation in enumerate(translations, first)]
        sys.stdout.buffer.write("".join(texts).encode("utf-8"))
        sys.stdout.buffer.flush()
        notes += count_notes(translations)
        if at_terminal:
            say_notes(notes)
            notes.clear()
        first += len(chunk)
    say_notes(notes)


def translate_files(arguments: argparse.Namespace, device: "torch.device") -> None:
    """Translate the inputs to the output. Collective: every rank must call it."""
    from dist_transformer.inference.files.corpus import CorpusJob, translate_corpus
    from dist_transformer.inference.translator import count_notes
    from dist_transformer.runtime.distributed import gather_objects, on_all_ranks

    output, lines_at_once = output_format(arguments), chunk_lines(arguments, device.type)
    precision = agreed_precision(arguments.precision, device)
    translator, info = on_all_ranks(lambda: load_translator(arguments, device, precision))
    how = {name: value for name, value in vars(arguments).items() if name not in _PLACES}
    # Their texts are a part of the inputs.
    how |= {name: vars(arguments)[name] is not None for name in _BESIDE}
    # Settings that the device decides are recorded under their own flags.
    how |= {"batch_tokens": translator.max_batch_tokens, "device": device.type, "chunk_lines": lines_at_once}
    how["precision"] = precision
    job = CorpusJob(
        models=arguments.model,
        inputs=on_all_ranks(lambda: expand(arguments.input, "--input")),
        output=arguments.output,
        chunk_lines=lines_at_once,
        settings={f"--{name.replace('_', '-')}": value for name, value in how.items()},
        beside=files_beside(arguments),
        one_line_each=output.one_line_each,
    )
    notes = Counter[str]()

    translated = translation_of(arguments, translator, info)

    def translate(lines: list[str], first: int, beside: dict[str, list[str]]) -> "Sequence[Translation]":
        if first == 0:
            warn_of_wrong_side(lines, translator, info, job.inputs[0])
        translations = translated(lines, first, beside)
        notes.update(count_notes(translations))
        return translations

    translate_corpus(job, translate, output.text_of)
    say_notes(sum(map(Counter[str], gather_objects(notes)), Counter[str]()))


def files_beside(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the files with a line for each input line, by their flags."""
    files = {f"--{name.replace('_', '-')}": vars(arguments)[name] for name in _BESIDE}
    return {flag: file for flag, file in files.items() if file is not None}


def translation_of(arguments: argparse.Namespace, translator: "Translator", info: "ModelInfo") -> "Translate":
    """Return the translation of lines with those of the files beside them."""
    choose: Closest | None = None
    if arguments.closest_to is not None:
        choose = Closest(info.target_language, lowercase=translator.tokenizer.target.lowercase)

    def translate(lines: list[str], first: int, beside: dict[str, list[str]]) -> "Sequence[Translation]":
        found = translator.translate(lines, first=first, prefixes=beside.get("--prefix"))
        return found if choose is None else list(map(choose, found, beside["--closest-to"]))

    return translate


def warn_of_wrong_side(lines: list[str], translator: "Translator", info: "ModelInfo", file: Path | None = None) -> None:
    """Warn if the first lines are in the language that the model writes."""
    flags = "the text, and --direction"
    if caution := wrong_side(info, translator.tokenizer, sources=lines, source_file=file, flags=flags):
        say(f"warning: {caution}", file=sys.stderr)


def say_notes(notes: Counter[str]) -> None:
    """Tell, on the first rank, how many lines were not translated as they stand."""
    from dist_transformer.inference.translator import noted
    from dist_transformer.runtime.distributed import rank

    if rank() == 0:
        for note in noted(notes):
            say(f"note: {note}", file=sys.stderr)


def load_translator(
    arguments: argparse.Namespace, device: "torch.device", precision: str
) -> "tuple[Translator, ModelInfo]":
    from dist_transformer.inference.translator import Translator

    search, sampling, mbr = decoding_settings(arguments, check_model(arguments))
    way = {"direction": arguments.direction, "tags": arguments.tag}
    model, tokenizer, info = load_joint(arguments.model, device, *as_arithmetic(precision, device), **way)
    translator = Translator(
        model,
        tokenizer,
        device,
        search,
        sampling=sampling,
        mbr=mbr,
        tags=info.direction.tags,
        max_batch_tokens=arguments.batch_tokens,
        split_over=choose_split_over(arguments.split_over, info.split_over),
        longest_trained=info.longest_source,
    )
    return translator, info


def decoding_settings(
    arguments: argparse.Namespace, info: ModelInfo
) -> "tuple[BeamSettings, SamplingSettings | None, MbrSettings | None]":
    is_search = not arguments.sample and arguments.mbr is None
    several = arguments.beam if arguments.closest_to is not None else arguments.nbest
    search = beam_settings(arguments, nbest=several if is_search and several is not None else 1)
    mbr = mbr_settings(arguments, language=info.target_language, nbest=arguments.nbest)
    return search, sampling_settings(arguments), mbr


def sampling_settings(arguments: argparse.Namespace) -> "SamplingSettings | None":
    from dist_transformer.inference.sampling.sampling import SamplingSettings

    if not arguments.sample:
        return None
    return SamplingSettings(
        seed=arguments.seed,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        epsilon=arguments.epsilon,
        temperature=1.0 if arguments.temperature is None else arguments.temperature,
        samples=1 if arguments.nbest is None else arguments.nbest,
        distinct=arguments.distinct,
    )


def output_format(arguments: argparse.Namespace) -> OutputFormat:
    return OutputFormat(
        nbest=None if arguments.nbest is None else arguments.format or FORMATS[0],
        noise_seed=arguments.seed if arguments.noise else None,
    )


def chunk_lines(arguments: argparse.Namespace, device_type: str) -> int:
    lines = _CHUNK_LINES[device_type] if arguments.chunk_lines is None else arguments.chunk_lines
    if lines < 1:
        raise UserError(f"--chunk-lines is {lines}: it must be 1 or more")
    return int(lines)


def _require_fitting(arguments: argparse.Namespace, world: World) -> None:
    """Refuse values of flags that do not go together, or do not fit the number of processes."""
    if arguments.output is not None:
        parts = parts_of(arguments.output)
        inputs = (*arguments.model, *files_beside(arguments).values(), *expand(arguments.input, "--input"))
        claim_file(arguments.output, "--output", inputs, beside=[parts])
    if arguments.input is None and world.size > 1:
        raise UserError(f"{world.size} processes cannot share standard input: pass --input and --output, or start one")


def typed_lines(prompt: str) -> Iterator[bytes]:
    """Read lines as they are typed, each after a prompt on standard error."""
    if prompt:
        print("Type one sentence per line. Ctrl-D ends.", file=sys.stderr)
    while True:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            break
        yield line
    if prompt:
        # The shell's prompt starts on a new line.
        print(file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, shares_work=True, rules=_RULES)
    add_models_option(parser)
    parser.add_argument("--input", type=Path, nargs="+", metavar="F", help="text files, or patterns (default: stdin)")
    parser.add_argument("--output", type=Path, metavar="OUT", help="one file for all inputs (default: stdout)")
    add_direction_options(parser)
    add_decoding_options(parser)
    add_split_option(parser, default="see above")
    parser.add_argument("--prefix", type=Path, metavar="F", help="beginnings of the translations, line by line")
    parser.add_argument("--closest-to", type=Path, metavar="F", help="write the hypothesis closest to F, line by line")
    parser.add_argument("--nbest", type=int, metavar="K", help="write the K best (default: the best, as plain text)")
    parser.add_argument("--format", choices=FORMATS, help="format of --nbest (default moses)")
    parser.add_argument("--sample", action="store_true", help="draw each token from the model, without search")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens (default: all)")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the most probable tokens of sum P")
    parser.add_argument("--distinct", action="store_true", help="write no text twice among --nbest samples of a line")
    add_mbr_options(parser)
    parser.add_argument("--temperature", type=float, metavar="T", help="sample from p^(1/T) (default 1)")
    parser.add_argument("--noise", action="store_true", help="drop, blank and move words of the best translation")
    defaults = f"default {_CHUNK_LINES['cpu']} on a CPU, {_CHUNK_LINES['cuda']} on a GPU"
    parser.add_argument(
        "--chunk-lines", type=int, metavar="N", help=f"lines that are translated and kept at a time ({defaults})"
    )
    add_device_option(parser, several_processes=True)
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.closest_to is not None and arguments.beam == 1:
        raise UserError("--closest-to has no effect with --beam 1, which has one hypothesis: set --beam to 2 or more")
    return arguments
