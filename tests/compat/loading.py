"""Programs for environments without our code: they load exported folders, and print what they find as JSON."""

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
