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
  jsonl   {"line": NUMBER, "translations": [T, ...]}, where T is
          {"text": TEXT, "score": SCORE}, with "cut": true if it was cut

--alignment adds which words of the line, counted from 0 between white space, became which words of the translation:
pairs such as 0-0 1-2, in a further field, or as "alignment" in JSON.

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

import itertools
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dist_transformer.base.errors import UserError, caution, say
from dist_transformer.base.files import leaving_at_sigterm, sha256_of
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.plain import to_plain
from dist_transformer.config.schema import FLAT, FlagRules, require_positive, settings_of, values_of
from dist_transformer.data.text.lines import decode_lines, read_stream
from dist_transformer.data.text.pairs import expand
from dist_transformer.evaluation.bleu import Closest
from dist_transformer.evaluation.languages import warn_of_wrong_side
from dist_transformer.inference.decoding import RULES, Decoding, Loading
from dist_transformer.inference.files.formats import Format, OutputFormat
from dist_transformer.inference.files.parts import parts_of, require_free
from dist_transformer.inference.loading import load_joint, require_inputs, with_agreed_precision
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.agreement import joined
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    import torch

    from dist_transformer.inference.files.corpus import Translate
    from dist_transformer.inference.translation import Translation
    from dist_transformer.inference.translator import Translator
    from dist_transformer.model_folder import ModelInfo

