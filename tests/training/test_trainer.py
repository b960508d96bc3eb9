import gc
import weakref

import pytest

from dist_transformer.training.logbook import describe_not_finite
from dist_transformer.training.trainer import existing_objects_spared


def test_a_loss_that_is_not_finite_is_named_by_rank_and_packs() -> None:
    assert describe_not_finite([[], [4, 12]], packs=4) == "loss of rank 1 in packs 4 to 7 of the step"
    assert describe_not_finite([[], [], [3]], packs=1) == "loss of rank 2 in pack 3 of the step"
    several = describe_not_finite([[0], [4], []], packs=4)
    assert several == "loss of rank 0 in packs 0 to 3 of the step, and loss of 1 other rank(s)"
    assert describe_not_finite([[], []], packs=4) == "the loss is finite on all ranks, so it arose in the backward pass"


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
