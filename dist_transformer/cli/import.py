"""Convert a published model to a model folder: one of Hugging Face's MarianMTModel, or of Marian in C++.

dist-transformer import opus-mt-en-de --out MODEL
dist-transformer import marian/decoder.yml --src-lang en --tgt-lang de --out MODEL

transformers or Marian loads the original, and its results are compared with those of the new model, on 1,000 lines of
--src (default: synthetic English) and on hostile strings. MODEL is written only if token ids and the texts of ids are
the same, and, on 20 of the lines, on the hostile strings and up to 16 tokens of each, log-probabilities of given tokens
differ by at most 1e-4 (more if logits are large) and 99.5% of greedy outputs are identical.

`prepare --tokenizer MODEL` prepares text with its vocabulary, and `train --preset finetune --init-from MODEL` continues
its training.

A folder of MarianMTModel needs transformers: in the clone, pip install -e '.[export]'. A model of Marian needs Marian:
pip install pymarian, in an environment of its own. decoder.yml names model.npz and its vocabularies, .spm, or .yml with
source.spm and target.spm beside model.npz.
"""

# A command has the name of its module.
# ruff: noqa: N999

import argparse
from pathlib import Path

from dist_transformer.cli.export import comparing, show_checks
from dist_transformer.cli.parser import make_parser
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.inference.options import add_device_option
from dist_transformer.run.outputs import claim_folder


def main() -> None:
    arguments = parse_arguments()
    claim_folder(arguments.out, "--out", (arguments.folder, arguments.src))

    from dist_transformer.importing.importing import ImportSettings, import_marian

    settings = ImportSettings(
        folder=arguments.folder,
        out=arguments.out,
        source=arguments.src,
        source_language=arguments.src_lang,
        target_language=arguments.tgt_lang,
        program=arguments.marian,
    )
    with comparing(arguments.device) as (device, bar):
        info = import_marian(settings, device, progress=bar, show=show_checks)
    names = ", ".join(direction.name for direction in info.all_directions)
    print(f"written: {settings.out}, {names}, {show_sizes(info.model.vocab_sizes)} entries of vocabulary")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder of MarianMTModel or Marian, or a decoder.yml"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder to write")
    text = "text to compare with, one sentence per line, 1,000 lines or more (default: synthetic English)"
    parser.add_argument("--src", type=Path, metavar="F", help=text)
    parser.add_argument("--src-lang", metavar="L", help="source language (default: as FOLDER names it)")
    parser.add_argument("--tgt-lang", metavar="L", help="target language (default: as FOLDER names it)")
    text = "with a model of Marian: the program to compare with (default: marian or pymarian in PATH)"
    parser.add_argument("--marian", metavar="PROGRAM", help=text)
    add_device_option(parser)
    return parser.parse_args()
