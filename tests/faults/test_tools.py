"""Every command meets every file of its folders missing, empty, cut, damaged or of zeros.

A command ends with status 0, or with 1 and one sentence: no traceback, no signal, within a time.
"""

import random
import shutil
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests import lived
from tests.commands import Commands, Ended
from tests.faults.campaign import Case, campaign, in_slice
from tests.lived import NEWEST
from tests.support.damage import FAULTS, Fault, damage

# One process runs one command after the other.
pytestmark = in_slice

TOOLS = {
    "train": lived.FRESH,
    "train, resumed": lived.RESUMED,
    "train --init-from": lived.BEGIN_WITH,
    "average --last": lived.LAST,
    "average --best": lived.BEST,
    "average --sweep": lived.SWEEP,
    "average of a checkpoint": lived.AVERAGE_CHECKPOINT,
    "average of a model": lived.AVERAGE_MODEL,
    "translate": lived.TRANSLATE,
    "score": lived.SCORE,
    "evaluate": lived.EVALUATE,
    "report": lived.REPORT,
    "inspect": lived.INSPECT,
    "verify": lived.VERIFY,
    "verify --data": lived.VERIFY_DATA,
    "doctor": lived.DOCTOR,
    "plan": lived.PLAN,
    "plan --against": lived.AGAINST,
    "prepare --tokenizer": lived.PREPARE,
}
_DATA = ("index.json", "tokenizer.json", "lengths.npy", "train-00000.arrow", "valid/lengths.npy")
_RUN = ("config.json", "tokenizer.json", "metrics.jsonl", "ledger.jsonl", "environment.json", "lock", "bleu.json")
FILES = (
    *(f"data/{name}" for name in (*_DATA, "valid/valid-00000.arrow", "valid/source.txt", "valid/target.txt")),
    *(f"run/{name}" for name in (*_RUN, "samples/step-00000002.json", "checkpoints/latest", "weights/SHA256SUMS")),
    *(f"{NEWEST}/{name}" for name in ("manifest.json", "state.json", "part-00000.safetensors")),
    *(f"run/weights/{name}-00000002.safetensors" for name in ("step", "ema")),
    *(f"run/model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
)
# What these print is all that they make; it has nothing of the time or the place in it.
EXACT = ("translate", "score", "average of a model")


class Workshop:
    """A sound folder, and a warm process that runs commands in copies of it."""

    def __init__(self, scratch: Path, commands: Commands) -> None:
        self.sound, self.copy, self.commands = scratch / "sound", scratch / "copy", commands

    def run(self, tool: str, name: str = "", fault: Fault | None = None) -> Ended:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.sound, self.copy)
        if fault is not None:
            damage(self.copy / name, fault, random.Random(f"{tool} {name}"))
        return self.commands.run(TOOLS[tool], self.copy, stdin=self.copy / "in.en")


def problem(ended: Ended, wanted: str | None = None) -> str:
    """Return what a user must not see, or an empty text; `wanted` is the output on a sound folder."""
    errors = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    checks = {
        f"status {ended.status}": ended.status in (0, 1),
        "a traceback": "Traceback" not in ended.output,
        "no line that says why": not ended.status or len(errors) == 1 or "FAIL" in ended.output,
        "its output differs": bool(ended.status) or wanted in (None, ended.output),
    }
    return next((f"{name}: {ended.output[-300:]}" for name, holds in checks.items() if not holds), "")


@pytest.fixture(scope="module")
def shop(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("tools"), commands)
    lived.live(commands, toy_data.path, shop.sound)
    return shop


@campaign(dict.fromkeys(TOOLS, len(FILES) * len(FAULTS)), each=len(FILES) * len(FAULTS), sample=("translate", "report"))
def test_tools(case: Case, shop: Workshop) -> None:
    sound = shop.run(case.kind)
    assert sound.status == 0, sound.output
    wanted = sound.output if case.kind in EXACT else None
    for name in FILES:
        for word, fault in FAULTS.items():
            ended = shop.run(case.kind, name, fault)
            assert problem(ended, wanted) == "", f"{name} {word}"
