"""Fixtures that several tests share: a small prepared corpus, the real corpora where they exist, and launches."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Many small tensors on few cores: threads would wait for each other longer than they compute. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.launching import deepspeed_command
from dist_transformer.base.errors import print_messages
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import free_port
from tests.commands import Begun, Commands, Ended, environment_of, rank_variables
from tests.rights import umask
from tests.small_model import model_folder, model_info, other_folder, random_model, toy_lines, toy_tokenizer
from tests.variants import distant, registrations

__all__ = [
    "deepspeed_command",
    "distant",
    "model_folder",
    "model_info",
    "other_folder",
    "random_model",
    "registrations",
    "toy_lines",
    "toy_tokenizer",
    "umask",
]

ROOT = Path(__file__).resolve().parents[1]

# Time is no result: beside other work, an example may take any.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def printed_messages() -> None:
    """Print the library's messages in every test, as commands do."""
    print_messages()


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """Undo what a command's `main` has set: `prepare` handles SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    """2,000 synthetic pairs in four shards, 400 entries of vocabulary, raw text in `text/`."""
    path = tmp_path_factory.mktemp("toy") / "data"
    sizes = ["--toy", 2000, "--vocab-size", 400, "--pairs-per-shard", 500]
    run_command(sys.executable, "tools/prepare_data.py", *sizes, "--out", path)
    return DataFolder.open(path)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that asks for it is skipped where there is none."""
    path = Path(os.environ.get("DIST_TRANSFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no corpora at {path}: set DIST_TRANSFORMER_DATA")
    return path


def allow_interrupts() -> None:
    """Let signals reach a child (its `preexec_fn`) that a shell's background process or nohup would ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: processes that share the files then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent.name != "distributed", item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file to one process of pytest, and to one those that start launches of several ranks.

    Two launches on two cores would wait for each other.
    """
    # The machine of `make gpu-check` may lack it.
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/distributed" if nodeid.startswith("tests/distributed/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


@functools.cache
def _commands() -> Commands:
    return Commands(Path(tempfile.mkdtemp(prefix="commands-")))


def pytest_unconfigure() -> None:
    if _commands.cache_info().currsize:
        _commands().close()
        shutil.rmtree(_commands().scratch)


def scratch_folder() -> Path:
    """Make a folder that is removed at the end of the tests."""
    return Path(tempfile.mkdtemp(dir=_commands().scratch))


def run_command(*command: object, status: int = 0, timeout: float = 600) -> str:
    """Run a command as a user would, from the repository root; gives its output, standard error included.

    A program of this interpreter starts as a fork of a process that has imported the libraries: see fork_server.py.
    """
    if command[0] == sys.executable and (command[1] == "-m" or str(command[1]).endswith(".py")):
        return expect(status, _commands().start(command[1:], ROOT, seconds=timeout))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment_of({}),
        timeout=timeout,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return expect(status, Ended(status=done.returncode, output=done.stdout))


def run_ranks(ranks: int, *program: object, status: int = 0, timeout: float = 600) -> str:
    """Run the processes of one launch, as a launcher starts them; `program` is what a user types after `python`."""
    return expect(status, _commands().start(program, ROOT, ranks=ranks, seconds=timeout))


def run_python(
    *program: object, input: str | bytes = "", cwd: Path = ROOT, ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run what a user types after `python`, with the two outputs apart; the status may be any."""
    commands = _commands()
    given = commands.scratch / "input"
    given.write_bytes(input.encode() if isinstance(input, str) else input)
    ended = commands.start(program, cwd, ranks=ranks, stdin=given, environment=environment, apart=True)
    words = [sys.executable, *map(str, program)]
    return subprocess.CompletedProcess(words, ended.status, stdout=ended.output, stderr=ended.errors)


@pytest.fixture(scope="session")
def commands() -> Commands:
    """Programs of this project, started quickly."""
    return _commands()


def begin_python(
    *program: object,
    output: Path,
    errors: Path | None = None,
    cwd: Path = ROOT,
    stdin: Path = Path(os.devnull),
    **environment: str,
) -> Begun:
    """Start what a user types after `python`, and do not wait for it; a signal reaches it as in a terminal."""
    return _commands().begin(program, cwd, output=output, errors=errors, stdin=stdin, environment=environment)


def begin_ranks(
    ranks: Sequence[int],
    *program: object,
    output: Path,
    errors: Path | None = None,
    world: int = 2,
    **environment: str,
) -> list[Begun]:
    """Start some ranks of one launch, and do not wait for them."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        begin_python(*program, output=output, errors=errors, **{**master, **environment, **rank_variables(rank, world)})
        for rank in ranks
    ]


def expect(status: int, ended: Ended) -> str:
    assert ended.status == status, f"status {ended.status}, wanted {status}:\n{ended.output[-4000:]}"
    return ended.output
