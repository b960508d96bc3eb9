"""The scripts of docs/python.md, in the order of the page, and the text that they are about."""

import re
from collections.abc import Callable
from pathlib import Path

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def sections() -> dict[str, list[str]]:
    """Scripts by the heading that they stand under."""
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    scripts = {
        title: re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL) for title, text in found
    }
    assert [len(scripts["Use a trained model"]), len(scripts["Train a model"])] == [2, 4]
    return scripts


def run_examples(folder: Path, run: Callable[[Path], str]) -> None:
    """Write the text and the scripts to `folder`, and run them there: a model is used when it is trained.

    Args:
        run: runs a script in `folder` and gives its output.
    """
    write_toy_corpus(folder, make_toy_corpus(train_pairs=2_000, valid_pairs=60, test_pairs=20, seed=1))
    scripts = sections()
    order = [*scripts["Train a model"], *scripts["Use a trained model"]]
    outputs = []
    for number, script in enumerate(order):
        file = folder / f"example_{number}.py"
        file.write_text(script, encoding="utf-8")
        outputs.append(run(file))
    prepared, trained, evaluated, refused, translated, scored = outputs
    assert prepared.endswith("2000 pairs\n")
    *_, finished, first, second = trained.splitlines()
    assert finished == "finished"
    (_, before), (_, after) = (line.split() for line in (first, second))
    assert float(after) < float(before)
    assert "mean of steps (10, 20)" in evaluated
    assert "BLEU" in evaluated
    assert refused == (
        "runs/other/model is not a model folder (it does not exist): check the path, or make a model with "
        "dist-transformer average\n"
    )
    assert len(translated.splitlines()) == 6
    assert translated.splitlines()[-1].startswith("Zwei Hun")
    assert scored.count("of which </s>") == 2
    assert scored.rstrip().count("looks at") >= 2
