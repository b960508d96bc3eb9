"""Convert a model for another library: Hugging Face's transformers, or CTranslate2.

dist-transformer export --model MODEL --to hf --src dev.en --ref dev.de --out OUT
dist-transformer export --model MODEL --to ctranslate2 --quantize int8 --src dev.en --ref dev.de --out OUT

--to hf: AutoModelForSeq2SeqLM and AutoTokenizer load the folder, with transformers 4.57 and later or 5. --to
ctranslate2: ctranslate2.Translator loads it; its tokens are those of tokenizer.json.

The library loads the folder, and its results are compared with those of MODEL in fp32, on 1,000 random lines of the dev
text and on hostile strings. The folder is written only if token ids and the texts of ids are the same,
log-probabilities of given tokens differ by at most 1e-4 (more if logits are large), and 99.5% of greedy outputs are
identical. 500 of the lines are translated by beam search, and 200 of these choose the length penalty of the library's
search. If BLEU then differs by more than 0.2, or if there are fewer than 1,000 lines, the row is a warning, which is
also in the model card. A quantised model may lose at most 0.5 BLEU. Each check is one row of stdout. If one fails, the
exit status is 1 and nothing is written.

Needs transformers or ctranslate2: in the clone, pip install -e '.[export]'.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dist_transformer.base.checks import Check, check_table
from dist_transformer.base.errors import say
from dist_transformer.base.files import write_file
from dist_transformer.cli.parser import make_parser
from dist_transformer.evaluation.report import hypotheses_file
from dist_transformer.export.libraries import LIBRARIES, QUANTIZATIONS
from dist_transformer.inference.options import add_device_option, add_direction_options, add_model_option
from dist_transformer.model_folder import read_model_info
from dist_transformer.run.outputs import claim_file, claim_folder

if TYPE_CHECKING:
    import torch

    from dist_transformer.export.export import Export

_BAR = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed}<{remaining}"


def main() -> None:
    arguments = parse_arguments()
    inputs = (arguments.model, arguments.src, arguments.ref)
    claim_folder(arguments.out, "--out", inputs)
    if arguments.json is not None:
        claim_file(arguments.json, "--json", (*inputs, arguments.out), beside=[hypotheses_file(arguments.json)])
    # Early, because the imports below take seconds.
    read_model_info(arguments.model)

    from dist_transformer.export.export import ExportSettings, export

    settings = ExportSettings(
        model=arguments.model,
        to=arguments.to,
        out=arguments.out,
        source=arguments.src,
        reference=arguments.ref,
        direction=arguments.direction,
        tags=None if arguments.tag is None else tuple(arguments.tag),
        quantization=arguments.quantize,
        name=arguments.name,
        license=arguments.license,
    )
    with comparing(arguments.device) as (device, bar):
        made = export(settings, device, progress=bar, show=show_checks)
    if settings.license is None:
        print("note: the card states no license; --license adds one, such as cc-by-4.0")
    print(f"written: {settings.out}, for {LIBRARIES[settings.to]}; {settings.out / 'README.md'} shows how to load it")
    if arguments.json is not None:
        write_json(made, arguments.json)


@contextmanager
def comparing(name: str | None) -> "Iterator[tuple[torch.device, Bar]]":
    """Give the device of this name, ready for other libraries, and a bar for the comparison with one."""
    from dist_transformer.runtime.device import find_device

    device = find_device(name)
    if device.type == "cpu":
        # transformers imports DeepSpeed if it is installed. DeepSpeed would look for an accelerator, and warn.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tqdm(bar_format=_BAR, disable=None, leave=False) as bar:
        yield device, Bar(bar)


def show_checks(checks: "Sequence[Check]") -> None:
    with tqdm.external_write_mode():
        print(check_table(checks), flush=True)


class Bar:
    """Progress on standard error: a bar if it is a terminal, otherwise a line per stage."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.bar = bar

    def say(self, line: str) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            say(line, file=sys.stderr)

    def begin(self, total: int) -> None:
        self.bar.reset(total)

    def stage(self, name: str) -> None:
        self.bar.set_description_str(name)
        if self.bar.disable:
            say(name, file=sys.stderr)

    def advance(self, units: int) -> None:
        self.bar.update(units)


def write_json(made: "Export", file: Path) -> None:
    """Write the results to `file`, and the exported model's outputs, one per line, to a file in the same folder."""
    outputs = hypotheses_file(file)
    write_file(outputs, "".join(f"{' '.join(line.splitlines())}\n" for line in made.outputs))
    report = {**made.report(), "hypotheses": str(outputs)}
    write_file(file, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model_option(parser)
    parser.add_argument("--to", choices=tuple(LIBRARIES), required=True, help="library that will load it")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        metavar="Q",
        help=f"with --to ctranslate2: {', '.join(QUANTIZATIONS)} (default: fp32)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    text = (
        "dev text, one sentence per line, 1,000 lines or more; not the test set, because it chooses the length penalty"
    )
    parser.add_argument("--src", type=Path, required=True, metavar="F", help=text)
    parser.add_argument("--ref", type=Path, required=True, metavar="F", help="raw reference text, line by line")
    parser.add_argument("--name", help="name of the model in its card (default: the name of DIR)")
    parser.add_argument("--license", metavar="L", help="license in the card, in the hub's notation (default: none)")
    text = "write the results to OUT, and the outputs of the dev text to the same folder"
    parser.add_argument("--json", type=Path, metavar="OUT", help=text)
    add_direction_options(parser)
    add_device_option(parser)
    return parser.parse_args()
