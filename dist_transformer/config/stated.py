"""Checks of what a user states: repetitions, and settings without effect."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import refuse_secrets
from dist_transformer.base.urls import is_url
from dist_transformer.config.settings import TrainConfig
from dist_transformer.config.wrong_names import plain_name


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagRules:
    """When the flags of a command have an effect. Several flags are separated by spaces."""

    needs: Mapping[str, str] = field(default_factory=dict)
    """Flags, maybe with another flag ("--a with --b"), and those of which they need one."""
    conflicts: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Flags, those of which each leaves them without effect, and why."""

    def check(self, stated: Collection[str]) -> None:
        """Refuse a flag that is stated although the others leave it without effect, also if it states the default.

        Raises:
            UserError: there is one; the error names both flags and the remedy.
        """
        for rule, others in self.needs.items():
            flags, _, mode = rule.partition(" with ")
            known = others.split()
            if (mode and mode not in stated) or not set(known).isdisjoint(stated):
                continue
            for flag in flags.split():
                if flag in stated:
                    what = f"{flag} with {mode}" if mode else flag
                    add = known[0] if len(known) == 1 else "one of them"
                    raise UserError(f"{what} needs {' or '.join(known)}: add {add}, or leave {flag} out")
        for (some, others), why in self.conflicts.items():
            for flag, other in itertools.product(some.split(), others.split()):
                if flag in stated and other in stated:
                    raise UserError(f"{flag} has no effect with {other}, {why}: leave {flag} or {other} out")


def _has_one_folder(config: TrainConfig) -> bool:
    return len(config.corpora.data) < 2


def _never_validates(config: TrainConfig) -> bool:
    return config.validation.validate_every == 0


# When a setting has no effect, and why. Schedules that a user registered may read both rates.
_WITHOUT_EFFECT: dict[str, tuple[Callable[[TrainConfig], bool], str]] = {
    "optimizer.peak_lr": (
        lambda config: config.optimizer.schedule == "noam",
        "the peak of the noam schedule is --optimizer.lr-scale · (width · warmup_steps)^-0.5: set that factor, or "
        "use another --optimizer.schedule, such as inverse_sqrt",
    ),
    "optimizer.lr_scale": (
        lambda config: config.optimizer.schedule in ("inverse_sqrt", "cosine", "constant"),
        "it is a factor of the noam schedule: use --optimizer.peak-lr",
    ),
    "init_vocabulary": (
        lambda config: config.checkpoints.init_from is None,
        "it sets how --init-from is read: pass that too",
    ),
    "data_weights": (_has_one_folder, "there is one data folder: leave it out"),
    "data_temperature": (
        lambda config: _has_one_folder(config) or bool(config.corpora.data_weights),
        "it mixes several data folders by their sizes, without --data-weights: leave it out",
    ),
    "validate_sentences": (_never_validates, "--validate-every is 0: raise that"),
    "best_by": (_never_validates, "--validate-every is 0: raise that"),
    "validation_command": (_never_validates, "--validate-every is 0: raise that"),
    "validation_command_minutes": (
        lambda config: config.validation.validation_command is None,
        "it limits --validation-command: set that too",
    ),
    "keep_best": (_never_validates, "--validate-every is 0: raise that"),
}


def refuse_repeated(words: Sequence[str]) -> None:
    """Refuse flags that are given twice, of which only one would count.

    Also refuse the secrets of URLs, because errors of the parser repeat words.

    Raises:
        UserError: there are such flags or words.
    """
    for word in words:
        refuse_secrets(word)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    names = [plain_name(flag) for flag in flags]
    twice = next((flag for flag, name in zip(flags, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} appears twice: pass it once, with all its values")


def refuse_without_effect(stated: Mapping[str, str], config: TrainConfig) -> None:
    """Refuse settings that were stated although the others leave them without effect, and a data folder given twice.

    Args:
        stated: names of settings, and how the user wrote them.

    Raises:
        UserError: there is one; the error names it and why it has no effect.
    """
    for name, (is_unused, why) in _WITHOUT_EFFECT.items():
        if name in stated and is_unused(config):
            raise UserError(f"{stated[name]} has no effect here, because {why}")
    places = config.corpora.data
    folders = [place if is_url(place) else str(Path(place).resolve()) for place in places]
    if twice := [place for place, folder in zip(places, folders, strict=True) if folders.count(folder) > 1]:
        raise UserError(
            f"--data has {twice[0]} twice: pass it once; a larger share of it is a matter of --data-weights"
        )
    packs, tokens = (stated.get(f"batch.{name}_per_step") for name in ("packs", "target_tokens"))
    if packs and tokens:
        raise UserError(f"{packs} and {tokens} both set the size of a step: use one of them")
