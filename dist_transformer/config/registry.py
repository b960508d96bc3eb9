"""Registries of code that settings choose by name: schedules, position encodings, attention.

The built-in names are declared here, so that a configuration is validated without importing their code. The modules
that implement them register the code. A module outside the package may register more (docs/extending.md).
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dist_transformer.config.wrong_names import nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Code by name, for one setting.

    Args:
        setting: name of the setting, for messages.
        built_in: names that modules of the package register at import.
    """

    def __init__(self, setting: str, *built_in: str) -> None:
        self.setting = setting
        self._entries: dict[str, F | None] = dict.fromkeys(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Known names: built-in ones first, then the others in registration order."""
        return tuple(self._entries)

    def remedy_for(self, name: object) -> str:
        """Return the second half of the message about an unknown name."""
        if near := nearest(str(name), self.names):
            return f"did you mean {near}, or is --import with the file that registers this {self.setting} missing?"
        return (
            f"pass the file that registers this {self.setting} with --import "
            f"(docs/extending.md), or choose one of {', '.join(self.names)}"
        )

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a function or class known as `name`.

        Raises:
            ValueError: the name is taken.
        """

        def add(entry: T) -> T:
            if self._entries.get(name) is not None:
                raise ValueError(f"{self.setting} {name!r} is registered already: choose another name")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> F:
        entry = self._entries[name]
        assert entry is not None, f"the module that implements {name!r} is not imported"
        return entry


SCHEDULES: Registry[Callable[..., float]] = Registry("schedule", "noam", "inverse_sqrt", "cosine", "constant")
"""Learning rate schedules: `training.engine.schedule.Schedule`."""
POSITIONS: Registry[Callable[..., Any]] = Registry("position encoding", "sinusoidal", "sinusoidal_t2t", "learned")
"""Functions and classes that make a position encoding from a `ModelConfig`: `model.positions`."""
ATTENTIONS: Registry[Callable[..., Any]] = Registry("attention", "softmax")
"""Subclasses of `model.attention.MultiHeadAttention`."""
SINK_NAMES = ("tensorboard", "wandb", "mlflow")
"""Sinks of the package for a run's figures; others are registered in `reporting.sinks`."""
