"""Disks that a test mounts, as root."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(*arguments: object) -> Iterator[None]:
    mount(*arguments)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(arguments[-1])], check=True)


def mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here ({done.stderr.strip()}): run as root")
