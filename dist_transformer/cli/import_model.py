"""Convert a published model to a model folder: MarianMT, M2M100 or NLLB of Hugging Face, or one of Marian in C++.

dist-transformer import opus-mt-en-de --out MODEL
dist-transformer import Helsinki-NLP/opus-mt-en-de --out MODEL
dist-transformer import facebook/nllb-200-distilled-600M --src-lang eng_Latn --tgt-lang deu_Latn --out MODEL
dist-transformer import marian/decoder.yml --src-lang en --tgt-lang de --out MODEL

transformers or Marian loads the original, and its results are compared with those of the new model, on 1,000 lines of
--src (default: synthetic English) and on hostile strings. MODEL is written only if token ids and the texts of ids are
the same, and, on 20 of the lines, on the hostile strings and up to 16 tokens of each, log-probabilities of given tokens
differ by at most 1e-4 (more if logits are large) and 99.5% of greedy outputs are identical.

`prepare --tokenizer MODEL` prepares text with its vocabulary, and `train --preset finetune --init-from MODEL` continues
its training.

A name that is no folder here, such as Helsinki-NLP/opus-mt-en-de, is that of a model of Hugging Face's hub, which is
downloaded to its cache.

A folder of transformers needs transformers: in the clone, pip install -e '.[export]'. A model of Marian needs Marian:
pip install pymarian, in an environment of its own. decoder.yml names model.npz and its vocabularies, .spm, or .yml with
source.spm and target.spm beside model.npz.
"""

from dist_transformer.cli.export import comparing, show_checks
from dist_transformer.config.command_line import Page, parse
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.run.outputs import claim_folder


def main() -> None:
    settings = parse(ImportSettings, Page(text=__doc__))
    claim_folder(settings.out, "--out", (settings.folder, settings.source, *settings.keep_text))

    from dist_transformer.importing.checked_import import import_model

    with comparing(settings.device) as (device, bar):
        info = import_model(settings, device, progress=bar, show=show_checks)
    names = ", ".join(direction.name for direction in info.all_directions)
    print(f"written: {settings.out}, {names}, {show_sizes(info.model.vocab_sizes)} entries of vocabulary")
