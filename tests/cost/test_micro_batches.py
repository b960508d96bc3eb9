"""The number of packs that a GPU computes at once.

Memory by hand: `big` in bf16 keeps 18 bytes of each of 214 million parameters, 404 kB of a pair of tokens, 0.3 GB of
the projection's gradient and 2 bytes of each logit, with 8 more of 2^27 of them at most; 5% and 1.5 GiB besides.
"""

import dataclasses

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.cost.memory import ZeroSettings
from dist_transformer.cost.micro_batches import choose_compilation, packs_that_fit


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


@pytest.mark.parametrize(
    ("setting", "stage", "packs", "expected"),
    [
        # The measured gains on an H100: 1.20 at 25,088 tokens, 1.07 at 6,272, and 0.87 at 3,136.
        ("auto", 1, 64, (True, "25,088 target tokens at once, at least 6,000")),
        ("auto", 0, 16, (True, "6,272 target tokens at once, at least 6,000")),
        ("auto", 2, 8, (False, "3,136 target tokens at once, below 6,000")),
        ("on", 1, 8, (True, "--compile on")),
        ("off", 1, 64, (False, "--compile off")),
        ("on", 3, 64, (False, "ZeRO-3")),
    ],
)
def test_layers_are_compiled_where_it_pays(setting: str, stage: int, packs: int, expected: tuple[bool, str]) -> None:
    config = PRESETS["big"].changed(compile=setting)
    assert choose_compilation(config, stage=stage, packs=packs) == expected
    batch = dataclasses.replace(config.batch, packs_per_micro_batch=packs)
    assert choose_compilation(config.changed(batch=batch), stage=stage) == expected


def test_nothing_is_compiled_in_fp32() -> None:
    config = PRESETS["big"].changed(compile="on", precision="fp32")
    assert choose_compilation(config, stage=1, packs=64) == (False, "fp32")


def test_both_passes_of_rdrop_are_computed_at_once() -> None:
    optimizer = dataclasses.replace(PRESETS["big"].optimizer, rdrop_alpha=5.0)
    assert choose_compilation(PRESETS["big"].changed(optimizer=optimizer), stage=1, packs=8)[0]


def test_big_is_compiled_as_its_script_trains_it() -> None:
    """8 packs of 3,584 target tokens at once on 8 GPUs of 80 GB; 128 GPUs have a pack each, of too few."""
    config = PRESETS["big_large_batch"]
    assert choose_compilation(config, stage=1, packs=packs("big_large_batch", 80, world_size=8))[0]
    assert not choose_compilation(config, stage=1, packs=packs("big_large_batch", 80, world_size=128))[0]
