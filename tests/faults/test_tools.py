"""Files in bad states before some commands; `make faults` does all of them. And bugs that must be found."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.commands import Ended
from tests.faults.tools import (
    FAULTS,
    FILES,
    READS,
    TOOLS,
    Fault,
    Workshop,
    flipped,
    linked,
    nested,
    pipe,
    problem,
    victim_of,
)

# One process runs one command after the other.
pytestmark = pytest.mark.slice(name="campaigns")


@pytest.fixture(scope="module")
def shop(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("tools"), toy_data.path)
    with shop.commands:
        yield shop


def test_every_file_has_a_reader(shop: Workshop) -> None:
    opened = {tool: shop.on_sound_folder(tool)[1] for tool in TOOLS}
    assert set().union(*opened.values()) == set(FILES)
    assert {tool: len(names) for tool, names in opened.items()} == READS


@pytest.mark.parametrize("tool", ["translate", "report"])
def test_every_file_in_every_bad_state(tool: str, shop: Workshop) -> None:
    generator, letters = random.Random(tool), set[str]()
    for name in FILES:
        for fault in FAULTS:
            letter, wrong = shop.examine(tool, name, fault, generator)
            assert not wrong
            letters.add(letter)
    assert letters >= {"R", ""}


@contextmanager
def planted(bug: str, shop: Workshop, folder: Path) -> Iterator[Workshop]:
    shutil.copytree(shop.sound, folder / "sound")
    shop = Workshop(folder, folder / "sound/data", bug, seconds=15)
    with shop.commands:
        yield shop


@pytest.mark.parametrize(
    ("bug", "tool", "name", "fault", "wrong"),
    [
        (
            "dist_transformer.base.files._open_regular = os.open",
            "translate",
            "run/model/config.json",
            pipe,
            "status -14",
        ),
        (
            "dist_transformer.base.verified.Stated.require = lambda *_: None",
            "score",
            "run/model/model.safetensors",
            flipped,
            "its output differs",
        ),
        (
            "dist_transformer.config.plain.parse_json = __import__('json').loads",
            "report",
            "run/config.json",
            nested,
            "a traceback",
        ),
    ],
    ids=["a pipe is waited for", "a hash is not compared", "deep JSON"],
)
def test_a_planted_bug_is_found(
    bug: str, tool: str, name: str, fault: Fault, wrong: str, shop: Workshop, tmp_path: Path
) -> None:
    imports = "import dist_transformer.base.files, dist_transformer.base.verified, dist_transformer.config.plain\n"
    with planted(imports + bug, shop, tmp_path) as bugged:
        found = (bugged.examine(tool, name, fault, random.Random(seed))[1] for seed in range(20))
        assert wrong in next(filter(None, found), "")


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        (Ended(status=0, output="fine"), ""),
        (Ended(status=1, output="error: x is damaged: y\n"), ""),
        (Ended(status=1, output="bad\n"), "no line that says why: bad\n"),
        (Ended(status=-11, output=""), "status -11: "),
        (Ended(status=1, output="Traceback\nerror: x"), "a traceback: Traceback\nerror: x"),
    ],
)
def test_what_a_user_must_not_see(ended: Ended, found: str) -> None:
    assert problem(ended) == found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_changes_what_is_there(fault: Callable[[Path, random.Random], object], tmp_path: Path) -> None:
    file = tmp_path / "copy" / "file"
    file.parent.mkdir()
    file.write_bytes(b"sound content")
    fault(file, random.Random(1))
    is_sound = file.is_file() and not file.is_symlink() and file.read_bytes() == b"sound content"
    assert not is_sound
    if fault is linked:
        assert file.read_bytes() == victim_of(file).read_bytes() == b"sound content"
