"""Command lines of trainings that benchmarks and tests start."""

from collections.abc import Sequence

from dist_transformer.runtime.launch import free_port, installed_program


def deepspeed_command(ranks: int) -> list[object]:
    """Build the command of this environment's DeepSpeed launcher for `ranks` processes, on a free port."""
    return [installed_program("deepspeed"), "--quiet", "--num_gpus", ranks, "--master_port", free_port()]


def overridden(words: Sequence[object]) -> list[str]:
    """Leave out every flag that comes again later, with its values: for commands that add flags to common ones.

    A command itself refuses a flag that is given twice, because one of the two would be lost without a word.
    """
    groups = list[list[str]]()
    for word in map(str, words):
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    names = [group[0].partition("=")[0].replace("_", "-") if group[0].startswith("--") else "" for group in groups]
    kept = [group for at, group in enumerate(groups) if not names[at] or names[at] not in names[at + 1 :]]
    return [word for group in kept for word in group]
