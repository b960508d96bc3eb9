"""A run folder to damage."""

from tests.run.sound_run import run, sound_run

__all__ = ["run", "sound_run"]
