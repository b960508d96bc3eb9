import gc
import weakref

import pytest

from dist_transformer.training.trainer import existing_objects_spared


def test_objects_from_before_the_loop_are_collected_after_it() -> None:
    """Inside the loop only what it made itself is collected; an error ends the loop, too."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def is_collected(cycle: "weakref.ref[Cycle]") -> bool:
        gc.collect()
        return cycle() is None

    held = Cycle()
    old = weakref.ref(held)

    def loop() -> None:
        nonlocal held
        with existing_objects_spared():
            del held
            assert not is_collected(old)
            new = weakref.ref(Cycle())
            assert is_collected(new)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        loop()
    assert is_collected(old)
