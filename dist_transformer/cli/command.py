"""The program `dist-transformer`: one command per module of this folder."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from dist_transformer import __version__
from dist_transformer.errors import UserError, exit_on_user_error
from dist_transformer.runtime.extensions import import_extension
from dist_transformer.runtime.launch import take_number, take_values
from dist_transformer.runtime.processes import adopt_streams, run_processes

COMMANDS = {
    "demo": "the whole way on synthetic text, in minutes",
    "prepare": "parallel text → data folder",
    "inspect": "what is in a data folder",
    "plan": "memory, time and disk of a training, before it",
    "doctor": "is this machine, or this job, fit to train",
    "train": "data folder → run folder, with checkpoints",
    "report": "a run as one page",
    "verify": "is a run folder sound, and trained as planned",
    "average": "weights of a run → model folder",
    "translate": "stdin → stdout, or files of any size → a file",
    "evaluate": "test set or hypotheses → BLEU, chrF, TER",
    "score": "how probable a model finds given translations",
    "export": "model folder → transformers or CTranslate2",
    "serve": "a page to try a model or two, on this machine",
}
# Commands that share their work among processes.
SHARED = ("train", "average", "translate", "evaluate", "score")


def main() -> None:
    """Run the command that the command line names, and exit with its status."""
    adopt_streams()
    exit_on_user_error(lambda: run(sys.argv[1:]))


def run(words: Sequence[str]) -> None:
    """Run one command.

    Args:
        words: the command and its arguments.

    Raises:
        UserError: there is no such command, or as the command.
    """
    name, *arguments = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return
    if name in ("-V", "--version"):
        print(f"dist-transformer {__version__}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see dist-transformer --help"
        raise UserError(f"{name!r} is no command: {remedy}")
    processes, arguments = take_number(arguments, "--processes") if name in SHARED else (None, arguments)
    if processes is not None and not {"-h", "--help"} & set(arguments):
        raise SystemExit(run_processes(processes, [name, *arguments]))
    extensions, arguments = take_values(arguments, "--import")
    for extension in extensions:
        import_extension(extension)
    sys.argv = [f"dist-transformer {name}", *arguments]
    import_module(f"dist_transformer.cli.{name}").main()


def overview() -> str:
    """Lay out the commands, in the order in which they are needed."""
    rows = "\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items())
    return (
        "usage: dist-transformer COMMAND [flags]\n\n"
        "Train the Transformer for translation, from one CPU to a cluster of GPUs.\n\n"
        f"commands:\n{rows}\n\n"
        f"`dist-transformer COMMAND --help` lists the flags of a command.\n"
        f"{', '.join(SHARED[:-1])} and {SHARED[-1]} take --processes N:\n"
        "N processes on this machine, one per GPU where there are GPUs. Every command\n"
        "takes --import MODULE or --import FILE.py: code of yours that registers a\n"
        "schedule, a position encoding, an attention or a metric sink."
    )
