import itertools
import re
from dataclasses import replace

import markdown
from huggingface_hub import ModelCard

from dist_transformer.base.checks import Check
from dist_transformer.config.directions import Direction
from dist_transformer.evaluation.bleu import Score
from dist_transformer.export.card import Card
from dist_transformer.model_folder import ModelInfo

HOSTILE = "x` [a](b) <b> | \n# c\n---\nlicense: y\n```\n😀\ud800\ufeff"
HEAD = {"language", "license", "pipeline_tag", "library_name", "tags", "metrics", "model-index"}


def card(info: ModelInfo, name: str, library: str, tokenizer: str) -> str:
    score = Score(value=30.0, signature=name)
    return str(
        Card(
            name=name,
            library=library,
            info=info,
            tags=[name],
            tokenizer_libraries=(tokenizer,),
            parameters=1,
            license=name,
            dev_name=name,
            dev_lines=1000,
            bleu=score,
            longest=10,
            checks=[Check(name="a", found=name), Check(name="b", found=name, state="warn", remedy=name)],
        )
    )


def test_names_change_no_structure_of_the_card(model_info: ModelInfo) -> None:
    """A reader of YAML and a renderer of Markdown find the same elements as in the card of a plain name."""
    for library, tokenizer in itertools.product(("transformers", "ctranslate2"), ("tokenizers", "sentencepiece")):
        pages = []
        for name in ("plain", HOSTILE):
            way = Direction(source_language=name, target_language=name, tags=(name,))
            info = replace(model_info, source_language=name, target_language=name, corpus=name, directions=(way,))
            read = ModelCard(card(info, name, library, tokenizer))
            assert read.data.to_dict().keys() == HEAD
            assert (read.data.language, read.data.license, read.data.model_name) == ([name], name, name)
            (result,) = read.data.eval_results
            assert (result.dataset_type, result.metric_args) == (name, {"signature": name})
            pages.append(re.findall(r"<\w+", markdown.markdown(read.text, extensions=["tables", "fenced_code"])))
        assert pages[0] == pages[1]
