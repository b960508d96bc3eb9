"""Garbage collection during long loops."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def existing_objects_spared() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection, for a long loop.

    Torch and DeepSpeed make some hundred thousand objects that live until the end. Collections that search them would
    interrupt the loop, and other ranks would wait for this one.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
