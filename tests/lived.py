"""A folder in which every command has been: `data/`, a `run/` with its model, scores and report, and what was said."""

import shutil
from pathlib import Path

from tests.commands import Commands
from tests.support.tiny import TINY_FLAGS

SMALL = (*TINY_FLAGS, "--validate-sentences", "4")
TRAIN = ("train", *SMALL, "--data", "data", "--run-dir")
NEWEST = "run/checkpoints/step-00000002"

FRESH, RESUMED = (*TRAIN, "fresh", "--max-steps", "1"), (*TRAIN, "run", "--max-steps", "3", "--ema-decay", "0.9")
INSPECT, VERIFY, REPORT = ("inspect", "data", "--verify"), ("verify", "run"), ("report", "run")
VERIFY_DATA = ("verify", "run", "--data", "data")
DOCTOR = ("doctor", "--data", "data", "--run-gib", "0.01")
PLAN = ("plan", "--preset", "tiny", "--data", "data", "--gpu", "h100")
AGAINST = ("plan", "--against", "run")
LAST = ("average", "--run-dir", "run", "--last", "1", "--out", "m")
BEST = ("average", "--run-dir", "run", "--best", "1", "--out", "m")
SWEEP = ("average", "--run-dir", "run", "--sweep", "1", "--out", "m")
AVERAGE_CHECKPOINT = ("average", "--checkpoints", NEWEST, "--out", "m")
AVERAGE_MODEL = ("average", "--checkpoints", "run/model", "--out", "m")
TRANSLATE = ("translate", "--model", "run/model")
EVALUATE = ("evaluate", "--model", "run/model", "--src", "in.en", "--ref", "in.de")
SCORE = ("score", "--model", "run/model", "--src", "in.en", "--tgt", "in.de")
BEGIN_WITH = (*TRAIN, "fresh", "--max-steps", "1", "--init-from", "run/model")
PREPARE = ("prepare", "--src", "in.en", "--tgt", "in.de", "--tokenizer", "data/tokenizer.json", "--out", "more")


def live(commands: Commands, data: Path, folder: Path, **environment: str) -> Path:
    """Fill `folder`; `output.txt` has what the commands printed.

    Raises:
        AssertionError: a command does not end well.
    """
    shutil.copytree(data, folder / "data")
    for name in ("in.en", "in.de"):
        text = "".join(f"Our {number} hungry guests sing.\n" for number in range(4))
        (folder / name).write_text(text, encoding="utf-8")
    printed = ""
    for words in (
        (*TRAIN, "run", "--max-steps", "2", "--save-every", "1", "--validate-every", "2", "--ema-decay", "0.9"),
        ("average", "--run-dir", "run", "--last", "2", "--out", "run/model"),
        (*EVALUATE, "--beam", "1", "--json", "run/bleu.json"),
        REPORT,
        ("doctor", "--run-dir", "run", "--data", "data", "--run-gib", "0.01"),
        VERIFY,
    ):
        ended = commands.run(words, folder, **environment)
        assert ended.status == 0, ended.output
        printed += ended.output
    (folder / "output.txt").write_text(printed, encoding="utf-8")
    return folder
