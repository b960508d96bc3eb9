"""Exported folders without our code: each of the libraries alone gives the outputs that export recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.compat.environments import make_environment, pinned, run_installed
from tests.importing.marian_folders import write_folder

# Arguments: the folder, and a file of lines.
TRANSFORMERS = """
import json, sys
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, __version__

folder, lines = sys.argv[1], open(sys.argv[2], encoding="utf-8").read().splitlines()
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
outputs = []
for start in range(0, len(lines), 50):
    inputs = tokenizer(lines[start : start + 50], padding=True, return_tensors="pt")
    outputs += tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
text = "a </s> <pad> b"
card = ModelCard.load(folder + "/README.md").data
print(json.dumps({
    "version": __version__,
    "outputs": outputs,
    "ids": tokenizer(text)["input_ids"],
    "text": tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True),
    "license": card.license,
    "bleu": [result.metric_value for result in card.eval_results],
}))
"""

# The example of the card, in which the lines of the file stand for its sentences.
CTRANSLATE2 = """
import json, os, re, sys

card = open(sys.argv[1] + "/README.md", encoding="utf-8").read()
lines = open(sys.argv[2], encoding="utf-8").read().splitlines()
(example,) = re.findall("```python\\n(.*?)```", card, re.DOTALL)
assert '["A sentence.", "Another one."]' in example
made = {}
example = example.replace('["A sentence.", "Another one."]', "lines").replace("print(", "made.update(outputs=")
os.chdir(sys.argv[1])
exec(example, {"lines": lines, "made": made})
print(json.dumps(made))
"""


pytestmark = pytest.mark.slice(name="exports")

NAMES = {
    "hf": ["--to", "hf"],
    "given-back": ["--to", "hf"],
    "ctranslate2": ["--to", "ctranslate2"],
    "int8": ["--to", "ctranslate2", "--quantize", "int8"],
}
# Lines whose outputs are compared; batches of other sizes than those of the export round otherwise.
COMPARED = 200
LEAST_IDENTICAL = 0.99


@pytest.fixture(scope="module")
def exported(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small trained model, exported by the installed program as each of `NAMES`."""
    folder = tmp_path_factory.mktemp("exported")
    (wheel,) = distributions.glob("*.whl")
    programs = make_environment(folder / "venv", f"{wheel}[export]")
    write_toy_corpus(folder, make_toy_corpus(train_pairs=3_000, valid_pairs=1_000, test_pairs=50, seed=1))

    def run(*words: object) -> str:
        return run_installed(programs, folder, "dist-transformer", *words)

    files = ["--src", "train.en", "--tgt", "train.de", "--valid-src", "valid.en", "--valid-tgt", "valid.de"]
    # With a tag, which users of the exported folders need not know.
    run("prepare", *files, "--vocab-size", 500, "--tag", "<2de>", "--src-tag", "<2de>", "--out", "data")
    steps = ["--max-steps", 250, "--save-every", 50, "--validate-every", 250]
    run("train", "--preset", "tiny", "--data", "data", "--run-dir", "run", *steps)
    run("average", "--run-dir", "run", "--last", 2, "--out", "model")
    # A published model, tuned and given back.
    lines = tuple((folder / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de"))
    write_folder(folder / "published", lines)
    run("import", "published", "--out", "imported")
    run("prepare", *files, "--tokenizer", "imported", "--out", "tuning")
    places = ["--init-from", "imported", "--data", "tuning", "--run-dir", "tuned"]
    run("train", "--preset", "finetune", *places, "--optimizer.peak-lr", 3e-3, *steps)
    run("average", "--run-dir", "tuned", "--last", 2, "--out", "tuned-model")
    for name, words in NAMES.items():
        dev = ["--src", "valid.en", "--ref", "valid.de", "--license", "mit"]
        try:
            model = "tuned-model" if name == "given-back" else "model"
            run("export", "--model", model, *words, *dev, "--out", name, "--json", f"{name}.json")
        except AssertionError as refused:
            # Seen on a CPU without AVX-512 only: int8 then costs this small model more BLEU than the gate allows.
            if name != "int8" or "error: int8 was not written, because its outputs differ" not in str(refused):
                raise
    lines = (folder / "valid.en").read_text(encoding="utf-8").splitlines()
    numbers = json.loads((folder / "hf.json").read_text(encoding="utf-8"))["line_numbers"][:COMPARED]
    (folder / "lines.en").write_text("".join(f"{lines[number - 1]}\n" for number in numbers), encoding="utf-8")
    return folder


def load(programs: Path, program: str, exported: Path, name: str) -> dict[str, Any]:
    said = run_installed(programs, exported, "python", "-c", program, name, "lines.en")
    return json.loads(said.splitlines()[-1])


def assert_recorded(outputs: list[str], exported: Path, name: str) -> None:
    recorded = (exported / f"{name}.hypotheses.txt").read_text(encoding="utf-8").splitlines()[:COMPARED]
    assert len(outputs) == len(recorded) == COMPARED
    same = sum(ours == theirs for ours, theirs in zip(outputs, recorded, strict=True))
    assert same >= LEAST_IDENTICAL * COMPARED


@pytest.mark.parametrize(("requirement", "major"), [("transformers==4.57.*", "4."), ("transformers>=5,<6", "5.")])
def test_transformers_alone(requirement: str, major: str, exported: Path, tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "venv", requirement, pinned("torch"), "sentencepiece", constrained=False)
    found = load(programs, TRANSFORMERS, exported, "hf")
    assert found["version"].startswith(major)
    assert_recorded(found["outputs"], exported, "hf")
    # The tag begins the line. Text that spells a special token is text: one id ends the line, and none stands in it.
    assert (found["ids"][0], found["ids"][-1], found["ids"].count(3), found["ids"].count(0)) == (4, 3, 1, 0)
    assert found["text"] == "a </s> <pad> b"
    figures = json.loads((exported / "hf.json").read_text(encoding="utf-8"))
    assert found["license"] == "mit"
    assert found["bleu"] == [pytest.approx(figures["bleu"], abs=0.005)]
    assert_recorded(load(programs, TRANSFORMERS, exported, "given-back")["outputs"], exported, "given-back")
    for file in ("source.spm", "target.spm", "vocab.json"):
        assert (exported / "given-back" / file).read_bytes() == (exported / "published" / file).read_bytes()


@pytest.mark.parametrize("name", ["ctranslate2", "int8"])
def test_ctranslate2_alone(name: str, exported: Path, tmp_path: Path) -> None:
    if not (exported / name).exists():
        assert not [*exported.glob(f"*{name}*")]
        pytest.skip("int8 of this model differs too much from fp32 on this CPU, so its export was refused")
    programs = make_environment(tmp_path / "venv", "ctranslate2", "tokenizers", constrained=False)
    assert_recorded(load(programs, CTRANSLATE2, exported, name)["outputs"], exported, name)
