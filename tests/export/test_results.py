import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import markdown
from huggingface_hub import ModelCard

from dist_transformer.base.checks import Check
from dist_transformer.config.directions import Direction
from dist_transformer.export.gate import DevText
from dist_transformer.export.libraries import ExportSettings
from dist_transformer.export.results import Export
from dist_transformer.model_folder import ModelInfo

HOSTILE = "x` [a](b) <b> | \n# c\n---\nlicense: y\n```\n😀\ud800\ufeff"
HEAD = {"language", "license", "pipeline_tag", "library_name", "tags", "metrics", "model-index"}


def card(info: ModelInfo, name: str, library: str, tokenizer: str) -> str:
    """Write a card in which every text is `name`."""
    side = SimpleNamespace(library=tokenizer, lowercase=False, tags=[name])
    out = Path("out")
    exported = Export(
        settings=ExportSettings(
            model=out, to=library, out=out, source=Path(name), reference=out, name=name, license=name
        ),
        info=info,
        tokenizer=SimpleNamespace(source=side, target=side, sizes=(9, 0)),
        parameters=1,
        checks=[Check(name="a", found=name), Check(name="b", found=name, state="warn", remedy=name)],
        dev=DevText(numbers=[1], sources=["a"], targets=["a b c d"]),
        precision="float32",
        ours=["a b c d"],
        outputs=["a b c d"],
    )
    return exported.card()


def test_names_change_no_structure_of_the_card(model_info: ModelInfo) -> None:
    """A reader of YAML and a renderer of Markdown find the same elements as in the card of a plain name."""
    for library, tokenizer in itertools.product(("hf", "ctranslate2"), ("tokenizers", "sentencepiece")):
        pages = []
        for name in ("plain", HOSTILE):
            way = Direction(source_language=name, target_language=name, tags=(name,))
            info = replace(model_info, source_language=name, target_language=name, corpus=name, directions=(way,))
            read = ModelCard(card(info, name, library, tokenizer))
            assert read.data.to_dict().keys() == HEAD
            assert (read.data.language, read.data.license, read.data.model_name) == ([name], name, name)
            (result,) = read.data.eval_results
            assert (result.dataset_type, result.metric_value) == (name, 100)
            pages.append(re.findall(r"<\w+", markdown.markdown(read.text, extensions=["tables", "fenced_code"])))
        assert pages[0] == pages[1]
