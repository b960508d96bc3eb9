"""Convert a model for another library: Hugging Face's transformers, CTranslate2, or Marian in C++.

dist-transformer export --model MODEL --to hf --out OUT
dist-transformer export --model MODEL --to ctranslate2 --quantize int8 --src dev.en --ref dev.de --out OUT
dist-transformer export --model MODEL --to hf --push ORG/NAME --out OUT
dist-transformer export --model MODEL --to marian --marian marian/bin/pymarian --out OUT

--to hf: AutoModelForSeq2SeqLM and AutoTokenizer load the folder, with transformers 4.57 and later or 5; a model that
was imported from M2M100 or NLLB has their class and tokenizer again. --to
ctranslate2: ctranslate2.Translator loads it; its tokens are those of tokenizer.json. --to marian: a model.npz, its
vocabularies and decoder.yml, of a model that was imported from Marian, or trained with a SentencePiece vocabulary and
--model.begin-with-zeros --model.positions sinusoidal_t2t --model.norm-epsilon 1e-6.

The library loads the folder, and its results are compared with those of MODEL in fp32, on hostile strings and on a
built-in text, or on 1,000 random lines of --src. The folder is written only if token ids and the texts of ids are the
same, log-probabilities of given tokens differ by at most 1e-4 (more if logits are large), and 99.5% of greedy outputs
are identical. With --ref, 500 of the lines get a BLEU by beam search. If it differs by more than 0.2, or if --src has
fewer than 1,000 lines, the row is a warning, which is also in the model card. A quantised model may lose at most 0.5
BLEU. Each check is one row of stdout. If one fails, the exit status is 1 and nothing is written.

Needs transformers or ctranslate2: in the clone, pip install -e '.[export]'; or Marian: pip install pymarian (Python
3.11) in an environment of its own.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from dist_transformer.base.checks import Check, check_table
from dist_transformer.base.errors import say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.evaluation.report import hypotheses_file, write_report
from dist_transformer.export.hub import push
from dist_transformer.export.libraries import LIBRARIES, ExportSettings
from dist_transformer.model_folder import read_model_info
from dist_transformer.run.outputs import claim_file, claim_folder

if TYPE_CHECKING:
    import torch

_BAR = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed}<{remaining}"


def main() -> None:
    settings = parse(ExportSettings, Page(text=__doc__))
    inputs = (settings.model, settings.source, settings.reference)
    claim_folder(settings.out, "--out", inputs)
    if settings.json is not None:
        claim_file(settings.json, "--json", (*inputs, settings.out), beside=[hypotheses_file(settings.json)])
    # Early, because the imports below take seconds.
    read_model_info(settings.model)

    from dist_transformer.export.checked_export import export_model

    with comparing(settings.device) as (device, bar):
        made = export_model(settings, device, progress=bar, show=show_checks)
    if settings.license is None:
        print("note: the card states no license; --license adds one, such as cc-by-4.0")
    print(f"written: {settings.out}, for {LIBRARIES[settings.to]}; {settings.out / 'README.md'} shows how to load it")
    if settings.push is not None:
        print(f"pushed: {push(settings.out, settings.push)}")
    if settings.json is not None:
        # One line per output.
        outputs = hypotheses_file(settings.json)
        text = "".join(f"{' '.join(line.splitlines())}\n" for line in made.outputs)
        write_report({**made.report(), "hypotheses": str(outputs)}, settings.json, beside={outputs: text})


@contextmanager
def comparing(name: str | None) -> "Iterator[tuple[torch.device, tqdm]]":
    """Yield the device of this name, ready for other libraries, and a bar for the comparison with one."""
    from dist_transformer.runtime.device import find_device

    device = find_device(name)
    if device.type == "cpu":
        # transformers imports DeepSpeed if it is installed. DeepSpeed would look for an accelerator, and warn.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with Bar(bar_format=_BAR, disable=None, leave=False) as bar:
        yield device, bar


class Bar(tqdm):
    """Progress on standard error: a bar if it is a terminal, otherwise a line per stage."""

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        super().set_description_str(desc, refresh)
        if self.disable:
            say(desc, file=sys.stderr)


def show_checks(checks: Sequence[Check]) -> None:
    with tqdm.external_write_mode():
        print(check_table(checks), flush=True)