# Lines that are in memory at a time; batches are formed from them.
_CHUNK_LINES = {"cpu": 2_000, "cuda": 10_000}
# Finished ranks wait for the others this long. A rank that dies is noticed by the launcher.
_LONGEST_WAIT_MINUTES = 7 * 24 * 60.0
# Settings for what to translate and where to write it; all others affect the translations.
_PLACES = ("model", "input", "output")
_COMMON = ("model", "input", "output", "direction", "precision", "device", "beam", "nbest", "prefix", "sample", "mbr")
_RULES = FlagRules(
    needs={
        **RULES.needs,
        "--input": "--output",
        "--output": "--input",
        "--format": "--nbest",
        "--seed": "--sample --mbr --noise",
    },
    conflicts={
        **RULES.conflicts,
        ("--noise", "--sample --mbr --nbest"): "because noise is for the best translation of a search",
        ("--markup", "--prefix --closest-to --noise"): "which are for text without tags",
        ("--prefix", "--noise"): "which changes its words",
        ("--closest-to", "--nbest --sample --noise --mbr"): "because it chooses one of the hypotheses of a beam",
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslateSettings:
    """Text and its translations."""

    model: tuple[Path, ...]
    """Model folder; several are an ensemble: the mean of their probabilities, with shares such as A:2 B:1."""
    input: tuple[Path, ...] = ()
    """Text files, or patterns; default: standard input."""
    output: Path | None = None
    """One file for all inputs; default: standard output."""
    prefix: Path | None = None
    """File with the beginnings of the translations, line by line."""
    closest_to: Path | None = None
    """Write the hypothesis that is closest to the line of this file."""
    format: Format = "moses"
    """Format of nbest."""
    noise: bool = False
    """Drop, blank and move words of the best translation."""
    chunk_lines: int | None = None
    """Lines that are translated and kept at a time; default: 2000 on a CPU, 10000 on a GPU."""
    loading: Annotated[Loading, FLAT]
    decoding: Annotated[Decoding, FLAT]

    def __post_init__(self) -> None:
        require_positive(self, "chunk_lines")
        if self.closest_to is not None and self.decoding.beam == 1:
            raise UserError("closest_to has no effect with a beam of 1, which has one hypothesis: raise beam")

    @property
    def beside(self) -> dict[str, Path]:
        """Files with a line for each input line, by their flags."""
        files = {"--prefix": self.prefix, "--closest-to": self.closest_to}
        return {flag: file for flag, file in files.items() if file is not None}

    @property
    def output_format(self) -> OutputFormat:
        nbest = None if self.decoding.nbest is None else self.format
        return OutputFormat(nbest=nbest, noise_seed=self.decoding.seed if self.noise else None)


def main() -> None:
    settings, world = parse_arguments(), read_world()
    if settings.output is None:
        translate_stream(settings, world)
        return
    check = partial(check_files, settings)
    group = joined(world, values_of(settings), check, timeout_minutes=_LONGEST_WAIT_MINUTES)
    with resumable(world), group as device:
        translate_files(settings, settings.output, device)


def parse_arguments() -> TranslateSettings:
    page = Page(text=__doc__, common=_COMMON, taken=("--processes", "--import"))
    return parse(TranslateSettings, page, rules=_RULES)


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


def check_files(settings: TranslateSettings) -> None:
    """Check what one rank can check alone: places, the model's description, and that the texts can be read."""
    texts = [*settings.beside.values(), *filter(None, [settings.decoding.terms]), *expand(settings.input, "--input")]
    if settings.output is not None:
        beside = [parts_of(settings.output)]
        claim_file(settings.output, "--output", (*settings.model, *texts), beside=beside)
        require_free(settings.output)
    require_inputs(settings.model, settings.loading, texts)


def translate_stream(settings: TranslateSettings, world: World) -> None:
    """Translate standard input to standard output."""
    if world.size > 1:
        raise UserError(f"{world.size} processes cannot share standard input: pass --input and --output, or start one")
    if sys.stdin is None:
        raise UserError("standard input is closed: redirect a text to it with < FILE, or pass --input and --output")
    # Early, because the imports below take seconds.
    check_files(settings)

    from dist_transformer.inference.files.corpus import aligned
    from dist_transformer.runtime.device import find_device

    device = find_device(settings.loading.device)
    translator, info = load_translator(settings, with_agreed_precision(settings.loading, device), device)
    at_terminal = sys.stdin.isatty()
    prompt = f"{info.direction.name}> " if at_terminal and sys.stderr.isatty() else ""
    typed = decode_lines(typed_lines(prompt), "standard input") if at_terminal else None
    lines = typed or read_stream(sys.stdin.buffer, "standard input")
    first, lines_at_once = 0, 1 if at_terminal else settings.chunk_lines or _CHUNK_LINES[device.type]
    notes = Counter[str]()
    translate = translation_of(settings, translator, info, notes)
    rows = aligned(lines, settings.beside)
    while chunk := list(itertools.islice(rows, lines_at_once)):
        texts = map(settings.output_format.text_of, itertools.count(first), translate(chunk, first))
        sys.stdout.buffer.write("".join(texts).encode("utf-8"))
        sys.stdout.buffer.flush()
        if at_terminal:
            say_notes(notes)
            notes.clear()
        first += len(chunk)
    say_notes(notes)


def translate_files(settings: TranslateSettings, output: Path, device: "torch.device") -> None:
    """Translate the inputs to the output. Collective: every rank must call it."""
    from dist_transformer.inference.files.corpus import CorpusJob, translate_corpus
    from dist_transformer.runtime.distributed import gather_objects, on_all_ranks

    loading, lines_at_once = with_agreed_precision(settings.loading, device), settings.chunk_lines
    translator, info = on_all_ranks(lambda: load_translator(settings, loading, device))
    # What the device decides is recorded under its own flag, and texts beside the inputs are a part of these.
    how = to_plain(settings) | {
        "precision": loading.precision,
        "device": device.type,
        "batch_tokens": translator.batch_tokens,
        "chunk_lines": lines_at_once or _CHUNK_LINES[device.type],
        "prefix": settings.prefix is not None,
        "closest_to": settings.closest_to is not None,
        "terms": settings.decoding.terms and sha256_of(settings.decoding.terms),
    }
    job = CorpusJob(
        models=settings.model,
        inputs=on_all_ranks(lambda: expand(settings.input, "--input")),
        output=output,
        chunk_lines=how["chunk_lines"],
        settings={each.flag: how[each.name] for each in settings_of(TranslateSettings) if each.name not in _PLACES},
        beside=settings.beside,
    )
    notes = Counter[str]()
    translate = translation_of(settings, translator, info, notes, job.inputs[0])
    translate_corpus(job, translate, settings.output_format.text_of)
    say_notes(sum(map(Counter[str], gather_objects(notes)), Counter[str]()))


def load_translator(
    settings: TranslateSettings, loading: Loading, device: "torch.device"
) -> "tuple[Translator, ModelInfo]":
    from dist_transformer.inference.translator import Translator

    decoding = settings.decoding
    if settings.closest_to is not None:
        decoding = replace(decoding, nbest=decoding.beam)
    model, tokenizer, info = load_joint(settings.model, loading, device)
    return Translator(model, tokenizer, device, decoding, info), info


def translation_of(
    settings: TranslateSettings,
    translator: "Translator",
    info: "ModelInfo",
    notes: Counter[str],
    file: Path | None = None,
) -> "Translate":
    """Return the translation of rows: a line, and those of the files beside it.

    Warn if the first lines are in the language that the model writes.

    Args:
        notes: counts the notes of the translations.
        file: first input.
    """
    from dist_transformer.inference.translation import count_notes

    choose: Closest | None = None
    if settings.closest_to is not None:
        choose = Closest(info.target_language, lowercase=translator.tokenizer.target.lowercase)

    def translate(rows: Sequence[Sequence[str]], first: int) -> "Sequence[Translation]":
        lines, *others = map(list, zip(*rows, strict=True))
        beside = dict(zip(settings.beside, others, strict=True))
        if first == 0:
            warn_of_wrong_side(caution, info, translator.tokenizer, "the text, and --direction", (lines, file))
        found = translator.translate(lines, first=first, prefixes=beside.get("--prefix"))
        if choose is not None:
            found = list(map(choose, found, beside["--closest-to"]))
        notes.update(count_notes(found))
        return found

    return translate


def say_notes(notes: Counter[str]) -> None:
    """Tell, on the first rank, how many lines were not translated as they stand."""
    from dist_transformer.inference.translation import noted
    from dist_transformer.runtime.distributed import rank

    if rank() == 0:
        for note in noted(notes):
            say(f"note: {note}", file=sys.stderr)


def typed_lines(prompt: str) -> Iterator[bytes]:
    """Read lines as they are typed, each after a prompt on standard error."""
    if prompt:
        print("Type one sentence per line. Ctrl-D ends.", file=sys.stderr)

    def read() -> bytes:
        print(prompt, end="", file=sys.stderr, flush=True)
        return sys.stdin.buffer.readline()

    yield from iter(read, b"")
    if prompt:
        # The shell's prompt starts on a new line.
        print(file=sys.stderr)
