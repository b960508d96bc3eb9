"""The number of packs that a GPU computes at once.

Memory by hand: `big` in bf16 keeps 18 bytes of each of 214 million parameters, 404 kB of a pair of tokens, 0.3 GB of
the projection's gradient and 2 bytes of each logit, with 8 more of 2^27 of them at most; 5% and 1.5 GiB besides.
"""

import dataclasses

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.cost.memory import ZeroSettings
from dist_transformer.cost.micro_batches import packs_that_fit


def packs(preset: str, gib: int, *, world_size: int = 1, **batch: int) -> int:
    config: TrainConfig = PRESETS[preset]
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=37_000),
        batch=BatchConfig(**batch) if batch else config.batch,  # type: ignore[arg-type]
    )
    return packs_that_fit(
        config,
        ZeroSettings(stage=1),
        world_size=world_size,
        source_budget=config.batch.max_target_tokens,
        memory_bytes=gib * 2**30,
    )


@pytest.mark.parametrize(
    ("preset", "gib", "world_size", "expected"),
    [
        # 64 packs are a step of 25k tokens: all at once, or a rank's share.
        ("big", 80, 1, 64),
        ("base", 80, 1, 64),
        ("big", 80, 2, 32),
        ("big", 80, 3, 22),
        ("big", 80, 8, 8),
        ("big", 80, 64, 1),
        # All need 18.3 GiB of 0.9 · 24; of 0.9 · 12 = 10.8 a half of them needs more, and a third does not.
        ("big", 24, 1, 64),
        ("big", 12, 1, 22),
        # If not even one fits, the error comes when it is tried.
        ("big", 4, 1, 1),
        # 128 packs of 3,584: no more than 32,768 tokens pay, and 15 parts of at most 9 are the fewest of those.
        ("big_large_batch", 80, 1, 9),
        ("big_large_batch", 80, 8, 8),
    ],
)
def test_the_largest_equal_part_that_fits(preset: str, gib: int, world_size: int, expected: int) -> None:
    assert packs(preset, gib, world_size=world_size) == expected


def test_a_pack_that_is_large_already_is_one_at_a_time() -> None:
    assert packs("base", 80, max_target_tokens=40_000, packs_per_step=4) == 1
