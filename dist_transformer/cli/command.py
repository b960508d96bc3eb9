"""The program `dist-transformer`: one command per module of this folder."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.config.wrong_names import LIST_FLAGS, command_meant
from dist_transformer.runtime.extensions import import_extension
from dist_transformer.runtime.interpreter import end_at_ctrl_c, share_cores
from dist_transformer.runtime.launch import take_number, take_values
from dist_transformer.runtime.processes import run_processes
from dist_transformer.version import __version__

COMMANDS = {
    "demo": "run the whole pipeline on synthetic text, in minutes",
    "prepare": "parallel text → data folder",
    "inspect": "show the contents of a data folder",
    "plan": "predict memory, time and disk of a training run",
    "doctor": "check that this machine or job is fit to train",
    "train": "data folder → run folder, with checkpoints",
    "report": "write a run's report as one HTML page",
    "verify": "check that a run folder is intact and followed its plan",
    "average": "weights of a run → model folder",
    "translate": "stdin → stdout, or files of any size → a file",
    "evaluate": "test set or hypotheses → BLEU, chrF, TER",
    "score": "log-probabilities of given translations",
    "import": "model of transformers or Marian → model folder",
    "export": "model folder → transformers or CTranslate2",
    "serve": "a local web page to try one or two models",
    "pictures": "draw the Transformer's parts and a model's attention",
}
# Commands that share their work among processes.
SHARED = ("train", "average", "translate", "evaluate", "score")

COMPLETION = f"""\
if [ -n "${{ZSH_VERSION-}}" ]; then
  autoload -Uz compinit bashcompinit && compinit -i && bashcompinit
fi
_dist_transformer() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" lines
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    lines=$("$1" {LIST_FLAGS} 2>/dev/null)
  else
    lines=$("$1" "${{COMP_WORDS[1]}}" {LIST_FLAGS} 2>/dev/null)
    case "$word" in
      -*) lines=$(printf '%s\\n' "$lines" | cut -d ' ' -f 1) ;;
      *) lines=$(printf '%s\\n' "$lines" | grep -e "^$before " | cut -d ' ' -f 2-) ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$lines" -- "$word"))
}}
complete -o default -F _dist_transformer dist-transformer"""
"""Shell code that completes commands, flags and their choices in bash and zsh, and otherwise names of files."""


def main() -> None:
    """Run the command that the command line names and exit with its status."""
    share_cores()
    # Training continues without its streams.
    prints = without_launcher_flag(sys.argv[1:])[:1] != ["train"]
    exit_on_user_error(lambda: run(sys.argv[1:]), prints=prints)


def without_launcher_flag(words: Sequence[str]) -> list[str]:
    """Remove the flag that DeepSpeed's launcher puts first; the environment has the same value."""
    return list(words[1:] if words and words[0].startswith("--local_rank=") else words)


def run(words: Sequence[str]) -> None:
    """Run one command.

    Args:
        words: the command and its arguments.

    Raises:
        UserError: there is no such command, or the command raised it.
    """
    name, *arguments = without_launcher_flag(words) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return
    if name in ("-V", "--version"):
        print(f"dist-transformer {__version__}")
        return
    if name == "--completion":
        print(COMPLETION)
        return
    if name == LIST_FLAGS:
        print("\n".join(COMMANDS))
        return
    if name not in COMMANDS:
        near = command_meant(name, COMMANDS)
        remedy = f"did you mean {near}?" if near else "see dist-transformer --help"
        raise UserError(f"{name!r} is not a command: {remedy}")
    processes, arguments = take_number(arguments, "--processes") if name in SHARED else (None, arguments)
    if processes is not None and not {"-h", "--help"} & set(arguments):
        check = partial(refuse_wrong_arguments, name, arguments)
        raise SystemExit(run_processes(processes, [name, *arguments], check))
    extensions, arguments = take_values(arguments, "--import")
    for extension in extensions:
        import_extension(extension)
    sys.argv = [f"dist-transformer {name}", *arguments]
    if name == "train":
        end_at_ctrl_c()
    module_of(name).main()


def module_of(name: str) -> ModuleType:
    """Import the module of a command, which has its name; no import statement can name one called `import`."""
    return import_module(f"dist_transformer.cli.{'import_model' if name == 'import' else name}")


def refuse_wrong_arguments(name: str, arguments: Sequence[str]) -> None:
    """Parse the arguments of a command that several processes will run: to start them takes seconds.

    With --import, only the processes know the names that it registers.
    """
    if take_values(arguments, "--import")[0]:
        return
    sys.argv = [f"dist-transformer {name}", *arguments]
    module_of(name).parse_arguments()


def overview() -> str:
    """Return the list of commands, in the order in which they are needed."""
    rows = "\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items())
    return (
        "usage: dist-transformer COMMAND [flags]\n\n"
        "Train the Transformer for translation, from one CPU to a cluster of GPUs.\n\n"
        f"commands:\n{rows}\n\n"
        f"`dist-transformer COMMAND --help` lists the flags of a command.\n"
        '`eval "$(dist-transformer --completion)"` in bash or zsh completes them.\n'
        f"{', '.join(SHARED[:-1])} and {SHARED[-1]} take --processes N:\n"
        "they run in N processes on this machine, one per GPU if there are GPUs.\n"
        "Every command takes --import MODULE or --import FILE.py: your own code that\n"
        "registers a schedule, a position encoding, an attention or a metric sink.\n"
        "Every command takes --traceback, which shows where an unexpected error began."
    )
